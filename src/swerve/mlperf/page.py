"""The page of a report: one HTML file that needs nothing else, readable on a phone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from swerve.mlperf.run_summary import RunSummary

if TYPE_CHECKING:
    from swerve.mlperf.report import Group

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; margin: 0 auto; max-width: 60rem; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; vertical-align: bottom; white-space: normal; max-width: 6rem; }
td:first-child, th:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; min-width: 5rem; }
td.bad { color: #b00020; font-weight: 600; }
dt { font-weight: 600; margin-top: 0.5rem; } dd { margin: 0 0 0 1rem; }
"""
_DEFINITIONS = {
    "score": "run_stop - run_start, as MLPerf scores a run; of converged runs only. Where the evaluation ran offline, "
    "run_stop is dated back to the weight update of the passing checkpoint, and the score holds no evaluation.",
    "training to target": "run_start to the weight update of the first checkpoint that reaches 0.69: a run_stop "
    "dated back to it, else its block_stop or the statistics of its step.",
    "olympic mean": "mean score without the best and the worst run; a run that did not converge is the worst.",
    "wall": "run_start to the last block_stop.",
    "logged": "sum of train_step_time over the steps that logged it.",
    "gap": "wall - logged: what the first step took beyond its logged time, what passed between the statistics of "
    "later steps beyond their logged times, and what followed the last step that logged its time "
    "(negative where that step went on after the update at which block_stop is dated).",
}
_CAPTIONS = {
    "time_to_target": "Where the time of each run went",
    "accuracy": "Accuracy",
    "reward": "Reward",
    "loss": "Loss and gradient norm",
    "step_time": "Step time",
    "gap": "Logged step time beside wall time",
}


def write_page(groups: Sequence[Group], names: Mapping[Path, str], pictures: Mapping[str, bytes]) -> str:
    """Writes the page.

    Args:
        groups: Runs by batch size.
        names: Short name of every run.
        pictures: PNGs by name.

    Returns:
        HTML.
    """
    num_runs = sum(len(group.runs) for group in groups)
    num_converged = sum(group.num_converged for group in groups)
    parts = [
        f"<h1>{num_runs} runs, {num_converged} converged</h1>",
        "<h2>By global batch size</h2>",
        _table(_GROUP_HEADS, [_group_row(group) for group in groups]),
        "<h2>Runs</h2>",
        _table(_RUN_HEADS, [_run_row(run, names[run.path]) for group in groups for run in group.runs]),
    ]
    for name, data in pictures.items():
        source = base64.b64encode(data).decode()
        caption = _CAPTIONS[name]
        parts.append(f'<h2>{caption}</h2>\n<img alt="{caption}" src="data:image/png;base64,{source}">')
        if name == "gap":
            rows = [_gap_row(run, names[run.path]) for group in groups for run in group.runs if run.gap]
            parts.append(_table(_GAP_HEADS, rows))
    words = "".join(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in _DEFINITIONS.items())
    parts.append(f"<h2>What the words mean</h2>\n<dl>{words}</dl>")
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Scored runs</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join(parts) + "\n</body>\n</html>\n"


# ---------------------------------------------------------------------------------------------------- tables

_GROUP_HEADS = (
    *("GBS", "converged", "olympic mean, min", "mean score, min", "training to target, min", "samples to target"),
    *("last accuracy", "step, s", "generation, s", "training, s", "sync, s", "gap"),
)
_RUN_HEADS = (
    *("run", "outcome", "GBS", "seed", "steps", "score, min", "training to target, min", "samples to target"),
    *("last accuracy", "evals", "evals, min"),
)
_GAP_HEADS = (
    *("run", "wall, s", "logged, s", "steps logged", "gap, s", "gap, %", "first step, s", "between steps, s"),
    "after the last, s",
)


def _group_row(group: Group) -> list[str]:
    told = group.to_json()

    def number(name: str, scale: float = 1.0, digits: int = 1) -> str:
        value = told[name]
        return f"{value / scale:.{digits}f}" if isinstance(value, int | float) else "-"

    gap = told["mean_gap_share"]
    return [
        str(group.global_batch_size or "-"),
        f"{group.num_converged} of {len(group.runs)}",
        number("olympic_score_s", 60),
        number("mean_score_s", 60),
        number("mean_train_to_target_s", 60),
        number("mean_samples_to_target", 1, 0),
        number("mean_accuracy", 1, 4),
        number("mean_step_time_s"),
        number("mean_exposed_generation_time_s"),
        number("mean_policy_training_time_s"),
        number("mean_weight_sync_time_s"),
        f"{gap:.1%}" if isinstance(gap, float) else "-",
    ]


def _run_row(run: RunSummary, name: str) -> list[str]:
    return [
        name,
        ": ".join((run.outcome, "; ".join(run.notes))).removesuffix(": "),
        str(run.global_batch_size or "-"),
        str(run.seed if run.seed is not None else "-"),
        str(run.num_steps),
        _minutes(run.score_s),
        _minutes(run.train_to_target_s),
        str(run.samples_to_target or "-"),
        f"{run.evaluations[-1].accuracy:.4f}" if run.evaluations else "-",
        str(len(run.evaluations)),
        _minutes(run.evaluation_s),
    ]


def _gap_row(run: RunSummary, name: str) -> list[str]:
    gap = run.gap
    if gap is None:
        return [name]
    return [
        name,
        f"{gap.wall_s:.1f}",
        f"{gap.logged_s:.1f}",
        str(gap.num_logged_steps),
        f"{gap.gap_s:.1f}",
        f"{100 * gap.share:.1f}",
        f"{gap.first_step_s:.1f}",
        f"{gap.between_s:.1f}",
        f"{gap.after_s:.1f}",
    ]


def _minutes(seconds: float | None) -> str:
    return f"{seconds / 60:.1f}" if seconds is not None else "-"


_BAD = ("aborted", "unfinished", "no run")


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cell(tag: str, head: str, text: str) -> str:
        names = [*(["text"] if head == "outcome" else []), *(["bad"] if text.startswith(_BAD) else [])]
        kind = f' class="{" ".join(names)}"' if names else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    top = "".join(cell("th", head, head) for head in heads)
    body = "\n".join(
        f"<tr>{''.join(cell('td', head, text) for head, text in zip(heads, row, strict=True))}</tr>" for row in rows
    )
    return f'<div class="wide"><table>\n<tr>{top}</tr>\n{body}\n</table></div>'
