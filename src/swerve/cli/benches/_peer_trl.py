"""The peer of `swerve bench step`: the same GRPO step by TRL's trainer, in an interpreter of its own.

Imports nothing of Swerve. Reads one JSON request a line and answers each with one line:

    {"call": "open", "directory": ..., "threads": N, "settings": {...}}    versions
    {"call": "try_out", "settings": {...}, "num_groups": N}                seconds of a step of the first groups
    {"call": "prepare"}                                      a first step, of the weights as they lie in the directory
    {"call": "run"}                                          seconds of one more step, and of its scoring pass

Everything after generation is TRL's own: padding, log-probabilities, correction, loss, backward, clip and update. Its
`rollout_func` plays the recorded attempts instead of sampling, its callbacks say when a step begins and ends, and its
reward function, which follows the pass that scores the attempts for the correction, when that pass is over. The
correction is the one that TRL applies where vLLM samples; the switch is set after the trainer is made, so that no vLLM
need be there.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import importlib.util
import itertools
import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


def _beside(name: str) -> Any:
    """A module beside this file. Its folder is not searched for others: some have the names of packages."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_shared = _beside("_peer_transformers")


class _Attempt(NamedTuple):
    """One recorded trajectory as TRL takes it: what precedes the first sampled token is the prompt."""

    prompt_ids: list[int]
    completion_ids: list[int]
    sampled: list[int]
    logprobs: list[float]
    reward: float


class _Peer:
    """TRL's trainer on the model and the trajectories of the directory.

    `settings` has `experts` and their implementation, `batch` sequences computed at once, `checkpointing` of
    activations, whether threads without work go to sleep (`waiting` is `passive`) or spin for a while (`default`), and
    whether freed memory goes back to the kernel (`memory` is `default`) or is `kept`. The last two are of a process.
    """

    def __init__(self, directory: str, threads: int, settings: dict[str, Any]) -> None:
        if settings["memory"] == "kept":
            _keep_memory()
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
        if settings["waiting"] == "passive":
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # read when torch is loaded
        import torch  # pyright: ignore[reportMissingImports]

        torch.set_num_threads(threads)
        self.torch: Any = torch
        self.directory = directory
        self.algorithm: dict[str, Any] = json.loads((Path(directory) / "step.json").read_text(encoding="utf-8"))
        self.groups = _read_groups(Path(directory) / "trajectories.jsonl")
        self.settings = settings
        self.trainer: Any = None

    def versions(self) -> dict[str, Any]:
        import transformers  # pyright: ignore[reportMissingImports]
        import trl  # pyright: ignore[reportMissingImports]

        transformers.logging.set_verbosity_error()
        capability = self.torch.backends.cpu.get_cpu_capability()
        return {
            "versions": f"trl {trl.__version__}, transformers {transformers.__version__}, "
            f"torch {self.torch.__version__} ({capability})",
            "threads": self.torch.get_num_threads(),
            "group_sizes": list(map(len, self.groups)),
        }

    def try_out(self, settings: dict[str, Any], num_groups: int) -> dict[str, Any]:
        """A step with other settings; the process's first is not the one that is timed."""
        first = self.trainer is None
        self.settings, self.groups = settings, self.groups[:num_groups]
        self.trainer, self.clock = self.make_trainer()
        if first:
            self.run()
        return self.run()

    def prepare(self) -> dict[str, Any]:
        """A first step from the weights as they were read, and what the other side must find as well."""
        self.trainer, self.clock = self.make_trainer()
        before = [parameter.detach().clone() for parameter in self.trainer.model.parameters()]
        first = self.run()
        moved = zip(self.trainer.model.parameters(), before, strict=True)
        logged = self.trainer.state.log_history[0]
        check = {
            "loss": self.trainer.state.log_history[-1]["train_loss"],
            "logprob_gap": logged["sampling/sampling_logp_difference/mean"],
            "gradient_norm": float(logged["grad_norm"]),
            "update_norm": sum(float((new.detach() - old).double().square().sum()) for new, old in moved) ** 0.5,
        }
        attempts = [attempt for group in self.groups for attempt in group]
        widths = (max(len(getattr(one, part)) for one in attempts) for part in ("prompt_ids", "completion_ids"))
        settings = f"{self.settings['experts']} experts, {self.settings['batch']} sequences at a time"
        settings += ", checkpointed" if self.settings["checkpointing"] else ""
        return {"settings": settings, "slots": sum(widths) * len(attempts), "seconds": first["seconds"], "check": check}

    def run(self) -> dict[str, Any]:
        """Time one more step of TRL's training loop."""
        gc.collect()
        self.trainer.train()
        return self.clock.measured | {"peak_bytes": _shared.peak_bytes()}

    def make_trainer(self) -> tuple[Any, Any]:
        """TRL's trainer, with the weights read anew, and what times its steps."""
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from transformers import Qwen3_5MoeForCausalLM  # pyright: ignore[reportMissingImports]
        from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

        self.trainer = None  # one at a time: memory is compared
        gc.collect()
        model = Qwen3_5MoeForCausalLM.from_pretrained(
            self.directory,
            dtype=self.torch.float32,
            attn_implementation="sdpa",
            experts_implementation=self.settings["experts"],
        )
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.requires_grad_(False)  # the router
        num_attempts, batch = sum(map(len, self.groups)), self.settings["batch"]
        of = self.algorithm
        arguments = GRPOConfig(
            output_dir=f"{self.directory}/trl",
            use_cpu=True,
            bf16=False,
            max_steps=1,
            learning_rate=of["learning_rate"],
            lr_scheduler_type="constant",
            adam_beta1=of["beta1"],
            adam_beta2=of["beta2"],
            adam_epsilon=of["eps"],
            weight_decay=of["weight_decay"],
            max_grad_norm=of["max_grad_norm"],
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=num_attempts // batch,
            gradient_checkpointing=self.settings["checkpointing"],
            num_generations=len(self.groups[0]),
            num_iterations=1,
            beta=0.0,
            loss_type="dapo",  # divided by the number of sampled tokens of the whole step
            scale_rewards="none",
            router_aux_loss_coef=0.0,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=of["importance_cap"],
            shuffle_dataset=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = _clock()

        def recorded_rewards(*, recorded_reward: list[float], **_: Any) -> list[float]:
            clock.scored()
            return recorded_reward

        trainer = GRPOTrainer(
            model=model,
            args=arguments,
            callbacks=[clock],
            reward_funcs=recorded_rewards,
            rollout_func=self.rollout,
            train_dataset=Dataset.from_dict({"prompt": [str(index) for index in range(len(self.groups))]}),
            processing_class=_tokenizer(),
        )
        nothing_to_sync = types.SimpleNamespace(sync_weights=lambda: None)
        trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, nothing_to_sync, -1
        return trainer, clock

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The recorded attempts at the tasks of a step, in place of sampled ones."""
        del trainer
        following = {index: iter(group) for index, group in enumerate(self.groups)}
        played = [next(following[int(prompt)]) for prompt in prompts]
        names = {"prompt_ids": "prompt_ids", "completion_ids": "completion_ids", "sampled": "env_mask",
                 "logprobs": "logprobs", "reward": "recorded_reward"}  # fmt: skip
        return {theirs: [getattr(attempt, ours) for attempt in played] for ours, theirs in names.items()}


def _clock() -> Any:
    from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

    class Clock(TrainerCallback):
        """From the first micro-batch of a step, whose attempts are there, to the end of its update."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.cores_began = time.perf_counter(), time.process_time()

        def scored(self) -> None:
            self.scoring_seconds = time.perf_counter() - self.began

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.measured = {
                "seconds": time.perf_counter() - self.began,
                "core_seconds": time.process_time() - self.cores_began,
                "scoring_seconds": self.scoring_seconds,
            }

    return Clock()


def _keep_memory() -> None:
    """Keep freed memory in the process: a tenth of a step's time. Only glibc can."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, value in ((-4, 0), (-1, -1), (-8, 1)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_ARENA_MAX
        if mallopt:
            mallopt(name, value)


def _restart_with_huge_pages() -> None:
    """Start this process anew with large blocks of memory in huge pages, as our side does; without effect elsewhere."""
    name, wanted = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
    if wanted not in os.environ.get(name, ""):
        os.environ[name] = wanted
        os.execv(sys.executable, sys.orig_argv)


def _tokenizer() -> Any:
    """A tokenizer to which every id of the trajectories is unknown: TRL wants one, and decodes what was sampled."""
    from tokenizers import Tokenizer, models  # pyright: ignore[reportMissingImports]
    from transformers import PreTrainedTokenizerFast  # pyright: ignore[reportMissingImports]

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, "<eos>")),
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
    )


def _read_groups(path: Path) -> list[list[_Attempt]]:
    """The attempts of a file of trajectories, by task."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_task = itertools.groupby(records, key=lambda record: record["task_id"])
    return [list(map(_attempt, of_task)) for _, of_task in by_task]


def _attempt(record: dict[str, Any]) -> _Attempt:
    import numpy

    tokens, lengths = record["tokens"], record["sampled"]  # runs of given and sampled tokens in turn
    sampled = [number % 2 for number, length in enumerate(lengths) for _ in range(length)]
    drawn: Iterator[float] = iter(numpy.frombuffer(base64.b64decode(record["behaviour_logprobs"]), "<f4").tolist())
    logprobs = [next(drawn) if one else 0.0 for one in sampled]
    start = lengths[0]
    return _Attempt(tokens[:start], tokens[start:], sampled[start:], logprobs[start:], record["reward"])


if __name__ == "__main__":
    _restart_with_huge_pages()
    _shared.answer_requests(_Peer)
