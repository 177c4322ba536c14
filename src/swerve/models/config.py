"""The configuration of the Qwen3.5-MoE text model, with Hugging Face's field names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35MoeConfig:
    """Shape of one model: blocks of `full_attention_interval` layers, the last of each with softmax attention.

    Attributes:
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        num_hidden_layers: Layers, a multiple of `full_attention_interval`.
        full_attention_interval: Layers of a block: all but the last are Gated DeltaNet.
        num_attention_heads: Query heads of the softmax attention.
        num_key_value_heads: Key and value heads of the softmax attention.
        head_dim: Width of an attention head.
        partial_rotary_factor: Share of a head that is rotated by position.
        rope_theta: Base of the rotary frequencies.
        linear_num_key_heads: Query and key heads of the DeltaNet layers.
        linear_num_value_heads: Value heads of the DeltaNet layers, a multiple of the key heads.
        linear_key_head_dim: Width of a DeltaNet query or key head.
        linear_value_head_dim: Width of a DeltaNet value head.
        linear_conv_kernel_dim: Width of the causal convolution before the DeltaNet.
        num_experts: Routed experts of a layer.
        num_experts_per_tok: Experts that each token visits.
        moe_intermediate_size: Width of a routed expert.
        shared_expert_intermediate_size: Width of the expert that every token visits.
        rms_norm_eps: Added to the mean square before its root.
        tie_word_embeddings: Whether the head is the embedding.
        initializer_range: Standard deviation with which the embedding and the head start.
        max_position_embeddings: Longest context the weights were made for; recorded, not enforced.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    full_attention_interval: int = 4
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    partial_rotary_factor: float = 0.25
    rope_theta: float = 1e7
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int = 4
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 262144

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built."""
        for name, divisor in (
            ("num_hidden_layers", "full_attention_interval"),
            ("num_attention_heads", "num_key_value_heads"),
            ("linear_num_value_heads", "linear_num_key_heads"),
        ):
            if getattr(self, name) % getattr(self, divisor):
                raise SwerveError(f"model config: {name} {getattr(self, name)} is not a multiple of {divisor}")
        if not 1 <= self.num_experts_per_tok <= self.num_experts:
            raise SwerveError(f"model config: num_experts_per_tok must be in 1..{self.num_experts}")
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise SwerveError(f"model config: partial_rotary_factor rotates {self.rotary_dim} of {self.head_dim}")

    @property
    def num_blocks(self) -> int:
        """Groups of `full_attention_interval` layers."""
        return self.num_hidden_layers // self.full_attention_interval

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of an attention head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        """Width of all DeltaNet keys together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        """Width of all DeltaNet values together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    def is_attention_layer(self, layer: int) -> bool:
        """Whether a layer (0-based) has softmax attention rather than a DeltaNet."""
        return (layer + 1) % self.full_attention_interval == 0

    @property
    def layer_types(self) -> list[str]:
        """Hugging Face's name of each layer's kind."""
        return [
            "full_attention" if self.is_attention_layer(i) else "linear_attention"
            for i in range(self.num_hidden_layers)
        ]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str = "config.json") -> Qwen35MoeConfig:
        """Read a Hugging Face configuration.

        Args:
            config: The parsed `config.json`; a `text_config` inside it is used where there is one.
            source: How to call the configuration in an error.

        Returns:
            The configuration.

        Raises:
            SwerveError: A field is missing, or the configuration asks for something this model does not do.
        """
        text = dict(config.get("text_config") or config)
        text.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
        rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in rope:
                text[key] = rope[key]
        if rope.get("rope_type", "default") != "default":
            raise SwerveError(f"{source}: rope_type {rope['rope_type']!r} is not supported; only 'default' is")
        if text.get("hidden_act", "silu") != "silu":
            raise SwerveError(f"{source}: hidden_act {text['hidden_act']!r} is not supported; only 'silu' is")
        if text.get("attention_bias"):
            raise SwerveError(f"{source}: attention_bias is not supported")
        kinds = text.get("layer_types") or ()
        if "full_attention" in kinds:  # `transformers` writes the kinds alone
            text.setdefault("full_attention_interval", kinds.index("full_attention") + 1)
        required = [f.name for f in fields(cls) if f.default is f.default_factory]
        if missing := [name for name in required if name not in text]:
            raise SwerveError(f"{source}: missing {', '.join(missing)}")
        made = cls(**{f.name: text[f.name] for f in fields(cls) if f.name in text})
        if kinds and list(kinds) != made.layer_types:
            raise SwerveError(
                f"{source}: layer_types must repeat full_attention_interval - 1 linear layers and a full one"
            )
        return made

    def to_hf(self) -> dict[str, Any]:
        """The `config.json` that `transformers` reads this model with."""
        own = asdict(self)
        rotary = {"rope_theta": own.pop("rope_theta"), "partial_rotary_factor": own.pop("partial_rotary_factor")}
        third = self.rotary_dim // 2 // 3
        sections = [self.rotary_dim // 2 - 2 * third, third, third]
        return {
            "architectures": ["Qwen3_5MoeForCausalLM"],
            "model_type": "qwen3_5_moe_text",
            **own,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "rope_parameters": {
                "rope_type": "default",
                **rotary,
                "mrope_section": sections,
                "mrope_interleaved": True,
            },
            "layer_types": self.layer_types,
        }


TINY = Qwen35MoeConfig(
    vocab_size=1536,
    hidden_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    partial_rotary_factor=0.5,
    rope_theta=10_000.0,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=32,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
    max_position_embeddings=4096,
)
"""The shipped policy: 8 layers, about four million parameters, a million of them active for a token."""

PUBLISHED = {
    "qwen35_397b_a17b": Qwen35MoeConfig(
        vocab_size=248_320,
        hidden_size=4096,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=64,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=1024,
        shared_expert_intermediate_size=1024,
    ),
    "qwen35_35b_a3b": Qwen35MoeConfig(
        vocab_size=248_320,
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
"""Shapes of the published models of the family, by the names that recipes use; their text paths."""
