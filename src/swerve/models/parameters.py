"""The parameters of the model, each declared once.

Linear weights are `[in, out]`; heads and the two halves of a swiglu are dimensions of their own where they come out of
a product, and one dimension where they go into the next; the DeltaNet's query, key and value projections are separate.
So every dimension can be sharded by its meaning:

    embed                       goes into a product that splits over heads or inner units
    heads, kv_heads, ...        what such a product gives
    contracted                  goes into the product that ends a layer: heads or inner units, flat
    expert, expert_inner        routed experts, and their inner units
    vocab, vocab_embed          the embedding's rows and columns
    head_embed, head_vocab      the head's

Layers are stacked for scanning: arrays below `blocks.delta` have leading dimensions `[num_blocks, interval - 1]`, those
below `blocks.attention` `[num_blocks]`. `unstack_blocks` gives the same tree with tuples in their place; every function
of the model takes both forms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from swerve import parallel
from swerve.models.config import Qwen35MoeConfig
from swerve.parallel import Parameter, ParameterTree

Params: TypeAlias = Mapping[str, Any]
"""Nested mapping of arrays with the structure of `parameters(config)`."""


KEPT_IN_FLOAT32 = ("A_log", "router")
"""Parameters that stay float32 whatever type the others have: decay rates, and the router."""


def parameters(config: Qwen35MoeConfig, dtype: str = "float32") -> dict[str, Any]:
    """Declare every parameter of the model.

    Args:
        config: The model's shape.
        dtype: Type of all but `KEPT_IN_FLOAT32`.

    Returns:
        A nested mapping of `Parameter`. `embedding` `[vocab, hidden]`, `blocks` (stacked), `final_norm`, and `head`
        `[hidden, vocab]` unless the embedding serves as head.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    delta = parallel.stack(layer_parameters(config, attention=False), config.full_attention_interval - 1, "layers")
    block = {"delta": delta, "attention": layer_parameters(config, attention=True)}
    small = parallel.normal(config.initializer_range)
    tree: dict[str, Any] = {
        "embedding": Parameter(shape=(vocab, hidden), axes=("vocab", "vocab_embed"), initialiser=small),
        "blocks": parallel.stack(block, config.num_blocks, "blocks"),
        "final_norm": _norm(hidden),
    }
    if not config.tie_word_embeddings:
        tree["head"] = Parameter(shape=(hidden, vocab), axes=("head_embed", "head_vocab"), initialiser=small)
    named = parallel.flatten_names(tree)
    return parallel.unflatten_names({name: replace(p, dtype=dtype_of(name, dtype)) for name, p in named.items()})


def cast(params: Params, dtype: str) -> dict[str, Any]:
    """Parameters in the type in which they are to be kept, all but `KEPT_IN_FLOAT32`."""
    named = parallel.flatten_names(params)
    return parallel.unflatten_names({name: x.astype(dtype_of(name, dtype)) for name, x in named.items()})


def dtype_of(name: str, dtype: str) -> str:
    """The type of a parameter, by its dotted name, where most are kept in `dtype`."""
    return "float32" if name.rpartition(".")[2] in KEPT_IN_FLOAT32 else dtype


def initialise(config: Qwen35MoeConfig, key: jax.Array) -> dict[str, Any]:
    """First values of all parameters, float32, blocks stacked."""
    return parallel.initialise(parameters(config), key)


def num_active_parameters(config: Qwen35MoeConfig) -> int:
    """Parameters that one token passes through, embedding rows it does not read left out."""
    total = parallel.num_parameters(parameters(config)) - config.vocab_size * config.hidden_size
    if config.tie_word_embeddings:
        total += config.vocab_size * config.hidden_size
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return total - config.num_hidden_layers * (config.num_experts - config.num_experts_per_tok) * expert


def unstack_blocks(params: Params) -> dict[str, Any]:
    """The tree with a tuple of `{"delta": tuple of layers, "attention": layer}` as `blocks`."""
    blocks = params["blocks"]
    if isinstance(blocks, tuple):
        return dict(params)
    return {
        **params,
        "blocks": tuple({**block, "delta": _split(block["delta"])} for block in _split(blocks)),
    }


def stack_blocks(params: Params) -> dict[str, Any]:
    """The tree with layers stacked; itself, if it is so already."""
    blocks = params["blocks"]
    if not isinstance(blocks, tuple):
        return dict(params)
    return {**params, "blocks": _join(tuple({**block, "delta": _join(block["delta"])} for block in blocks))}


def _split(tree: Params) -> tuple[dict[str, Any], ...]:
    size = jax.tree.leaves(tree)[0].shape[0]
    return tuple(jax.tree.map(lambda x, i=i: x[i], dict(tree)) for i in range(size))


def _join(trees: tuple[Params, ...]) -> dict[str, Any]:
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


# ------------------------------------------------------------------------------------------------- declarations


def _norm(size: int) -> Parameter:
    """Weight of an RMS norm that scales by `1 + w`."""
    return Parameter(shape=(size,), axes=(None,), initialiser=parallel.zeros)


def layer_parameters(config: Qwen35MoeConfig, *, attention: bool) -> ParameterTree:
    """Declare the parameters of one layer, not stacked."""
    return {
        "input_norm": _norm(config.hidden_size),
        "mixer": _attention(config) if attention else _delta_net(config),
        "post_norm": _norm(config.hidden_size),
        "moe": _moe(config),
    }


def _residual_gain(config: Qwen35MoeConfig) -> float:
    """Keeps the residual stream's size independent of the depth at the start."""
    return 1 / math.sqrt(2 * config.num_hidden_layers)


def _attention(config: Qwen35MoeConfig) -> ParameterTree:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    into = parallel.scaled_normal(hidden)
    query_axes, key_axes = ("embed", "heads", None), ("embed", "kv_heads", None)
    return {
        "q": Parameter(shape=(hidden, queries, width), axes=query_axes, initialiser=into, outputs=2),
        "gate": Parameter(shape=(hidden, queries, width), axes=query_axes, initialiser=into, outputs=2),
        "k": Parameter(shape=(hidden, keys, width), axes=key_axes, initialiser=into, outputs=2),
        "v": Parameter(shape=(hidden, keys, width), axes=key_axes, initialiser=into, outputs=2),
        "q_norm": _norm(width),
        "k_norm": _norm(width),
        "out": Parameter(
            shape=(queries * width, hidden),
            axes=("contracted", None),
            initialiser=parallel.scaled_normal(queries * width, _residual_gain(config)),
        ),
    }


def _delta_net(config: Qwen35MoeConfig) -> ParameterTree:
    hidden, conv = config.hidden_size, config.linear_conv_kernel_dim
    keys, key_width = config.linear_num_key_heads, config.linear_key_head_dim
    values, value_width = config.linear_num_value_heads, config.linear_value_head_dim
    into = parallel.scaled_normal(hidden)
    taps = parallel.uniform(-1 / math.sqrt(conv), 1 / math.sqrt(conv))

    def project(heads: int, width: int, axis: str) -> Parameter:
        return Parameter(shape=(hidden, heads, width), axes=("embed", axis, None), initialiser=into, outputs=2)

    def convolve(heads: int, width: int, axis: str) -> Parameter:
        return Parameter(shape=(conv, heads, width), axes=(None, axis, None), initialiser=taps)

    return {
        "q": project(keys, key_width, "delta_key_heads"),
        "k": project(keys, key_width, "delta_key_heads"),
        "v": project(values, value_width, "delta_value_heads"),
        "z": project(values, value_width, "delta_value_heads"),
        "b": Parameter(shape=(hidden, values), axes=("embed", "delta_value_heads"), initialiser=into),
        "a": Parameter(
            shape=(hidden, values),
            axes=("embed", "delta_value_heads"),
            initialiser=parallel.scaled_normal(hidden, 0.1),
        ),
        "q_conv": convolve(keys, key_width, "delta_key_heads"),
        "k_conv": convolve(keys, key_width, "delta_key_heads"),
        "v_conv": convolve(values, value_width, "delta_value_heads"),
        "A_log": Parameter(shape=(values,), axes=("delta_value_heads",), initialiser=parallel.uniform_log(0.05, 4.0)),
        "dt_bias": Parameter(
            shape=(values,), axes=("delta_value_heads",), initialiser=parallel.log_uniform_step(0.01, 0.1)
        ),
        "norm": Parameter(shape=(value_width,), axes=(None,), initialiser=parallel.ones),
        "out": Parameter(
            shape=(values * value_width, hidden),
            axes=("contracted", None),
            initialiser=parallel.scaled_normal(values * value_width, _residual_gain(config)),
        ),
    }


def _moe(config: Qwen35MoeConfig) -> ParameterTree:
    hidden, experts = config.hidden_size, config.num_experts
    inner, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    into, gain = parallel.scaled_normal(hidden), _residual_gain(config)
    return {
        "router": Parameter(shape=(hidden, experts), axes=("embed", None), initialiser=into),
        "gate_up": Parameter(
            shape=(experts, hidden, 2, inner), axes=("expert", None, None, "expert_inner"), initialiser=into, outputs=2
        ),
        "down": Parameter(
            shape=(experts, inner, hidden),
            axes=("expert", "expert_inner", None),
            initialiser=parallel.scaled_normal(inner, gain),
        ),
        "shared_gate_up": Parameter(
            shape=(hidden, 2, shared), axes=("embed", None, "shared_inner"), initialiser=into, outputs=2
        ),
        "shared_down": Parameter(
            shape=(shared, hidden),
            axes=("contracted", None),
            initialiser=parallel.scaled_normal(shared, gain),
        ),
        "shared_scale": Parameter(shape=(hidden,), axes=(None,), initialiser=into),
    }
