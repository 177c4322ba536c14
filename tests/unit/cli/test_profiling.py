"""Profiles of steps: which are recorded, and how much of them the devices were idle."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from swerve.cli.profiling import Profile, Span, StepProfiler, parse_steps, read_profile
from swerve.types import SwerveError


def test_steps_are_read_from_text() -> None:
    assert parse_steps("2:3", 5) == (2, 3)
    assert parse_steps("4", 5) == (4, 4)


@pytest.mark.parametrize("text", ["0:1", "3:2", "5:6", "two", "1:2:3"])
def test_steps_that_are_none_of_the_run_are_refused(text: str) -> None:
    with pytest.raises(SwerveError, match=f"--profile {text}: "):
        parse_steps(text, 5)


def test_a_recording_shows_phases_and_when_devices_were_idle(tmp_path: Path) -> None:
    @jax.jit
    def compute(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ y), x)

    x = compute(jnp.ones((256, 256))).block_until_ready()
    profiler = StepProfiler(tmp_path, 2, 2)
    for step in (1, 2, 3):
        profiler.begin_step(step)
        with profiler.annotate("compute"):
            compute(x).block_until_ready()
        with profiler.annotate("update"):
            time.sleep(0.2)
        with profiler.annotate("compute"):
            compute(x).block_until_ready()
    profiler.close()
    profile = read_profile(tmp_path)
    assert [one.name for one in profile.phases] == ["compute", "update", "compute"]  # of step 2 alone
    first, update, second = profile.phases
    assert profile.idle_s(update.start_s, update.end_s) == pytest.approx(0.2, abs=0.05)
    assert profile.idle_s(first.start_s, first.end_s) < 0.5 * (first.end_s - first.start_s)
    (idle,) = profile.idle_at_boundaries()
    assert 0.2 <= idle < second.end_s - first.start_s


def test_idle_time_is_what_no_operation_covers() -> None:
    busy = (Span(name="busy", start_s=0, end_s=2), Span(name="busy", start_s=5, end_s=9))
    phases = [("compute", 1, 2), ("update", 2, 3), ("copy", 3, 5), ("compute", 5, 6), ("update", 9, 10)]
    profile = Profile(phases=tuple(Span(name=n, start_s=a, end_s=b) for n, a, b in phases), busy=busy)
    assert profile.idle_s(1, 6) == 3
    assert profile.idle_at_boundaries() == [3]  # the last update has no step after it


def test_a_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwerveError, match="holds no recording"):
        read_profile(tmp_path)
