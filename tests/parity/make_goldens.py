"""Write the golden files of `test_transformers.py` with the `transformers` implementation.

Run it with an interpreter that has torch and transformers; nothing of this package is imported:

    python -m venv .venv-parity && .venv-parity/bin/pip install torch==2.13.0 transformers
    .venv-parity/bin/python tests/parity/make_goldens.py

Each case is a directory: the model as `save_pretrained` writes it (bfloat16, which holds the weights exactly) and
`expected.npz` with float32 logits (plain, left-padded, cached decoding), the loss, and a sketch of every gradient.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from sketch import sketch
from transformers import (  # pyright: ignore[reportMissingImports]
    DynamicCache,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
)

GOLDENS = Path(__file__).resolve().parent / "goldens"
ROWS, TIME, PREFILL, LEFT = 3, 21, 13, 7

COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "untied": {
        "vocab_size": 48,
        "hidden_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 6,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 12,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [2, 0, 0]},
    },
    "tied": {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 6,
        "shared_expert_intermediate_size": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 0, 0]},
    },
}


def main() -> None:
    """Write every case."""
    torch.set_num_threads(1)
    for name, own in CASES.items():
        rope = {"rope_type": "default", "mrope_interleaved": True, **own["rope_parameters"]}
        config = Qwen3_5MoeTextConfig(**{**COMMON, **own, "rope_parameters": rope})
        config._experts_implementation = config._attn_implementation = "eager"  # the plain forms
        model = Qwen3_5MoeForCausalLM(config).float().train()  # no dropout anywhere
        randomise(model)
        directory = GOLDENS / name
        directory.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(directory / "expected.npz", **expectations(model, config.vocab_size))
        model.to(torch.bfloat16).save_pretrained(directory)
        (directory / "generation_config.json").unlink(missing_ok=True)


def randomise(model: torch.nn.Module) -> None:
    """Fill every parameter with values that bfloat16 holds exactly, none of them special."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                noise = torch.log(torch.rand(parameter.shape, generator=generator) * 4 + 0.05)
            elif name.endswith(("dt_bias", "linear_attn.norm.weight")):
                noise = noise * 0.3 + 1
            elif "norm" in name:
                noise = noise * 0.3
            elif parameter.ndim > 1 and "conv1d" not in name:
                noise = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(noise.to(torch.bfloat16).float())


def expectations(model: torch.nn.Module, vocab_size: int) -> dict[str, Any]:
    """Inputs, and what the model makes of them."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocab_size, (ROWS, TIME), generator=generator)
    out: dict[str, Any] = {"tokens": tokens.numpy().astype(np.int32)}
    logits = model(tokens).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), tokens[:, 1:].reshape(-1))
    loss.backward()
    out |= {"logits": logits.detach().numpy(), "loss": loss.detach().numpy()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        out[f"gradient.{name}"] = sketch(parameter.grad.numpy())
    with torch.no_grad():
        padded = torch.nn.functional.pad(tokens, (LEFT, 0))
        mask = (torch.arange(LEFT + TIME) >= LEFT).long().expand(ROWS, -1)
        out["left_padded_logits"] = model(padded, attention_mask=mask).logits[:, LEFT:].numpy()
        out["cached_logits"] = cached(model.eval(), tokens).numpy()
    return out


def cached(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a prefill followed by single steps."""
    cache = DynamicCache(config=model.config)
    parts = [model(tokens[:, :PREFILL], past_key_values=cache, use_cache=True).logits]
    parts += [model(tokens[:, t : t + 1], past_key_values=cache, use_cache=True).logits for t in range(PREFILL, TIME)]
    return torch.cat(parts, 1)


if __name__ == "__main__":
    main()
