"""A step on a mesh of eight devices is the step on one: loss, sums, gradients, update."""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from swerve import models, parallel
from swerve.config.schema import Algorithm, Mesh, Optimizer, TrainRecipe
from swerve.parallel import MeshShape
from swerve.trainer import GrpoTrainer, StepStats, plan_programs
from swerve.types import Group, SwerveError, Trajectory

from .samples import OPEN, make_group, make_trajectory

CONFIG = models.Qwen35MoeConfig(
    vocab_size=48,
    hidden_size=16,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    partial_rotary_factor=0.5,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
)
EXECUTION = models.Execution(attention_block=8, delta_chunk=4, expert_block=8, logprob_chunk=16, layers="scan")
# What reads whole sequences, which the axis `context` cuts: a gate, a filter, means over sequences.
SEQUENCES = Algorithm(
    sequence_gate_low=0.4, sequence_gate_high=1.0, logprob_error_threshold=30.0, normaliser="sequence"
)

FACTORISATIONS = [
    MeshShape(fsdp=fsdp, context=context, expert=expert, tensor=tensor)
    for tensor in (1, 2)
    for expert in (1, 2, 4, 8)
    for context in (1, 2, 4, 8)
    for fsdp in (1, 2, 4, 8)
    if fsdp * context * expert * tensor == 8
]
"""All ways to lay out eight devices; two key heads leave two ranks of the tensor axis."""


@functools.cache
def params() -> Any:
    rng = np.random.default_rng(0)
    first = jax.device_get(models.initialise(CONFIG, jax.random.key(1)))
    return jax.tree.map(lambda x: (x + 0.02 * rng.standard_normal(x.shape)).astype(np.float32), first)


@functools.cache
def groups(routed: bool = False) -> list[Group]:
    """Sixteen sequences of 8 to 23 tokens: packed, some begin on one device of a row and end on another."""
    return [make_group([attempt(f"t{g}", i, 8 + 5 * ((g + i) % 4), routed=routed) for i in range(4)]) for g in range(4)]


def attempt(task: str, index: int, length: int, *, routed: bool) -> Trajectory:
    """A trajectory; with routing, two thirds of its tokens visited experts that were drawn at random."""
    routing = None
    if routed:
        rng = np.random.default_rng(length)
        order = np.argsort(rng.random((length, CONFIG.num_hidden_layers, CONFIG.num_experts)), axis=-1)
        routing = order[..., : CONFIG.num_experts_per_tok].astype(np.int16)
        routing[::3] = -1
    return make_trajectory(task, index, length, routing=routing)


def make(execution: models.Execution, algorithm: Algorithm = OPEN, weights: Any = None, **options: Any) -> GrpoTrainer:
    settings: dict[str, Any] = {"freeze_router": False, "router_aux_coefficient": 0.02} | options
    return GrpoTrainer(
        settings.pop("config", CONFIG),
        params() if weights is None else weights,
        algorithm=algorithm,
        optimizer=Optimizer(max_grad_norm=0.5),
        context_length=32,
        row_length=32,
        rows_per_micro_batch=8,
        execution=execution,
        **settings,
    )


def step(
    execution: models.Execution, algorithm: Algorithm = OPEN, routed: bool = False, **options: Any
) -> tuple[StepStats, Any, Any]:
    """One step's numbers, the new weights and the gradient as Adam's first moment has it, on the host."""
    trainer = make(execution, algorithm, **options)
    stats = trainer.step(trainer.prepare(groups(routed)), learning_rate=1e-2)
    state = trainer.state()
    return stats, state.params, state.optimizer["mu"]


@functools.cache
def on_one_device(algorithm: Algorithm = OPEN, routed: bool = False) -> tuple[StepStats, Any, Any]:
    return step(EXECUTION, algorithm, routed)


TIMES = ("train_s", "slots_per_s", "real_tokens_per_s", "dropless_replays")


def assert_equal(found: tuple[StepStats, Any, Any], expected: tuple[StepStats, Any, Any]) -> None:
    numbers, wanted = found[0].scalars(), expected[0].scalars()
    for name in numbers.keys() - set(TIMES):
        assert numbers[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-6), name
    kinds: tuple[tuple[Any, Any, float], ...] = ((found[2], expected[2], 2e-4), (found[1], expected[1], 2e-3))
    for tree, wanted_tree, tolerance in kinds:  # a first step of Adam is the gradient's sign, where it has one
        leaves = parallel.flatten_names(wanted_tree)
        for name, value in parallel.flatten_names(tree).items():
            allowed = tolerance * np.abs(leaves[name]).max() + 1e-7
            np.testing.assert_allclose(value, leaves[name], rtol=0, atol=allowed, err_msg=name)


def on(shape: MeshShape, **changes: Any) -> models.Execution:
    return dataclasses.replace(EXECUTION, mesh=shape, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", FACTORISATIONS, ids=str)
def test_every_layout_of_eight_devices_equals_one_device(shape: MeshShape) -> None:
    assert_equal(step(on(shape)), on_one_device())


def test_rows_experts_and_stretches_of_rows_over_eight_devices_equal_one_device() -> None:
    found = step(on(MeshShape(fsdp=2, context=2, expert=2)), SEQUENCES, routed=True)
    assert_equal(found, on_one_device(SEQUENCES, routed=True))
    assert 0 < found[0].kept_share < 1


def test_a_device_that_holds_prompts_alone_changes_nothing() -> None:
    def late(index: int, task: str) -> Trajectory:
        """Thirty tokens of which the last six were sampled: the first stretch of its row is all prompt."""
        one = attempt(task, index, 30, routed=True)
        sampled = np.arange(30) >= 24
        logprobs = np.where(sampled, -3.5, 0.0).astype(np.float32)
        versions = np.where(sampled, 0, -1).astype(np.int32)
        return dataclasses.replace(one, sampled=sampled, behaviour_logprobs=logprobs, weights_versions=versions)

    given = [make_group([late(i, f"t{g}") for i in range(4)]) for g in range(2)]
    results = []
    for execution in (on(MeshShape(fsdp=2, context=2, expert=2)), EXECUTION):
        trainer = make(execution, SEQUENCES)
        batch = trainer.prepare(given)
        assert all(
            not one.loss_mask[:, :16].any() and one.segment_ids[:, :16].all() for one in batch.packed.micro_batches
        )
        stats = trainer.step(batch, learning_rate=1e-2)
        results.append((stats, trainer.state().params, trainer.state().optimizer["mu"]))
    assert_equal(*results)


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """Programs are compiled here: JAX 0.10 computes those that offload wrongly once it has them from its cache."""
    compilation_cache.reset_cache()
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.mark.usefixtures("no_compilation_cache")
def test_tensor_ranks_a_ring_and_a_limit_on_experts_equal_one_device() -> None:
    shape = MeshShape(context=2, expert=2, tensor=2)
    remat = models.Remat(keep=("layer_input",), offload=("attention_query", "mixer_output"))
    found = step(on(shape, context_attention="ring", buffer_factor=0.8, expert_chunks=2, remat=remat))
    assert_equal(found, on_one_device())
    assert found[0].dropless_replays == found[0].batch.num_micro_batches
    assert found[0].dropped_assignments_used == 0


@pytest.mark.parametrize("factor", [0.4, 1.0])
def test_a_limit_that_overflows_is_computed_again_and_one_that_holds_is_not(factor: float) -> None:
    found = step(dataclasses.replace(EXECUTION, buffer_factor=factor))
    assert_equal(found, on_one_device())
    assert found[0].dropless_replays == (found[0].batch.num_micro_batches if factor < 1 else 0)
    assert found[0].dropped_assignments_used == 0


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (MeshShape(fsdp=2, context=2, expert=2), {"routed": True}),
        pytest.param(MeshShape(), {}, marks=pytest.mark.slow),
        pytest.param(MeshShape(context=2, expert=2, tensor=2), {}, marks=pytest.mark.slow),
        pytest.param(MeshShape(fsdp=4, tensor=2), {}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_plain_head_and_the_sharded_one_train_alike(shape: MeshShape, options: dict[str, bool]) -> None:
    found = step(on(shape, head="plain", logprob_chunk=12, buffer_factor=0.8), SEQUENCES, **options)
    assert_equal(found, on_one_device(SEQUENCES, **options))
    assert found[0].dropped_assignments_used == 0


@pytest.mark.slow
def test_the_plain_head_on_a_mesh_scores_every_token_as_the_sharded_one_on_one_device() -> None:
    scores = []
    for execution in (EXECUTION, on(MeshShape(fsdp=2, context=2, expert=2), head="plain")):
        trainer = make(execution, temperature=0.7)
        scores.append(trainer.logprobs(trainer.prepare(groups()).packed.micro_batches[0]))
    assert (scores[0][1] > 0).sum() > 100
    for found, expected in zip(scores[1], scores[0], strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.slow
def test_an_embedding_that_serves_as_head_trains_alike_with_both_heads() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    weights = {name: value for name, value in params().items() if name != "head"}
    found = [
        step(on(shape, head=head), config=config, weights=weights, temperature=0.5)
        for shape, head in (
            (MeshShape(), "sharded"),
            (MeshShape(fsdp=4, tensor=2), "sharded"),
            (MeshShape(fsdp=4, tensor=2), "plain"),
        )
    ]
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


def reductions(gradient_sum_dtype: str) -> Counter[tuple[str, str, bool]]:
    """Reductions over devices in the program of a micro-batch: which, of what type, whether of more than a scalar."""
    recipe = TrainRecipe()
    execution = dataclasses.replace(
        recipe.execution,
        parameter_dtype="bfloat16",
        activation_dtype="bfloat16",
        layers="scan",
        gradient_sum_dtype=gradient_sum_dtype,
    )
    recipe = dataclasses.replace(recipe, execution=execution, mesh=Mesh(fsdp=2, context=2, expert=2))
    program = plan_programs(recipe, CONFIG, MeshShape(fsdp=2, context=2, expert=2).make())["micro_batch"]
    text = program.jitted.lower(*program.arguments).as_text()
    found = re.findall(
        r'"stablehlo\.(all_reduce|reduce_scatter)".*?\^bb0\(%\w+: tensor<(\w+)>.*?: \(tensor<(\d*)', text, re.DOTALL
    )
    return Counter((kind, dtype, bool(size)) for kind, dtype, size in found)


@pytest.mark.slow
def test_gradients_are_cast_to_float32_after_or_before_they_are_summed_over_devices() -> None:
    after, before = reductions("parameter"), reductions("float32")
    for kind, least in (("reduce_scatter", 20), ("all_reduce", 5)):
        moved = after[kind, "bf16", True] - before[kind, "bf16", True]
        assert moved == before[kind, "f32", True] - after[kind, "f32", True] >= least
    assert before["all_reduce", "bf16", True] == 0
    assert before["reduce_scatter", "bf16", True] == 6  # of activations: keys and values of a row, sums of experts


@pytest.mark.slow
def test_the_type_in_which_gradients_are_summed_changes_them_by_rounding() -> None:
    kinds: dict[str, Any] = {"parameter_dtype": "bfloat16", "activation_dtype": "bfloat16"}
    shape = MeshShape(fsdp=2, context=2, expert=2)
    narrow, wide = (step(on(shape, gradient_sum_dtype=dtype), **kinds) for dtype in ("parameter", "float32"))
    assert wide[0].grad_norm == pytest.approx(narrow[0].grad_norm, rel=1e-2)
    differences = 0
    leaves = parallel.flatten_names(narrow[2])
    for name, value in parallel.flatten_names(wide[2]).items():
        np.testing.assert_allclose(value, leaves[name], rtol=0, atol=2e-2 * np.abs(leaves[name]).max(), err_msg=name)
        differences += bool((value != leaves[name]).any())
    assert differences > len(leaves) / 2


def test_parameters_moments_and_batches_are_spread() -> None:
    trainer = make(on(MeshShape(fsdp=2, context=2, expert=2)))
    expert = trainer.params["blocks"]["delta"]["moe"]["gate_up"]
    assert expert.shape == (1, 1, 8, 16, 2, 8)
    assert expert.addressable_shards[0].data.shape == (1, 1, 1, 16, 2, 8)
    assert trainer.params["head"].addressable_shards[0].data.shape == (4, 24)
    assert len(trainer.params["final_norm"].addressable_shards) == 8


def test_the_callers_weights_survive_on_a_mesh() -> None:
    weights = jax.device_put(params(), jax.devices()[0])
    trainer = make(on(MeshShape(fsdp=2, context=2, expert=2)), weights=weights)
    trainer.step(trainer.prepare(groups()), learning_rate=1e-2)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(weights), params())


def test_a_state_moves_between_meshes() -> None:
    first = make(EXECUTION)
    first.step(first.prepare(groups()), learning_rate=1e-2)
    second = make(on(MeshShape(fsdp=2, context=2, expert=2)))
    second.restore(first.state())
    jax.tree.map(np.testing.assert_array_equal, second.state().params, first.state().params)
    assert (
        second.params["head"].sharding.spec
        == models.parameter_specs(CONFIG, second.params["head"].sharding.mesh)["head"]
    )


def test_weights_and_activations_in_bfloat16_learn_the_same() -> None:
    kinds: dict[str, Any] = {"parameter_dtype": "bfloat16", "activation_dtype": "bfloat16"}
    stats, weights, _ = step(EXECUTION, **kinds)
    assert str(weights["head"].dtype) == "bfloat16"
    assert {
        str(weights["blocks"]["delta"][part][name].dtype) for part, name in (("mixer", "A_log"), ("moe", "router"))
    } == {"float32"}
    expected = on_one_device()[0]
    assert stats.entropy == pytest.approx(expected.entropy, rel=1e-2)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=5e-2)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (MeshShape(fsdp=3), "8 rows of a micro-batch do not divide over 3 devices"),
        (MeshShape(context=16), "leave 2 each; the convolution looks back 3"),
        (MeshShape(tensor=4), "dimension 'kv_heads' of size 2 does not divide over 4 devices"),
        (MeshShape(fsdp=8, tensor=2), "needs 16 devices; there are 8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(shape: MeshShape, message: str) -> None:
    with pytest.raises(SwerveError, match=message):
        make(on(shape))


def test_routing_recorded_outside_the_live_choice_trains_the_router() -> None:
    _, _, replayed = step(EXECUTION, SEQUENCES, routed=True, router_aux_coefficient=0.0)
    _, _, live = step(EXECUTION, SEQUENCES, router_aux_coefficient=0.0)
    for moments in (replayed, live):
        router = moments["blocks"]["delta"]["moe"]["router"]
        assert (np.abs(router).max(axis=-2) > 1e-6).all()
    assert not np.allclose(replayed["blocks"]["delta"]["moe"]["router"], live["blocks"]["delta"]["moe"]["router"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[:-1], r"shape \[7, 2, 2\]; the model and its tokens ask for \[8, 2, 2\]: tokens, layers"),
        (lambda r: np.swapaxes(r, 0, 1), r"shape \[2, 8, 2\]"),
        (lambda r: r[..., :1], r"shape \[8, 2, 1\]"),
        (lambda r: r + 7, "routing to expert 14; the model has 0 to 7"),
        (lambda r: np.where(r == r[1, 1, 1], -1, r), "some of their 2 experts recorded only"),
    ],
)
def test_routing_that_is_not_of_the_tokens_or_the_model_is_refused(change: Any, message: str) -> None:
    good = attempt("t", 0, 8, routed=True)
    trainer = make(EXECUTION)
    assert trainer.prepare([make_group([good] * 3)])
    bad = dataclasses.replace(good, routing=change(good.routing).astype(np.int16))
    with pytest.raises(SwerveError, match=message):
        trainer.prepare([make_group([good, bad, good])])
