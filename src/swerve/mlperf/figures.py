"""Pictures of runs, as PNG; matplotlib is imported when the first one is drawn."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from swerve.config import laws
from swerve.mlperf.run_summary import PARTS, RunSummary, Step
from swerve.types import MachineError

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""One per batch size; told apart by the colour-blind too."""
_PART_COLORS = {
    "policy training": "#0072b2",
    "exposed generation": "#e69f00",
    "weight sync": "#cc79a7",
    "rest of the step": "#56b4e9",
    "first step, not logged": "#555555",
    "between steps": "#999999",
    "after the last logged step": "#cccccc",
    "evaluation in the score": "#009e73",
}
_WIDTH = 5.6
"""Inches; narrow, so that a phone shows words at a readable size."""
_DPI = 160
_STYLE = {
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "figure.constrained_layout.use": True,
}
Groups = Sequence[Sequence[RunSummary]]
Names = Mapping[Path, str]


def draw_figures(groups: Groups, names: Names) -> dict[str, bytes]:
    """Draws every picture that the runs have data for.

    Args:
        groups: Runs by batch size.
        names: Short name of every run.

    Returns:
        Name to PNG, in the order of a page.

    Raises:
        MachineError: matplotlib is missing.
    """
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
        context = importlib.import_module("matplotlib").rc_context
    except ImportError as error:
        raise MachineError("matplotlib is missing: pip install 'swerve[mlperf]'") from error
    drawn: dict[str, bytes] = {}
    pictures: tuple[tuple[str, Callable[[Any, Groups, Names], bool]], ...] = (
        ("time_to_target", _time_to_target),
        ("accuracy", _accuracy),
        ("reward", _reward),
        ("loss", _loss),
        ("step_time", _step_time),
        ("gap", _gap),
    )
    for name, draw in pictures:
        with context(_STYLE):
            canvas = figure(figsize=(_WIDTH, 3.8))
            if not draw(canvas, groups, names):
                continue
            data = io.BytesIO()
            canvas.savefig(data, format="png", dpi=_DPI, metadata={"Software": None})
            drawn[name] = data.getvalue()
    return drawn


def parts_of_time(run: RunSummary) -> dict[str, float]:
    """Seconds of a run by what they went to; they add up to its wall time and what of the score follows that."""
    if run.gap is None:
        return {}
    timed = [step for step in run.steps if step.step_time_s is not None]
    named = {part: sum(step.parts_s.get(part, 0.0) for step in timed) for part in PARTS}
    return {
        "policy training": named["policy_training_time"],
        "exposed generation": named["exposed_generation_time"],
        "weight sync": named["weight_sync_time"],
        "rest of the step": run.gap.logged_s - sum(named.values()),
        "first step, not logged": run.gap.first_step_s,
        "between steps": run.gap.between_s,
        "after the last logged step": run.gap.after_s,
        "evaluation in the score": run.evaluation_in_score_s or 0.0,
    }


def label_of(runs: Sequence[RunSummary]) -> str:
    """Name of a batch size."""
    size = runs[0].global_batch_size
    return f"GBS {size}" if size is not None else "batch size not logged"


# ---------------------------------------------------------------------------------------------------- pictures


def _time_to_target(figure: Any, groups: Groups, names: Names) -> bool:
    runs = [run for group in groups for run in group]
    if not any(run.gap for run in runs):
        return False
    figure.set_size_inches(_WIDTH, 2.1 + 0.28 * len(runs))
    axes = figure.subplots()
    axes.grid(axis="y", visible=False)
    for place, run in enumerate(runs):
        left = 0.0
        for part, seconds in parts_of_time(run).items():
            width = max(0.0, seconds) / 60
            axes.barh(place, width, left=left, color=_PART_COLORS[part], height=0.72)
            left += width
        if run.score_s is not None:
            axes.plot([run.score_s / 60] * 2, [place - 0.45, place + 0.45], color="black", lw=1.5)
        score = f"{run.score_s / 60:.1f} min" if run.score_s is not None else run.outcome
        color = "black" if run.score_s is not None else "#b00020"
        axes.annotate(
            score, (left, place), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9, color=color
        )
    axes.set_yticks(range(len(runs)), [names[run.path] for run in runs], fontsize=9)
    longest = max(sum(parts_of_time(run).values()) for run in runs) / 60
    axes.set(xlim=(0, 1.03 * longest), ylim=(len(runs) - 0.4, -0.6))
    axes.set(xlabel="minutes, each part summed over the run", title="Time of each run; the stroke is its score")
    used = [part for part in _PART_COLORS if any(parts_of_time(run).get(part, 0.0) > 0 for run in runs)]
    _legend_below(figure, [_patch(part) for part in used])
    return True


def _accuracy(figure: Any, groups: Groups, names: Names) -> bool:
    if not any(run.evaluations for group in groups for run in group):
        return False
    axes = figure.subplots()
    for color, group in _colored(groups):
        for run in group:
            if not run.evaluations:
                continue
            samples = [found.samples for found in run.evaluations]
            accuracies = [found.accuracy for found in run.evaluations]
            axes.plot(samples, accuracies, "-o", color=color, markerfacecolor="none", lw=1, label=label_of(group))
    axes.axhline(laws.TARGET_ACCURACY, color="#444444", lw=1, ls="--")
    axes.annotate(f"target {laws.TARGET_ACCURACY}", (0.01, laws.TARGET_ACCURACY), xycoords=("axes fraction", "data"),
                  xytext=(0, 3), textcoords="offset points", fontsize=10)  # fmt: skip
    axes.set(xlabel="training samples", ylabel="pass@4 on held-out tasks", title="Accuracy of each evaluation")
    axes.margins(y=0.12)
    _legend(axes)
    return True


def _reward(figure: Any, groups: Groups, names: Names) -> bool:
    axes = figure.subplots()
    drawn = _curves(axes, groups, lambda step: step.reward)
    axes.set(xlabel="training samples", ylabel="mean reward of a step", title="Reward: runs thin, their median thick")
    _legend(axes)
    return drawn


def _loss(figure: Any, groups: Groups, names: Names) -> bool:
    figure.set_size_inches(_WIDTH, 5.8)
    above, below = figure.subplots(2, sharex=True)
    drawn = _curves(above, groups, lambda step: step.loss)
    drawn |= _curves(below, groups, lambda step: step.grad_norm)
    below.set_yscale("log")
    above.set(ylabel="loss", title="Training loss: runs thin, their median thick")
    below.set(xlabel="training samples", ylabel="gradient norm (log)", title="Gradient norm before clipping")
    _legend(above)
    return drawn


def _step_time(figure: Any, groups: Groups, names: Names) -> bool:
    """Mean step of each batch size, stacked by part."""
    rows = [
        (label_of(group), [step for run in group for step in run.steps if step.step_time_s is not None])
        for group in groups
    ]
    rows = [(label, steps) for label, steps in rows if steps]
    if not rows:
        return False
    figure.set_size_inches(_WIDTH, 1.9 + 0.55 * len(rows))
    axes = figure.subplots()
    axes.grid(axis="y", visible=False)
    parts = dict(zip(("policy training", "exposed generation", "weight sync"), PARTS, strict=True))
    for place, (_, steps) in enumerate(rows):
        total, left = fmean(step.step_time_s or 0.0 for step in steps), 0.0
        means = {name: fmean(step.parts_s.get(part, 0.0) for step in steps) for name, part in parts.items()}
        for name, width in {**means, "rest of the step": max(0.0, total - sum(means.values()))}.items():
            axes.barh(place, width, left=left, color=_PART_COLORS[name], height=0.6)
            if width > 0.06 * total:
                words, ink = f"{width:.{0 if width >= 10 else 1}f}", "white" if name == "policy training" else "black"
                axes.text(left + width / 2, place, words, ha="center", va="center", color=ink, fontsize=10)
            left += width
        axes.annotate(f"{total:.1f} s", (left, place), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set(xlabel="seconds", title="Mean logged step (train_step_time) by part")
    _legend_below(figure, [_patch(name) for name in (*parts, "rest of the step")])
    return True


def _gap(figure: Any, groups: Groups, names: Names) -> bool:
    """Wall time between statistics beyond the logged step time, per step."""
    axes = figure.subplots()
    drawn = False
    for color, group in _colored(groups):
        for run in group:
            timed = [step for step in run.steps if step.step_time_s is not None]
            gaps = [step.wall_s - (step.step_time_s or 0.0) for step in timed]
            drawn |= bool(gaps)
            axes.plot([step.step for step in timed], gaps, "-o", ms=3, lw=1, color=color, label=label_of(group))
    axes.set_yscale("symlog", linthresh=1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="step", ylabel="seconds not logged (log)", title="Wall time of a step beyond train_step_time")
    _legend(axes)
    return drawn


# ---------------------------------------------------------------------------------------------------- parts


def _curves(axes: Any, groups: Groups, value: Callable[[Step], float | None]) -> bool:
    drawn = False
    for color, group in _colored(groups):
        by_samples: dict[int, list[float]] = {}
        for run in group:
            points = [(step.samples, found) for step in run.steps if (found := value(step)) is not None]
            drawn |= bool(points)
            axes.plot([x for x, _ in points], [y for _, y in points], color=color, lw=0.7, alpha=0.45)
            for samples, found in points:
                by_samples.setdefault(samples, []).append(found)
        middles = {samples: median(found) for samples, found in sorted(by_samples.items())}
        axes.plot(list(middles), list(middles.values()), color=color, lw=2.2, label=label_of(group))
    return drawn


def _colored(groups: Groups) -> list[tuple[str, Sequence[RunSummary]]]:
    return [(_COLORS[place % len(_COLORS)], group) for place, group in enumerate(groups)]


def _patch(part: str) -> Any:
    return importlib.import_module("matplotlib.patches").Patch(color=_PART_COLORS[part], label=part)


def _legend_below(figure: Any, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=2, fontsize=9)


def _legend(axes: Any) -> None:
    """A legend that names each batch size once."""
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        axes.legend(once.values(), once.keys())
