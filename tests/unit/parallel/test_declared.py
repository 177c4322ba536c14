"""What derives from a declared tree."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from swerve import parallel
from swerve.parallel import Parameter, ShardingRules, Split
from swerve.types import SwerveError

TREE = {
    "a": Parameter(shape=(8, 6), axes=("embed", "heads"), initialiser=parallel.scaled_normal(8)),
    "inner": {"b": Parameter(shape=(6,), axes=(None,), initialiser=parallel.ones, dtype="bfloat16")},
}


def test_arrays_have_the_declared_shapes_and_types_and_do_not_depend_on_their_neighbours() -> None:
    values = parallel.initialise(TREE, jax.random.key(0))
    shapes = parallel.abstract(TREE)
    assert jax.tree.structure(values) == jax.tree.structure(shapes)
    jax.tree.map(lambda x, s: (x.shape, x.dtype) == (s.shape, s.dtype) or pytest.fail(str(s)), values, shapes)
    alone = parallel.initialise({"a": TREE["a"]}, jax.random.key(0))
    assert np.array_equal(alone["a"], values["a"])
    assert parallel.num_parameters(TREE) == 54


def test_stacked_slices_are_initialised_on_their_own() -> None:
    stacked = parallel.stack(TREE, 3, "layers")
    assert stacked["a"].axes == ("layers", "embed", "heads")
    values = parallel.initialise(stacked, jax.random.key(0))["a"]
    assert values.shape == (3, 8, 6)
    assert not np.array_equal(values[0], values[1])


def test_names_come_and_go() -> None:
    named = parallel.flatten_names(TREE)
    assert list(named) == ["a", "inner.b"]
    assert parallel.unflatten_names(named) == TREE


def test_first_step_sizes_lie_where_they_should() -> None:
    steps = jax.nn.softplus(parallel.log_uniform_step(0.01, 0.1)(jax.random.key(0), (100,)))
    assert 0.0099 < steps.min() < steps.max() < 0.1001
    logs = parallel.uniform_log(0.5, 2.0)(jax.random.key(0), (100,))
    assert 0.5 <= jnp.exp(logs).min() < jnp.exp(logs).max() <= 2.0


MESH = AbstractMesh((4, 2, 1), ("fsdp", "tensor", "expert"))


def test_rules_map_logical_axes_to_mesh_axes_that_split_something() -> None:
    rules = ShardingRules(axes={"embed": Split(storage=("fsdp", "expert")), "heads": Split(compute=("tensor",))})
    assert rules.spec(TREE["a"], MESH) == PartitionSpec("fsdp", "tensor")
    assert ShardingRules(axes={"embed": Split(), "heads": Split(compute=("expert",))}).spec(
        TREE["a"], MESH
    ) == PartitionSpec(None, None)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"embed": Split(storage=("fsdp",))}, "no sharding rule for logical axis 'heads'"),
        (
            {"embed": Split(compute=("tensor",)), "heads": Split(compute=("tensor",))},
            "'tensor' would split two dimensions",
        ),
        ({"embed": Split(), "heads": Split(storage=("fsdp",))}, "size 6 does not divide over 4"),
    ],
)
def test_rules_refuse_what_cannot_be(axes: dict[str, Split], message: str) -> None:
    with pytest.raises(SwerveError, match=message):
        ShardingRules(axes=axes).spec(TREE["a"], MESH, "a")


def test_a_declaration_needs_one_axis_per_dimension() -> None:
    with pytest.raises(ValueError, match="cannot have axes"):
        Parameter(shape=(2,), axes=(), initialiser=parallel.zeros)


def test_tuning_twice_keeps_what_the_user_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3 --xla_cpu_multi_thread_eigen=false")
    parallel.tune_cpu()
    parallel.tune_cpu()
    assert os.environ["XLA_FLAGS"] == "--xla_backend_optimization_level=3 --xla_cpu_multi_thread_eigen=false"


@pytest.mark.parametrize("wide", [False, True])
def test_gradients_are_added_up_over_devices_in_the_type_that_is_asked_for(wide: bool) -> None:
    mesh = parallel.MeshShape(fsdp=2, context=4)
    rules = ShardingRules(axes={"embed": Split(storage=("fsdp", "context"))})
    declared = Parameter(shape=(16, 3), axes=("embed", None), initialiser=parallel.ones)
    spec = rules.spec(declared, mesh.make())

    def of_device(part: jax.Array, weight: jax.Array) -> jax.Array:
        def loss(part: jax.Array) -> jax.Array:
            return (rules.gather(part, declared, mesh, sum_in_float32=wide).astype(jnp.float32) * weight).sum()

        return jax.grad(loss)(part)

    by_device = PartitionSpec(("fsdp", "context"))
    manual = jax.shard_map(of_device, mesh=mesh.make(), in_specs=(spec, by_device), out_specs=spec, check_vma=False)
    values = jnp.ones((16, 3), jnp.bfloat16), jnp.asarray([[256.0]] + [[1.0]] * 7)
    found = jax.jit(manual)(*values)
    assert found.dtype == jnp.bfloat16
    text = str(jax.make_jaxpr(manual)(*values))
    assert re.findall(r"(\w+)\[[\d,]+\] = reduce_scatter", text) == ["f32" if wide else "bf16"] * 2
    if wide:  # 263, between two bfloat16 numbers; each term alone would vanish beside 256
        np.testing.assert_array_equal(found, np.full((16, 3), 264.0, np.float32).astype(found.dtype))
