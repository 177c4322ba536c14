"""An endless stream of demonstrations as token sequences, addressed by position.

What lies at a position depends on the seed, the position and the sources, and on nothing that was drawn before it: a
run that stops anywhere goes on by remembering one number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from swerve.environments.demonstrations.corpus import CorpusFunction
from swerve.environments.demonstrations.repairs import Demonstration, Noise, Size, demonstrate
from swerve.environments.functions.mutations import Edit, apply, sites
from swerve.rendering import ConversationRenderer
from swerve.types import Float32Array, Int32Array

MAX_REPEATS = 6
SHORTEST_LIMIT = 140


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenFunction:
    """A function to repair, and how.

    Attributes:
        broken: Its text, without a trailing newline.
        fix: The edit that mends it.
        test_names: Names of its visible tests, or none.
        guesses: Edits as plausible as the fix, beside the inverses of all mutations.
    """

    broken: str
    fix: Edit
    test_names: tuple[str, ...] = ()
    guesses: tuple[Edit, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedSequence:
    """One sequence to imitate.

    Attributes:
        tokens: int32 `[T]`.
        weights: float32 `[T]`, loss weight of each token.
        right_edits: bool `[T]`, true for the tokens of turns whose edit is the fix.
    """

    tokens: Int32Array
    weights: Float32Array
    right_edits: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Where demonstrations come from.

    Attributes:
        mini_share: Part made of freshly generated functions.
        task_share: Part made of functions of training tasks, broken anew.
        short_first: Over this many positions the longest corpus function allowed grows to the full length.
        files_first: Over this many positions the probability that a demonstration writes the whole file anew falls from
            1 to 0.
        lines_first: Likewise for replacing whole lines, among the demonstrations that do not write the file. What must
            be copied is then most of an edit, and copying is learnt before choosing.
    """

    mini_share: float = 0.08
    task_share: float = 0.03
    short_first: int = 12_000
    files_first: int = 4_000
    lines_first: int = 12_000


class DemonstrationStream:
    """Token sequences by position."""

    def __init__(
        self,
        renderer: ConversationRenderer,
        corpus: Sequence[CorpusFunction],
        *,
        seed: int,
        noise: Noise,
        mixture: Mixture,
        max_tokens: int = 512,
        task_functions: Sequence[tuple[str, tuple[str, ...]]] = (),
        mint: Callable[[random.Random], BrokenFunction] | None = None,
    ) -> None:
        """Prepare the order of the corpus.

        Args:
            renderer: Turns conversations into tokens.
            corpus: Functions that any single-site mutation may break.
            seed: Decides everything.
            noise: How imperfect the demonstrations are.
            mixture: Where they come from.
            max_tokens: Longer demonstrations are passed over.
            task_functions: Right functions of training tasks, each with the names of its visible tests.
            mint: Makes a fresh generated function.
        """
        self._renderer = renderer
        self._corpus = corpus
        self._seed = seed
        self._noise = noise
        self._mixture = mixture
        self._max_tokens = max_tokens
        self._tasks = task_functions
        self._mint = mint
        repeats = np.minimum([function.num_sites for function in corpus], MAX_REPEATS)
        self._order = np.repeat(np.arange(len(corpus), dtype=np.int32), repeats)
        lengths = np.asarray([len(function.text) for function in corpus])[self._order]
        self._by_length = self._order[np.argsort(lengths, kind="stable")]
        self._lengths = np.sort(lengths)
        self._epoch = -1
        self._permuted = self._order

    def demonstration(self, position: int) -> Demonstration:
        """The demonstration at a position, before it is known whether it is short enough."""
        return self._draw(random.Random(f"{self._seed}/{position}"), position)

    def sequence(self, position: int) -> WeightedSequence:
        """The sequence at a position."""
        rng = random.Random(f"{self._seed}/{position}")
        while True:
            sequence = render(self._renderer, self._draw(rng, position), self._noise.code_weight)
            if len(sequence.tokens) <= self._max_tokens:
                return sequence
            position += len(self._order) // 2 + 1

    def _draw(self, rng: random.Random, position: int) -> Demonstration:
        first = position
        while True:
            problem = self._broken_function(rng, position)
            if problem is not None:
                size = self._size(rng, first)
                made = demonstrate(
                    rng,
                    problem.broken,
                    problem.fix,
                    self._noise,
                    problem.test_names,
                    guesses=problem.guesses,
                    size=size,
                )
                if made is not None:
                    return made
            position += len(self._order) // 3 + 1

    def _size(self, rng: random.Random, position: int) -> Size:
        files, lines = rng.random() * self._mixture.files_first, rng.random() * self._mixture.lines_first
        return "file" if files > position else "line" if lines > position else "span"

    def _broken_function(self, rng: random.Random, position: int) -> BrokenFunction | None:
        choice = rng.random()
        if self._mint is not None and choice < self._mixture.mini_share:
            return self._mint(rng)
        if self._tasks and 1.0 - choice < self._mixture.task_share:
            right, names = rng.choice(self._tasks)
            return break_anew(rng, right, names)
        return break_anew(rng, self._corpus[self._corpus_index(rng, position)].text)

    def _corpus_index(self, rng: random.Random, position: int) -> int:
        if position < self._mixture.short_first:
            longest = self._lengths[-1]
            limit = SHORTEST_LIMIT + (longest - SHORTEST_LIMIT) * position / self._mixture.short_first
            allowed = max(1, int(np.searchsorted(self._lengths, limit, side="right")))
            return int(self._by_length[rng.randrange(allowed)])
        epoch, offset = divmod(position, len(self._order))
        if epoch != self._epoch:
            self._permuted = np.random.default_rng((self._seed, epoch)).permutation(self._order)
            self._epoch = epoch
        return int(self._permuted[offset])


def break_anew(rng: random.Random, right: str, test_names: tuple[str, ...] = ()) -> BrokenFunction | None:
    """Break a function at a random site; half the time every kind of site is equally likely, else every site."""
    edits = sites(right)
    if not edits:
        return None
    if rng.random() < 0.5:
        kind = rng.choice(sorted({edit.kind for edit in edits}))
        edits = [edit for edit in edits if edit.kind == kind]
    edit = rng.choice(edits)
    fix = Edit(edit.kind, edit.start, edit.start + len(edit.text), right[edit.start : edit.end])
    return BrokenFunction(broken=apply(right, edit), fix=fix, test_names=test_names)


def render(renderer: ConversationRenderer, demonstration: Demonstration, code_weight: float) -> WeightedSequence:
    """Tokens and loss weights of a demonstration.

    What the policy would sample has the weight of its turn, the source shown by the first turn has `code_weight`, all
    else has none.
    """
    tokens, sampled = renderer.demonstration(demonstration.problem, demonstration.turns)
    weights = np.zeros(len(tokens), np.float32)
    right_edits = np.zeros(len(tokens), np.bool_)
    borders = np.flatnonzero(np.diff(sampled.astype(np.int8))) + 1
    runs = np.split(np.arange(len(tokens)), borders)
    turns = zip(runs[1::2], demonstration.turns, demonstration.weights, strict=True)
    for number, (run, (calls, _), weight) in enumerate(turns):
        weights[run] = weight
        right_edits[run] = weight == 1.0 and number > 0 and len(calls) > 1
    weights[runs[2]] = code_weight
    return WeightedSequence(tokens=tokens, weights=weights, right_edits=right_edits)
