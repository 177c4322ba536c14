"""Equal inputs give equal bits, in another process too."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

TRAIN = """
    import sys
    from trainer.samples import make_groups, make_trainer
    from swerve.weights import digest

    trainer = make_trainer()
    for step in range(3):
        trainer.step(trainer.prepare(make_groups(2 + step % 2)), learning_rate=1e-2)
    state = trainer.state()
    print(digest(state.params), digest(state.optimizer))
"""


def test_two_processes_end_with_the_same_bits() -> None:
    """Both compile for themselves, and compute with as many threads as there are cores."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent.parent)]),
        "XLA_FLAGS": "",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAIN)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=280) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0][1]
    assert len(outputs[0][0].split()[0]) == 64
    assert outputs[0][0] == outputs[1][0]
