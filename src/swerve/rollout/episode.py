"""One episode: a task and a policy in, a trajectory out.

    open session ---> start sandbox ---> agent loop ---> collect work -> close sandbox ---> grade elsewhere
                                         |<- episode_timeout_s ->|

The session is opened before anything that takes time, in the order of the tasks, and closed as soon as the policy is
asked no more: engines that work in rounds wait for every open session. Waiting for a place costs no episode time.
Whatever goes wrong on the way becomes the trajectory's status. Only a mistake in the program itself is raised.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from swerve.agents import PLAIN, CodeActAgent, PlainStyle, Toolbox, Transcript
from swerve.agents.outside import OutsideAgents
from swerve.rendering import ConversationRenderer
from swerve.sandboxes import Json, Sandbox
from swerve.types import (
    EpisodeStatus,
    Limits,
    Policy,
    PolicySession,
    SamplingParams,
    SwerveError,
    Task,
    Trajectory,
    Work,
)


class StartsSandboxes(Protocol):
    """What an episode needs of a sandbox pool."""

    async def start(self, image_name: str, prepare: Json = None) -> Sandbox:
        """Start a sandbox of a named image, prepared with a payload."""
        ...


class PreparesTasks(Protocol):
    """What an episode needs of an environment."""

    def image_for(self, task: Task) -> str:
        """Name of the image the agent's sandbox starts from."""
        ...

    def prepare_payload(self, task: Task) -> Json:
        """What the image's harness is told before the agent's first command; it writes the workspace."""
        ...

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """What counts as the agent's work of all that it left in its sandbox."""
        ...


class Verdict(Protocol):
    """What an episode needs of a grade."""

    @property
    def reward(self) -> float | None:
        """1.0 or 0.0, or `None` where the grader could not decide."""
        ...

    @property
    def test_statuses(self) -> Mapping[str, str]:
        """Status per test."""
        ...

    @property
    def status(self) -> EpisodeStatus:
        """SUCCEEDED where there is a verdict, GRADER_TIMEOUT, or ERROR."""
        ...

    @property
    def error(self) -> str:
        """Cause of an ERROR in one line."""
        ...


class Grades(Protocol):
    """What an episode needs of a grader."""

    async def grade(self, task: Task, work: Work, timeout_s: float) -> Verdict:
        """Grade an agent's work in a sandbox of the grader's own, within some seconds."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """How episodes are played.

    Attributes:
        sampling: How the policy's tokens are drawn.
        limits: Used in place of each task's own limits, unless `None`.
        max_observation_characters: Longer observations lose their middle, and say so. `None` is as many as the
            policy's context has tokens: code takes a token for every two to three characters, so one observation fills
            less than half of the context, and an agent that asked for too much can go on.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: Limits | None = None
    max_observation_characters: int | None = None


@dataclass(frozen=True, kw_only=True)
class EpisodeRoles:
    """Those an episode works with.

    Attributes:
        policy: Gives tokens.
        pool: Starts the agent's sandboxes.
        environment: Knows how a task's sandbox is prepared.
        grader: Decides on the reward.
        renderer: Turns conversations into tokens of the policy.
        style: How the built-in agent's tools read and what they say.
        outside: Plays in place of the built-in agent, unless `None`; it has a renderer and tools of its own.
    """

    policy: Policy
    pool: StartsSandboxes
    environment: PreparesTasks
    grader: Grades
    renderer: ConversationRenderer
    style: PlainStyle = PLAIN
    outside: OutsideAgents | None = None


async def run_episode(
    task: Task,
    sample_index: int,
    *,
    roles: EpisodeRoles,
    settings: EpisodeSettings,
    seed: int,
    session_id: str | None = None,
) -> Trajectory:
    """Play one episode and have it graded.

    Args:
        task: What to repair.
        sample_index: Which of the task's attempts this is.
        roles: Whom to work with.
        settings: How to play.
        seed: Of the policy's sampling.
        session_id: Unique among open sessions; made of the task and the attempt if `None`.

    Returns:
        The trajectory; its status says how the episode ended. Failures of infrastructure are values, too.
    """
    limits = settings.limits or task.limits
    transcript = Transcript()
    work: dict[str, str | None] = {}
    error = ""
    session_id = session_id or f"{task.id}#{sample_index:04d}"
    try:
        status = await _play(task, roles, settings, limits, transcript, work, seed, session_id)
    except (SwerveError, OSError) as failure:
        status, error = EpisodeStatus.ERROR, _one_line(failure)
    if status is EpisodeStatus.AGENT_TIMEOUT:
        error = f"the episode's {limits.episode_timeout_s:g} s ran out"
    elif status is EpisodeStatus.CANCELLED:
        error = "the policy stopped generating"
    reward: float | None = None
    test_statuses: Mapping[str, str] = {}
    if status.is_valid_sample:
        status, reward, test_statuses, error = await _grade(
            task, work, status, limits.test_timeout_s, roles.grader, transcript
        )
    tokens, sampled, logprobs, versions = transcript.arrays()
    return Trajectory(
        task_id=task.id,
        sample_index=sample_index,
        tokens=tokens,
        sampled=sampled,
        behaviour_logprobs=logprobs,
        weights_versions=versions,
        status=status,
        reward=reward,
        turns=tuple(transcript.turns),
        error=error,
        test_statuses=test_statuses,
        seconds=transcript.seconds,
        seed=seed,
        requests=transcript.requests,
    )


async def _play(
    task: Task,
    roles: EpisodeRoles,
    settings: EpisodeSettings,
    limits: Limits,
    transcript: Transcript,
    work: dict[str, str | None],
    seed: int,
    session_id: str,
) -> EpisodeStatus:
    """Let the agent work; what it leaves behind goes into `work`."""
    start = time.perf_counter()
    session = await roles.policy.open(session_id, seed)
    sandbox: Sandbox | None = None
    try:
        sandbox = await roles.pool.start(roles.environment.image_for(task), roles.environment.prepare_payload(task))
        transcript.add_seconds("start", start)
        budget = asyncio.timeout(limits.episode_timeout_s)
        try:
            async with budget:
                status = await _act(task, session, sandbox, transcript, roles, settings, limits)
        except TimeoutError:
            if not budget.expired():
                raise
            return EpisodeStatus.AGENT_TIMEOUT
        session.close()
        if status.is_valid_sample:
            work.update(await roles.environment.collect(task, sandbox))
        return status
    finally:
        session.close()
        if sandbox is not None:
            await sandbox.close()


async def _act(
    task: Task,
    session: PolicySession,
    sandbox: Sandbox,
    transcript: Transcript,
    roles: EpisodeRoles,
    settings: EpisodeSettings,
    limits: Limits,
) -> EpisodeStatus:
    """Have the built-in agent, or the outside one, play."""
    context_length = roles.policy.context_length
    if roles.outside is not None:
        return await roles.outside.play(
            task,
            session,
            sandbox,
            transcript,
            sampling=settings.sampling,
            limits=limits,
            context_length=context_length,
        )
    toolbox = Toolbox(
        sandbox,
        command_timeout_s=limits.command_timeout_s,
        max_observation_characters=settings.max_observation_characters or context_length,
        style=roles.style,
    )
    agent = CodeActAgent(roles.renderer, settings.sampling, max_turns=limits.max_turns)
    return await agent.run(task.problem_statement, session, toolbox, transcript, context_length=context_length)


async def _grade(
    task: Task,
    work: Work,
    status: EpisodeStatus,
    timeout_s: float,
    grader: Grades,
    transcript: Transcript,
) -> tuple[EpisodeStatus, float | None, Mapping[str, str], str]:
    """Status, reward, test statuses and error of a finished episode."""
    start = time.perf_counter()
    try:
        verdict = await grader.grade(task, work, timeout_s)
    except (SwerveError, OSError) as failure:
        return EpisodeStatus.ERROR, None, {}, _one_line(failure)
    finally:
        transcript.add_seconds("grade", start)
    if verdict.status is EpisodeStatus.GRADER_TIMEOUT:
        return EpisodeStatus.GRADER_TIMEOUT, 0.0, verdict.test_statuses, ""
    if verdict.status is not EpisodeStatus.SUCCEEDED or verdict.reward is None:
        return EpisodeStatus.ERROR, None, verdict.test_statuses, verdict.error or "the grader gave no verdict"
    return status, verdict.reward, verdict.test_statuses, ""


def _one_line(failure: BaseException) -> str:
    return " ".join(str(failure).split()) or type(failure).__name__
