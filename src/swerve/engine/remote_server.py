"""One server of vLLM: what it is asked and how its answers are read. Written for, and tried with, vLLM 0.32.

/inference/v1/generate   token ids in, token ids out, with log-probabilities and weights versions; --enable-scale-out
/pause /collective_rpc /reset_prefix_cache /update_weight_version /weight_info /resume    VLLM_SERVER_DEV_MODE=1
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from swerve.engine.errors import EngineError
from swerve.engine.remote_http import HttpClient, RefusedError
from swerve.types import FinishReason, Float32Array, SamplingParams, SwerveError

GENERATE = "/inference/v1/generate"
_NO_LOGPROB = -9999.0
"""What the server writes where it has no log-probability, or minus infinity."""
_NUM_ALTERNATIVES = 5
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_NEUTRAL = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1}
"""Settings that a model's own files would otherwise decide."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """What has come of a completion so far.

    Attributes:
        tokens: Sampled token ids.
        logprobs: Of each, under the distribution it was sampled from.
        finish_reason: Why it ended; `None` while it goes on.
        versions: Labels of the weights that sampled the tokens; known at the end.
    """

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish_reason: FinishReason | None = None
    versions: list[str] = field(default_factory=list[str])


class VllmServer:
    """Speaks with one server.

    Args:
        client: Of its URL.
        model: Name by which it serves the policy; empty asks it.
        end_of_turn_id: Token that ends a completion.
        load_timeout_s: Seconds that it may take to read weights.
    """

    def __init__(self, client: HttpClient, *, model: str, end_of_turn_id: int, load_timeout_s: float) -> None:
        self.client = client
        self._wanted_model = self._model = model
        self._end_of_turn_id = end_of_turn_id
        self._load_timeout_s = load_timeout_s
        self.num_sessions = 0
        """Sessions that it serves now."""
        self.num_failures = 0
        """Completions that failed since the last that did not."""

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url

    # -------------------------------------------------------------------------------------------------- generation

    async def generate(
        self, tokens: Sequence[int], sampling: SamplingParams, *, room: int, seed: int, salt: str, answer: Answer
    ) -> None:
        """Sample a completion, and fill the answer as it comes; cancelling this ends it at the server, too.

        Args:
            tokens: The whole context.
            sampling: How to draw.
            room: Tokens of the completion at most.
            seed: Of this completion alone.
            salt: What is cached under another is not used.
            answer: Takes tokens.

        Raises:
            EngineError: The server failed, or answers what cannot be.
        """
        body = self._request(
            tokens,
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": room,
                "seed": seed,
                "logprobs": 0,
                "stop_token_ids": [self._end_of_turn_id],
                "ignore_eos": True,
            },
            salt,
        )
        try:
            async with contextlib.aclosing(self.client.events(GENERATE, {**body, "stream": True})) as events:
                async for event in events:
                    self._add(answer, event)
            if answer.finish_reason is None:
                raise EngineError(f"{self.url}: a completion ended without a reason")
        except EngineError:
            self.num_failures += 1
            raise
        self.num_failures = 0

    def _request(self, tokens: Sequence[int], sampling: Mapping[str, Any], salt: str) -> dict[str, Any]:
        return {
            "model": self._model,
            "token_ids": [int(token) for token in tokens],
            "sampling_params": {**_NEUTRAL, "detokenize": False, **sampling},
            "cache_salt": salt,
        }

    def _add(self, answer: Answer, event: Any) -> None:
        """Read one event of a stream."""
        if "error" in event:
            raise EngineError(f"{self.url}: a completion failed: {event['error'].get('message', event['error'])}")
        try:
            for choice in event["choices"]:
                tokens, content = choice["token_ids"], (choice["logprobs"] or {"content": []})["content"] or []
                if [one["token_id"] for one in content] != list(tokens):
                    raise EngineError(f"{self.url}: log-probabilities are not those of the tokens")
                answer.tokens += tokens
                answer.logprobs += [self._logprob(one) for one in content]
                if (reason := choice["finish_reason"]) is not None:
                    if reason not in _REASONS:
                        raise EngineError(f"{self.url}: a completion ended for an unknown reason, {reason}")
                    answer.finish_reason = _REASONS[reason]
                answer.versions += [span["version"] for span in choice["weight_versions"] or ()]
        except (KeyError, TypeError) as error:
            raise self._unreadable(GENERATE, error) from error

    def _logprob(self, entry: Mapping[str, Any]) -> float:
        value = float(entry["logprob"])
        if not math.isfinite(value) or value <= _NO_LOGPROB:
            raise EngineError(f"{self.url}: token {entry['token_id']} comes without a log-probability")
        return value

    # ------------------------------------------------------------------------------------------------------ checks

    def examine(self, tokens: Sequence[int], context_length: int) -> None:
        """See that the server can do what an engine has to, before it is relied on.

        Args:
            tokens: Some context.
            context_length: Tokens that a session may have.

        Raises:
            SwerveError: It serves another model, too short a context, or log-probabilities of another distribution
                than it samples from.
        """
        self._develop("POST", "/resume")  # a run that ended badly may have left it paused
        try:
            models = {one["id"]: one["max_model_len"] for one in self.client.call("GET", "/v1/models")["data"]}
        except (KeyError, TypeError) as error:
            raise self._unreadable("/v1/models", error) from error
        self._model = self._wanted_model or next(iter(models))  # of a server that is started anew, perhaps another
        if self._model not in models:
            raise SwerveError(f'engine.model = "{self._model}": {self.url} serves {", ".join(models)}')
        if models[self._model] < context_length:
            raise SwerveError(
                f"rollout.context_length = {context_length}: {self.url} holds {models[self._model]} tokens: lower it, "
                "or start the server with a larger --max-model-len"
            )
        self._examine_logprobs(tokens)

    def _examine_logprobs(self, tokens: Sequence[int]) -> None:
        """See that log-probabilities are of the distribution sampled from: halving T doubles their differences."""
        plain, sharp = (self._alternatives(tokens, temperature) for temperature in (1.0, 0.5))
        both = sorted(plain.keys() & sharp.keys(), key=lambda token: plain[token])
        gap, sharp_gap = (values[both[-1]] - values[both[0]] if both else 0.0 for values in (plain, sharp))
        normalised = all(sum(map(math.exp, values.values())) <= 1.001 for values in (plain, sharp))
        if not (normalised and abs(sharp_gap - 2 * gap) < abs(sharp_gap - gap)):
            raise SwerveError(
                f"{self.url}: its log-probabilities are not of the distribution it samples from (they differ by "
                f"{gap:.3f} nats at temperature 1, and by {sharp_gap:.3f} at 0.5): start it with "
                "--logprobs-mode processed_logprobs"
            )

    def _alternatives(self, tokens: Sequence[int], temperature: float) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens, by token."""
        sampling = {
            "temperature": temperature,
            "max_tokens": 1,
            "logprobs": _NUM_ALTERNATIVES,
            "top_p": 1.0,
            "top_k": 0,
        }
        answer = self._generate_now(self._request(tokens, {**sampling, "seed": 0, "ignore_eos": True}, "examination"))
        try:
            (entry,) = answer["choices"][0]["logprobs"]["content"]
            return {int(one["token_id"]): float(one["logprob"]) for one in [entry, *entry["top_logprobs"]]}
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(GENERATE, error) from error

    def probe(self, tokens: Sequence[int]) -> Float32Array:
        """Log-probabilities of tokens at temperature 1, float32 `[n]`, entry 0 being 0; computed anew, from no cache.

        Raises:
            EngineError: The server failed.
        """
        sampling = {"temperature": 1.0, "max_tokens": 1, "prompt_logprobs": 0, "ignore_eos": True}
        answer = self._generate_now(self._request(tokens, sampling, secrets.token_hex(16)))
        try:
            scored = zip(tokens[1:], answer["prompt_logprobs"][1:], strict=True)
            return np.array([0.0, *(one[str(token)]["logprob"] for token, one in scored)], np.float32)
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(GENERATE, error) from error

    def _generate_now(self, body: Mapping[str, Any]) -> Any:
        try:
            return self.client.call("POST", GENERATE, body)
        except RefusedError as error:
            if str(error).endswith("Not Found"):
                raise EngineError(f"{error}: start it with --enable-scale-out") from error
            raise

    # ----------------------------------------------------------------------------------------------------- weights

    def reload(self, weights: Path) -> None:
        """Have the server read files in place of its weights, and forget what it computed with the old ones.

        It is paused meanwhile, and stays so where anything fails.

        Raises:
            EngineError: It could not.
        """
        self._develop("POST", "/pause?mode=abort")
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
        self._develop("POST", "/collective_rpc", load, timeout_s=self._load_timeout_s)
        done = self._develop("POST", "/reset_prefix_cache")
        if not (isinstance(done, dict) and done.get("success")):
            raise EngineError(f"{self.url}: it did not drop what it has cached with the old weights")

    def name_weights(self, label: str) -> None:
        """Tell the server what its weights are called, as every completion will then say, and have it go on."""
        self._develop("POST", "/update_weight_version", {"new_version": label})
        found = self._develop("GET", "/weight_info")
        if not (isinstance(found, dict) and found.get("weight_version") == label):
            raise EngineError(f"{self.url}: it calls its weights {found}, not {label}")
        self._develop("POST", "/resume")

    def _develop(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        try:
            return self.client.call(method, path, body, timeout_s=timeout_s)
        except RefusedError as error:
            if error.status == 404:
                raise EngineError(
                    f"{error}: it must be vLLM 0.32 or newer, started with VLLM_SERVER_DEV_MODE=1"
                ) from error
            raise

    def _unreadable(self, path: str, error: Exception) -> EngineError:
        return EngineError(f"{self.url}: {path} answers otherwise than vLLM 0.32 does: {type(error).__name__}: {error}")
