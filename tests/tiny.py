"""The smallest model with every part of the family, for tests that compute real steps."""

from swerve import models

CONFIG = models.Qwen35MoeConfig(
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    partial_rotary_factor=0.5,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)
