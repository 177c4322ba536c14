"""The benchmark's table of settings is the test of the laws it was derived from."""

import pytest

from swerve.config import laws

TABLE = [
    # GBS, prompts, learning rate, clip, first evaluation, max steps
    (256, 16, 1.0e-6, 0.125, 18, 30),
    (512, 32, 1.4142135624e-6, 0.08838834765, 10, 20),
    (1024, 64, 2.0e-6, 0.0625, 7, 10),
    (1152, 72, 2.1213203436e-6, 0.05892556510, 6, 10),
]


@pytest.mark.parametrize(("gbs", "prompts", "lr", "clip", "first_evaluation", "max_steps"), TABLE)
def test_published_settings_follow_from_the_batch_size(gbs, prompts, lr, clip, first_evaluation, max_steps):
    assert laws.num_prompts(gbs) == prompts
    assert laws.learning_rate(gbs) == pytest.approx(lr, rel=1e-10)
    assert laws.max_grad_norm(gbs) == pytest.approx(clip, rel=1e-9)
    assert laws.first_evaluation_step(gbs) == first_evaluation
    assert laws.MAX_STEPS[gbs] == max_steps
    assert laws.settings(gbs) == {
        "rollout.prompts_per_step": prompts,
        "rollout.generations_per_prompt": 16,
        "optimizer.learning_rate": pytest.approx(lr, rel=1e-10),
        "optimizer.max_grad_norm": pytest.approx(clip, rel=1e-9),
        "training.num_steps": max_steps,
    }


def test_the_number_of_steps_is_published_for_four_batch_sizes():
    assert "training.num_steps" not in laws.settings(384)


def test_the_table_is_whole():
    assert tuple(row[0] for row in TABLE) == laws.BATCH_SIZES


@pytest.mark.parametrize("gbs", [0, -16, 250])
def test_a_batch_that_is_no_multiple_of_the_generations_is_refused(gbs):
    with pytest.raises(ValueError, match="multiple of 16"):
        laws.num_prompts(gbs)
