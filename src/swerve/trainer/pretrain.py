"""Pre-training by imitation: packed rows of weighted sequences, one optimizer step after another.

The loss of a step is the weighted mean of the tokens' negative log-likelihood over all of its micro-batches. Learning
rate and step size (in tokens) follow from the tokens seen, so a run may be resumed with another length: that is how
one decides late when to let the learning rate fall.

Everything a run needs to go on lies in one file, written atomically: parameters, optimizer state, and the position in
the data. A run that was stopped anywhere and resumed ends with the same parameters, bit for bit.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from swerve import models
from swerve.packing import plan_rows
from swerve.telemetry import JsonLines, keep_json_lines, machine_faults, write_atomic
from swerve.types import Float32Array, Int32Array, SwerveError

Params = Any

_POOL = 1.4
"""Tokens to choose from for a micro-batch, per token slot: more of them pack tighter."""


class WeightedTokens(Protocol):
    """One sequence to imitate: `tokens` int32 `[T]`, `weights` float32 `[T]`, `right_edits` bool `[T]`."""

    @property
    def tokens(self) -> Int32Array: ...  # noqa: D102
    @property
    def weights(self) -> Float32Array: ...  # noqa: D102
    @property
    def right_edits(self) -> NDArray[np.bool_]: ...  # noqa: D102


class SequenceSource(Protocol):
    """Sequences by position, the same one every time."""

    def sequence(self, position: int) -> WeightedTokens:
        """The sequence at a position."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainSettings:
    """How imitation proceeds.

    Attributes:
        num_tokens: Token slots after which the run ends.
        row_length: Token slots of one row.
        rows_per_micro_batch: Rows computed at once.
        micro_batches: Micro-batches of one step by tokens seen: pairs `(from this many tokens on, micro-batches)`.
        optimizer: `muon` (matrices; Adam for the rest) or `adamw`.
        learning_rate: Step size between warm-up and decay.
        warmup_tokens: Tokens over which it rises from 0.
        decay_share: Part of the tokens, at the end, over which it falls linearly.
        final_share: What is left of it at the very end.
        beta1: Decay of the gradient's mean (Adam).
        beta2: Decay of the squared gradient's mean (Adam).
        momentum: Decay of the gradient's mean (Muon).
        weight_decay: Decoupled decay per unit of learning rate.
        max_grad_norm: Largest global norm of the gradient.
        router_weight: Weight of the router's balance loss.
        log_every: Steps between metric lines.
        evaluate_every: Steps between evaluations.
        checkpoint_seconds: Wall-clock seconds between checkpoints.
        export_tokens: Tokens between exports of the policy; 0 exports at the end only.
        embedding_std: Standard deviation of the embedding at the start; that of the head is this over the root of the
            width. Tokens must be told apart in the residual stream before their first update, or nothing is copied.
        recall_init: Begin with layers that look up what followed a token before.
        seed: Seeds the initial parameters.
    """

    num_tokens: int = 30_000_000
    row_length: int = 512
    rows_per_micro_batch: int = 8
    micro_batches: tuple[tuple[int, int], ...] = ((0, 1), (3_000_000, 2), (12_000_000, 4))
    optimizer: str = "muon"
    learning_rate: float = 6e-3
    warmup_tokens: int = 200_000
    decay_share: float = 0.2
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    weight_decay: float = 0.05
    max_grad_norm: float = 1.0
    router_weight: float = 0.01
    log_every: int = 20
    evaluate_every: int = 200
    checkpoint_seconds: float = 180.0
    export_tokens: int = 1_000_000
    embedding_std: float = 0.5
    recall_init: bool = True
    seed: int = 0

    @property
    def micro_batch_slots(self) -> int:
        """Token slots of one micro-batch."""
        return self.row_length * self.rows_per_micro_batch

    def learning_rate_at(self, tokens: int) -> float:
        """Learning rate of a step that begins after `tokens` token slots."""
        warm = min(1.0, (tokens + self.micro_batch_slots) / max(1, self.warmup_tokens))
        left = (self.num_tokens - tokens) / max(1.0, self.decay_share * self.num_tokens)
        return self.learning_rate * min(warm, self.final_share + (1 - self.final_share) * min(1.0, max(0.0, left)))

    def micro_batches_at(self, tokens: int) -> int:
        """Micro-batches of a step that begins after `tokens` token slots."""
        return [count for start, count in self.micro_batches if tokens >= start][-1]


@dataclass(kw_only=True, slots=True)
class Rows:
    """Packs sequences into micro-batches without end; its state is two small numbers of integers.

    Sequences that did not fit into one micro-batch wait for the next.

    Attributes:
        source: Where sequences come from.
        settings: Shape of a micro-batch.
        next_position: First position not drawn yet.
        waiting: Positions drawn and not packed yet.
    """

    source: SequenceSource
    settings: PretrainSettings
    next_position: int = 0
    waiting: list[int] = field(default_factory=list)
    _drawn: dict[int, WeightedTokens] = field(default_factory=dict)

    def next(self) -> dict[str, NDArray[Any]]:
        """The next micro-batch: arrays `[rows, time]`."""
        rows, length = self.settings.rows_per_micro_batch, self.settings.row_length
        for position in self.waiting:
            if position not in self._drawn:
                self._drawn[position] = self.source.sequence(position)
        total = sum(len(self._drawn[position].tokens) for position in self.waiting)
        while total < _POOL * rows * length:
            self._drawn[self.next_position] = self.source.sequence(self.next_position)
            total += len(self._drawn[self.next_position].tokens)
            self.waiting.append(self.next_position)
            self.next_position += 1
        plan = plan_rows([len(self._drawn[position].tokens) for position in self.waiting], length)
        fullest = sorted(plan.rows, key=lambda row: -sum(placement.length for placement in row))[:rows]
        packed = [[self._drawn[self.waiting[p.sequence]] for p in row] for row in fullest]
        taken = {p.sequence for row in fullest for p in row}
        for index in taken:
            del self._drawn[self.waiting[index]]
        self.waiting = [position for i, position in enumerate(self.waiting) if i not in taken]
        return pack_rows(packed, rows, length)


def pack_rows(packed: Sequence[Sequence[WeightedTokens]], rows: int, length: int) -> dict[str, NDArray[Any]]:
    """Lay sequences out in rows.

    Returns:
        `tokens`, `segment_ids`, `positions` (int32), `weights` (float32) and `right_edits` (bool), `[rows, length]`.
    """
    integers = {name: np.zeros((rows, length), np.int32) for name in ("tokens", "segment_ids", "positions")}
    weights = np.zeros((rows, length), np.float32)
    right_edits = np.zeros((rows, length), np.bool_)
    for row, sequences in enumerate(packed):
        start = 0
        for segment, sequence in enumerate(sequences, 1):
            slots = (row, slice(start, start + len(sequence.tokens)))
            integers["tokens"][slots] = sequence.tokens
            integers["segment_ids"][slots] = segment
            integers["positions"][slots] = np.arange(len(sequence.tokens))
            weights[slots] = sequence.weights
            right_edits[slots] = sequence.right_edits
            start += len(sequence.tokens)
    return {**integers, "weights": weights, "right_edits": right_edits}


def make_optimizer(settings: PretrainSettings, params: Params) -> optax.GradientTransformation:
    """The update rule for a learning rate of 1; the step multiplies by the real one."""
    if settings.optimizer == "adamw":
        rule = optax.chain(
            optax.scale_by_adam(settings.beta1, settings.beta2),
            optax.add_decayed_weights(settings.weight_decay, jax.tree.map(lambda p: p.ndim > 1, params)),
            optax.scale(-1.0),
        )
    elif settings.optimizer == "muon":
        numbers = jax.tree_util.tree_map_with_path(_matrix_dims, params)
        rule = optax.contrib.muon(
            1.0,
            beta=settings.momentum,
            weight_decay=settings.weight_decay,
            adam_b1=settings.beta1,
            adam_b2=settings.beta2,
            adam_weight_decay=0.0,
            muon_weight_dimension_numbers=numbers,
            consistent_rms=0.2,
        )
    else:
        raise SwerveError(f"optimizer: '{settings.optimizer}' is neither muon nor adamw")
    return optax.chain(optax.clip_by_global_norm(settings.max_grad_norm), rule)


_MATRICES: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("q", "k", "v", "z", "gate"), ((-3,), (-2, -1))),
    "out": ((-2,), (-1,)),
    "down": ((-2,), (-1,)),
    "shared_down": ((-2,), (-1,)),
    "gate_up": ((-3,), (-1,)),
    "shared_gate_up": ((-3,), (-1,)),
}
"""Input and output dimensions of the parameters that are matrices, by name; their other dimensions are a batch."""


def _matrix_dims(path: tuple[Any, ...], leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
    """Which dimensions of a parameter Muon takes as a matrix; none for tables, norms, routers and small things."""
    dims = _MATRICES.get(str(getattr(path[-1], "key", "")))
    if dims is None:
        return None
    inputs, outputs = (tuple(dim % leaf.ndim for dim in group) for group in dims)
    return optax.contrib.MuonDimensionNumbers(inputs, outputs)


class Pretrainer:
    """The state of a run and its compiled programs."""

    def __init__(
        self,
        config: models.Qwen35MoeConfig,
        settings: PretrainSettings,
        source: SequenceSource,
        params: Params | None = None,
    ) -> None:
        """Begin.

        Args:
            config: Shape of the model.
            settings: How imitation proceeds.
            source: What to imitate.
            params: Starting weights, which the first step consumes; initial ones are drawn if `None`.
        """
        self.config = config
        self.settings = settings
        self.rows = Rows(source=source, settings=settings)
        self.params: Params = _initial_params(config, settings) if params is None else params
        optimizer = make_optimizer(settings, self.params)
        self.opt_state: Any = optimizer.init(self.params)
        self.num_steps = 0
        self.num_tokens = 0
        weights = functools.partial(_weighted_nll, config=config, router_weight=settings.router_weight)

        @functools.partial(jax.jit, donate_argnums=1)
        def accumulate(params: Params, sums: Any, batch: Mapping[str, jax.Array]) -> Any:
            (_, numbers), gradient = jax.value_and_grad(weights, has_aux=True)(params, batch)
            return jax.tree.map(jnp.add, sums, (gradient, numbers))

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Params, state: Any, sums: Any, learning_rate: jax.Array) -> Any:
            gradient, numbers = sums
            gradient = jax.tree.map(lambda g: g / numbers["weight"], gradient)
            norm = optax.tree.norm(gradient)
            change, state = optimizer.update(gradient, state, params)
            params = jax.tree.map(lambda p, u: p + learning_rate * u, params, change)
            return params, state, {**numbers, "grad_norm": norm}

        self._accumulate, self._update = accumulate, update
        self._score = jax.jit(functools.partial(_edit_scores, config=config))
        self._zeros = jax.jit(lambda params: (jax.tree.map(jnp.zeros_like, params), _no_numbers()))

    def step(self) -> dict[str, float]:
        """Take one optimizer step.

        Returns:
            `loss`, `call_nll` (mean over the tokens of right edits), `router_aux`, `grad_norm`, `learning_rate`,
            `tokens` (slots seen so far) and `padding_share`.

        Raises:
            SwerveError: The gradient is not finite; the parameters are those of before.
        """
        learning_rate = self.settings.learning_rate_at(self.num_tokens)
        sums = self._zeros(self.params)
        count = self.settings.micro_batches_at(self.num_tokens)
        padding = 0.0
        for _ in range(count):
            batch = self.rows.next()
            padding += float((batch["segment_ids"] == 0).mean()) / count
            sums = self._accumulate(self.params, sums, batch)
        self.params, self.opt_state, numbers = self._update(
            self.params, self.opt_state, sums, np.float32(learning_rate)
        )
        self.num_steps += 1
        self.num_tokens += count * self.settings.micro_batch_slots
        values = {name: float(value) for name, value in numbers.items()}
        if not np.isfinite(values["grad_norm"]):
            raise SwerveError(f"step {self.num_steps}: the gradient is not finite; resume from the last checkpoint")
        return {
            "loss": values["nll"] / values["weight"],
            "call_nll": values["call_nll"] / max(values["call_tokens"], 1.0),
            "router_aux": values["router_aux"] / count,
            "grad_norm": values["grad_norm"],
            "learning_rate": learning_rate,
            "tokens": float(self.num_tokens),
            "padding_share": padding,
        }

    def evaluate(self, sequences: Sequence[WeightedTokens]) -> dict[str, float]:
        """Score right edits under teacher forcing.

        Args:
            sequences: Held-back sequences.

        Returns:
            `eval_call_nll` per token, and `eval_exact`: part of the sequences with a right edit in which the most
            likely token is the right one throughout that edit's turn.
        """
        rows, length = self.settings.rows_per_micro_batch, self.settings.row_length
        plan = plan_rows([len(sequence.tokens) for sequence in sequences], length)
        totals = np.zeros(4)
        for start in range(0, len(plan.rows), rows):
            packed = [[sequences[p.sequence] for p in row] for row in plan.rows[start : start + rows]]
            totals += np.asarray(self._score(self.params, pack_rows(packed, rows, length)), np.float64)
        nll, tokens, exact, edits = totals
        return {"eval_call_nll": float(nll / max(tokens, 1)), "eval_exact": float(exact / max(edits, 1))}

    def save(self, path: Path) -> None:
        """Write everything the run needs to go on, atomically."""
        leaves = jax.tree.leaves((self.params, self.opt_state))
        arrays = {f"{i:04d}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
        state = {
            "num_steps": self.num_steps,
            "num_tokens": self.num_tokens,
            "next_position": self.rows.next_position,
            "waiting": self.rows.waiting,
            "structure": _structure((self.params, self.opt_state)),
        }
        write_atomic(path, save(arrays, metadata={"pretrain": json.dumps(state)}))

    def restore(self, path: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            SwerveError: The file is missing, torn, or of another model or optimizer.
        """
        try:
            with safe_open(path, framework="numpy") as stream:
                state = json.loads((stream.metadata() or {})["pretrain"])
                arrays = [stream.get_tensor(name) for name in sorted(stream.keys())]
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            raise SwerveError(f"{path}: not a checkpoint of a pre-training run ({error})") from None
        tree = (self.params, self.opt_state)
        if state["structure"] != _structure(tree):
            raise SwerveError(f"{path}: belongs to another model or optimizer; name another run directory")
        leaves = [
            jnp.asarray(array).reshape(old.shape) for array, old in zip(arrays, jax.tree.leaves(tree), strict=True)
        ]
        self.params, self.opt_state = jax.tree.unflatten(jax.tree.structure(tree), leaves)
        self.num_steps, self.num_tokens = state["num_steps"], state["num_tokens"]
        self.rows.next_position, self.rows.waiting = state["next_position"], list(state["waiting"])
        self.rows._drawn.clear()


def _initial_params(config: models.Qwen35MoeConfig, settings: PretrainSettings) -> Params:
    """The model's own initial parameters, inclined towards recall, with a wider embedding and head.

    Copying is what a small model learns last, and a repair is mostly copied. Queries that begin as the keys, keys that
    look one token back, and a state that hardly decays make each DeltaNet layer look up what followed a token the last
    time (the idea of "Mimetic Initialization Helps State Space Models Learn to Recall", Trockman et al., 2024).
    """
    params = models.initialise(config, jax.random.key(settings.seed))
    wide = settings.embedding_std / config.initializer_range
    params["embedding"] = params["embedding"] * wide
    if "head" in params:
        params["head"] = params["head"] * (wide / config.hidden_size**0.5)
    if settings.recall_init:
        for kind, change in (("delta", _recalling_delta_net), ("attention", _recalling_attention)):
            mixer = params["blocks"][kind]["mixer"]
            params["blocks"][kind]["mixer"] = {**mixer, **change(mixer)}
    return params


def _recalling_delta_net(mixer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Queries see the present token where keys see the one before; all heads but the first see one more token back."""
    tap = {name: 0.05 * mixer[name] for name in ("q_conv", "k_conv", "v_conv")}  # [..., W, heads, width]
    return {
        "q": jnp.copy(mixer["k"]),
        "q_conv": tap["q_conv"].at[..., -1, :, :].add(1.0).at[..., -2, 1:, :].add(0.7),
        "k_conv": tap["k_conv"].at[..., -2, :, :].add(1.0).at[..., -3, 1:, :].add(0.7),
        "v_conv": tap["v_conv"].at[..., -1, :, :].add(1.0),
        "A_log": mixer["A_log"] - jnp.log(100.0),
    }


def _recalling_attention(mixer: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Queries that mostly equal the keys of their group."""
    repeats = mixer["q"].shape[-2] // mixer["k"].shape[-2]
    return {"q": jnp.repeat(mixer["k"], repeats, -2) + 0.3 * mixer["q"]}


def _structure(tree: Any) -> str:
    """What a tree must look like to be restored: its leaves' paths, shapes and dtypes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return "; ".join(f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves)


def _no_numbers() -> dict[str, jax.Array]:
    return {name: jnp.zeros(()) for name in ("nll", "weight", "call_nll", "call_tokens", "router_aux")}


def _weighted_nll(
    params: Params, batch: Mapping[str, jax.Array], config: models.Qwen35MoeConfig, router_weight: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of weighted negative log-likelihoods of one micro-batch, and the numbers that go with it."""
    out = models.forward(params, config, batch["tokens"], batch["segment_ids"], batch["positions"])
    logprobs, _ = models.token_logprobs(params, config, out.hidden, batch["tokens"], batch["segment_ids"])
    weights = batch["weights"] * (batch["positions"] > 0)
    calls = batch["right_edits"].astype(jnp.float32)
    nll, weight = -jnp.sum(weights * logprobs), jnp.sum(weights)
    numbers = {
        "nll": nll,
        "weight": weight,
        "call_nll": -jnp.sum(calls * logprobs),
        "call_tokens": jnp.sum(calls),
        "router_aux": out.router_aux,
    }
    return nll + router_weight * weight * out.router_aux, numbers


def _edit_scores(params: Params, batch: Mapping[str, jax.Array], config: models.Qwen35MoeConfig) -> jax.Array:
    """`[summed nll of right-edit tokens, their number, sequences right throughout, sequences with such an edit]`."""
    out = models.forward(params, config, batch["tokens"], batch["segment_ids"], batch["positions"])
    logits = models.logits(params, config, out.hidden)
    logprobs, _ = models.token_logprobs(params, config, out.hidden, batch["tokens"], batch["segment_ids"])
    calls = batch["right_edits"]
    hit = jnp.argmax(logits[:, :-1], -1) == batch["tokens"][:, 1:]
    missed = jnp.concatenate([jnp.zeros_like(hit[:, :1]), ~hit], 1) & calls
    num_segments = 64
    segments = jax.vmap(lambda values, ids: jax.ops.segment_sum(values.astype(jnp.int32), ids, num_segments))
    with_edit = segments(calls, batch["segment_ids"])[:, 1:] > 0
    wrong = segments(missed, batch["segment_ids"])[:, 1:] > 0
    sums = (-jnp.sum(calls * logprobs), jnp.sum(calls), jnp.sum(with_edit & ~wrong), jnp.sum(with_edit))
    return jnp.stack([value.astype(jnp.float32) for value in sums])


def pretrain(
    trainer: Pretrainer,
    directory: Path,
    held_back: Sequence[WeightedTokens] = (),
    *,
    export: Callable[[Path, Params], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[dict[str, float]]:
    """Train until `num_tokens`, from the directory's checkpoint if there is one.

    Args:
        trainer: A new run, or one that goes on.
        directory: Holds `state.safetensors`, `metrics.jsonl` and exports `hf-<tokens>`.
        held_back: Sequences for evaluation.
        export: Writes the policy's files to a folder.
        stop: Asked after each step; true ends the run early, resumably.

    Yields:
        Every metric line, after it was written.
    """
    settings = trainer.settings
    with machine_faults(directory):
        directory.mkdir(parents=True, exist_ok=True)
    state_path, metrics_path = directory / "state.safetensors", directory / "metrics.jsonl"
    if state_path.is_file():
        trainer.restore(state_path)
    keep_json_lines(metrics_path, lambda line: line["step"] <= trainer.num_steps)
    saved_at = logged_at = time.monotonic()
    logged_tokens, sums, num_summed = trainer.num_tokens, dict[str, float](), 0
    with JsonLines(metrics_path) as metrics:
        while trainer.num_tokens < settings.num_tokens and not stop():
            exported = trainer.num_tokens // max(1, settings.export_tokens)
            numbers = trainer.step()
            sums = {name: sums.get(name, 0.0) + value for name, value in numbers.items()}
            num_summed += 1
            done = trainer.num_tokens >= settings.num_tokens
            evaluates = bool(held_back) and (done or trainer.num_steps % settings.evaluate_every == 0)
            if trainer.num_steps % settings.log_every == 0 or evaluates:
                now = time.monotonic()
                line = {name: total / num_summed for name, total in sums.items()}
                line |= {name: numbers[name] for name in ("tokens", "learning_rate")}
                line |= {"step": float(trainer.num_steps), "time": time.time()}
                line["tokens_per_s"] = (trainer.num_tokens - logged_tokens) / max(now - logged_at, 1e-9)
                if evaluates:
                    line |= trainer.evaluate(held_back)
                metrics.append(line)
                yield line
                logged_at, logged_tokens, sums, num_summed = time.monotonic(), trainer.num_tokens, {}, 0
            if export and settings.export_tokens and trainer.num_tokens // settings.export_tokens > exported:
                export(directory / f"hf-{trainer.num_tokens}", trainer.params)
            if time.monotonic() - saved_at > settings.checkpoint_seconds:
                trainer.save(state_path)
                saved_at = time.monotonic()
        trainer.save(state_path)
        if export and trainer.num_tokens >= settings.num_tokens:
            export(directory / "hf-final", trainer.params)
