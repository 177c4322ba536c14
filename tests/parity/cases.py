"""The models that are compared, and what is asked of them: data only, read by both sides.

Between them every field of the configuration takes at least two values (`test_cases.py` holds that), and every layout
of the files occurs.
"""

from pathlib import Path
from typing import Any, NamedTuple

GOLDENS = Path(__file__).resolve().parent / "goldens"

ROWS, TIME = 3, 24
SHORT, PAD = 17, 7
"""Rows that are padded hold the first `SHORT` tokens beside `PAD` of padding."""
PREFILL = 11
"""Cached decoding is given this many tokens at once, and the rest of `SHORT` one by one."""
TEMPERATURE = 0.7
"""Divides the logits whose log-probabilities and loss are compared."""
BF16_ROWS, BF16_TIME = 64, 64
BF16_KEPT = 6
"""Logits of a token that are compared in bfloat16, at even distances: all come from one hidden state."""


class Case(NamedTuple):
    """One model.

    Attributes:
        config: Fields of `config.json`.
        fused: The experts of a layer are one tensor in the file rather than one each.
        nested: `config.json` holds the text model in `text_config`, its tensors are below `model.language_model.`, and
            tensors of parts that the text model does not have lie beside them.
        scan: Our side loops over its layers rather than unrolling them.
    """

    config: dict[str, Any]
    fused: bool = False
    nested: bool = False
    scan: bool = False


CASES: dict[str, Case] = {
    # GQA of 2, DeltaNet of 2, a quarter of each head rotated: the published models' ratios
    "published": Case(
        {
            "vocab_size": 48,
            "hidden_size": 24,
            "num_hidden_layers": 4,
            "full_attention_interval": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "partial_rotary_factor": 0.25,
            "rope_theta": 1e7,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        fused=True,
        nested=True,
        scan=True,
    ),
    # one key head for all queries, DeltaNet without groups, tied embedding
    "multi_query": Case(
        {
            "vocab_size": 40,
            "hidden_size": 16,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 10,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    # a key head per query, DeltaNet of 4, whole heads rotated, one expert a token, a norm that its epsilon bends
    "multi_head": Case(
        {
            "vocab_size": 36,
            "hidden_size": 20,
            "num_hidden_layers": 3,
            "full_attention_interval": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "partial_rotary_factor": 1.0,
            "rope_theta": 100.0,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 2,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 6,
            "rms_norm_eps": 1e-2,
            "tie_word_embeddings": False,
        },
    ),
    # GQA of 4, every expert for every token, tied and fused
    "all_experts": Case(
        {
            "vocab_size": 32,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "full_attention_interval": 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "partial_rotary_factor": 0.5,
            "rope_theta": 1e3,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 6,
            "linear_value_head_dim": 4,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 12,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        fused=True,
    ),
}
