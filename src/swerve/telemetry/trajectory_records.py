"""Trajectories as JSON objects: exact to the last bit, and readable where that costs nothing.

Words, tokens and statuses are plain JSON. What a person would not read is packed: the sampled mask as run lengths
that begin with given tokens, versions as runs over the sampled tokens, log-probabilities of the sampled tokens as
base64 of little-endian float32, routing as base64 of deflated little-endian int16.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swerve.types import EpisodeStatus, Int16Array, OutsideRequests, SwerveError, Trajectory, Turn

_KEYS = tuple(sorted({field.name for field in fields(Trajectory)}))
_TURN_KEYS = frozenset(field.name for field in fields(Turn))


def trajectory_to_json(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as a JSON object.

    Raises:
        ValueError: A token that was not sampled has a log-probability or a version, or lengths differ.
    """
    sampled = trajectory.sampled
    if not trajectory.tokens.shape == sampled.shape == trajectory.behaviour_logprobs.shape:
        raise ValueError(f"trajectory of {trajectory.task_id}: its arrays differ in length")
    if trajectory.behaviour_logprobs[~sampled].view(np.int32).any():
        raise ValueError(f"trajectory of {trajectory.task_id}: a token that was not sampled has a log-probability")
    if (trajectory.weights_versions[~sampled] != -1).any():
        raise ValueError(f"trajectory of {trajectory.task_id}: a token that was not sampled has a weights version")
    logprobs = trajectory.behaviour_logprobs[sampled].astype("<f4")
    return {
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "seed": trajectory.seed,
        "turns": [asdict(turn) for turn in trajectory.turns],
        "test_statuses": dict(trajectory.test_statuses),
        "seconds": dict(trajectory.seconds),
        "tokens": trajectory.tokens.tolist(),
        "sampled": _run_lengths(sampled),
        "weights_versions": _runs(trajectory.weights_versions[sampled]),
        "behaviour_logprobs": base64.b64encode(logprobs.tobytes()).decode(),
        "routing": _pack_routing(trajectory.routing),
        "requests": None if trajectory.requests is None else asdict(trajectory.requests),
    }


def trajectory_from_json(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a JSON object.

    Raises:
        SwerveError: A key is missing, unknown, or does not fit the others. The message names it.
    """
    missing = [key for key in _KEYS if key not in record]
    unknown = sorted(set(record) - set(_KEYS))
    if missing or unknown:
        raise SwerveError(f"key {(missing or unknown)[0]}: {'is missing' if missing else 'is unknown'}")
    key = ""
    try:
        key = "tokens"
        tokens = np.asarray(record[key], np.int32).reshape(-1)
        key = "sampled"
        sampled = _from_run_lengths(record[key], tokens.size)
        key = "behaviour_logprobs"
        logprobs = np.zeros(tokens.size, np.float32)
        logprobs[sampled] = np.frombuffer(base64.b64decode(record[key], validate=True), "<f4")
        key = "weights_versions"
        versions = np.full(tokens.size, -1, np.int32)
        versions[sampled] = np.repeat(*_columns(record[key]))
        key = "routing"
        routing = _unpack_routing(record[key], tokens.size)
        key = "turns"
        turns = tuple(_turn(turn) for turn in record[key])
        key = "requests"
        requests = None if record[key] is None else OutsideRequests(**record[key])
        key = "status"
        status = EpisodeStatus(record[key])
    except (ValueError, TypeError, KeyError, OverflowError, binascii.Error, zlib.error) as error:
        raise SwerveError(f"key {key}: {error}") from None
    return Trajectory(
        task_id=record["task_id"],
        sample_index=record["sample_index"],
        tokens=tokens,
        sampled=sampled,
        behaviour_logprobs=logprobs,
        weights_versions=versions,
        status=status,
        reward=record["reward"],
        turns=turns,
        routing=routing,
        error=record["error"],
        test_statuses=record["test_statuses"],
        seconds=record["seconds"],
        seed=record["seed"],
        requests=requests,
    )


def _turn(record: Mapping[str, Any]) -> Turn:
    if set(record) != _TURN_KEYS:
        raise ValueError(f"a turn has the keys {', '.join(sorted(_TURN_KEYS))}")
    return Turn(**{**record, "tool_names": tuple(record["tool_names"]), "observations": tuple(record["observations"])})


def _run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Lengths of the alternating runs of a mask, beginning with the false ones: [0, ...] if it begins with true."""
    if not mask.size:
        return []
    borders = np.flatnonzero(np.diff(mask)) + 1
    lengths = np.diff(np.concatenate(([0], borders, [mask.size]))).tolist()
    return [0, *lengths] if mask[0] else lengths


def _from_run_lengths(lengths: Sequence[int], size: int) -> NDArray[np.bool_]:
    mask = np.repeat(np.arange(len(lengths)) % 2 == 1, np.asarray(lengths, np.int64))
    if mask.size != size:
        raise ValueError(f"covers {mask.size} tokens, there are {size}")
    return mask


def _runs(values: NDArray[np.int32]) -> list[list[int]]:
    """Runs `[value, length]` of equal values."""
    if not values.size:
        return []
    borders = np.concatenate(([0], np.flatnonzero(np.diff(values)) + 1, [values.size]))
    return [[int(values[first]), int(last - first)] for first, last in itertools.pairwise(borders)]


def _columns(runs: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.asarray(runs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _pack_routing(routing: Int16Array | None) -> dict[str, Any] | None:
    if routing is None:
        return None
    data = zlib.compress(routing.astype("<i2").tobytes(), level=6)
    return {"shape": list(routing.shape), "data": base64.b64encode(data).decode()}


def _unpack_routing(record: Mapping[str, Any] | None, num_tokens: int) -> Int16Array | None:
    if record is None:
        return None
    shape = tuple(record["shape"])
    if len(shape) != 3 or shape[0] != num_tokens:
        raise ValueError(f"has shape {shape}, expected ({num_tokens}, moe_layers, k)")
    data = zlib.decompress(base64.b64decode(record["data"], validate=True))
    return np.frombuffer(data, "<i2").astype(np.int16).reshape(shape)
