"""What a comparison says: a table and one line, or JSON."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swerve.cli.ab.verdicts import STEPS, Comparison, overall, worst
from swerve.config import AbRecipe, digest, render_value
from swerve.config.schema import AbBounds

_HEADINGS = ("metric", "reference", "candidate", "difference", "noise", "passes up to", "fails above", "verdict")


def bounds_digest(bounds: AbBounds) -> str:
    """Identity of the bounds: hexadecimal SHA-256 of their values."""
    text = "\n".join(f"{name} = {render_value(value)}" for name, value in dataclasses.asdict(bounds).items())
    return hashlib.sha256(text.encode()).hexdigest()


def opening_lines(recipe: AbRecipe, path: Path, broken: str) -> list[str]:
    """What is compared, and with which bounds, before anything runs."""
    spoilt = f", with the fault {broken}" if broken else ""
    return [
        f"reference: {' '.join(recipe.arms.reference) or 'as the recipe says'}",
        f"candidate: {' '.join(recipe.arms.candidate) or 'as the recipe says'}{spoilt}",
        f"bounds: [bounds] of {path}, sha256 {bounds_digest(recipe.bounds)[:12]}",
    ]


def table(comparisons: Sequence[Comparison]) -> list[str]:
    """A line for each metric, under headings, and one line that says what decides."""
    rows = [_HEADINGS, *map(_row, comparisons)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"{row[0]:<{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
        + f"  {row[-1]}"
        for row in rows
    ]
    return [*lines, "", closing_line(comparisons)]


def closing_line(comparisons: Sequence[Comparison]) -> str:
    """The verdict, and the metric that decides it."""
    verdict, decisive = overall(comparisons), worst(comparisons)
    found = decisive.found
    place = f"in step {found.step}" + (f", {found.where}" if found.where else "")
    if verdict == "PASS":
        return f"PASS: every metric is within its bound; {decisive.metric} comes closest, {found.relative:.1e} {place}"
    if decisive.metric == STEPS:
        return f"FAIL: the candidate made {found.second:g} of {found.first:g} steps"
    if verdict == "FAIL":
        times = found.relative / decisive.fails
        return f"FAIL: {decisive.metric} differs by {found.relative:.1e} {place}: {times:,.1f} times its bound"
    if decisive.noise > decisive.passes:
        return (
            f"INCONCLUSIVE: the reference differs from itself by {decisive.noise:.1e} in {decisive.metric}, more than "
            f"the {decisive.passes:g} that it is to be held to"
        )
    return f"INCONCLUSIVE: {decisive.metric} differs by {found.relative:.1e} {place}, between its two bounds"


def as_json(
    recipe: AbRecipe, path: Path, comparisons: Sequence[Comparison], broken: str, seconds: float
) -> dict[str, Any]:
    """Everything that the table says, and what was compared."""
    return {
        "verdict": overall(comparisons),
        "because": closing_line(comparisons),
        "recipe": str(path),
        "recipe_digest": digest(recipe),
        "bounds": dataclasses.asdict(recipe.bounds),
        "bounds_digest": bounds_digest(recipe.bounds),
        "reference": list(recipe.arms.reference),
        "candidate": list(recipe.arms.candidate),
        "break": broken,
        "num_steps": recipe.input.num_steps,
        "seconds": round(seconds, 1),
        "metrics": [
            {
                "name": one.metric,
                "reference": one.found.first,
                "candidate": one.found.second,
                "difference": one.found.relative,
                "noise": one.noise,
                "passes_up_to": one.passes,
                "fails_above": one.fails,
                "step": one.found.step,
                "parameter": one.found.where,
                "verdict": one.verdict,
            }
            for one in comparisons
        ],
    }


def _row(one: Comparison) -> tuple[str, ...]:
    name = f"{one.metric} of {one.found.where}" if one.found.where else one.metric
    numbers = (f"{one.found.first:.6g}", f"{one.found.second:.6g}", f"{one.found.relative:.1e}", f"{one.noise:.1e}")
    return (f"{name}, step {one.found.step}", *numbers, f"{one.passes:g}", f"{one.fails:g}", one.verdict)
