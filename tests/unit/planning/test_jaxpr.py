"""Costs counted in jaxprs equal those computed by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, PartitionSpec

from swerve.planning.costs import wire_bytes
from swerve.planning.jaxpr import count_costs
from swerve.planning.names import direction_of, scope_of

MESH = AbstractMesh((4, 2), ("fsdp", "expert"))
SIZES = {"fsdp": 4, "expert": 2}
ALL = PartitionSpec(("fsdp", "expert"))


def costs_of(function, *arguments, sizes=None):
    return count_costs(jax.make_jaxpr(function)(*arguments), sizes or {"fsdp": 1})


def manual(function, *arguments, specs=ALL):
    mapped = jax.shard_map(function, mesh=MESH, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    return costs_of(mapped, *arguments, sizes=SIZES)


def floats(*shape):
    return jnp.zeros(shape, jnp.bfloat16)


def test_products_and_convolutions():
    costs = costs_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), floats(3, 5, 7), floats(3, 7, 11))
    assert costs.flops == 2 * 3 * 5 * 7 * 11
    assert costs.hbm_bytes == 2 * (3 * 5 * 7 + 3 * 7 * 11 + 3 * 5 * 11)
    one = lax.conv_dimension_numbers((2, 16, 6), (4, 2, 9), ("NWC", "WIO", "NWC"))
    convolve = costs_of(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=one, feature_group_count=3),
        floats(2, 16, 6),
        floats(4, 2, 9),
    )
    assert convolve.flops == 2 * (2 * 16 * 9) * 4 * 2


def test_loops_multiply_nested_and_conditions_take_the_heaviest_branch():
    w = floats(8, 8)

    def inner(x, _):
        return lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x), None

    def outer(x, _):
        return lax.scan(inner, x, None, length=5)[0], None

    costs = costs_of(lambda x: lax.scan(outer, x, None, length=3)[0], floats(4, 8))
    assert costs.flops == 3 * 5 * 2 * (2 * 4 * 8 * 8)
    assert costs.notes == ()


def test_a_while_loop_counts_where_its_length_is_written_and_says_so_where_not():
    w = floats(8, 8)

    def counted(x):
        return lax.while_loop(lambda c: c[0] < 7, lambda c: (c[0] + 2, c[1] @ w), (1, x))[1]

    def open_ended(x):
        return lax.while_loop(lambda x: x.sum() < 7, lambda x: x @ w, x)

    assert costs_of(counted, floats(4, 8)).flops == 3 * (2 * 4 * 8 * 8)
    costs = costs_of(open_ended, floats(4, 8))
    assert costs.flops == 2 * 4 * 8 * 8
    assert [note for note in costs.notes if "unknown length" in note]


def test_remat_scans_and_custom_derivatives_split_into_forward_recomputed_and_backward():
    @jax.custom_vjp
    def double(x):
        return x * 2

    double.defvjp(lambda x: (double(x), None), lambda _, g: (g @ floats(8, 8),))

    def layer(x, w):
        with jax.named_scope("mixer"):
            return jnp.tanh(double(x @ w)), None

    def loss(w, x):
        return lax.scan(jax.checkpoint(layer), x, w)[0].astype(jnp.float32).sum()

    costs = costs_of(jax.grad(loss), floats(3, 8, 8), floats(4, 8))
    once = 3 * 2 * 4 * 8 * 8
    by_direction = {}
    for work in costs.work:
        assert work.source.startswith("mixer")
        by_direction[work.direction] = by_direction.get(work.direction, 0) + work.flops
    # Backward: the gradients of x and of w, and the product in the custom rule.
    assert by_direction == {"forward": once, "recomputed": once, "backward": 3 * once}


def test_inside_shard_map_shapes_are_per_device_and_outside_work_is_shared():
    product = 2 * 64 * 8 * 8
    assert manual(lambda x: lax.psum(x @ floats(8, 8), ("fsdp", "expert")), floats(64, 8)).flops == product / 8
    assert costs_of(lambda x: x @ floats(8, 8), floats(64, 8), sizes=SIZES).flops == product / 8


def test_collectives_by_kind_axis_count_and_bytes():
    def body(x):
        def step(carry, _):
            y = lax.all_gather(carry, "fsdp", tiled=True)  # [32, 8]
            return lax.psum_scatter(y, "fsdp", tiled=True), None

        x, _ = lax.scan(step, x, None, length=5)
        x = lax.ppermute(x, "expert", [(0, 1)])
        x = lax.all_to_all(x, "fsdp", 0, 0, tiled=True)
        return lax.pmax(lax.psum(x, ("fsdp", "expert")), "expert")

    costs = manual(body, floats(64, 8))
    found = {(c.kind, c.axes): (c.count, c.num_bytes, c.wire_bytes) for c in costs.collectives}
    whole, part = 2 * 32 * 8, 2 * 8 * 8
    assert found == {
        ("all_gather", ("fsdp",)): (5, 5 * whole, 5 * whole * 3 / 4),
        ("reduce_scatter", ("fsdp",)): (5, 5 * whole, 5 * whole * 3 / 4),
        ("permute", ("expert",)): (1, part, part),
        ("all_to_all", ("fsdp",)): (1, part, part * 3 / 4),
        ("all_reduce", ("fsdp", "expert")): (1, part, 2 * part * 7 / 8),
        ("all_reduce", ("expert",)): (1, part, part),
    }
    assert costs.wire_bytes == sum(wire for _, _, wire in found.values())


def test_bytes_on_the_wire():
    assert wire_bytes("all_gather", 800, 8) == 700
    assert wire_bytes("reduce_scatter", 800, 8) == 700
    assert wire_bytes("all_reduce", 800, 8) == 1400
    assert wire_bytes("permute", 800, 8) == 800


def test_kernels_by_their_estimate_or_by_their_grid():
    def kernel(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], y_ref[...])

    def call(x, y, **options):
        block = pl.BlockSpec((8, 16), lambda i: (i, 0))
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[block, pl.BlockSpec((16, 16), lambda i: (0, 0))],
            out_specs=block,
            out_shape=jax.ShapeDtypeStruct((32, 16), jnp.float32),
            name="product",
            **options,
        )(x, y)

    x, y = jnp.zeros((32, 16)), jnp.zeros((16, 16))
    costs = costs_of(call, x, y)
    assert costs.flops == 4 * 2 * 8 * 16 * 16
    assert ["kernel product" in note for note in costs.notes] == [True]
    estimate = pl.CostEstimate(flops=123, transcendentals=0, bytes_accessed=456)
    estimated = costs_of(lambda x, y: call(x, y, cost_estimate=estimate), x, y)
    assert (estimated.flops, estimated.hbm_bytes, estimated.notes) == (123, 456, ())


def test_bad_lowerings_are_named():
    groups = jnp.array([3, 5], jnp.int32)

    def loss(x, w):
        return lax.ragged_dot(x, w, groups).astype(jnp.float32).sum()

    backward = costs_of(jax.grad(loss, argnums=(0, 1)), floats(8, 4), floats(2, 4, 6))
    assert [line for line in backward.bad_lowerings if "dense masked convolution" in line]
    assert costs_of(loss, floats(8, 4), floats(2, 4, 6)).bad_lowerings == ()
    # The gradient of the weights [2, 4, 6] takes all 8 rows for each of the 2 groups; loss and dx take each row once.
    assert backward.flops == (1 + 1 + 2) * 2 * 8 * 4 * 6
    whole = manual(lambda x: lax.all_gather(x, ("fsdp", "expert"), tiled=True), floats(64, 8))
    assert [line for line in whole.suspects if "whole mesh" in line]
    steps = manual(lambda x: lax.all_gather(lax.all_gather(x, "fsdp", tiled=True), "expert", tiled=True), floats(64, 8))
    assert steps.suspects == ()


@pytest.mark.parametrize(
    ("stack", "scope", "direction"),
    [
        ("jit(f)/shard_map/jvp(layer)/while/body/closed_call/attention", "layer/attention", "forward"),
        ("transpose(jvp(layer))/checkpoint/rematted_computation/attention", "layer/attention", "recomputed"),
        ("jit(f)/transpose(jvp())/while/body/closed_call/checkpoint", "", "backward"),
        ("jit(f)/ab,bc->ac/jit(silu)", "", "forward"),
    ],
)
def test_names_of_operations(stack, scope, direction):
    assert (scope_of(stack), direction_of(stack)) == (scope, direction)
