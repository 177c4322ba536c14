"""Where the model's parameters live on a mesh, and the model as one rank of the tensor axis sees it."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from swerve import parallel
from swerve.models.config import Qwen35MoeConfig
from swerve.models.parameters import parameters
from swerve.parallel import MeshShape, ShardingRules, Split
from swerve.types import SwerveError

_DENSE = ("fsdp", "context", "expert")

RULES = ShardingRules(
    axes={
        "blocks": Split(),
        "layers": Split(),
        "embed": Split(storage=_DENSE),
        "heads": Split(compute=("tensor",)),
        "kv_heads": Split(compute=("tensor",)),
        "delta_key_heads": Split(compute=("tensor",)),
        "delta_value_heads": Split(compute=("tensor",)),
        "shared_inner": Split(compute=("tensor",)),
        "contracted": Split(compute=("tensor",), storage=_DENSE),
        "expert": Split(compute=("expert",), storage=("fsdp", "context")),
        "expert_inner": Split(compute=("tensor",)),
        "vocab": Split(storage=("fsdp", "expert")),
        "vocab_embed": Split(storage=("context",)),
        "head_embed": Split(storage=("fsdp", "expert")),
        "head_vocab": Split(storage=("context",)),
    }
)
"""Dense weights are spread over all devices and gathered layer by layer; experts are gathered over all but `expert`."""


def parameter_specs(config: Qwen35MoeConfig, mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """The tree of `PartitionSpec` of the parameters.

    Raises:
        SwerveError: A dimension does not divide over the mesh.
    """
    return parallel.specs(parameters(config), mesh, RULES)


def parameter_shardings(config: Qwen35MoeConfig, mesh: Mesh) -> dict[str, Any]:
    """The tree of `NamedSharding` of the parameters.

    Raises:
        SwerveError: A dimension does not divide over the mesh.
    """
    return parallel.shardings(parameters(config), mesh, RULES)


def check_mesh(config: Qwen35MoeConfig, mesh: MeshShape, rows: int, time: int, expert_chunks: int = 1) -> None:
    """Refuse a mesh that cannot compute a micro-batch of a model.

    Args:
        config: The model's shape.
        mesh: Devices along each axis.
        rows: Rows of a micro-batch.
        time: Token slots of a row.
        expert_chunks: Parts in which a device's tokens visit the experts.

    Raises:
        SwerveError: Something does not divide.
    """
    for what, size, axes in (
        ("rows of a micro-batch", rows, ("fsdp", "expert")),
        ("token slots of a row", time, ("context",)),
    ):
        if size % mesh.size(*axes):
            raise SwerveError(
                f"{size} {what} do not divide over {mesh.size(*axes)} devices of the mesh axes {', '.join(axes)}"
            )
    history = config.linear_conv_kernel_dim - 1
    if mesh.context > 1 and time // mesh.context < history:
        raise SwerveError(
            f"{time} token slots over {mesh.context} devices leave {time // mesh.context} each; the convolution looks "
            f"back {history}: lower the mesh axis context"
        )
    tokens = rows // mesh.size("fsdp", "expert") * (time // mesh.context)
    if tokens % expert_chunks:
        raise SwerveError(
            f"{tokens} tokens of a device do not divide into execution.expert_chunks = {expert_chunks}: lower it"
        )
    if tokens % mesh.tensor:
        raise SwerveError(f"{tokens} tokens of a device do not divide over {mesh.tensor} devices of the axis tensor")
    abstract = AbstractMesh(tuple(getattr(mesh, axis) for axis in parallel.AXES), parallel.AXES)
    parameter_specs(config, abstract)


def of_tensor_rank(config: Qwen35MoeConfig, mesh: MeshShape) -> Qwen35MoeConfig:
    """The model with the heads that one rank of the tensor axis computes."""
    if mesh.tensor == 1:
        return config
    heads = ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads")
    return dataclasses.replace(config, **{name: getattr(config, name) // mesh.tensor for name in heads})
