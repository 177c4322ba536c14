"""Equal inputs give equal bits, in another process too."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from swerve.weights import digest

from .samples import make_groups, make_trainer

TRAIN = """
    from trainer.test_determinism import train

    print(train())
"""


def train() -> str:
    """Digests of parameters and moments after three steps."""
    trainer = make_trainer()
    for step in range(3):
        trainer.step(trainer.prepare(make_groups(2 + step % 2)), learning_rate=1e-2)
    state = trainer.state()
    return f"{digest(state.params)} {digest(state.optimizer)}"


def train_elsewhere(timeout_s: float = 290) -> str:
    """The same in a fresh process that compiles everything itself."""
    path = os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRAIN)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "JAX_ENABLE_COMPILATION_CACHE": "0"},
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_another_process_ends_with_the_same_bits() -> None:
    assert train_elsewhere() == train()


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.usefixtures("as_users_run")
def test_all_threads_and_optimisations_end_with_the_same_bits_every_time() -> None:
    assert train_elsewhere(600) == train_elsewhere(600)
