"""What the demo promises: over five seeds it learns, ends above its target, and fits in memory."""

import statistics
from pathlib import Path

import pytest
from demo_seeds import blind_enumeration, run_seeds, table

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "demo.toml"


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("as_users_run")
def test_over_five_seeds_the_demo_learns() -> None:
    rows, blind = run_seeds(RECIPE, 5), blind_enumeration(RECIPE)
    print(table(rows, blind))
    mean = {name: statistics.fmean(row[name] for row in rows) for name in rows[0] if name.startswith("pass_at_")}
    assert max(row["pass_at_1_before"] for row in rows) <= 0.60
    assert sum(row["pass_at_1_after"] >= 0.69 for row in rows) >= 4
    assert mean["pass_at_1_after"] - mean["pass_at_1_before"] >= 0.10
    assert mean["pass_at_1_after"] > blind.pass_at_1
    assert mean["pass_at_4_after"] > blind.pass_at_4
    assert mean["pass_at_4_after"] >= 0.69
    assert max(row["peak_rss_bytes"] for row in rows) < 3e9
