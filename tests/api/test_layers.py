"""The surface of each package: documented, exported deliberately, and free of JAX where it must be."""

import importlib
import pkgutil
import subprocess
import sys

import pytest

import swerve

PACKAGES = sorted(module.name for module in pkgutil.iter_modules(swerve.__path__))
WITHOUT_JAX = (
    *("types", "config", "telemetry", "downloads", "rendering", "sandboxes", "agents"),
    *("environments", "rollout", "evaluation", "mlperf", "launch"),
)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_says_what_it_owns_and_exports_what_exists(name):
    module = importlib.import_module(f"swerve.{name}")
    assert module.__doc__
    assert len(module.__doc__) > 60
    exported = getattr(module, "__all__", [])
    assert [symbol for symbol in exported if not hasattr(module, symbol)] == []
    assert sorted(set(exported)) == sorted(exported)
    for symbol in exported:
        value = getattr(module, symbol)
        if getattr(value, "__name__", "") == symbol:  # a class or function, not a value made by one
            assert value.__doc__, f"{name}.{symbol} has no docstring"


def test_jax_is_not_loaded_by_packages_that_run_without_it():
    wanted = [f"swerve.{name}" for name in WITHOUT_JAX if name in PACKAGES]
    code = (
        "import importlib, pkgutil, sys\n"
        f"for name in {wanted!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for inner in pkgutil.walk_packages(getattr(module, '__path__', []), name + '.'):\n"
        "        if not inner.name.rsplit('.', 1)[-1] in ('guest', 'launcher', 'harness', '__main__'):\n"
        "            importlib.import_module(inner.name)\n"
        "    loaded = {'jax', 'jaxlib', 'optax'} & set(sys.modules)\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_prints_nothing_and_makes_nothing(tmp_path):
    code = f"import {', '.join(f'swerve.{name}' for name in PACKAGES)}"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
