"""Which part of which tensor each of our leaves is, in every layout that files may have.

A leaf is one array of one layer as our model names and shapes it (`blocks.0.delta.1.mixer.q`), or one of `embedding`,
`final_norm` and `head`. A layout names tensors and links each to leaves; a link says

    tensor.reshape(-1)[offset:].reshape(view)[pick].transpose(order)  ==  leaf[place]

and is read from right to left as well, so one declaration serves reading, writing, checking and conversion. There are
four: `transformers`' own with a layer's experts in one tensor (`fused`) or one for each (`each`), and ours with layers
stacked (`scanned`) or apart (`unscanned`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from swerve import parallel
from swerve.models.config import Qwen35MoeConfig
from swerve.models.parameters import parameters
from swerve.types import SwerveError

Experts: TypeAlias = Literal["fused", "each"]
Shape: TypeAlias = tuple[int, ...]

PREFIX = "model."
"""Before the names of the text model's tensors, where no vision model surrounds it."""
HEAD = "lm_head.weight"
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", PREFIX)
_OTHER_PARTS = re.compile(r"^(model\.|language_model\.)*(mtp|visual|vision_tower)\.|rotary_emb\.inv_freq$")
_ONE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


class Link(NamedTuple):
    """A box of a tensor that is a box of a leaf.

    Attributes:
        leaf: The leaf's name.
        offset: Elements of the tensor before the view.
        view: Dimensions to see the elements from there on with.
        pick: Per dimension of the view, the index that is taken of it, or `None` for all.
        order: Per dimension of the leaf that is not placed, which of the view's that are not picked it is.
        place: Per dimension of the leaf, the index where the box goes, or `None` for all.
    """

    leaf: str
    offset: int
    view: Shape
    pick: tuple[int | None, ...]
    order: tuple[int, ...]
    place: tuple[int | None, ...]

    @property
    def leads(self) -> bool:
        """Whether the leaf's first dimension is the tensor's too, so that a part of the one is a part of the other."""
        return self.place[0] is not None or self.order[0] == 0

    @property
    def contiguous(self) -> bool:
        """Whether the box is one stretch of the tensor."""
        picked = [index is not None for index in self.pick]
        return picked == sorted(picked, reverse=True)

    @property
    def first_element(self) -> int:
        """Elements of the tensor before the box."""
        strides = (math.prod(self.view[axis + 1 :]) for axis in range(len(self.view)))
        return self.offset + sum((index or 0) * stride for index, stride in zip(self.pick, strides, strict=True))


class TensorLayout(NamedTuple):
    """A tensor's shape in files, and the leaves that it is made of, in the order of its elements."""

    shape: Shape
    links: tuple[Link, ...]


Layout: TypeAlias = Mapping[str, TensorLayout]
"""Every tensor of a model by name, in the order of the model."""


def leaf_shapes(config: Qwen35MoeConfig) -> dict[str, Shape]:
    """The shape of every leaf, in the order of the model."""
    return {name: tensor.shape for name, tensor in native_layout(config, scanned=False).items()}


@functools.lru_cache(maxsize=8)
def native_layout(config: Qwen35MoeConfig, *, scanned: bool) -> Layout:
    """Our own layout: a tensor for each array of `parameters(config)`, or for each leaf."""
    arrays = {name: p.shape for name, p in parallel.flatten_names(parameters(config)).items()}
    stacked = {name: TensorLayout(shape, tuple(_stacked(config, name, shape))) for name, shape in arrays.items()}
    if scanned:
        return stacked
    shapes = {link.leaf: _own(link) for tensor in stacked.values() for link in tensor.links}
    by_layer = sorted(shapes, key=lambda leaf: _rank(config, leaf))
    return {leaf: TensorLayout(shapes[leaf], (_link(leaf, shapes[leaf]),)) for leaf in by_layer}


@functools.lru_cache(maxsize=8)
def hf_layout(config: Qwen35MoeConfig, experts: Experts = "fused") -> Layout:
    """`transformers`' layout, names with the prefix `model.`; see `renamed`."""
    embedding = (config.vocab_size, config.hidden_size)
    templates = {attends: _layer(config, experts, attends) for attends in (False, True)}
    layout: dict[str, TensorLayout] = {
        f"{PREFIX}embed_tokens.weight": TensorLayout(embedding, (_link("embedding", embedding),))
    }
    for layer in range(config.num_hidden_layers):
        base = layer_name(config, layer)
        for name, (shape, links) in templates[config.is_attention_layer(layer)].items():
            own = tuple(link._replace(leaf=f"{base}.{link.leaf}") for link in links)
            layout[f"{PREFIX}layers.{layer}.{name}"] = TensorLayout(shape, own)
    norm = (config.hidden_size,)
    layout[f"{PREFIX}norm.weight"] = TensorLayout(norm, (_link("final_norm", norm),))
    if not config.tie_word_embeddings:
        layout[HEAD] = TensorLayout(embedding, (_link("head", embedding, order=(1, 0)),))
    return layout


def layer_name(config: Qwen35MoeConfig, layer: int) -> str:
    """What comes before the names of a layer's leaves."""
    block, within = divmod(layer, config.full_attention_interval)
    return f"blocks.{block}.attention" if config.is_attention_layer(layer) else f"blocks.{block}.delta.{within}"


# ----------------------------------------------------------------------------------------------------------- names


def normalised(name: str) -> str | None:
    """A tensor's name with the prefix `model.`, or `None` if it is of another part than the text model."""
    if _OTHER_PARTS.search(name):
        return None
    if name.endswith(HEAD):
        return HEAD
    prefix = prefix_of(name)
    return name if prefix is None else PREFIX + name.removeprefix(prefix)


def prefix_of(name: str) -> str | None:
    """Which of the known prefixes a name has."""
    return next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)


def renamed(layout: Layout, prefix: str) -> Layout:
    """A layout with another prefix than `model.`; the head goes where `transformers` has it.

    Raises:
        SwerveError: The prefix is none of those that are read.
    """
    if prefix not in _PREFIXES:
        raise SwerveError(f"prefix {prefix!r}: must be one of {', '.join(sorted(_PREFIXES))}")
    head = f"language_model.{HEAD}" if prefix.startswith("language_model.") else HEAD
    return {head if name == HEAD else prefix + name.removeprefix(PREFIX): tensor for name, tensor in layout.items()}


def experts_of(names: Mapping[str, object]) -> Experts:
    """How files with these names hold their experts."""
    return "each" if any(_ONE_EXPERT.search(name) for name in names) else "fused"


# -------------------------------------------------------------------------------------------------------- our layers


def _stacked(config: Qwen35MoeConfig, name: str, shape: Shape) -> Iterator[Link]:
    """The leaves of an array of `parameters(config)`."""
    if not name.startswith("blocks."):
        yield _link(name, shape)
        return
    _, kind, leaf = name.split(".", 2)
    for block in range(config.num_blocks):
        if kind == "attention":
            yield _link(f"blocks.{block}.attention.{leaf}", shape, pick={0: block})
            continue
        for within in range(config.full_attention_interval - 1):
            yield _link(f"blocks.{block}.delta.{within}.{leaf}", shape, pick={0: block, 1: within})


def _own(link: Link) -> Shape:
    return tuple(size for size, index in zip(link.view, link.pick, strict=True) if index is None)


def _rank(config: Qwen35MoeConfig, leaf: str) -> int:
    if not leaf.startswith("blocks."):
        return -1 if leaf == "embedding" else config.num_hidden_layers
    _, block, kind, within, *_ = leaf.split(".")
    interval = config.full_attention_interval
    return int(block) * interval + (interval - 1 if kind == "attention" else int(within))


# --------------------------------------------------------------------------------------------------- their layers


def _layer(config: Qwen35MoeConfig, experts: Experts, attends: bool) -> Layout:
    hidden, shared = config.hidden_size, config.shared_expert_intermediate_size
    own = _attention(config) if attends else _delta_net(config)
    return {
        "input_layernorm.weight": _same("input_norm", hidden),
        "post_attention_layernorm.weight": _same("post_norm", hidden),
        **own,
        "mlp.gate.weight": _linear("moe.router", hidden, config.num_experts),
        **(_fused_experts(config) if experts == "fused" else _each_expert(config)),
        "mlp.shared_expert.gate_proj.weight": _half("moe.shared_gate_up", (shared, hidden), {1: 0}),
        "mlp.shared_expert.up_proj.weight": _half("moe.shared_gate_up", (shared, hidden), {1: 1}),
        "mlp.shared_expert.down_proj.weight": _linear("moe.shared_down", shared, hidden),
        "mlp.shared_expert_gate.weight": TensorLayout((1, hidden), (_link("moe.shared_scale", (hidden,)),)),
    }


def _fused_experts(config: Qwen35MoeConfig) -> Layout:
    experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    gate_up = _link("moe.gate_up", (experts, 2, inner, hidden), order=(0, 3, 1, 2))
    down = _link("moe.down", (experts, hidden, inner), order=(0, 2, 1))
    return {
        "mlp.experts.gate_up_proj": TensorLayout((experts, 2 * inner, hidden), (gate_up,)),
        "mlp.experts.down_proj": TensorLayout((experts, hidden, inner), (down,)),
    }


def _each_expert(config: Qwen35MoeConfig) -> Layout:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    layout: dict[str, TensorLayout] = {}
    for expert in range(config.num_experts):
        base = f"mlp.experts.{expert}"
        layout[f"{base}.gate_proj.weight"] = _half("moe.gate_up", (inner, hidden), {0: expert, 2: 0})
        layout[f"{base}.up_proj.weight"] = _half("moe.gate_up", (inner, hidden), {0: expert, 2: 1})
        layout[f"{base}.down_proj.weight"] = _half("moe.down", (hidden, inner), {0: expert})
    return layout


def _attention(config: Qwen35MoeConfig) -> Layout:
    hidden, width = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads, config.num_key_value_heads
    both = (queries, 2, width, hidden)  # query and gate interleave per head
    halves = tuple(
        _link(leaf, both, pick={1: half}, order=(2, 0, 1)) for half, leaf in enumerate(("mixer.q", "mixer.gate"))
    )
    return {
        "self_attn.q_proj.weight": TensorLayout((2 * queries * width, hidden), halves),
        "self_attn.k_proj.weight": _linear("mixer.k", hidden, keys, width),
        "self_attn.v_proj.weight": _linear("mixer.v", hidden, keys, width),
        "self_attn.q_norm.weight": _same("mixer.q_norm", width),
        "self_attn.k_norm.weight": _same("mixer.k_norm", width),
        "self_attn.o_proj.weight": _linear("mixer.out", queries * width, hidden),
    }


def _delta_net(config: Qwen35MoeConfig) -> Layout:
    hidden, conv = config.hidden_size, config.linear_conv_kernel_dim
    values, value_width = config.linear_num_value_heads, config.linear_value_head_dim
    keys = (config.linear_num_key_heads, config.linear_key_head_dim)
    parts = {"q": keys, "k": keys, "v": (values, value_width)}
    channels = sum(math.prod(heads) for heads in parts.values())

    def joined(shape: Shape, inputs: int, suffix: str) -> TensorLayout:
        links, offset = [], 0
        for name, heads in parts.items():
            links.append(_link(f"mixer.{name}{suffix}", (*heads, inputs), order=(2, 0, 1), offset=offset))
            offset += math.prod(heads) * inputs
        return TensorLayout(shape, tuple(links))

    return {
        "linear_attn.in_proj_qkv.weight": joined((channels, hidden), hidden, ""),
        "linear_attn.in_proj_z.weight": _linear("mixer.z", hidden, values, value_width),
        "linear_attn.in_proj_b.weight": _linear("mixer.b", hidden, values),
        "linear_attn.in_proj_a.weight": _linear("mixer.a", hidden, values),
        "linear_attn.conv1d.weight": joined((channels, 1, conv), conv, "_conv"),
        "linear_attn.A_log": _same("mixer.A_log", values),
        "linear_attn.dt_bias": _same("mixer.dt_bias", values),
        "linear_attn.norm.weight": _same("mixer.norm", value_width),
        "linear_attn.out_proj.weight": _linear("mixer.out", values * value_width, hidden),
    }


def _same(leaf: str, size: int) -> TensorLayout:
    return TensorLayout((size,), (_link(leaf, (size,)),))


def _linear(leaf: str, inputs: int, *outputs: int) -> TensorLayout:
    """A `[out, in]` weight against our `[in, *out]`."""
    order = (len(outputs), *range(len(outputs)))
    return TensorLayout((math.prod(outputs), inputs), (_link(leaf, (*outputs, inputs), order=order),))


def _half(leaf: str, shape: Shape, place: Mapping[int, int]) -> TensorLayout:
    """An `[out, in]` weight that is one `[in, out]` slice of a leaf."""
    return TensorLayout(shape, (_link(leaf, shape, order=(1, 0), place=place),))


def _link(
    leaf: str,
    view: Shape,
    *,
    pick: Mapping[int, int] | None = None,
    order: Sequence[int] | None = None,
    place: Mapping[int, int] | None = None,
    offset: int = 0,
) -> Link:
    free = len(view) - len(pick or {})
    return Link(
        leaf=leaf,
        offset=offset,
        view=view,
        pick=tuple((pick or {}).get(axis) for axis in range(len(view))),
        order=tuple(range(free) if order is None else order),
        place=tuple((place or {}).get(axis) for axis in range(free + len(place or {}))),
    )
