"""The sources of the tiny policy's pre-training, put together: corpus, training tasks, generated functions.

Held-out tasks are read only to keep their functions out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerve.environments.demonstrations.corpus import CorpusFunction, load_corpus, skeleton
from swerve.environments.demonstrations.repairs import Noise
from swerve.environments.demonstrations.stream import BrokenFunction, DemonstrationStream, Mixture
from swerve.environments.functions.packages import Package, SourceFunction, functions, packages, source_tree
from swerve.environments.mini.bugs import breaks
from swerve.environments.mini.generator import generate
from swerve.environments.tasks import REPAIR_FILE, gold_text, load_tasks
from swerve.rendering import ConversationRenderer
from swerve.types import Task

HELD_BACK_SHARE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """What demonstrations are drawn from.

    Attributes:
        corpus: Functions to train on.
        held_back: Corpus functions kept for measuring, about one in a hundred.
        task_functions: Right functions of training tasks, each with the names of its visible tests.
        forbidden: Texts of `mini` tasks, right and broken, which must not be generated again.
    """

    corpus: Sequence[CorpusFunction]
    held_back: Sequence[CorpusFunction]
    task_functions: Sequence[tuple[str, tuple[str, ...]]]
    forbidden: frozenset[str]

    def mint(self, *, with_guesses: bool) -> Callable[[random.Random], BrokenFunction]:
        """A maker of fresh generated functions, each with what else could be tried or without."""
        forbidden = self.forbidden

        def make(rng: random.Random) -> BrokenFunction:
            while True:
                function = generate(rng)
                if function.broken not in forbidden and function.right not in forbidden:
                    names = tuple(f"test_{i}" for i in range(1, 1 + rng.choice((2, 3, 3, 3))))
                    guesses = tuple(edit for _, edit in breaks(function.broken)) if with_guesses else ()
                    return BrokenFunction(broken=function.broken, fix=function.fix, test_names=names, guesses=guesses)

        return make

    def stream(
        self, renderer: ConversationRenderer, *, seed: int, noise: Noise, mixture: Mixture, max_tokens: int
    ) -> DemonstrationStream:
        """The training stream."""
        return DemonstrationStream(
            renderer,
            self.corpus,
            seed=seed,
            noise=noise,
            mixture=mixture,
            max_tokens=max_tokens,
            task_functions=self.task_functions,
            mint=self.mint(with_guesses=noise.wrong_by_kind),
        )

    def held_back_stream(self, renderer: ConversationRenderer, *, seed: int, max_tokens: int) -> DemonstrationStream:
        """A stream of held-back functions, for measuring."""
        noise, mixture = (
            Noise(invalid_edit=0.0),
            Mixture(mini_share=0.0, task_share=0.0, short_first=0, files_first=0, lines_first=0),
        )
        return DemonstrationStream(
            renderer, self.held_back, seed=seed, noise=noise, mixture=mixture, max_tokens=max_tokens
        )


def _right_and_broken(task: Task) -> tuple[str, str]:
    """Texts of a task's function, mended and as the agent finds it, without trailing newlines."""
    return gold_text(task).rstrip("\n"), task.workspace[REPAIR_FILE].rstrip("\n")


def _functions(package: Package) -> Iterator[SourceFunction]:
    return functions(package, source_tree(package))


def load_sources(training: Iterable[Path], held_out: Iterable[Path], *, cache: Path | None = None) -> Sources:
    """Read task files and the corpus.

    Args:
        training: Task files whose functions may be broken anew.
        held_out: Task files whose functions must not be seen.
        cache: Folder of the corpus.

    Returns:
        The sources. Identifiers aside, no corpus function equals any function of a package that tasks come from, and
        of the functions of training tasks none equals one of a held-out task.
    """
    train = [task for path in training for task in load_tasks(path)]
    kept_out = [task for path in held_out for task in load_tasks(path)]
    texts = {task.id: _right_and_broken(task) for task in [*train, *kept_out]}
    secret = {skeleton(text) for task in kept_out for text in texts[task.id]}
    task_functions = [
        (texts[task.id][0], tuple(test.partition(":")[0] for test in task.visible_tests))
        for task in train
        if task.family != "mini" and not {skeleton(text) for text in texts[task.id]} & secret
    ]
    archived = (function.source for package in packages().values() for function in _functions(package))
    corpus = load_corpus([*(text for pair in texts.values() for text in pair), *archived], cache)
    held_back, kept = [], []
    for function in corpus:
        share = int(function.shape[:8], 16) / 16**8
        (held_back if share < HELD_BACK_SHARE else kept).append(function)
    forbidden = frozenset(text for task in [*train, *kept_out] if task.family == "mini" for text in texts[task.id])
    return Sources(
        corpus=kept, held_back=held_back, task_functions=tuple(dict.fromkeys(task_functions)), forbidden=forbidden
    )
