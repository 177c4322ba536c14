"""Everything an episode needs, small and real: sandboxes with a harness, a grader, scripted policies."""

import asyncio
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest

from swerve.environments.grading import GradeResult
from swerve.rendering import ConversationRenderer, Template, Tokenizer, render_calls
from swerve.rollout import EpisodeRoles, EpisodeSettings
from swerve.sandboxes import SandboxImage, SandboxPool, read_files
from swerve.types import Completion, EpisodeStatus, FinishReason, SamplingParams, Task

HARNESS = Path(__file__).with_name("harness.py")
BROKEN = "def inc(x):\n    return x + 2\n"
VIEW = ("str_replace_editor", {"command": "view", "path": "repair.py"})
RUN = ("execute_bash", {"command": "./run_tests"})
FINISH = ("finish", {})


def edit(old, new):
    return ("str_replace_editor", {"command": "str_replace", "path": "repair.py", "old_str": old, "new_str": new})


RIGHT = ([VIEW], [edit("+ 2", "+ 1"), RUN], [FINISH])
WRONG = ([VIEW], [edit("+ 2", "+ 3"), RUN], [FINISH])


class ScriptedPolicy:
    """Says what its scripts say. A script is chosen by session id; it lists turns: calls, text, or an exception.

    A pair of a turn and a reason ends for that reason.
    """

    context_length = 1024

    def __init__(self, renderer, choose, delay_s=0.0):
        self.renderer, self.choose, self.delay_s = renderer, choose, delay_s
        self.opened, self.open_now = [], set()

    async def open(self, session_id, seed):
        assert session_id not in self.open_now, "session ids are unique among open sessions"
        self.opened.append((session_id, seed))
        self.open_now.add(session_id)
        return ScriptedSession(self, session_id, list(self.choose(session_id, len(self.opened))))


class ScriptedSession:
    def __init__(self, policy, session_id, turns):
        self.policy, self.session_id, self.turns = policy, session_id, turns

    async def generate(self, new_tokens, sampling):
        assert self.session_id in self.policy.open_now
        await asyncio.sleep(self.policy.delay_s)
        turn = self.turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        reason = FinishReason.STOP
        if isinstance(turn, tuple):
            turn, reason = turn
        tokenizer = self.policy.renderer.tokenizer
        tokens = tokenizer.encode(turn if isinstance(turn, str) else render_calls(turn))
        if reason is FinishReason.STOP:
            tokens.append(tokenizer.end_of_turn_id)
        return Completion(
            tokens=tuple(tokens),
            logprobs=tuple(-1.0 / (3 + i) for i in range(len(tokens))),
            finish_reason=reason,
            weights_version=7,
        )

    def close(self):
        self.policy.open_now.discard(self.session_id)


class IncrementEnvironment:
    """Tasks about one function, judged in a sandbox by the harness next to this file."""

    def __init__(self, pool):
        self.pool = pool
        self.num_graded = 0
        self.timeout_s = 0.0
        self.outcome = None

    def image_for(self, task):
        return task.image

    async def collect(self, task, sandbox):
        return await read_files(sandbox, ("repair.py",))

    def prepare_payload(self, task):
        return {"files": dict(task.workspace)}

    async def grade(self, task, work, timeout_s):
        self.num_graded += 1
        self.timeout_s = timeout_s
        if isinstance(self.outcome, Exception):
            raise self.outcome
        if self.outcome is not None:
            return GradeResult(reward=None, status=self.outcome, error="the grader's own fault")
        sandbox = await self.pool.start(task.image)
        try:
            statuses = await sandbox.call("grade", {"text": work.get("repair.py") or ""}, timeout_s=5.0)
        finally:
            await sandbox.close()
        reward = float(set(statuses.values()) == {"passed"})
        return GradeResult(reward=reward, status=EpisodeStatus.SUCCEEDED, test_statuses=statuses)


def make_task(task_id="inc", **changes):
    fields = {
        "id": task_id,
        "family": "inc",
        "split": "train",
        "image": "inc",
        "base_commit": "0" * 64,
        "problem_statement": "Fix the function inc in repair.py. ./run_tests fails with AssertionError.",
        "workspace": {"repair.py": BROKEN},
        "visible_tests": ("test_inc",),
        "hidden_tests": ("test_hidden",),
        "fail_to_pass": ("test_inc", "test_hidden"),
        "pass_to_pass": (),
        "gold_patch": "",
    }
    return Task(**{**fields, **changes})


@pytest.fixture(scope="session")
def run():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def pool(run):
    pool = SandboxPool([SandboxImage(name="inc", harness=HARNESS)])
    yield pool
    run(pool.close())


@pytest.fixture(scope="session")
def renderer():
    with resources.as_file(resources.files("swerve") / "policies" / "tiny") as directory:
        return ConversationRenderer(Tokenizer.load(directory), Template.load("tiny_repair"))


@pytest.fixture
def world(pool, renderer):
    """Roles around a scripted policy, and what tests need to write scripts."""

    def world(choose, delay_s=0.0):
        policy = ScriptedPolicy(renderer, choose, delay_s)
        environment = IncrementEnvironment(pool)
        roles = EpisodeRoles(policy=policy, pool=pool, environment=environment, grader=environment, renderer=renderer)
        return SimpleNamespace(
            roles=roles, policy=policy, environment=environment, settings=EpisodeSettings(sampling=SamplingParams())
        )

    return world


@pytest.fixture(scope="session")
def words():
    return SimpleNamespace(
        task=make_task, edit=edit, VIEW=VIEW, RUN=RUN, FINISH=FINISH, RIGHT=RIGHT, WRONG=WRONG, BROKEN=BROKEN
    )
