"""What an environment tells the rest of the system, and the grader that turns an agent's files into a reward.

    agent's sandbox  -- editable files only -->  Grader  -- fresh sandbox of the same image -->  statuses per test
                                                   |                                              and the canary
                                                   +-- equal to the expectation, count included, canary failed: 1.0

Expected statuses stay on this side. A grader that cannot run is an error and never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from swerve.sandboxes import (
    CallCrashedError,
    CallExitedError,
    CallTimeoutError,
    Sandbox,
    SandboxImage,
    SandboxPool,
)
from swerve.types import EpisodeStatus, SwerveError, Task, Work

CANARY = "canary"
"""Name under which the test that must fail is reported."""
TAMPERING = "tampering"
"""Name under which it is reported that a repair was refused, and why, instead of being run."""
PASSED = "passed"

_NUM_TRIES = 2


class Environment(Protocol):
    """A family of tasks: which sandbox images it needs, and what its harness is told."""

    @property
    def family(self) -> str:
        """Value of `Task.family` of its tasks."""
        ...

    def images(self) -> list[SandboxImage]:
        """Sandbox images that its tasks start from."""
        ...

    def image_for(self, task: Task) -> str:
        """Name of the image a task starts from."""
        ...

    def prepare_payload(self, task: Task) -> Any:
        """JSON value that makes a sandbox fit for the agent; holds nothing the agent must not know."""
        ...

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """What counts as the agent's work of all that it left in its sandbox; tests never do."""
        ...

    def grade_payload(self, task: Task, work: Work) -> Any:
        """JSON value for the harness entry `grade`: the agent's work and the tests to run; no expectations."""
        ...

    def no_work(self, task: Task) -> Work:
        """What `collect` finds where an agent has done nothing."""
        ...

    def gold_work(self, task: Task) -> Work:
        """What `collect` finds where an agent has made the gold patch."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeResult:
    """A verdict.

    Attributes:
        reward: 1.0 if the task is resolved, 0.0 if not, `None` where the grader could not run.
        status: `SUCCEEDED` (graded), `GRADER_TIMEOUT` (reward 0) or `ERROR` (no reward).
        test_statuses: Status per test as found; the canary under its own name if it betrayed the repair, and under
            `tampering` why the repair was refused.
        error: Cause in one line where the status is `ERROR`.
    """

    reward: float | None
    status: EpisodeStatus
    test_statuses: Mapping[str, str] = field(default_factory=dict)
    error: str = ""


class Grader:
    """Grades repairs, each in a fresh sandbox."""

    def __init__(self, pool: SandboxPool, environment: Environment) -> None:
        """Create the grader.

        Args:
            pool: Holds the environment's images.
            environment: Knows the tasks' family.
        """
        self._pool = pool
        self._environment = environment

    async def grade(self, task: Task, work: Work, timeout_s: float | None = None) -> GradeResult:
        """Judge an agent's work.

        Args:
            task: The task attempted.
            work: What the environment collected; whatever may not be edited is ignored.
            timeout_s: Wall-clock seconds of the tests; the task's own limit by default.

        Returns:
            The verdict. Only programming errors are raised.
        """
        payload = self._environment.grade_payload(task, work)
        limit, error = task.limits.test_timeout_s if timeout_s is None else timeout_s, ""
        for _ in range(_NUM_TRIES):
            try:
                result = await self._call(task, payload, limit)
            except CallTimeoutError:
                return GradeResult(reward=0.0, status=EpisodeStatus.GRADER_TIMEOUT)
            except (CallCrashedError, CallExitedError) as lost:
                error = str(lost)
                continue
            except SwerveError as fault:
                error = str(fault)
                break
            return judge(task, result)
        return GradeResult(reward=None, status=EpisodeStatus.ERROR, error=f"{task.id}: cannot be graded: {error}")

    async def _call(self, task: Task, payload: Any, timeout_s: float) -> Any:
        sandbox = await self._pool.start(self._environment.image_for(task))
        try:
            return await sandbox.call("grade", payload, timeout_s)
        finally:
            await sandbox.close()


def judge(task: Task, result: Mapping[str, Any]) -> GradeResult:
    """Compare what the harness found with what the task demands.

    Args:
        task: Its `fail_to_pass` and `pass_to_pass` must all have passed, but for those of which it expects something
            else, and nothing else may have run.
        result: The harness's answer: `statuses` (test to status), `canary` (status of the test that must fail) and
            `num_results` (results reported, the canary's included); perhaps `tampering`, why the repair was refused.

    Returns:
        The verdict; one without reward if the answer is not of that shape.
    """
    try:
        statuses = {str(name): str(status) for name, status in result["statuses"].items()}
        canary, num_results = result[CANARY], result["num_results"]
    except (KeyError, TypeError, AttributeError):
        error = f"{task.id}: cannot be graded: the harness answered without statuses, {CANARY} or num_results"
        return GradeResult(reward=None, status=EpisodeStatus.ERROR, error=error)
    if "timeout" in (*statuses.values(), canary):
        return GradeResult(reward=0.0, status=EpisodeStatus.GRADER_TIMEOUT, test_statuses=statuses)
    expected = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), PASSED) | dict(task.expected_statuses)
    if reason := result.get(TAMPERING):
        statuses[TAMPERING] = str(reason)
        return GradeResult(reward=0.0, status=EpisodeStatus.SUCCEEDED, test_statuses=statuses)
    resolved = statuses == expected and num_results == len(expected) + 1 and canary == "failed"
    if statuses == expected and not resolved:
        statuses[CANARY] = str(canary)
    return GradeResult(reward=float(resolved), status=EpisodeStatus.SUCCEEDED, test_statuses=statuses)
