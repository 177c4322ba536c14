"""No attack on the grader earns anything, and the right repair does."""

import asyncio
import json

import pytest

from swerve.cli.main import main
from swerve.environments import load_tasks, shipped_file
from swerve.environments.cheats import CHEATS, GOLD, play_all
from swerve.environments.functions import FunctionsEnvironment
from swerve.environments.functions.drafts import gold_text
from swerve.environments.guest.pytest_runner import tampering
from swerve.sandboxes import SandboxPool

TASKS = load_tasks(shipped_file("functions", "validation"))


def played(task, cheats):
    async def play():
        environment = FunctionsEnvironment([task])
        async with SandboxPool(environment.images()) as pool:
            return await play_all(task, pool, environment, cheats)

    return {outcome.name: outcome for outcome in asyncio.run(play())}


def test_every_attack_is_caught_and_the_right_repair_passes():
    outcomes = played(TASKS[0], CHEATS)
    assert len(outcomes) > 30
    assert [outcome for outcome in outcomes.values() if not outcome.caught] == []
    assert outcomes[GOLD].reward == 1.0
    assert all(outcome.reward != 1.0 for name, outcome in outcomes.items() if name != GOLD)
    assert all(outcome.detail for name, outcome in outcomes.items() if name != GOLD)
    assert "_getframe" in outcomes["find the result pipe in the frames and forge it"].detail


@pytest.mark.slow
def test_attacks_are_caught_on_other_packages():
    firsts = {task.image: task for task in TASKS}
    for task in firsts.values():
        assert [outcome for outcome in played(task, CHEATS).values() if not outcome.caught] == [], task.id


def test_no_right_repair_is_taken_for_an_attack():
    tasks = [*TASKS, *load_tasks(shipped_file("functions", "train"))]
    refused = {task.id: tampering(gold_text(task), task.workspace["repair.py"]) for task in tasks}
    assert {name: reason for name, reason in refused.items() if reason} == {}


def test_a_repair_may_use_what_the_function_used():
    source = "def f(x):\n    import os\n    return os.getcwd()\n"
    assert tampering("def f(x):\n    import os\n    return os.sep\n", source) == ""
    assert tampering(source, "def f(x):\n    return x\n") == "reaches for os"
    assert tampering("def f(x):\n    return getattr(x, 'y')\n", "def f(x): pass") == ""
    assert "computed" in tampering("def f(x):\n    return getattr(x, x)\n", "def f(x): pass")
    assert tampering("def f(x):\n    return getattr(x, '__globals__')\n", "def f(x): pass")
    assert tampering("def f(:", source) == ""


def test_the_command_reports_every_attack(capsys, monkeypatch):
    monkeypatch.setattr("swerve.environments.cheats.play_all.__defaults__", (CHEATS[:2],))
    assert main(["sandbox", "cheats", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["attacks"], told["all_caught"]) == (2, True)
    assert [row["caught"] for row in told["outcomes"]] == [True] * 3
    assert main(["sandbox", "cheats", "--task", "none"]) == 2
    assert main(["sandbox", "reap", "--json"]) == 0
