"""The digest, and a publisher that believes only what it has probed."""

from collections.abc import Sequence

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from swerve.types import Float32Array, SwerveError
from swerve.weights import WeightsError, WeightsPublisher, digest

PARAMS = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": {"w": np.ones(2, ml_dtypes.bfloat16)}}


def test_the_digest_sees_names_shapes_types_and_bits() -> None:
    base = digest(PARAMS)
    changes = [
        {"c": PARAMS["b"], "a": PARAMS["a"]},
        {**PARAMS, "b": PARAMS["b"].reshape(3, 2)},
        {**PARAMS, "b": PARAMS["b"].view(np.int32)},
        {**PARAMS, "b": np.nextafter(PARAMS["b"], np.float32(9))},
        {"b": PARAMS["b"]},
    ]
    assert len({base, *map(digest, changes)}) == 6
    assert len(base) == 64


def test_the_digest_does_not_see_order_or_place() -> None:
    elsewhere = {"a": {"w": jnp.asarray(PARAMS["a"]["w"])}, "b": np.asfortranarray(PARAMS["b"])}
    assert digest(elsewhere) == digest(PARAMS)


def test_the_digest_of_known_content_is_pinned() -> None:
    assert digest({"w": np.zeros(2, np.float32)}) == "d5a20f380bb3919bb4d102d0b74619d8aa7611be5a6c45c24ba02b36c86f42bc"


class Engine:
    """A policy with one weight: the log-probability of every token but the first is that weight."""

    def __init__(self) -> None:
        self.weights_version = 0
        self.weight = -1.0
        self.takes_weights = True
        self.takes_version = True

    def refit(self, params: dict[str, np.ndarray], version: int) -> None:
        if self.takes_weights:
            self.weight = float(params["w"][0])
        if self.takes_version:
            self.weights_version = version

    def probe(self, tokens: Sequence[int]) -> Float32Array:
        return np.array([0.0] + [self.weight] * (len(tokens) - 1), np.float32)


class Trainer:
    def __init__(self) -> None:
        self.params = {"w": np.array([-1.0], np.float32)}

    def score(self, tokens: Sequence[int]) -> Float32Array:
        return np.array([0.0] + [self.params["w"][0]] * (len(tokens) - 1), np.float32)

    def move(self, weight: float) -> dict[str, np.ndarray]:
        self.params = {"w": np.array([weight], np.float32)}
        return self.params


def test_weights_a_b_a() -> None:
    engine, trainer = Engine(), Trainer()
    publisher = WeightsPublisher(engine, score=trainer.score, probe_tokens=[1, 2, 3])
    versions = [publisher.publish(trainer.move(w), n) for n, w in enumerate((-2.0, -3.0, -2.0), start=1)]
    assert [v.number for v in versions] == [1, 2, 3]
    assert versions[0].digest == versions[2].digest != versions[1].digest
    assert engine.weight == -2.0


def test_a_refit_that_serves_other_weights_is_caught() -> None:
    engine, trainer = Engine(), Trainer()
    publisher = WeightsPublisher(engine, score=trainer.score, probe_tokens=[1, 2])
    publisher.publish(trainer.move(-2.0), 1)
    engine.takes_weights = False
    with pytest.raises(WeightsError, match=r"differ from the trainer's by 5\.00e-01"):
        publisher.publish(trainer.move(-2.5), 2)


@pytest.mark.parametrize("digests", [True, False])
def test_a_refit_too_small_for_the_tolerance_is_caught_by_its_unchanged_answer(digests: bool) -> None:
    engine, trainer = Engine(), Trainer()
    publisher = WeightsPublisher(engine, score=trainer.score, probe_tokens=[1, 2], digests=digests)
    publisher.publish(trainer.move(-2.0), 1)
    publisher.publish(trainer.move(-2.0001), 2)
    engine.takes_weights = False
    with pytest.raises(WeightsError, match="serves the old ones"):
        publisher.publish(trainer.move(-2.0002), 3)


def test_answers_that_are_no_numbers_are_caught() -> None:
    engine, trainer = Engine(), Trainer()
    publisher = WeightsPublisher(engine, score=trainer.score, probe_tokens=[1, 2])
    with pytest.raises(WeightsError, match="nan nats"):
        publisher.publish(trainer.move(float("nan")), 1)


def test_versions_rise() -> None:
    engine, trainer = Engine(), Trainer()
    publisher = WeightsPublisher(engine, score=trainer.score, probe_tokens=[1, 2])
    publisher.publish(trainer.move(-2.0), 4)
    for number in (3, 4):
        with pytest.raises(WeightsError, match=f"version {number} cannot follow version 4"):
            publisher.publish(trainer.params, number)
    engine.takes_version = False
    with pytest.raises(WeightsError, match="reports weights version 4 after a refit to 5"):
        publisher.publish(trainer.move(-3.0), 5)
    with pytest.raises(SwerveError, match="at least two tokens"):
        WeightsPublisher(engine, score=trainer.score, probe_tokens=[1])
