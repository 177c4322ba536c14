"""Batch arithmetic on numbers small enough to check by hand."""

import dataclasses

from swerve.config import PretrainRecipe, TrainRecipe, batch_arithmetic, fitting_rows
from swerve.config.schema import Continuation, Evaluation, Packing, Pretraining, Rollout, Tasks, Training


def test_training_counts():
    recipe = TrainRecipe(
        rollout=Rollout(prompts_per_step=3, generations_per_prompt=4, context_length=100, num_slots=5),
        packing=Packing(row_length=250, rows_per_micro_batch=4),
        training=Training(num_steps=10),
        tasks=Tasks(num_train=20),
        evaluation=Evaluation(attempts=4, every=5),
    )
    counts = batch_arithmetic(recipe, num_train_tasks=700, num_validation_tasks=25)
    assert counts["global_batch_size"] == 12
    assert counts["training_episodes"] == 120
    assert counts["decode_rounds_per_step"] == 3
    assert counts["max_tokens_per_step"] == 1200
    assert counts["max_micro_batches_per_step"] == 2  # two trajectories a row, six rows, four at a time
    assert counts["training_tasks"] == 20
    assert counts["passes_over_training_tasks"] == 1.5
    assert counts["episodes_per_evaluation"] == 100
    assert counts["evaluations"] == 3  # before, after step 5, after step 10


def test_what_is_unknown_is_left_out():
    assert "training_tasks" not in batch_arithmetic(TrainRecipe())


def test_pretraining_counts():
    recipe = PretrainRecipe(
        training=Pretraining(
            num_tokens=10_001,
            row_length=500,
            rows_per_micro_batch=2,
            micro_batches=((0, 1), (3_500, 2)),
            export_tokens=5_000,
        )
    )
    # Four steps of 1,000 slots pass 3,500; then four of 2,000 pass 10,001.
    assert batch_arithmetic(recipe) == {
        "optimizer_steps": 8,
        "token_slots": 12_000,
        "micro_batch_token_slots": 1_000,
        "exports": 2,
    }
    longer = dataclasses.replace(recipe, continuation=Continuation(num_tokens=5_000, micro_batches=3))
    assert batch_arithmetic(longer)["optimizer_steps"] == 10
    assert batch_arithmetic(longer)["token_slots"] == 18_000


def test_rows_double_until_the_longest_sequence_fits():
    assert fitting_rows(512, 512, 8) == (8, 512)
    assert fitting_rows(513, 512, 8) == (4, 1024)
    assert fitting_rows(5000, 512, 8) == (1, 8192)
    assert fitting_rows(5000, 512, 8, least_rows=4) == (4, 8192)  # four devices take a row each
    recipe = TrainRecipe(
        rollout=Rollout(prompts_per_step=2, generations_per_prompt=4, context_length=1000, num_slots=8),
        packing=Packing(row_length=300, rows_per_micro_batch=4),
    )
    assert batch_arithmetic(recipe)["max_micro_batches_per_step"] == 8  # rows of 1,200, one trajectory and one row each
