"""The reader of optimised HLO, on texts in the shape that TPU compilers write."""

import pytest

from swerve.planning.hlo import array_bytes, group_axes, parse_module, read_emitted, trip_count

SIZES = {"fsdp": 2, "context": 2, "expert": 2, "tensor": 1}

HLO = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,8]{1,0})->bf16[4,8]{1,0}}

%add (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  %y = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%x, %y)
}

%hidden (p.1: bf16[4,8]) -> bf16[8,8] {
  %p.1 = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, metadata={op_name="jit(step)/all_gather"}
}, execution_thread="sparsecore"

%fused (p.2: bf16[8,8]) -> bf16[4,8] {
  %p.2 = bf16[8,8]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = bf16[4,8]{1,0} reduce-scatter(%p.2), replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}, to_apply=%add
}

%body (c: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %c = (s32[], bf16[4,8]{1,0}) parameter(0)
  %g = ((bf16[4,8]{1,0}), bf16[8,8]{1,0}, u32[]{:S(8)}) async-start(%x.1), async_execution_thread="sparsecore", calls=%hidden
  %d = bf16[8,8]{1,0} async-done(%g), calls=%hidden
  %f = bf16[4,8]{1,0} fusion(%d), kind=kCustom, calls=%fused
  %s = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[]{:S(2)}) collective-permute-start(%f), channel_id=3, source_target_pairs={{0,2},{1,3},{4,6},{5,7}}
  %e = bf16[4,8]{1,0} collective-permute-done(%s)
}

%inner_limit (k: s32[]) -> pred[] {
  %k = s32[] parameter(0)
  %limit = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%k, %limit), direction=LT
}

%condition (c.1: (s32[], bf16[4,8])) -> pred[] {
  %c.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %call = pred[] fusion(%c.1), kind=kLoop, calls=%inner_limit
}

%outer (o: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %o = (s32[], bf16[4,8]{1,0}) parameter(0)
  %loop.1 = (s32[], bf16[4,8]{1,0}) while(%o), condition=%condition, body=%body
}

%light (l: bf16[4,8]) -> bf16[4,8] {
  %l = bf16[4,8]{1,0} parameter(0)
}

%heavy (h: bf16[4,8]) -> bf16[4,8] {
  %h = bf16[4,8]{1,0} parameter(0)
  %a2a = bf16[4,8]{1,0} all-to-all(%h), replica_groups=[4,2]<=[8], dimensions={0}
}

ENTRY %main (p: bf16[4,8]) -> bf16[4,8] {
  %p = bf16[4,8]{1,0} parameter(0), metadata={op_name="w"}
  %loop.2 = (s32[], bf16[4,8]{1,0}) while(%t), condition=%unknown, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %c.9 = bf16[4,8]{1,0} conditional(%q, %p, %p), branch_computations={%light, %heavy}
  %both = (f32[4,8]{1,0}, f32[]) all-reduce(%p, %p), replica_groups={}, to_apply=%add
  %whole = bf16[4,8]{1,0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add, metadata={op_name="jit(step)/all_gather"}
}
"""  # noqa: E501


def test_collectives_in_calls_fusions_loops_and_branches():
    emitted = read_emitted(parse_module(HLO), SIZES)
    found = {(c.kind, c.axes): (c.group_size, c.count, c.num_bytes) for c in emitted.collectives}
    assert found == {
        ("all_gather", ("fsdp",)): (2, 15, 15 * 8 * 8 * 2),
        ("reduce_scatter", ("context",)): (2, 15, 15 * 8 * 8 * 2),  # its operand, not its result
        ("permute", ("context",)): (2, 15, 15 * 4 * 8 * 2),
        ("all_to_all", ("expert",)): (2, 1, 4 * 8 * 2),
        ("all_reduce", ("fsdp", "context", "expert")): (8, 2, 4 * 8 * 4 + 4 + 4 * 8 * 2),
    }
    assert emitted.num_unknown_loops == 0


PRODUCTS = """\
HloModule jit_products

%fused (q: f32[7,3]) -> f32[2,3,5] {
  %q = f32[7,3]{1,0} parameter(0)
  %r = f32[2,7,5]{2,1,0:T(8,128)} parameter(1)
  %b = f32[2,7,3]{2,1,0} broadcast(%q), dimensions={1,2}
  ROOT %dot.1 = f32[2,3,5]{2,1,0} dot(%b, %r), lhs_batch_dims={0}, lhs_contracting_dims={1}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}

%hidden (c: (s32[], f32[7,3])) -> f32[2,3,5] {
  %c = (s32[], f32[7,3]{1,0}) parameter(0)
  %e = f32[7,3]{1,0} get-tuple-element(%c), index=1
  %f = f32[2,3,5]{2,1,0} fusion(%e, %e), kind=kOutput, calls=%fused
}

%body (o: (s32[], f32[7,3])) -> (s32[], f32[7,3]) {
  %o = (s32[], f32[7,3]{1,0}) parameter(0)
  %g = ((s32[], f32[7,3]{1,0}), f32[2,3,5]{2,1,0}, u32[]) async-start(%o), calls=%hidden
  %h = f32[2,3,5]{2,1,0} async-done(%g), calls=%hidden
}

ENTRY %main (p: bf16[16,4096]) -> bf16[16,512] {
  %p = bf16[16,4096]{1,0} parameter(0)
  %w = bf16[512,4096]{1,0} parameter(1)
  %loop = (s32[], f32[7,3]{1,0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %convolution.1 = bf16[16,512]{1,0} convolution(%p, %w), dim_labels=bf_oi->bf
}
"""  # noqa: E501


def test_products_in_loops_fusions_and_asynchronous_calls_and_as_convolutions():
    emitted = read_emitted(parse_module(PRODUCTS), SIZES)
    assert emitted.flops == 6 * 2 * (2 * 3 * 5) * 7 + 2 * 16 * 512 * 4096
    assert emitted.collectives == emitted.by_size == ()


def test_collectives_of_each_size_are_told_apart():
    emitted = read_emitted(parse_module(HLO), SIZES)
    both = [(c.count, c.num_bytes) for c in emitted.by_size if c.kind == "all_reduce"]
    assert both == [(1, 4 * 8 * 4 + 4), (1, 4 * 8 * 2)]
    assert sum(c.num_bytes for c in emitted.by_size) == sum(c.num_bytes for c in emitted.collectives)


def test_a_loop_of_unknown_length_counts_once_and_is_reported():
    unknown = HLO.replace("constant(5)", "parameter(0)")
    emitted = read_emitted(parse_module(unknown), SIZES)
    assert next(c.count for c in emitted.collectives if c.kind == "all_gather") == 3
    assert emitted.num_unknown_loops == 1
    module = parse_module(unknown)
    loops = {
        i.name: trip_count(module, i) for lines in module.computations.values() for i in lines if i.opcode == "while"
    }
    assert loops == {"loop.1": None, "loop.2": 3}


@pytest.mark.parametrize(
    ("groups", "pairs", "axes"),
    [
        ([[0, 1]], False, ("expert",)),
        ([[0, 2]], False, ("context",)),
        ([[0, 1, 4, 5]], False, ("fsdp", "expert")),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], False, ("fsdp", "context", "expert")),
        ([], False, ("fsdp", "context", "expert")),
        ([[0, 3]], False, ()),  # a diagonal is no set of axes
        ([[0, 2], [1, 3]], True, ("context",)),
    ],
)
def test_groups_of_devices_become_axes(groups, pairs, axes):
    assert group_axes(groups, SIZES, pairs=pairs)[0] == axes


def test_transposed_groups():
    text = HLO.replace("[4,2]<=[8]", "[4,2]<=[2,4]T(1,0)")
    emitted = read_emitted(parse_module(text), SIZES)
    assert next(c.axes for c in emitted.collectives if c.kind == "all_to_all") == ("fsdp",)


@pytest.mark.parametrize(
    ("dtype", "dims", "expected"),
    [("bf16", "3,5", 30), ("f32", "", 4), ("pred", "7", 7), ("s4", "3", 2), ("f8e4m3fn", "4", 4), ("token", "", 0)],
)
def test_sizes_of_types(dtype, dims, expected):
    assert array_bytes(dtype, dims) == expected
