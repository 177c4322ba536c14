"""Hugging Face files of the family: `config.json` and safetensors, read and written.

Published checkpoints differ in prefixes (`model.`, `model.language_model.`, `language_model.model.`) and in whether the
experts of a layer are one tensor or one per expert; all are read, and tensors of other parts (`mtp.*`, `visual.*`) are
passed over. A tensor that is missing, unknown or of the wrong shape is refused by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from swerve import parallel
from swerve.models.config import Qwen35MoeConfig
from swerve.models.parameters import Params, parameters, unstack_blocks
from swerve.telemetry import write_atomic
from swerve.types import SwerveError

_log = logging.getLogger(__name__)

Array = NDArray[Any]

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
_IGNORED = re.compile(r"^(model\.)?(mtp|visual|vision_tower)\.|rotary_emb\.inv_freq$")
_DTYPES: Mapping[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
}
_KEPT_IN_FLOAT32 = ("A_log",)


def load_hf(path: str | Path) -> tuple[Qwen35MoeConfig, dict[str, Any]]:
    """Read a model.

    Args:
        path: Directory with `config.json` and one or several `*.safetensors`.

    Returns:
        The configuration, and float32 parameters with blocks stacked.

    Raises:
        SwerveError: A file is missing or damaged, or a tensor is missing, unknown or misshapen.
    """
    directory = Path(path)
    config = read_config(directory)
    tensors = dict(_read_tensors(directory))
    params = from_hf_tensors(config, tensors, source=str(directory))
    return config, params


def save_hf(
    path: str | Path,
    config: Qwen35MoeConfig,
    params: Params,
    dtype: str = "bfloat16",
    *,
    dtypes: Mapping[str, str] | None = None,
) -> None:
    """Write a model as `config.json` and `model.safetensors`, experts fused, with `transformers`' names.

    Args:
        path: Directory; made if it is not there.
        config: The model's shape.
        params: Parameters, blocks stacked or not.
        dtype: Type of the tensors: `bfloat16`, `float16` or `float32`. Decay rates (`A_log`) stay float32.
        dtypes: Types of single tensors by their Hugging Face name, going before `dtype`.

    Raises:
        MachineError: The files cannot be written.
    """
    directory = Path(path)
    tensors: dict[str, Array] = {}
    for name, value in to_hf_tensors(config, params).items():
        kept = "float32" if name.endswith(_KEPT_IN_FLOAT32) else dtype
        wanted = _DTYPES[(dtypes or {}).get(name, kept)]
        tensors[name] = np.ascontiguousarray(value.astype(wanted))
    write_atomic(directory / "config.json", json.dumps({**config.to_hf(), "dtype": dtype}, indent=2) + "\n")
    write_atomic(directory / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def read_config(directory: str | Path) -> Qwen35MoeConfig:
    """Read `config.json` of a directory."""
    file = Path(directory) / "config.json"
    try:
        raw = json.loads(file.read_text())
    except OSError as error:
        raise SwerveError(f"{file}: cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise SwerveError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise SwerveError(f"{file}: expected a JSON object")
    return Qwen35MoeConfig.from_hf(raw, source=str(file))


def read_dtypes(path: str | Path) -> dict[str, str]:
    """Type of every tensor of a directory by its name without prefix variants, for `save_hf(dtypes=...)`."""
    return {name: str(value.dtype) for name, value in _read_tensors(Path(path))}


# --------------------------------------------------------------------------------------------------------- mapping


def to_hf_tensors(config: Qwen35MoeConfig, params: Params) -> dict[str, Array]:
    """Parameters as `transformers` names and lays them out, experts fused."""
    host = unstack_blocks(params)
    tensors: dict[str, Array] = {"model.embed_tokens.weight": np.asarray(host["embedding"])}
    for layer in range(config.num_hidden_layers):
        block, within = divmod(layer, config.full_attention_interval)
        attends = config.is_attention_layer(layer)
        leaves = parallel.flatten_names(
            host["blocks"][block]["attention"] if attends else host["blocks"][block]["delta"][within]
        )
        arrays = {leaf: np.asarray(value) for leaf, value in leaves.items()}
        for entry in _layer_entries(config, attention=attends):
            for name, value in zip(entry.names, entry.give(arrays), strict=True):
                tensors[f"model.layers.{layer}.{name}"] = value
    tensors["model.norm.weight"] = np.asarray(host["final_norm"])
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = np.asarray(host["head"]).T
    return tensors


def from_hf_tensors(
    config: Qwen35MoeConfig, tensors: Mapping[str, Array], source: str = "checkpoint"
) -> dict[str, Any]:
    """Parameters from tensors by their normalised names (`model.layers...`); float32, blocks stacked.

    Raises:
        SwerveError: A tensor is missing, unknown or misshapen.
    """
    remaining = {name: np.asarray(value) for name, value in tensors.items()}
    _fuse_experts(config, remaining, source)
    declared = parallel.flatten_names(parameters(config))
    expected = {name: value.shape for name, value in to_hf_tensors(config, _blank(config)).items()}
    if config.tie_word_embeddings:
        remaining.pop("lm_head.weight", None)
    if missing := sorted(expected.keys() - remaining.keys()):
        raise SwerveError(f"{source}: missing tensor {missing[0]}" + _and_more(missing))
    if extra := sorted(remaining.keys() - expected.keys()):
        raise SwerveError(f"{source}: unknown tensor {extra[0]}" + _and_more(extra))
    for name, shape in expected.items():
        if remaining[name].shape != shape:
            raise SwerveError(f"{source}: tensor {name} has shape {remaining[name].shape}, the config asks for {shape}")

    named: dict[str, Any] = {}
    stacked: dict[str, list[Array]] = {}
    for layer in range(config.num_hidden_layers):
        attends = config.is_attention_layer(layer)
        kind = "blocks.attention." if attends else "blocks.delta."
        for entry in _layer_entries(config, attention=attends):
            for leaf, value in entry.take(*(remaining[f"model.layers.{layer}.{name}"] for name in entry.names)).items():
                stacked.setdefault(kind + leaf, []).append(value.astype(np.float32))
    for name, arrays in stacked.items():
        named[name] = jnp.asarray(np.stack(arrays).reshape(declared[name].shape))
    named["embedding"] = jnp.asarray(remaining["model.embed_tokens.weight"].astype(np.float32))
    named["final_norm"] = jnp.asarray(remaining["model.norm.weight"].astype(np.float32))
    if not config.tie_word_embeddings:
        named["head"] = jnp.asarray(remaining["lm_head.weight"].astype(np.float32).T)
    return parallel.unflatten_names({name: named[name] for name in declared})


class _Entry(NamedTuple):
    """Tensors of a layer, how they are made of our leaves, and how our leaves are made of them."""

    names: tuple[str, ...]
    give: Callable[[Mapping[str, Array]], tuple[Array, ...]]
    take: Callable[..., dict[str, Array]]


def _layer_entries(config: Qwen35MoeConfig, *, attention: bool) -> list[_Entry]:
    hidden, experts = config.hidden_size, config.num_experts
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    entries = [
        _same("input_layernorm.weight", "input_norm"),
        _same("post_attention_layernorm.weight", "post_norm"),
        _linear("mlp.gate.weight", "moe.router", (hidden, experts)),
        _Entry(
            ("mlp.experts.gate_up_proj",),
            lambda p: (p["moe.gate_up"].reshape(experts, hidden, 2 * inner).swapaxes(1, 2),),
            lambda t: {"moe.gate_up": t.swapaxes(1, 2).reshape(experts, hidden, 2, inner)},
        ),
        _Entry(
            ("mlp.experts.down_proj",),
            lambda p: (p["moe.down"].swapaxes(1, 2),),
            lambda t: {"moe.down": t.swapaxes(1, 2)},
        ),
        _Entry(
            ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
            lambda p: (p["moe.shared_gate_up"][:, 0].T, p["moe.shared_gate_up"][:, 1].T),
            lambda gate, up: {"moe.shared_gate_up": np.stack([gate.T, up.T], axis=1)},
        ),
        _linear("mlp.shared_expert.down_proj.weight", "moe.shared_down", (shared, hidden)),
        _Entry(
            ("mlp.shared_expert_gate.weight",),
            lambda p: (p["moe.shared_scale"][None],),
            lambda t: {"moe.shared_scale": t[0]},
        ),
    ]
    return entries + (_attention_entries(config) if attention else _delta_entries(config))


def _attention_entries(config: Qwen35MoeConfig) -> list[_Entry]:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads, config.num_key_value_heads

    def give_q(p: Mapping[str, Array]) -> tuple[Array, ...]:
        both = np.stack([p["mixer.q"], p["mixer.gate"]], axis=2)  # q and gate interleave per head
        return (both.reshape(hidden, -1).T,)

    def take_q(t: Array) -> dict[str, Array]:
        both = t.T.reshape(hidden, queries, 2, width)
        return {"mixer.q": both[:, :, 0], "mixer.gate": both[:, :, 1]}

    return [
        _Entry(("self_attn.q_proj.weight",), give_q, take_q),
        _linear("self_attn.k_proj.weight", "mixer.k", (hidden, keys, width)),
        _linear("self_attn.v_proj.weight", "mixer.v", (hidden, keys, width)),
        _same("self_attn.q_norm.weight", "mixer.q_norm"),
        _same("self_attn.k_norm.weight", "mixer.k_norm"),
        _linear("self_attn.o_proj.weight", "mixer.out", (queries * width, hidden)),
    ]


def _delta_entries(config: Qwen35MoeConfig) -> list[_Entry]:
    hidden, conv = config.hidden_size, config.linear_conv_kernel_dim
    keys, key_width = config.linear_num_key_heads, config.linear_key_head_dim
    values, value_width = config.linear_num_value_heads, config.linear_value_head_dim
    cuts = (config.linear_key_dim, 2 * config.linear_key_dim)
    shapes = ((keys, key_width), (keys, key_width), (values, value_width))
    names = ("q", "k", "v")

    def give_qkv(p: Mapping[str, Array]) -> tuple[Array, ...]:
        return (np.concatenate([p[f"mixer.{n}"].reshape(hidden, -1) for n in names], axis=1).T,)

    def take_qkv(t: Array) -> dict[str, Array]:
        parts = np.split(t.T, cuts, axis=1)
        return {f"mixer.{n}": x.reshape(hidden, *s) for n, x, s in zip(names, parts, shapes, strict=True)}

    def give_conv(p: Mapping[str, Array]) -> tuple[Array, ...]:
        return (np.concatenate([p[f"mixer.{n}_conv"].reshape(conv, -1) for n in names], axis=1).T[:, None],)

    def take_conv(t: Array) -> dict[str, Array]:
        parts = np.split(t[:, 0].T, cuts, axis=1)
        return {f"mixer.{n}_conv": x.reshape(conv, *s) for n, x, s in zip(names, parts, shapes, strict=True)}

    return [
        _Entry(("linear_attn.in_proj_qkv.weight",), give_qkv, take_qkv),
        _linear("linear_attn.in_proj_z.weight", "mixer.z", (hidden, values, value_width)),
        _linear("linear_attn.in_proj_b.weight", "mixer.b", (hidden, values)),
        _linear("linear_attn.in_proj_a.weight", "mixer.a", (hidden, values)),
        _Entry(("linear_attn.conv1d.weight",), give_conv, take_conv),
        _same("linear_attn.A_log", "mixer.A_log"),
        _same("linear_attn.dt_bias", "mixer.dt_bias"),
        _same("linear_attn.norm.weight", "mixer.norm"),
        _linear("linear_attn.out_proj.weight", "mixer.out", (values * value_width, hidden)),
    ]


def _same(name: str, leaf: str) -> _Entry:
    return _Entry((name,), lambda p: (p[leaf],), lambda t: {leaf: t})


def _linear(name: str, leaf: str, shape: tuple[int, ...]) -> _Entry:
    """A `[out, in]` weight against our `[in, *out]`."""
    return _Entry((name,), lambda p: (p[leaf].reshape(shape[0], -1).T,), lambda t: {leaf: t.T.reshape(shape)})


def _blank(config: Qwen35MoeConfig) -> dict[str, Any]:
    """Arrays of the right shapes that hold nothing and take no memory."""
    leaves = parallel.flatten_names(parameters(config))
    return parallel.unflatten_names({n: np.broadcast_to(np.float32(0), p.shape) for n, p in leaves.items()})


def _fuse_experts(config: Qwen35MoeConfig, tensors: dict[str, Array], source: str) -> None:
    """Replace one-per-expert tensors by fused ones, in place."""
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}.mlp.experts."
        if f"{base}0.gate_proj.weight" not in tensors:
            continue
        fused: dict[str, list[Array]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(config.num_experts):
            names = [f"{base}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            if missing := [n for n in names if n not in tensors]:
                raise SwerveError(f"{source}: missing tensor {missing[0]}")
            gate, up, down = (tensors.pop(n) for n in names)
            fused["gate_up_proj"].append(np.concatenate([gate, up]))
            fused["down_proj"].append(down)
        tensors.update({base + name: np.stack(parts) for name, parts in fused.items()})


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _read_tensors(directory: Path) -> Iterator[tuple[str, Array]]:
    """Every tensor of the text model by normalised name."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise SwerveError(f"{directory}: no *.safetensors file")
    ignored = 0
    for file in files:
        try:
            with safe_open(file, framework="numpy") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a mapping)
                    if _IGNORED.search(name):
                        ignored += 1
                    else:
                        yield _normalised(name), reader.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SwerveError(f"{file}: damaged or unreadable: {error}") from error
    if ignored:
        _log.info("%s: passed over %d tensors that the text model does not use", directory, ignored)


def _normalised(name: str) -> str:
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name
