"""From what was read to the verdict: kinds sum up, absent state counts, and what does not fit says so."""

import dataclasses
import json

import pytest

from swerve.planning.compiler import Compiled, state_bytes
from swerve.planning.costs import Collective, Costs, Description, Work
from swerve.planning.hlo import Emitted
from swerve.planning.memory import Buffer, Memory
from swerve.planning.plan import make_plan
from swerve.planning.records import from_plain
from swerve.planning.report import plan_as_json, plan_as_text
from swerve.planning.topology import MIB, parse_topology

MESH = {"fsdp": 4, "context": 2}


def gather(kind, count, axes=("fsdp", "context"), num_bytes=800):
    return Collective(kind=kind, axes=axes, group_size=8, count=count, num_bytes=num_bytes, wire_bytes=700)


def description(arguments, **costs):
    work = (Work(source="experts", direction="forward", flops=4 * 10**12, num_bytes=2 * 10**9),)
    return Description(
        costs=Costs(work=work, **costs), argument_bytes=arguments, donated_bytes=MIB, digest="d", reference_flops=3e12
    )


def compiled(memory=None, collectives=(), **more):
    emitted = Emitted(collectives=collectives, num_unknown_loops=0)
    fields = dict(memory=memory, emitted=emitted, out_of_memory="", code_bytes=None)
    return Compiled(**{**fields, "seconds": 1.0, "cpu_seconds": 1.0, "peak_rss_bytes": MIB, **more})


def memory(total, arguments, activations=0):
    buffer = Buffer(
        num_bytes=total // 2, shape="f32[8]", instruction="dot.1", source="jit(f)/mlp/dot", kind="temporary"
    )
    return Memory(total_bytes=total, argument_bytes=arguments, activation_bytes=activations, buffers=(buffer,))


def plan_of(first, second, budget_mib=1000):
    topology = parse_topology("v5p:2x2x2").with_figures(budget_mib=budget_mib, peak_tflops=2, hbm_gbps=1, ici_gbps=1e-6)
    return make_plan(topology, MESH, False, {"micro_batch": first, "update": second})


MICRO = {"parameters": 100 * MIB, "gradients": 200 * MIB, "batch": MIB}
UPDATE = {"parameters": 100 * MIB, "optimizer": 400 * MIB, "gradients": 200 * MIB}


def test_kinds_sum_to_the_assignment_and_the_state_that_is_there_meanwhile():
    # 301 MiB of arguments in 303 with padding, 50 of activations, 500 in all.
    first = description(MICRO), compiled(memory(500 * MIB, 303 * MIB, 50 * MIB))
    plan = plan_of(first, (description(UPDATE), compiled(memory(700 * MIB, 700 * MIB))))
    micro = plan.programs["micro_batch"]
    assert {kind: size // MIB for kind, size in micro.memory_bytes.items()} == {
        "parameters": 100, "optimizer": 400, "gradients": 200, "batch": 1, "activations": 50, "temporaries": 149,
    }  # fmt: skip
    assert micro.total_bytes == plan.total_bytes == 900 * MIB  # the assignment, and the moments beside it
    assert plan.programs["update"].total_bytes == 700 * MIB
    assert plan.fits


def test_an_argument_that_nothing_reads_is_still_on_the_device():
    first = description(MICRO), compiled(memory(250 * MIB, 201 * MIB))
    plan = plan_of(first, (description(MICRO), compiled(memory(301 * MIB, 301 * MIB))))
    assert plan.programs["micro_batch"].total_bytes == (301 + 49) * MIB


@pytest.mark.parametrize(("budget_mib", "fits"), [(900, True), (899, False)])
def test_the_verdict_is_that_of_the_fullest_program(budget_mib, fits):
    first = description(MICRO), compiled(memory(500 * MIB, 301 * MIB))
    second = description(UPDATE), compiled(memory(700 * MIB, 700 * MIB))
    assert plan_of(first, second, budget_mib).fits is fits


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2.00G of 1.00G hbm. Exceeded by 1.00G.",
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (2.00G) exceeds available HBM (1.00G).",
    ],
)
def test_out_of_memory_is_a_verdict_with_its_numbers(message):
    first = description(MICRO), compiled(None, out_of_memory=message)
    plan = plan_of(first, (description(UPDATE), compiled(memory(700 * MIB, 700 * MIB))), 10**6)
    assert not plan.fits
    assert plan.programs["micro_batch"].total_bytes == 2048 * MIB + 400 * MIB
    assert "DOES NOT FIT: 2,448 of 1,000,000 MiB" in plan_as_text(plan)


def test_times_are_bounds_from_peak_figures():
    first = description(MICRO), compiled(memory(500 * MIB, 301 * MIB), (gather("all_gather", 3),))
    seconds = plan_of(first, first).programs["micro_batch"].seconds
    traffic = 2 * 10**9 + 301 * MIB + MIB + 800
    assert seconds["compute"] == 2.0
    assert seconds["memory"] == traffic / 1e9
    assert seconds["interconnect"] == pytest.approx(0.7)
    assert seconds["at_least"] == max(2.0, traffic / 1e9)
    assert seconds["at_most"] == seconds["compute"] + seconds["memory"] + seconds["interconnect"]


def test_collectives_that_xla_turned_into_reductions_show_in_comparison():
    asked = description(
        MICRO,
        collectives=(
            gather("all_gather", 930, num_bytes=93_000),
            gather("reduce_scatter", 40, num_bytes=4_000),
            gather("all_reduce", 13, num_bytes=13),
            gather("all_gather", 9, ("context",), num_bytes=900),
        ),
        suspects=("maybe",),
    )
    made = (
        gather("all_gather", 429, num_bytes=43_000),
        gather("reduce_scatter", 39, num_bytes=4_000),  # two joined into one: nothing was lost
        gather("all_reduce", 514, num_bytes=50_013),
        gather("all_gather", 9, ("context",), num_bytes=900),
    )
    turned, faithful = (compiled(memory(500, 301), emitted) for emitted in (made, asked.costs.collectives))
    plan = plan_of((asked, turned), (asked, faithful))
    assert plan.programs["micro_batch"].bad_lowerings == (
        "501 x all_gather over fsdp, context became 501 all-reduces, which move twice the bytes",
    )
    assert plan.programs["update"].bad_lowerings == ()


def test_state_is_what_outlives_a_program():
    found = state_bytes([description(MICRO), description(UPDATE)])
    assert found == {"parameters": 100 * MIB, "gradients": 200 * MIB, "optimizer": 400 * MIB}


def test_records_survive_the_trip_through_json():
    for record in (
        description(MICRO, collectives=(gather("all_gather", 3),), notes=("n",)),
        compiled(memory(500, 301, 7), (gather("all_reduce", 2),)),
        compiled(None, emitted=None),
    ):
        assert from_plain(type(record), json.loads(json.dumps(dataclasses.asdict(record)))) == record


def test_json_and_text_say_the_same():
    first = description(MICRO), compiled(memory(500 * MIB, 301 * MIB), (gather("all_gather", 3),))
    plan = plan_of(first, (description(UPDATE), compiled(memory(700 * MIB, 700 * MIB))))
    values, text = json.loads(json.dumps(plan_as_json(plan))), plan_as_text(plan)
    assert (values["fits"], values["total_mib"], values["budget_mib"]) == (True, 900, 1000)
    assert "fits: 900 of 1,000 MiB per device (90%)" in text
    assert values["programs"]["micro_batch"]["flops"] == 4e12
    assert "4 TFLOP per device; the model's own 3 TFLOP are 0.75 of it" in text
    assert "all_gather over fsdp, context" in text
    assert "mlp/dot" in text
