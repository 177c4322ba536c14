"""Names of operations, as transformations and control flow leave them."""

from __future__ import annotations

import re

# Words that transformations and control flow put into a name stack, as einsum puts its formula; what remains are the
# author's own scopes.
_MACHINERY = re.compile(r"(jit|pjit|shard_map|while|body|cond|scan|closed_call|checkpoint|rematted_computation|remat\d*"
                        r"|custom_jvp_call|custom_vjp_call|core_call|pallas_call|branch_\d+_fun)?")  # fmt: skip


def direction_of(scopes: str) -> str:
    """Whether an operation belongs to the forward pass, the backward pass, or is done again for it.

    Args:
        scopes: Its name stack, as transformations leave it.

    Returns:
        `forward`, `backward` or `recomputed`.
    """
    if "rematted_computation" in scopes:
        return "recomputed"
    return "backward" if "transpose(" in scopes else "forward"


def scope_of(scopes: str) -> str:
    """The author's own scopes in a name stack, joined by `/`; empty if there are none."""
    words = []
    for word in scopes.split("/"):
        while inner := re.fullmatch(r"(\w+)\((.*)\)", word):
            word = "" if inner[1] in ("jit", "pjit") else inner[2]
        if not _MACHINERY.fullmatch(word) and "->" not in word and (not words or words[-1] != word):
            words.append(word)
    return "/".join(words)
