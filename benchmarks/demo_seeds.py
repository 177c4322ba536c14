"""Repeat a training recipe over seeds and tabulate what was learnt, with standard errors.

    python benchmarks/demo_seeds.py [--recipe recipes/demo.toml] [--seeds 5] [--out benchmarks/demo.md]

Each run is `swerve train RECIPE --run.seed N`, one after another. The last rows give the mean over seeds with its
standard error, and blind enumeration with as many tries, which the policy has to beat.
"""

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from swerve.cli.composition import read_tasks
from swerve.config import TrainRecipe, read_recipe_as
from swerve.environments.functions.baseline import Baseline, baseline

COLUMNS = ("pass_at_1_before", "pass_at_1_after", "pass_at_4_before", "pass_at_4_after", "first_reward_s", "seconds")


def run_seeds(recipe: Path, num_seeds: int) -> list[dict[str, float]]:
    """Summaries of as many runs."""
    with tempfile.TemporaryDirectory() as directory:
        return [run(recipe, seed, Path(directory)) for seed in range(num_seeds)]


def run(recipe: Path, seed: int, directory: Path) -> dict[str, float]:
    """Summary of one run."""
    words = [
        "train",
        str(recipe),
        "--run.seed",
        str(seed),
        "--run.directory",
        str(directory),
        "--run.name",
        f"seed{seed}",
    ]
    words += ["--telemetry.trajectories", "false", "--telemetry.tensorboard", "false"]
    subprocess.run([sys.executable, "-m", "swerve.cli", *words], check=True)
    return json.loads((directory / f"seed{seed}" / "summary.json").read_text())


def blind_enumeration(recipe_path: Path) -> Baseline:
    """What blind enumeration achieves on the same tasks, with a try in every turn but the one that looks."""
    recipe = read_recipe_as(TrainRecipe, recipe_path)
    tasks = read_tasks(recipe.tasks, recipe.evaluation.num_tasks).validation
    return baseline(tasks, recipe.agent.max_turns - 1)


def table(rows: list[dict[str, float]], blind: Baseline) -> str:
    """The runs, their mean and what they have to beat, as Markdown."""
    lines = ["| seed | " + " | ".join(COLUMNS) + " | peak GiB |", "|---" * (len(COLUMNS) + 2) + "|"]
    for seed, row in enumerate(rows):
        cells = [f"{row[name]:.3f}" if "pass" in name else f"{row[name]:.0f}" for name in COLUMNS]
        lines.append(f"| {seed} | " + " | ".join(cells) + f" | {row['peak_rss_bytes'] / 2**30:.2f} |")
    means = []
    for name in COLUMNS:
        values = [row[name] for row in rows]
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        means.append(f"{statistics.fmean(values):.3f} ± {error:.3f}")
    lines.append("| mean ± s.e. | " + " | ".join(means) + " | |")
    lines.append(f"| blind, {blind.num_tries} tries | | {blind.pass_at_1:.3f} | | {blind.pass_at_4:.3f} | | | |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds and print, and write, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = run_seeds(arguments.recipe, arguments.seeds)
    text = (
        f"`python benchmarks/demo_seeds.py --recipe {arguments.recipe} --seeds {arguments.seeds}`, "
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {platform.python_version()}\n\n"
        f"{table(rows, blind_enumeration(arguments.recipe))}\n"
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
