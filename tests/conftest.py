"""Strict numerics and a fixed number of threads for every test and every process a test starts.

All of it goes through the environment, before JAX or numpy is imported, so that subprocesses inherit it and tests
of packages without JAX never import it.
"""

import os
from pathlib import Path

import hypothesis

_ROOT = Path(__file__).resolve().parent.parent

_ENVIRONMENT = {
    # Tests run side by side, one thread each: two pools that fight for two cores are slower than one.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": "0",
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_COMPILATION_CACHE_DIR": str(_ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
}

for _name, _value in _ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# How long an example takes says what else the machine does, not whether the code is right.
hypothesis.settings.register_profile("swerve", deadline=None)
hypothesis.settings.load_profile("swerve")
