"""How fast one whole GRPO step is, alone or beside TRL's trainer: the same trajectories, weights and cores in one run.

Multi-turn trajectories of the shape of a real run, and a model of four layers with random weights, are written once and
read by both sides. A step is all that follows sampling: log-probabilities, correction for the sampler, loss, backward
and update, in float32. TRL scores the trajectories before it trains on them, for the correction; its step is also given
without that pass. Each side is a process of its own; repetitions alternate, each after a step that is not timed, and
the median counts. No ratio is given unless both sides found the same loss, gap to the sampler, gradient norm and size
of the update.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.cli.benches import Figure
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.cli.benches._sides import Side

_TARGET = 2.5
_TOLERANCE = 1e-4
_LEAST_SIZE = {"loss": 0.01, "logprob_gap": 0.1}  # both may lie near 0: smaller ones are compared as if of this size
_IMPORTANCE_CAP = 2.0
_ROW_MULTIPLE = 64  # of recorded trajectories' rows
_TRIED_GROUPS = 1  # that TRL's settings are tried on
_TRIES = 2  # the faster counts
_OPTIONS: dict[str, tuple[Any, ...]] = {
    # `batched_mm` experts copy the weights of every token's experts: for decoding.
    "experts": ("grouped_mm", "eager"),
    "batch": (2, 1, 4, 8),
    "checkpointing": (False, True),
}
_OF_A_PROCESS: dict[str, tuple[Any, ...]] = {"waiting": ("default", "passive"), "memory": ("default", "kept")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the peer and sizes."""
    parser.add_argument("--peer", choices=["trl"], help="measure this trainer as well")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="its interpreter; made in the cache directory where it is not given"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="INT", help="cores for each side (all)")
    parser.add_argument(
        "--context-lengths", type=int, nargs="+", default=[1024, 2048], metavar="INT",
        help="most tokens of a trajectory, one comparison each (1024 2048)",
    )  # fmt: skip
    for name, default, text in (
        ("groups", 2, "tasks of a step"),
        ("group-size", 16, "attempts at each, as many as the benchmark has"),
        ("repetitions", 3, "of every step"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (%(default)s)")
    parser.add_argument(
        "--trajectories", metavar="FILE", help="trajectories.jsonl of a run: the first step's, in place of drawn ones"
    )
    parser.add_argument("--policy", metavar="DIR", help="the weights that sampled them")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench step --help`."""
    from swerve.cli.benches._sides import TRL_PACKAGES, peer_python, start_side

    threads = _check(arguments)
    own: list[str | Path] = [sys.executable, "-m", "swerve.cli.benches._own_step"]
    peer: list[str | Path] = []
    if arguments.peer:
        # -P: beside the script lie modules that have the names of packages
        script = Path(__file__).with_name("_peer_trl.py")
        peer = [peer_python(arguments.peer_python, TRL_PACKAGES), "-P", script]
    chosen: dict[str, Any] | None = None
    lengths: Sequence[int | None] = [None] if arguments.trajectories else arguments.context_lengths
    for length in lengths:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            directory = Path(name)
            title, tokens = _write_inputs(directory, arguments, length)
            sides = [stack.enter_context(start_side("swerve", own, threads))]
            opened = {"directory": name, "threads": threads}
            if peer:
                chosen = chosen or _choose(peer, threads, directory)
                sides.append(stack.enter_context(start_side("TRL", peer, threads)))
            for side in sides:
                told = side.ask("open", **opened, settings=chosen if side.name == "TRL" else None)
                print(f"{side.name}: {told['versions']}, {told['threads']} threads", file=sys.stderr, flush=True)
            yield from _compare(sides, title, tokens, arguments.repetitions)


def _check(arguments: argparse.Namespace) -> int:
    """How many threads a side gets.

    Raises:
        SwerveError: An argument is out of range.
    """
    from swerve.cli.benches._sides import threads_of

    threads = threads_of(arguments.threads)
    for name, least in (("groups", 1), ("group_size", 3), ("repetitions", 1)):
        if getattr(arguments, name) < least:
            raise SwerveError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: at least {least}")
    if min(arguments.context_lengths) < 64:
        raise SwerveError(f"--context-lengths {min(arguments.context_lengths)}: at least 64")
    if bool(arguments.trajectories) != bool(arguments.policy):
        raise SwerveError("--trajectories and --policy go together: the weights must be those that sampled")
    return threads


# ---------------------------------------------------------------------------------------------------------- inputs


def _write_inputs(directory: Path, arguments: argparse.Namespace, length: int | None) -> tuple[str, int]:
    """Weights, trajectories and settings for both sides; returns a title and the number of tokens."""
    import jax

    from swerve import models
    from swerve.cli.benches.model import MODEL
    from swerve.config import policy_directory
    from swerve.config.schema import Optimizer
    from swerve.telemetry import TrajectoryLog
    from swerve.trainer import SyntheticShape, synthetic_groups

    if length is None:
        config, params = models.load_hf(policy_directory(arguments.policy))
        attempts = _recorded(Path(arguments.trajectories))
        longest = max(len(one.tokens) for one in attempts)
        length, title = -(-longest // _ROW_MULTIPLE) * _ROW_MULTIPLE, "recorded"
    else:
        config = models.Qwen35MoeConfig(**MODEL)
        params = models.initialise(config, jax.random.key(0))
        shape = SyntheticShape(context_length=length)
        groups = synthetic_groups(shape, arguments.groups, arguments.group_size, vocab_size=config.vocab_size, seed=0)
        attempts, title = [one for group in groups for one in group.trajectories], f"context {length:,}"
    models.save_hf(directory, config, params, "float32")
    log = TrajectoryLog(directory / "trajectories.jsonl")
    log.append(1, "train", attempts)
    log.close()
    settings = {"row_length": length, "importance_cap": _IMPORTANCE_CAP, **asdict(Optimizer(max_grad_norm=1.0))}
    (directory / "step.json").write_text(json.dumps(settings), encoding="utf-8")
    return title, sum(len(one.tokens) for one in attempts)


def _recorded(path: Path) -> list[Any]:
    """The first step's attempts at tasks that have as many graded ones as any: TRL takes groups of one size.

    Raises:
        SwerveError: The file holds no step.
    """
    from swerve.telemetry import read_trajectories

    groups: dict[str, list[Any]] = {}
    first = None
    for step, one in read_trajectories(path, ("train",)):
        first = step if first is None else first
        if step == first and one.status.is_valid_sample and one.sampled.any():
            groups.setdefault(one.task_id, []).append(one)
    if not groups:
        raise SwerveError(f"{path}: no graded trajectory of a training step")
    size = max(map(len, groups.values()))
    return [one for group in groups.values() if len(group) == size for one in group]


# -------------------------------------------------------------------------------------------------- TRL's settings


def _choose(command: Sequence[str | Path], threads: int, directory: Path) -> dict[str, Any]:
    """The fastest of TRL's settings, each tried on steps of the first group, one option after the other."""
    from swerve.cli.benches._sides import start_side

    best: dict[str, Any] = {name: values[0] for name, values in (_OF_A_PROCESS | _OPTIONS).items()}
    seconds: dict[str, float] = {}

    def try_out(side: Side, candidate: dict[str, Any]) -> float:
        key = json.dumps(candidate)
        if key not in seconds:
            told = side.ask("try_out", settings=candidate, num_groups=_TRIED_GROUPS)
            seconds[key] = min(told["seconds"], *(side.ask("run")["seconds"] for _ in range(_TRIES - 1)))
            print(f"TRL, tried: {key}: {seconds[key]:.2f} s", file=sys.stderr, flush=True)
        return seconds[key]

    def in_a_process(candidate: dict[str, Any], options: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        with start_side("TRL", command, threads) as side:
            sizes = side.ask("open", directory=str(directory), threads=threads, settings=candidate)["group_sizes"]
            whole = math.gcd(sum(sizes), sum(sizes[:_TRIED_GROUPS]))  # batches must divide both
            try_out(side, candidate)
            for name, values in options.items():
                fitting = [value for value in values if name != "batch" or whole % value == 0]
                candidate = min((candidate | {name: value} for value in fitting), key=lambda one: try_out(side, one))
        return candidate

    for name, values in _OF_A_PROCESS.items():
        for value in values:
            if json.dumps(best | {name: value}) not in seconds:
                in_a_process(best | {name: value}, {})
        best = min((best | {name: value} for value in values), key=lambda one: seconds[json.dumps(one)])
    return in_a_process(best, _OPTIONS)


# ------------------------------------------------------------------------------------------------------ comparison


def _compare(sides: list[Side], title: str, tokens: int, repetitions: int) -> Iterator[Figure]:
    from swerve.cli.benches._sides import require_agreement

    prepared = {side.name: side.ask("prepare") for side in sides}
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    for _ in range(repetitions):
        for side in sides:
            side.ask("run")  # not timed: machines take memory back from a process that idles
            runs[side.name].append(side.ask("run"))
    for name, of_side in runs.items():
        yield from _figures(f"{title}, {name}", prepared[name], of_side, tokens)
    if len(sides) == 2:
        ours, theirs = runs.values()
        checks = [one["check"] for one in prepared.values()]
        require_agreement(title, "TRL's", checks[0], checks[1], _TOLERANCE, _LEAST_SIZE)
        scored = [run | {"seconds": run["seconds"] - run["scoring_seconds"]} for run in theirs]
        yield _ratio(f"{title}: TRL / swerve", ours, theirs, _TARGET)
        yield _ratio(f"{title}: TRL without its scoring pass / swerve", ours, scored, None)


def _figures(name: str, prepared: dict[str, Any], runs: list[dict[str, Any]], tokens: int) -> Iterator[Figure]:
    seconds = sorted(run["seconds"] for run in runs)
    count, spent = len(seconds), round(sum(seconds), 3)
    step = statistics.median(seconds)
    rows: list[tuple[str, float, str]] = [
        (f"{name} ({prepared['settings']})", step, "s"),
        (f"{name}: fastest repetition", seconds[0], "s"),
        (f"{name}: slowest repetition", seconds[-1], "s"),
    ]
    if "scoring_seconds" in runs[0]:
        scoring = statistics.median(run["scoring_seconds"] for run in runs)
        rows.append((f"{name}: of it the scoring pass", scoring, "s"))
    rows += [
        (f"{name}: tokens", tokens / step, "tokens/s"),
        (f"{name}: tokens and padding computed", prepared["slots"], "tokens"),
        (f"{name}: time of all cores", statistics.median(run["core_seconds"] for run in runs), "s"),
        (f"{name}: peak memory", max(run["peak_bytes"] for run in runs) / 2**20, "MiB"),
        (f"{name}: first step", prepared["seconds"], "s"),
        *((f"{name}: {key.replace('_', ' ')}", value, "") for key, value in prepared["check"].items()),
    ]
    for label, value, unit in rows:
        yield Figure(name=label, value=value, unit=unit, count=count, seconds=spent)


def _ratio(name: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], target: float | None) -> Figure:
    medians = [statistics.median(run["seconds"] for run in runs) for runs in (ours, theirs)]
    spent = round(sum(run["seconds"] for run in (*ours, *theirs)), 3)
    value = medians[1] / medians[0]
    return Figure(name=name, value=value, unit="times", count=len(ours), seconds=spent, target=target)
