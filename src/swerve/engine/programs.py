"""The engine's compiled programs: feed a chunk, decode, move rows between batches, score.

Each is compiled ahead of its use for one batch size and one chunk length, once, by whichever thread asks first.
Weights, tokens, limits and sampling settings are arguments, so neither a refit nor a new temperature compiles anything.

Legend: B rows of a batch, N slots, T chunk length, K steps of a decode segment.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from swerve.engine.sampling import SamplingRows, sample

State = Any
"""The model's decoding state: a tree of arrays, each with one axis of rows."""
Params = Any
"""The model's parameters: a tree of arrays."""


class DecoderModel(Protocol):
    """The functions an engine needs of a model; the module `swerve.models` has them."""

    def unstack_blocks(self, params: Params) -> Params:
        """The parameters in the layout that the other functions read fastest."""
        ...

    def init_state(self, config: Any, batch: int, max_length: int) -> State:
        """Empty state of `batch` rows of up to `max_length` tokens."""
        ...

    def grow_state(self, state: State, max_length: int) -> State:
        """The same rows with room for `max_length` tokens."""
        ...

    def extend(
        self, params: Params, config: Any, tokens: jax.Array, num_valid: jax.Array, state: State
    ) -> tuple[jax.Array, State]:
        """Append `num_valid [B]` leading tokens of `tokens [B, T]`; the last one's hidden state and the new state."""
        ...

    def reset_rows(self, state: State, mask: jax.Array) -> State:
        """Empty the rows where `mask [B]` is true."""
        ...

    def logits(self, params: Params, config: Any, hidden: jax.Array) -> jax.Array:
        """Logits `[B, V]` of hidden states `[B, D]`."""
        ...


class DecodeRows(NamedTuple):
    """What a decode segment is told about its rows.

    Attributes:
        token: int32 `[B]`, the last token of the context; the state does not hold it yet.
        alive: bool `[B]`, rows that generate.
        position: int32 `[B]`, index the next token will have in its session.
        room: int32 `[B]`, tokens the row may still generate.
        stop: int32 `[B]`, token that ends the row.
        sampling: Per-row sampling settings.
    """

    token: jax.Array
    alive: jax.Array
    position: jax.Array
    room: jax.Array
    stop: jax.Array
    sampling: SamplingRows


class DecodeResult(NamedTuple):
    """What a decode segment produced.

    Attributes:
        tokens: int32 `[B, K]`; the first `num_tokens` of a row are valid.
        logprobs: float32 `[B, K]`.
        num_tokens: int32 `[B]`.
        stopped: bool `[B]`, rows whose last token is their stop token.
        num_steps: int32 scalar, steps taken.
    """

    tokens: jax.Array
    logprobs: jax.Array
    num_tokens: jax.Array
    stopped: jax.Array
    num_steps: jax.Array


def row_axes(model: DecoderModel, config: Any, max_length: int) -> Any:
    """The axis of rows in each array of the state, as a tree of ints: the axis that follows the batch size."""
    two, three = (jax.eval_shape(lambda n=n: model.init_state(config, n, max_length)) for n in (2, 3))

    def axis(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> int:
        differing = [i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
        if len(differing) != 1:
            raise TypeError(f"model state: an array of shape {a.shape} must have exactly one axis of rows")
        return differing[0]

    return jax.tree.map(axis, two, three)


class Programs:
    """Compiles on demand and remembers, for rows of one capacity.

    Args:
        model: Functions of the model.
        config: Its configuration.
        params: Parameters (or their shapes) to compile for.
        num_slots: Rows of the full state.
        capacity: Tokens a row can hold.
        segment_steps: Most decode steps of one call.
    """

    def __init__(
        self,
        model: DecoderModel,
        config: Any,
        params: Params,
        *,
        num_slots: int,
        capacity: int,
        segment_steps: int,
    ) -> None:
        self._model = model
        self._config = config
        self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        self._num_slots = num_slots
        self.capacity = capacity
        self._segment_steps = segment_steps
        self._axes = row_axes(model, config, capacity)
        self._shapes: dict[int, State] = {}
        self._lock = threading.Lock()
        self._compiled: dict[str, Future[Any]] = {}
        self._seconds: dict[str, float] = {}

    @property
    def compile_seconds(self) -> Mapping[str, float]:
        """Wall-clock seconds that each program took to compile, by name."""
        return dict(self._seconds)

    def init_state(self) -> State:
        """The full state, all rows empty."""
        return self._model.init_state(self._config, self._num_slots, self.capacity)

    def feed(self, batch: int, length: int) -> Callable[..., State]:
        """`(params, tokens [B, T], num_valid [B], state) -> state`; the state given is consumed."""

        def feed(params: Params, tokens: jax.Array, num_valid: jax.Array, state: State) -> State:
            return self._model.extend(params, self._config, tokens, num_valid, state)[1]

        shapes = (self._params, _like(jnp.int32, batch, length), _like(jnp.int32, batch), self._state_shapes(batch))
        return self._get(f"feed[{batch}x{length}]", feed, shapes, donate=(3,))

    def decode(self, batch: int, truncated: bool) -> Callable[..., tuple[State, DecodeResult]]:
        """`(params, state, rows, min_alive) -> (state, result)`; the state given is consumed.

        Steps until `min_alive` rows or fewer are alive, or `segment_steps` are done.
        """

        def decode(params: Params, state: State, rows: DecodeRows, min_alive: jax.Array) -> tuple[State, DecodeResult]:
            return self._decode(params, state, rows, min_alive, truncated)

        sampling = SamplingRows(
            seed=_like(jnp.uint32, batch, 2),
            temperature=_like(jnp.float32, batch),
            top_p=_like(jnp.float32, batch),
            top_k=_like(jnp.int32, batch),
        )
        rows = DecodeRows(
            token=_like(jnp.int32, batch),
            alive=_like(jnp.bool_, batch),
            position=_like(jnp.int32, batch),
            room=_like(jnp.int32, batch),
            stop=_like(jnp.int32, batch),
            sampling=sampling,
        )
        name = f"decode[{batch}{' truncated' if truncated else ''}]"
        return self._get(name, decode, (self._params, self._state_shapes(batch), rows, _like(jnp.int32)), donate=(1,))

    def take(self, batch: int) -> Callable[..., State]:
        """`(full, rows [B], reset [B]) -> state of B rows`: gather rows, empty those marked."""

        def take(full: State, rows: jax.Array, reset: jax.Array) -> State:
            return self._model.reset_rows(self._gather(full, rows), reset)

        shapes = (self._state_shapes(self._num_slots), _like(jnp.int32, batch), _like(jnp.bool_, batch))
        return self._get(f"take[{batch}]", take, shapes)

    def put(self, batch: int) -> Callable[..., State]:
        """`(full, state of B rows, source [N]) -> full`: slot r becomes row `source[r]`, or stays where that is -1."""

        def put(full: State, part: State, source: jax.Array) -> State:
            def merge(old: jax.Array, new: jax.Array, axis: int) -> jax.Array:
                shape = [1] * old.ndim
                shape[axis] = -1
                return jnp.where((source >= 0).reshape(shape), new, old)

            return jax.tree.map(merge, full, self._gather(part, jnp.maximum(source, 0)), self._axes)

        shapes = (self._state_shapes(self._num_slots), self._state_shapes(batch), _like(jnp.int32, self._num_slots))
        return self._get(f"put[{batch}]", put, shapes, donate=(0,))

    def grow(self, capacity: int) -> Callable[..., State]:
        """`(full) -> full`: the same rows with a larger capacity."""
        return self._get(
            f"grow[{capacity}]",
            lambda full: self._model.grow_state(full, capacity),
            (self._state_shapes(self._num_slots),),
        )

    def reset(self) -> Callable[..., State]:
        """`(full, reset [N]) -> full`: empty the slots marked; the state given is consumed."""
        shapes = (self._state_shapes(self._num_slots), _like(jnp.bool_, self._num_slots))
        return self._get("reset", self._model.reset_rows, shapes, donate=(0,))

    def spread(self) -> Callable[..., State]:
        """`(full, source [N]) -> full`: slot r becomes a copy of slot `source[r]`."""
        return self._get(
            "spread", self._gather, (self._state_shapes(self._num_slots), _like(jnp.int32, self._num_slots))
        )

    def score(self, length: int) -> Callable[..., jax.Array]:
        """`(params, tokens [T], num_tokens) -> log-probs float32 [T]`, token by token; entry 0 and padding are 0."""

        def score(params: Params, tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
            def step(state: State, index: jax.Array) -> tuple[State, jax.Array]:
                valid = (index < num_tokens - 1).astype(jnp.int32)
                hidden, state = self._model.extend(params, self._config, tokens[index][None, None], valid[None], state)
                logits = self._model.logits(params, self._config, hidden).astype(jnp.float32)
                log_prob = jax.nn.log_softmax(logits, axis=-1)[0, tokens[jnp.minimum(index + 1, length - 1)]]
                return state, jnp.where(valid > 0, log_prob, 0.0)

            empty = self._model.init_state(self._config, 1, length)
            _, log_probs = jax.lax.scan(step, empty, jnp.arange(length - 1))
            return jnp.concatenate([jnp.zeros(1, jnp.float32), log_probs])

        return self._get(f"score[{length}]", score, (self._params, _like(jnp.int32, length), _like(jnp.int32)))

    def _decode(
        self, params: Params, state: State, rows: DecodeRows, min_alive: jax.Array, truncated: bool
    ) -> tuple[State, DecodeResult]:
        """Sample row by row until few are alive; rows that are not stay exactly as they are."""
        num_rows = rows.token.shape[0]
        shape = (num_rows, self._segment_steps)
        result = DecodeResult(
            tokens=jnp.zeros(shape, jnp.int32),
            logprobs=jnp.zeros(shape, jnp.float32),
            num_tokens=jnp.zeros(num_rows, jnp.int32),
            stopped=jnp.zeros(num_rows, jnp.bool_),
            num_steps=jnp.int32(0),
        )

        def unfinished(carry: tuple[State, jax.Array, jax.Array, DecodeResult]) -> jax.Array:
            _, _, alive, result = carry
            return (alive.sum(dtype=jnp.int32) > min_alive) & (result.num_steps < self._segment_steps)

        def step(
            carry: tuple[State, jax.Array, jax.Array, DecodeResult],
        ) -> tuple[State, jax.Array, jax.Array, DecodeResult]:
            state, token, alive, result = carry
            hidden, state = self._model.extend(params, self._config, token[:, None], alive.astype(jnp.int32), state)
            logits = self._model.logits(params, self._config, hidden)
            drawn, log_prob = sample(logits, rows.sampling, rows.position + result.num_tokens, truncated=truncated)
            token = jnp.where(alive, drawn, token)
            num_tokens = result.num_tokens + alive.astype(jnp.int32)
            stopped = result.stopped | (alive & (drawn == rows.stop))
            column = (jnp.int32(0), result.num_steps)
            result = DecodeResult(
                tokens=jax.lax.dynamic_update_slice(result.tokens, token[:, None], column),
                logprobs=jax.lax.dynamic_update_slice(result.logprobs, log_prob[:, None], column),
                num_tokens=num_tokens,
                stopped=stopped,
                num_steps=result.num_steps + 1,
            )
            return state, token, alive & ~stopped & (num_tokens < rows.room), result

        state, _, _, result = jax.lax.while_loop(unfinished, step, (state, rows.token, rows.alive, result))
        return state, result

    def _gather(self, state: State, rows: jax.Array) -> State:
        return jax.tree.map(lambda x, axis: jnp.take(x, rows, axis=axis, mode="clip"), state, self._axes)

    def _state_shapes(self, batch: int) -> State:
        if batch not in self._shapes:
            self._shapes[batch] = jax.eval_shape(lambda: self._model.init_state(self._config, batch, self.capacity))
        return self._shapes[batch]

    def _get(
        self, name: str, function: Callable[..., Any], shapes: tuple[Any, ...], donate: tuple[int, ...] = ()
    ) -> Callable[..., Any]:
        """The compiled program of a name; compiled by the first thread that asks, awaited by the others."""
        with self._lock:
            future = self._compiled.get(name)
            mine = future is None
            if future is None:
                future = self._compiled[name] = Future()
        if mine:
            started = time.perf_counter()
            try:
                future.set_result(jax.jit(function, donate_argnums=donate).lower(*shapes).compile())
            except BaseException as error:
                future.set_exception(error)
            self._seconds[name] = time.perf_counter() - started
        return future.result()


def _like(dtype: Any, *shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)
