"""The peer of `swerve bench model`: the same model by `transformers`, in an interpreter of its own.

Imports nothing of Swerve. Reads one JSON request a line and answers each with one line:

    {"call": "open", "directory": ..., "threads": N}             versions, settings
    {"call": "prepare", "measurement": ..., "precision": ..., "limit_s": null or S}
                                                                 first calls; chooses the fastest experts
    {"call": "run", "measurement": ..., "precision": ...}        seconds of one repetition

A measurement is `forward_backward` (loss over all tokens, gradients of all parameters) or `prefill` (cache filled,
logits of the last token). A precision that cannot keep to `limit_s` by far is given up after one row: some processors
lack products of bfloat16, and take minutes for what takes them seconds in float32.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_EXPERTS = ("grouped_mm", "eager")  # `batched_mm` copies the weights of every token's experts: for decoding


class _Peer:
    """The model as read from the directory, one copy per precision."""

    def __init__(self, directory: str, threads: int) -> None:
        import numpy
        import torch  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.directory = directory
        self.tokens = torch.from_numpy(numpy.load(Path(directory) / "tokens.npy")).long()
        self.models: dict[str, Any] = {}
        self.experts: dict[tuple[str, str], str] = {}

    def versions(self) -> dict[str, Any]:
        import transformers  # pyright: ignore[reportMissingImports]

        transformers.logging.set_verbosity_error()
        capability = self.torch.backends.cpu.get_cpu_capability()
        return {
            "versions": f"transformers {transformers.__version__}, torch {self.torch.__version__} ({capability})",
            "threads": self.torch.get_num_threads(),
            "processors": len(os.sched_getaffinity(0)),
        }

    def prepare(self, measurement: str, precision: str, limit_s: float | None) -> dict[str, Any]:
        """Try every implementation of the experts once warm; keep the fastest."""
        began = time.perf_counter()
        if limit_s is not None and (slow := self.row_seconds(measurement, precision)) > limit_s:
            return {"given_up": slow}
        seconds: dict[str, float] = {}
        for name in _EXPERTS:
            self.experts[measurement, precision] = name
            try:
                self.call(measurement, precision)
                seconds[name] = self.run(measurement, precision)["seconds"]
            except (RuntimeError, NotImplementedError, ValueError) as error:
                print(f"experts {name}, {precision}: {error}", file=sys.stderr)
        if not seconds:
            raise RuntimeError(f"no implementation of the experts runs in {precision}")
        self.experts[measurement, precision] = min(seconds, key=seconds.__getitem__)
        return {
            "preparation": "first calls, choosing",
            "seconds": time.perf_counter() - began,
            "settings": f"sdpa attention, {self.experts[measurement, precision]} experts",
            "check": self.check(measurement, precision),
        }

    def row_seconds(self, measurement: str, precision: str) -> float:
        """What all rows would take, by the first of them, with the experts that float32 chose."""
        self.experts[measurement, precision] = self.experts[measurement, "float32"]
        tokens, self.tokens = self.tokens, self.tokens[:1]
        try:
            return self.run(measurement, precision)["seconds"] * len(tokens)
        finally:
            self.tokens = tokens

    def run(self, measurement: str, precision: str) -> dict[str, Any]:
        gc.collect()
        return timed(lambda: self.call(measurement, precision))

    def call(self, measurement: str, precision: str) -> Any:
        model = self.model(precision)
        model.set_experts_implementation(self.experts[measurement, precision])
        step: Callable[[Any], Any] = self.forward_backward if measurement == "forward_backward" else self.prefill
        return step(model)

    def model(self, precision: str) -> Any:
        if precision not in self.models:
            from transformers import Qwen3_5MoeForCausalLM  # pyright: ignore[reportMissingImports]

            self.models.clear()  # one at a time: memory is compared
            gc.collect()
            dtype = getattr(self.torch, precision)
            self.models[precision] = Qwen3_5MoeForCausalLM.from_pretrained(
                self.directory, dtype=dtype, attn_implementation="sdpa"
            )
        return self.models[precision]

    def forward_backward(self, model: Any) -> Any:
        model.train()  # no dropout in this family
        model.zero_grad(set_to_none=True)
        logits = model(self.tokens, use_cache=False).logits[:, :-1].float()
        loss = self.torch.nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def prefill(self, model: Any) -> Any:
        from transformers import DynamicCache  # pyright: ignore[reportMissingImports]

        model.eval()
        with self.torch.inference_mode():
            cache = DynamicCache(config=model.config)
            return model(self.tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()

    def check(self, measurement: str, precision: str) -> dict[str, Any]:
        """What the other side must find as well."""
        out = self.call(measurement, precision)
        if measurement == "prefill":
            return {"logits": out.flatten().tolist()}
        squares = sum(float(p.grad.double().square().sum()) for p in self.model(precision).parameters())
        return {"loss": float(out), "gradient_norm": squares**0.5}


def timed(call: Callable[[], Any]) -> dict[str, Any]:
    """Seconds on the clock and of all cores together, and the largest memory this process held since it began."""
    began, cores_began = time.perf_counter(), time.process_time()
    call()
    seconds = {"seconds": time.perf_counter() - began, "core_seconds": time.process_time() - cores_began}
    return seconds | {"peak_bytes": peak_bytes()}


def peak_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def answer_requests(make: Callable[..., Any]) -> None:
    """Answer requests until there are no more.

    Args:
        make: Makes the side of the arguments of `open`.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print is no answer
    side: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        call = request.pop("call")
        try:
            if call == "open":
                side = make(**request)
                answer = side.versions()
            else:
                answer = getattr(side, call)(**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    answer_requests(_Peer)
