"""What XLA wrote about a buffer assignment, read back."""

import pytest

from swerve.planning.memory import Buffer, find_dump, read_memory

STEM = "module_0001.jit_step.cl_1.after_optimizations"

HLO = """\
HloModule jit_step

%forward (wide.f: (s32[], bf16[6,4,8])) -> (s32[], bf16[6,4,8]) {
  %wide.f = (s32[], bf16[6,4,8]{2,1,0}) parameter(0)
  %row = bf16[6,4,8]{2,1,0} fusion(%wide.f), calls=%x, metadata={op_name="jit(step)/jvp(mixer)/while/body/dynamic_update_slice"}
}

%backward (wide.b: (s32[], f32[6,8,8])) -> (s32[], f32[6,8,8]) {
  %wide.b = (s32[], f32[6,8,8]{2,1,0}) parameter(0)
  %gathered = bf16[8,8]{1,0} custom-call(%g), metadata={op_name="jit(step)/transpose(jvp(mixer))/while/body/checkpoint/rematted_computation/all_gather"}
  %early = f32[100]{0} fusion(%g), calls=%x, metadata={op_name="jit(step)/jvp(mixer)/while/body/exp"}
}

ENTRY %main (p.0: f32[6,8,8], p.1: f32[4,8]) -> f32[6,8,8] {
  %p.0 = f32[6,8,8]{2,1,0} parameter(0), metadata={op_name="w"}
  %p.1 = f32[4,8]{1,0} parameter(1), metadata={op_name="x"}
  %zeros = f32[6,8,8]{2,1,0} broadcast(%c), metadata={op_name="jit(step)/transpose(jvp())/broadcast_in_dim"}
  %kept = (s32[], bf16[6,4,8]{2,1,0}) while(%t), condition=%c1, body=%forward, metadata={op_name="jit(step)/jvp()/while"}
  %grads = (s32[], f32[6,8,8]{2,1,0}) while(%u), condition=%c2, body=%backward, metadata={op_name="jit(step)/transpose(jvp())/while"}
}
"""  # noqa: E501

LIVE_RANGE = """\
HloLiveRange (max 9):
  InstructionSequence:
    0:p.0
    1:p.1
    2:zeros
    3:kept
    4:early
    5:gathered
    6:grads
  BufferLiveRange:
    p.0{}:0-9
    p.1{}:0-9
    kept{1}:3-6
    early{}:4-4
    wide.b{1}:5-7
    wide.f{1}:3-7
    gathered{}:5-6
  Live ranges at 5 (peak):
    wide.b{1}: 1536 bytes (cumulative: 1536 bytes)
    p.0{}: 1536 bytes (cumulative: 3072 bytes)
    early{}: 400 bytes (cumulative: 3472 bytes)
    kept{1}: 384 bytes (cumulative: 3856 bytes)
    wide.f{1}: 192 bytes (cumulative: 3856 bytes)
    gathered{}: 128 bytes (cumulative: 4176 bytes)
    p.1{}: 128 bytes (cumulative: 4304 bytes)
    token{}: 0 bytes (cumulative: 4304 bytes)
  Stack trace breakdown for peak usage: 4 304 bytes
    main (100.0%, total: 4 304 bytes, current: 0 bytes, remaining: 4 304 bytes)
"""

ASSIGNMENT = """\
BufferAssignment:
allocation 0: size 512, color 7, thread-local:
 value: <1 add @7> (size=512,offset=0): bf16[]{:T(256)S(7)}
allocation 1: size 1536, parameter 0, shape |f32[6,8,8]| at ShapeIndex {}, maybe-live-out:
 value: <2 p.0 @0> (size=1536,offset=0): f32[6,8,8]{2,1,0}
allocation 2: size 128, parameter 1, shape |f32[4,8]| at ShapeIndex {}:
allocation 3: size 64, color 5, parameter 2, shape |f32[16]| at ShapeIndex {}:
allocation 4: size 3000, preallocated-temp:
 value: <3 row @0> (size=384,offset=512): bf16[6,4,8]{2,1,0}
 value: <4 kept{1} (phi) @0> (size=384,offset=512): bf16[6,4,8]{2,1,0}
 value: <5 early @0> (size=400,offset=1024): f32[100]{0}
allocation 5: size 4096, color 1, preallocated-temp:
 value: <6 fast @1> (size=4096,offset=0): f32[1024]{0:S(1)}
"""

REPORT = """\
Memory Space: default (color=0)
Total bytes: 4664 (4.6KiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: vmem (color=1)
Total bytes: 67108864 (64.00MiB)
"""


@pytest.fixture
def dump(tmp_path):
    for suffix, text in {
        ".txt": HLO,
        "-buffer-assignment.txt": ASSIGNMENT,
        "-live-range.txt": LIVE_RANGE,
        "-memory-usage-report.txt": REPORT,
    }.items():
        (tmp_path / (STEM + suffix)).write_text(text)
    return tmp_path


def found(directory):
    dump = find_dump(directory)
    assert dump is not None
    return dump


def test_totals_are_those_of_the_main_memory(dump):
    memory = read_memory(found(dump))
    assert memory.total_bytes == 4664
    assert memory.argument_bytes == 1536 + 128  # what lies in another memory space is not there


def test_activations_are_what_forward_operations_wrote_and_backward_ones_read(dump):
    memory = read_memory(found(dump))
    kinds = {buffer.instruction: buffer.kind for buffer in memory.buffers}
    assert kinds == {
        "p.0": "argument",
        "p.1": "argument",
        "kept": "activation",
        "wide.f": "activation",  # a loop's parameter holds what the loop writes
        "wide.b": "temporary",
        "gathered": "temporary",
        "early": "temporary",  # of the forward pass, and dead before the backward pass
    }
    assert memory.activation_bytes == 384 + 192


def test_the_largest_buffers_carry_shape_and_source(dump):
    memory = read_memory(found(dump), num_buffers=3)
    assert memory.buffers == (
        Buffer(num_bytes=1536, shape="f32[6,8,8]", instruction="wide.b", source="jit(step)/transpose(jvp())/while",
               kind="temporary"),
        Buffer(num_bytes=1536, shape="f32[6,8,8]", instruction="p.0", source="w", kind="argument"),
        Buffer(num_bytes=400, shape="f32[100]", instruction="early", source="jit(step)/jvp(mixer)/while/body/exp",
               kind="temporary"),
    )  # fmt: skip


def test_no_dump_while_the_report_is_not_there(dump):
    (dump / f"{STEM}-memory-usage-report.txt").unlink()
    assert find_dump(dump) is None


def test_a_report_without_main_memory_is_not_read_as_zero(dump):
    (dump / f"{STEM}-memory-usage-report.txt").write_text("Memory Space: vmem (color=1)\nTotal bytes: 1\n")
    with pytest.raises(ValueError, match="no default memory space"):
        read_memory(found(dump))


def test_a_peak_in_the_forward_pass_counts_what_loops_are_still_filling(dump):
    text = LIVE_RANGE.replace(
        "  Live ranges at 5 (peak):\n",
        "    row{}:2-3\n    fast{}:1-3\n  Live ranges at 2 (peak):\n"
        "    row{}: 384 bytes (cumulative: 384 bytes)\n"
        "    fast{}: 4096 bytes (cumulative: 4480 bytes)\n",
    )
    (dump / f"{STEM}-live-range.txt").write_text(text)
    kinds = {buffer.instruction: buffer.kind for buffer in read_memory(found(dump)).buffers}
    assert kinds["row"] == "activation"  # `kept` takes over its place and is read in the backward pass
    assert kinds["early"] == "temporary"
    assert "fast" not in kinds  # on-chip memory is not what is counted
