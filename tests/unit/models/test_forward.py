"""Fast paths equal their oracles, padding is nothing, labels stay in their segment; `test_segments.py` has the rest."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.config.schema import Remat as RematSection

from .samples import CONFIG, FAST, SLOW, assert_close, draw, forward, gradients, make_params, pack, scores

TIME = 24


def test_fast_paths_equal_their_oracles_in_log_probs_entropies_and_gradients() -> None:
    batch = pack([draw(np.random.default_rng(0), 9, 1, 6, 5), draw(np.random.default_rng(1), 24)], TIME)
    weights = jnp.asarray(np.random.default_rng(2).standard_normal((2, TIME)), jnp.float32)
    assert_close(scores(make_params(), *batch), scores(make_params(), *batch, execution=SLOW))
    assert_close(gradients(make_params(), *batch, weights), gradients(make_params(), *batch, weights, SLOW), rtol=2e-4)


@pytest.mark.parametrize("left", [0, 7])
def test_padding_left_or_right_changes_no_log_prob(left: int) -> None:
    part = draw(np.random.default_rng(7), 13)
    expected, _ = scores(make_params(), *pack([part, []], TIME))
    tokens, segments, positions = pack([part, []], TIME, left=left)
    for filler in (0, 17):
        found, _ = scores(make_params(), jnp.where(segments > 0, tokens, filler), segments, positions)
        np.testing.assert_allclose(found[0, left : left + 13], expected[0, :13], atol=2e-5)
        assert not np.asarray(found)[np.asarray(segments) == 0].any()


def test_labels_do_not_leak_across_segments() -> None:
    tokens, segments, positions = pack([[np.array([10, 11, 12]), np.array([20, 21])], []], TIME)
    lp, entropy = scores(make_params(), tokens, segments, positions)
    scored = [1, 2, 4]  # the first token of a segment has no prediction
    assert np.flatnonzero(lp[0]).tolist() == scored
    assert np.flatnonzero(entropy[0]).tolist() == scored
    hidden = forward(make_params(), tokens, segments, positions)
    every = jax.nn.log_softmax(models.logits(make_params(), CONFIG, hidden))
    np.testing.assert_allclose(lp[0, 4], every[0, 3, 21], atol=1e-5)


def test_log_probs_at_a_temperature_are_those_of_the_scaled_logits() -> None:
    batch = pack([draw(np.random.default_rng(8), 20), []], TIME)
    hidden = forward(make_params(), *batch)
    scaled = jax.nn.log_softmax(models.logits(make_params(), CONFIG, hidden) / 0.5)
    lp, entropy = scores(make_params(), *batch, temperature=0.5)
    np.testing.assert_allclose(lp[0, 7], scaled[0, 6, batch[0][0, 7]], atol=2e-5)
    np.testing.assert_allclose(entropy[0, 7], -(jnp.exp(scaled) * scaled).sum(-1)[0, 6], atol=2e-5)


def test_replayed_routing_equal_to_the_live_one_changes_nothing_and_another_does() -> None:
    batch = pack([draw(np.random.default_rng(9), 20), []], TIME)
    none = jnp.full((2, TIME, CONFIG.num_hidden_layers, 2), -1, jnp.int16)

    def hidden(routing: jax.Array | None) -> jax.Array:
        return forward(make_params(), *batch, routing)

    live = hidden(none)
    assert_close(live, hidden(None), rtol=5e-6)  # another program
    other = hidden(none.at[0, 5, 1].set(jnp.asarray([3, 0], jnp.int16)))
    assert np.array_equal(other[0, :5], live[0, :5])
    assert not np.allclose(other[0, 5:], live[0, 5:], atol=1e-3)
    with pytest.raises(ValueError, match="does not match"):
        hidden(none[:, 1:])


def test_remat_and_unrolling_change_no_gradient() -> None:
    batch = pack([draw(np.random.default_rng(10), 9, 8), draw(np.random.default_rng(11), 22)], TIME)
    weights = jnp.ones((2, TIME))
    expected = gradients(make_params(), *batch, weights)
    other = dataclasses.replace(FAST, remat=models.Remat())
    assert_close(gradients(make_params(), *batch, weights, other), expected)
    unstacked = gradients(models.unstack_blocks(make_params()), *batch, weights)
    assert_close(models.stack_blocks(unstacked), expected)


def test_every_tensor_that_can_be_kept_or_recomputed_is_named() -> None:
    batch = pack([draw(np.random.default_rng(10), 9, 8), []], TIME)
    text = str(jax.make_jaxpr(lambda: models.forward(make_params(), CONFIG, *batch, execution=FAST))())
    assert set(re.findall(r"name\[name=(\w+)\]", text)) == set(models.REMAT_NAMES)
    assert {setting.name for setting in dataclasses.fields(RematSection)} == {"enabled", *models.REMAT_NAMES}


def test_a_tied_model_scores_with_its_embedding() -> None:
    config, params = dataclasses.replace(CONFIG, tie_word_embeddings=True), make_params(tied=True)
    assert "head" not in params
    batch = pack([draw(np.random.default_rng(12), 5), []], TIME)
    hidden = forward(params, *batch, config=config)
    np.testing.assert_allclose(
        models.logits(params, config, hidden), hidden @ params["embedding"].T, rtol=1e-5, atol=1e-5
    )


def test_the_shipped_policy_is_small_enough() -> None:
    params = jax.eval_shape(lambda: models.initialise(models.TINY, jax.random.key(0)))
    assert 2e6 < sum(x.size for x in jax.tree.leaves(params)) < 6e6
    assert models.num_active_parameters(models.TINY) < 2e6
