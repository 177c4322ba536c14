"""Strict numerics and a fixed number of threads for every test and every process a test starts.

All of it goes through the environment, before JAX or numpy is imported, so that subprocesses inherit it and tests
of packages without JAX never import it.
"""

import os
import signal
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import hypothesis
import pytest

_ROOT = Path(__file__).resolve().parent.parent

# Tests of meshes run on simulated devices; the others use the first one.
_XLA_FLAGS = ["--xla_cpu_multi_thread_eigen=false", "--xla_force_host_platform_device_count=8"]
if version("jaxlib").startswith("0.10."):  # later ones have no other way to emit fusions, and end at an unknown flag
    _XLA_FLAGS.append("--xla_cpu_use_fusion_emitters=false")

_ENVIRONMENT = {
    # Tests run side by side, one thread each: two pools that fight for two cores are slower than one.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Compile fast rather than well: most programs run a few times, and compiling them is most of what tests cost.
    "XLA_FLAGS": " ".join(_XLA_FLAGS),
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "0",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    # Tests and the commands they start compile each program once between them, and leave the user's cache alone.
    "SWERVE_CACHE_DIR": str(_ROOT / ".cache" / "swerve"),
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "swerve" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

_SET_HERE = [name for name in _ENVIRONMENT if name not in os.environ]
os.environ.update({name: _ENVIRONMENT[name] for name in _SET_HERE})

# What a shell starts in the background ignores Ctrl-C, and so does all that it starts; some tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says what else the machine does, not whether the code is right.
hypothesis.settings.register_profile("swerve", deadline=None)
hypothesis.settings.load_profile("swerve")


@pytest.fixture(scope="module")
def optimised_commands() -> Iterator[None]:
    """Processes that the tests start are optimised: whole runs compute more than they compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        patch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=1")
        yield


@pytest.fixture
def as_users_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that the test starts run like a user's: optimised, and on all threads."""
    for name in _SET_HERE:
        monkeypatch.delenv(name)
