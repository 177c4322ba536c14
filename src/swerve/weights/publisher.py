"""Hand new weights to an engine, and believe it only after a probe.

    trainer --params--> publisher --refit(params, n)--> engine
                            |--probe(tokens)-----------> engine: log-probabilities of fixed tokens
                            |--score(tokens)-> trainer: the same from the weights that were meant

A refit that reports success and serves other weights is caught: the engine's answer must agree with the trainer's, and
it must have changed if the weights have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from swerve.types import Float32Array, SwerveError, WeightsVersion
from swerve.weights.digest import digest

_MOVED = 1e-5
"""Nats by which a log-probability moves only if so many weights have moved that their rounding shows some of it."""


class WeightsError(SwerveError):
    """An engine does not serve the weights it was given."""


class RefitTarget(Protocol):
    """What takes weights: the embedded engine or a remote one."""

    @property
    def weights_version(self) -> int:
        """Number of the weights in use."""
        ...

    def refit(self, params: Any, version: int) -> None:
        """Copy new weights into place; `version` is greater than the present one."""
        ...

    def probe(self, tokens: Sequence[int]) -> Float32Array:
        """Score tokens with the weights in use at temperature 1; entry t of `[n]` is of `tokens[t]`, entry 0 is 0."""
        ...


class WeightsPublisher:
    """Publishes versions of one policy's weights, in order, to one engine.

    Args:
        target: The engine.
        score: The trainer's log-probabilities of a list of tokens at temperature 1, under the weights last given to
            `publish`.
        probe_tokens: Fixed tokens to probe with, at least two.
        tolerance: Largest difference of any probed log-probability, nats.
        digests: Whether each version carries its content digest.
    """

    def __init__(
        self,
        target: RefitTarget,
        *,
        score: Callable[[Sequence[int]], Float32Array],
        probe_tokens: Sequence[int],
        tolerance: float = 1e-3,
        digests: bool = True,
    ) -> None:
        if len(probe_tokens) < 2:
            raise SwerveError("weights: a probe needs at least two tokens, the second scored given the first")
        self._target = target
        self._score = score
        self._probe_tokens = tuple(probe_tokens)
        self._tolerance = tolerance
        self._digests = digests
        self._last: tuple[str, Float32Array, Float32Array] | None = None

    def publish(self, params: Mapping[str, Any], number: int) -> WeightsVersion:
        """Put weights into the engine and probe it.

        Args:
            params: Nested mapping of arrays; the engine copies them, so they may be donated afterwards.
            number: Version, greater than the engine's present one.

        Returns:
            The version now in use.

        Raises:
            WeightsError: The number does not rise, or the engine answers with other weights.
        """
        present = self._target.weights_version
        if number <= present:
            raise WeightsError(
                f"weights version {number} cannot follow version {present} in the engine: use a number above it"
            )
        self._target.refit(params, number)
        if self._target.weights_version != number:
            raise WeightsError(
                f"the engine reports weights version {self._target.weights_version} after a refit to {number}: "
                f"restart it"
            )
        version = WeightsVersion(number=number, digest=digest(params) if self._digests else "")
        self.check(version)
        return version

    def check(self, version: WeightsVersion) -> None:
        """Probe the engine without a refit.

        Args:
            version: What it should serve.

        Raises:
            WeightsError: It answers with other weights.
        """
        found = np.asarray(self._target.probe(self._probe_tokens), np.float32)
        expected = np.asarray(self._score(self._probe_tokens), np.float32)
        gap = float(np.max(np.abs(found - expected))) if found.shape == expected.shape else float("inf")
        if not gap <= self._tolerance:
            raise WeightsError(
                f"with weights version {version.number} the engine's log-probabilities of the probe differ from the "
                f"trainer's by {gap:.2e} nats (limit engine.probe_tolerance = {self._tolerance:g}): it serves other "
                "weights, or rounds by more; restart it"
            )
        last, self._last = self._last, (version.digest, found, expected)
        if last and np.array_equal(last[1], found) and self._changed(last[0], last[2], version.digest, expected):
            raise WeightsError(
                f"the weights of version {version.number} differ from those before, but the engine's answer to the "
                f"probe does not: it serves the old ones; restart it"
            )

    def _changed(self, digest: str, scores: Float32Array, new_digest: str, new_scores: Float32Array) -> bool:
        """Whether weights differ: by their digests, or so far that an engine's rounding cannot hide it."""
        return bool(digest and digest != new_digest) or float(np.max(np.abs(new_scores - scores))) > _MOVED
