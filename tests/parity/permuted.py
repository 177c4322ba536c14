"""A model with its inner units renumbered: the same function, its sums taken in another order.

Renumbered are hidden channels, attention heads and widths (those that rotate excepted: their frequencies have an
order), DeltaNet heads and widths, experts, and inner units of experts.
"""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]

Tensors = dict[str, torch.Tensor]


def permuted(config: Any, tensors: Tensors, seed: int) -> Tensors:
    """The tensors of `Qwen3_5MoeForCausalLM(config)`, renumbered."""
    generator = torch.Generator().manual_seed(seed)

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    hidden = order(config.hidden_size)
    out: Tensors = {}
    for name, value in tensors.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            out[name] = value[:, hidden]
        elif (name.endswith("norm.weight") and ".layers." not in name) or name.endswith("layernorm.weight"):
            out[name] = value[hidden]
    for index, kind in enumerate(config.layer_types):
        base = f"model.layers.{index}."
        own = {n.removeprefix(base): t for n, t in tensors.items() if n.startswith(base)}
        renumber = _attention if kind == "full_attention" else _delta_net
        made = _experts(config, own, hidden, order) | renumber(config, own, hidden, order)
        out |= {base + n: t for n, t in made.items()}
    assert out.keys() == tensors.keys()
    return out


def _grouped(groups: int, members: int, order: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """An order of groups, and the order of their members that goes with it."""
    outer = order(groups)
    return outer, torch.cat([group * members + order(members) for group in outer])


def _experts(config: Any, own: Tensors, hidden: torch.Tensor, order: Any) -> Tensors:
    expert, inner = order(config.num_experts), order(config.moe_intermediate_size)
    shared = order(config.shared_expert_intermediate_size)
    both = torch.cat([inner, inner + len(inner)])
    return {
        "mlp.gate.weight": own["mlp.gate.weight"][expert][:, hidden],
        "mlp.experts.gate_up_proj": own["mlp.experts.gate_up_proj"][expert][:, both][:, :, hidden],
        "mlp.experts.down_proj": own["mlp.experts.down_proj"][expert][:, hidden][:, :, inner],
        "mlp.shared_expert.gate_proj.weight": own["mlp.shared_expert.gate_proj.weight"][shared][:, hidden],
        "mlp.shared_expert.up_proj.weight": own["mlp.shared_expert.up_proj.weight"][shared][:, hidden],
        "mlp.shared_expert.down_proj.weight": own["mlp.shared_expert.down_proj.weight"][hidden][:, shared],
        "mlp.shared_expert_gate.weight": own["mlp.shared_expert_gate.weight"][:, hidden],
    }


def _attention(config: Any, own: Tensors, hidden: torch.Tensor, order: Any) -> Tensors:
    width, num_heads, num_keys = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    keys, heads = _grouped(num_keys, num_heads // num_keys, order)
    rotary = int(width * config.rope_parameters["partial_rotary_factor"])
    across = torch.cat([torch.arange(rotary), rotary + order(width - rotary)])  # of a query or key
    along = order(width)  # of a value

    def rows(name: str, count: int, columns: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        return own[name].reshape(count, width, -1)[which][:, columns][:, :, hidden].reshape(own[name].shape)

    query = own["self_attn.q_proj.weight"].reshape(num_heads, 2, width, -1)[heads][..., hidden]
    query = torch.stack([query[:, 0, across], query[:, 1, along]], 1)
    result = own["self_attn.o_proj.weight"]
    return {
        "self_attn.q_proj.weight": query.reshape(own["self_attn.q_proj.weight"].shape),
        "self_attn.k_proj.weight": rows("self_attn.k_proj.weight", num_keys, across, keys),
        "self_attn.v_proj.weight": rows("self_attn.v_proj.weight", num_keys, along, keys),
        "self_attn.q_norm.weight": own["self_attn.q_norm.weight"][across],
        "self_attn.k_norm.weight": own["self_attn.k_norm.weight"][across],
        "self_attn.o_proj.weight": result.reshape(-1, num_heads, width)[hidden][:, heads][:, :, along].reshape(
            result.shape
        ),
    }


def _delta_net(config: Any, own: Tensors, hidden: torch.Tensor, order: Any) -> Tensors:
    num_keys, num_values = config.linear_num_key_heads, config.linear_num_value_heads
    keys, values = _grouped(num_keys, num_values // num_keys, order)
    across, along = order(config.linear_key_head_dim), order(config.linear_value_head_dim)
    key_rows = (keys[:, None] * len(across) + across).reshape(-1)
    value_rows = (values[:, None] * len(along) + along).reshape(-1)
    channels = torch.cat([key_rows, len(key_rows) + key_rows, 2 * len(key_rows) + value_rows])
    return {
        "linear_attn.in_proj_qkv.weight": own["linear_attn.in_proj_qkv.weight"][channels][:, hidden],
        "linear_attn.conv1d.weight": own["linear_attn.conv1d.weight"][channels],
        "linear_attn.in_proj_z.weight": own["linear_attn.in_proj_z.weight"][value_rows][:, hidden],
        "linear_attn.in_proj_b.weight": own["linear_attn.in_proj_b.weight"][values][:, hidden],
        "linear_attn.in_proj_a.weight": own["linear_attn.in_proj_a.weight"][values][:, hidden],
        "linear_attn.A_log": own["linear_attn.A_log"][values],
        "linear_attn.dt_bias": own["linear_attn.dt_bias"][values],
        "linear_attn.norm.weight": own["linear_attn.norm.weight"][along],
        "linear_attn.out_proj.weight": own["linear_attn.out_proj.weight"][hidden][:, value_rows],
    }
