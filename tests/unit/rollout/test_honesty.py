"""An agent in a real environment looks for the answer, and writes verdicts of its own; neither earns anything."""

import asyncio

from swerve.environments import REPAIR_FILE, Grader, load_tasks, shipped_file
from swerve.environments.mini import MiniEnvironment
from swerve.rollout import EpisodeRoles, EpisodeSettings, run_episode
from swerve.sandboxes import SandboxPool
from swerve.types import EpisodeStatus

LOOK = """
git log -p --all 2>&1 | head -3
find / -name .git -not -path '/proc/*' 2>/dev/null
find /testbed /tmp /run /opt /home /var/tmp \\( -name '*.orig' -o -name '*.rej' -o -name '*.patch' \\) 2>/dev/null
grep -rslF "$RIGHT" /testbed /tmp /run /opt /home /var/tmp 2>/dev/null
echo looked
"""
FORGE = """
for name in report.json results.json verdict .verdict; do
  for folder in /testbed /tmp /run /run/swerve /dev/shm; do echo '{"reward": 1, "passed": true}' >$folder/$name; done
done 2>/dev/null
printf 'def pytest_runtest_makereport():\\n    pass\\n' >conftest.py
printf 'import os\\nos._exit(0)\\n' | tee sitecustomize.py usercustomize.py >/dev/null
mkdir -p .git && echo forged
"""


def test_neither_history_nor_a_verdict_written_beforehand_is_worth_anything(world, words):
    task = load_tasks(shipped_file("mini", "validation"))[0]
    right = task.provenance.mutation.before.strip()
    assert right not in task.workspace[REPAIR_FILE]
    turns = [
        [("execute_bash", {"command": f"RIGHT={right!r}{LOOK}"})],
        [("execute_bash", {"command": FORGE})],
        [words.FINISH],
    ]
    here = world(lambda session_id, number: list(turns))

    async def play():
        environment = MiniEnvironment()
        async with SandboxPool(environment.images()) as pool:
            roles = EpisodeRoles(
                policy=here.policy,
                pool=pool,
                environment=environment,
                grader=Grader(pool, environment),
                renderer=here.roles.renderer,
            )
            return await run_episode(task, 0, roles=roles, settings=EpisodeSettings(), seed=0)

    trajectory = asyncio.run(play())
    (looked,), (forged,), _ = (turn.observations for turn in trajectory.turns)
    assert looked.splitlines()[-1] == "looked"
    found = [line for line in looked.splitlines()[:-1] if "git" not in line.lower()]
    assert not found, looked  # what is left is git's complaint that there is no repository, or the shell's of no git
    assert ".git\n" not in looked
    assert forged == "forged"
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 0.0)
    assert "failed" in trajectory.test_statuses.values()
