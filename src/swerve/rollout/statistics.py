"""Numbers that describe a set of trajectories, each with the denominator its name or docstring states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict

from swerve.types import EpisodeStatus, Trajectory


def tool_call_warning(trajectories: Iterable[Trajectory]) -> str | None:
    """What to tell the user if no rollout made a single well-formed tool call, else `None`.

    Conversations of outside agents that told the policy of no tools do not count.
    """
    trajectories = [trajectory for trajectory in trajectories if trajectory.turns and _has_tools(trajectory)]
    if not trajectories or any(turn.tool_names for trajectory in trajectories for turn in trajectory.turns):
        return None
    num_malformed = sum(turn.num_malformed_calls for trajectory in trajectories for turn in trajectory.turns)
    return (
        f"none of {len(trajectories)} rollouts made a tool call ({num_malformed} malformed ones): "
        "check that template, tokenizer and policy belong together"
    )


def _has_tools(trajectory: Trajectory) -> bool:
    return trajectory.requests is None or any(
        turn.no_call or turn.tool_names or turn.num_malformed_calls for turn in trajectory.turns
    )


def guard_notes(trajectories: Iterable[Trajectory]) -> list[str]:
    """What guards saw that neither a status nor a reward tells, in words; nothing where all went as it should."""
    trajectories = list(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    asked = [trajectory.requests for trajectory in trajectories if trajectory.requests is not None]
    counts = {
        "malformed calls": sum(turn.num_malformed_calls for turn in turns),
        "turns without a call": sum(turn.no_call for turn in turns),
        "repetitions of a failed call": sum(turn.num_repeated_failures for turn in turns),
        "ignored settings of requests": sum(one.num_ignored_settings for one in asked),
        "requests sent again": sum(one.num_repeated for one in asked),
        "answers that the agent dropped": sum(one.num_dropped_answers for one in asked),
        "refused requests": sum(one.num_refused for one in asked),
    }
    return [f"{count} {what}" for what, count in counts.items() if count]


def rollout_metrics(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Means over trajectories, by name.

    Returns:
        - `reward`: mean over valid samples (0 if there are none).
        - `num_valid`, `num_trajectories`, and `status/NAME` for every status: counts.
        - `num_turns`, `num_tokens`, `num_sampled_tokens`: means over valid samples.
        - `tool_call_rate`: share of turns with at least one well-formed call, over the turns of all trajectories.
        - `malformed_calls_per_turn`, `repeated_failures_per_turn`, `no_call_rate`: the same denominator.
        - `outside/NAME`: counts of what outside agents asked for, where such agents played.
        - `truncation_rate`: share of valid samples that the context or the turn limit ended.
        - `seconds/PHASE`: mean over all trajectories.
    """
    trajectories = list(trajectories)
    valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid_sample]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    statuses = Counter(trajectory.status for trajectory in trajectories)
    num_cut = statuses[EpisodeStatus.MAX_TURNS] + statuses[EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED]
    metrics = {
        "reward": _ratio(sum(trajectory.reward or 0.0 for trajectory in valid), len(valid)),
        "num_trajectories": float(len(trajectories)),
        "num_valid": float(len(valid)),
        "num_turns": _ratio(sum(len(trajectory.turns) for trajectory in valid), len(valid)),
        "num_tokens": _ratio(sum(trajectory.tokens.size for trajectory in valid), len(valid)),
        "num_sampled_tokens": _ratio(sum(trajectory.num_sampled_tokens for trajectory in valid), len(valid)),
        "tool_call_rate": _ratio(sum(bool(turn.tool_names) for turn in turns), len(turns)),
        "malformed_calls_per_turn": _ratio(sum(turn.num_malformed_calls for turn in turns), len(turns)),
        "repeated_failures_per_turn": _ratio(sum(turn.num_repeated_failures for turn in turns), len(turns)),
        "no_call_rate": _ratio(sum(turn.no_call for turn in turns), len(turns)),
        "truncation_rate": _ratio(num_cut, len(valid)),
    }
    asked = [asdict(trajectory.requests) for trajectory in trajectories if trajectory.requests is not None]
    for name in asked[0] if asked else ():
        metrics[f"outside/{name.removeprefix('num_')}"] = float(sum(counts[name] for counts in asked))
    for status in EpisodeStatus:
        metrics[f"status/{status.value}"] = float(statuses[status])
    for phase in sorted({phase for trajectory in trajectories for phase in trajectory.seconds}):
        total = sum(trajectory.seconds.get(phase, 0.0) for trajectory in trajectories)
        metrics[f"seconds/{phase}"] = _ratio(total, len(trajectories))
    return metrics


def _ratio(numerator: float, denominator: int) -> float:
    return float(numerator) / denominator if denominator else 0.0
