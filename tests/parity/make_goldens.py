"""Write the golden files with the `transformers` implementation; nothing of this package is imported.

`make parity` runs it, in an environment of its own. Each case is a directory: the model (bfloat16, which holds the
weights exactly) and `expected.npz`, with

    tokens, logits                     [ROWS, TIME], [ROWS, TIME, V]
    left_logits, right_logits          [ROWS, SHORT, V], of the first tokens with padding at one side
    cached_logits                      [ROWS, SHORT, V], of a prefill and single steps
    loss, gradient.NAME                mean negative log-probability at TEMPERATURE, and a sketch of each gradient
    bf16_tokens, bf16_truth, bf16_a    tokens, and some of their logits in float32 and as run A gives them
    bf16_b                             the same of run B

all float32. Run A is the model in bfloat16; run B is so too, its inner units renumbered (`permuted.py`), which is the
same function with its sums taken in another order.
"""

import json
import os
from pathlib import Path
from typing import Any

os.environ |= {  # the same instructions on every processor that has them: the same last bits
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file  # pyright: ignore[reportMissingImports]

from .cases import (
    BF16_KEPT,
    BF16_ROWS,
    BF16_TIME,
    CASES,
    GOLDENS,
    PAD,
    PREFILL,
    ROWS,
    SHORT,
    TEMPERATURE,
    TIME,
    Case,
)
from .permuted import permuted
from .sketch import sketch

Model = Any


def main() -> None:
    """Write every case."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name, case in CASES.items():
        model = build(configuration(case))
        randomise(model)
        directory = GOLDENS / name
        directory.mkdir(parents=True, exist_ok=True)
        # Of five seeds the one that float32 rounds least: with others, this implementation's gradients differ by up to
        # 1.3e-4 from those of the same model renumbered.
        generator = torch.Generator().manual_seed(5)
        expected = exact(model, generator) | in_bfloat16(model, generator)
        np.savez_compressed(directory / "expected.npz", **expected)
        save(model.to(torch.bfloat16), case, directory)
        check_reading(directory, expected)
        print(f"wrote {name}")


def configuration(case: Case) -> Any:
    """The configuration of a case, as `transformers` wants it."""
    own = dict(case.config)
    interval = own.pop("full_attention_interval")
    rotary = {key: own.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    pairs = int(own["head_dim"] * rotary["partial_rotary_factor"]) // 2
    kinds = ["linear_attention"] * (interval - 1) + ["full_attention"]
    config = transformers.Qwen3_5MoeTextConfig(
        **own,
        rope_parameters={
            "rope_type": "default",
            **rotary,
            "mrope_section": [pairs, 0, 0],  # one position a token: how pairs share three makes no difference
            "mrope_interleaved": True,
        },
        layer_types=kinds * (own["num_hidden_layers"] // interval),
        hidden_act="silu",
        max_position_embeddings=BF16_TIME,
    )
    config._experts_implementation = config._attn_implementation = "eager"  # the plain forms
    return config


def build(config: Any) -> Model:
    """A model in float32. It has no dropout, so training mode changes nothing."""
    return transformers.Qwen3_5MoeForCausalLM(config).float()


def randomise(model: Model) -> None:
    """Fill every parameter with values that bfloat16 holds exactly, none of them special.

    Layers add to the residual stream what a trained model's would: about as much, all together, as the embedding.
    """
    generator = torch.Generator().manual_seed(0)
    gain = (2 * model.config.num_hidden_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("dt_bias", "linear_attn.norm.weight")):
                noise = noise * 0.3 + 1
            elif "norm" in name:
                noise = noise * 0.3
            elif parameter.ndim > 1 and "conv1d" not in name and "embed" not in name:
                noise = noise * parameter.shape[-1] ** -0.5
                if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj", "down_proj.weight")):
                    noise = noise * gain
            parameter.copy_(noise.to(torch.bfloat16).float())


def exact(model: Model, generator: torch.Generator) -> dict[str, Any]:
    """What the float32 model makes of a few rows."""
    vocab = model.config.vocab_size
    tokens = torch.randint(0, vocab, (ROWS, TIME), generator=generator)
    logits = model(tokens).logits
    scaled = logits[:, :-1].reshape(-1, vocab) / TEMPERATURE
    loss = torch.nn.functional.cross_entropy(scaled, tokens[:, 1:].reshape(-1))
    loss.backward()
    out: dict[str, Any] = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": logits.detach().numpy(),
        "loss": loss.detach().numpy(),
    }
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        out[f"gradient.{name}"] = sketch(parameter.grad.numpy())
        parameter.grad = None
    with torch.no_grad():
        short, ones = tokens[:, :SHORT], torch.ones(ROWS, SHORT, dtype=torch.long)
        for side, pads in (("left", (PAD, 0)), ("right", (0, PAD))):
            padded, mask = (torch.nn.functional.pad(x, pads) for x in (short, ones))
            start = pads[0]
            out[f"{side}_logits"] = model(padded, attention_mask=mask).logits[:, start : start + SHORT].numpy()
        out["cached_logits"] = cached(model, short).numpy()
    return out


def cached(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a prefill followed by single steps."""
    cache = transformers.DynamicCache(config=model.config)
    ends = (PREFILL, *range(PREFILL + 1, SHORT + 1))
    parts = []
    for start, end in zip((0, *ends), ends, strict=False):
        parts.append(model(tokens[:, start:end], cache=cache, use_cache=True).logits)
    return torch.cat(parts, 1)


def in_bfloat16(model: Model, generator: torch.Generator) -> dict[str, Any]:
    """Some logits of many tokens: in float32, in bfloat16, and in bfloat16 with the sums in another order."""
    config, tensors = model.config, model.state_dict()
    tokens = torch.randint(0, config.vocab_size, (BF16_ROWS, BF16_TIME), generator=generator)
    other = build(config)
    other.load_state_dict(permuted(config, tensors, seed=2))
    with torch.no_grad():
        truth = model(tokens).logits
        assert (other(tokens).logits - truth).abs().max() < 1e-4 * truth.abs().max(), "renumbered wrongly"
        same = build(config)
        same.load_state_dict(tensors)
        runs = [m.to(torch.bfloat16)(tokens).logits.float() for m in (same, other)]
    kept = {n: kept_logits(x.numpy()) for n, x in zip(("truth", "a", "b"), (truth, *runs), strict=True)}
    return {"bf16_tokens": tokens.numpy().astype(np.int32)} | {f"bf16_{n}": x for n, x in kept.items()}


def kept_logits(logits: np.ndarray) -> np.ndarray:
    """`BF16_KEPT` of the last dimension, at even distances."""
    return logits[..., :: logits.shape[-1] // BF16_KEPT][..., :BF16_KEPT]


def save(model: Model, case: Case, directory: Path) -> None:
    """Write the model's files in the layout of the case."""
    model.save_pretrained(directory)  # experts one by one
    (directory / "generation_config.json").unlink(missing_ok=True)
    if case.fused:
        prefix = "model.language_model." if case.nested else "model."
        tensors = {n.replace("model.", prefix, 1): x.contiguous() for n, x in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del tensors["lm_head.weight"]
        if case.nested:
            tensors |= {"mtp.norm.weight": torch.zeros(2), "model.visual.norm.weight": torch.zeros(2)}
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if case.nested:
        file = directory / "config.json"
        text = json.loads(file.read_text())
        outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": text.pop("tie_word_embeddings")}
        file.write_text(json.dumps({**outer, "text_config": text}, indent=2) + "\n")


def check_reading(directory: Path, expected: dict[str, Any]) -> None:
    """See that `transformers` reads the files, in whichever layout, as the model they were written from."""
    model = transformers.Qwen3_5MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        found = model(torch.tensor(expected["tokens"]).long()).logits.numpy()
    np.testing.assert_allclose(found, expected["logits"], rtol=0, atol=1e-5 * np.abs(expected["logits"]).max())


if __name__ == "__main__":
    main()
