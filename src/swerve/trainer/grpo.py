"""The GRPO trainer: one forward and backward pass per micro-batch, one division and one update per batch.

    prepare(groups) -> batch            host: advantages are given, rows are packed
    begin(batch)                        host: the batch is of these weights
    place(micro_batch) -> placed        copied to the devices by a thread of its own
    accumulate(placed), ...             device: gradient of the numerator and sums, added up in float32
    update(learning_rate)               device: divide by the count, clip, Adam

An update may be held back, so that the next batch's first micro-batch is on its way to the devices before it:

    defer_update(learning_rate)         nothing but the two calls below is answered from here on
    stage(micro_batch) -> placed        of the next batch
    finish_update()                     the update

The parameters, the moments and the accumulated gradient are donated to the programs that replace them, so each exists
once; take a copy of `params` (or call `state`) to keep what an update would consume. Both programs have one shape each
and compile once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from swerve import models, packing
from swerve.config import fitting_rows
from swerve.config.schema import Algorithm, Optimizer
from swerve.trainer.batch import TrainingBatch, check_routing, make_batch
from swerve.trainer.gap import SamplerTrainerGap, measure_gap
from swerve.trainer.objective import Sums, check_algorithm
from swerve.trainer.optimizer import Adam, AdamState, Params, UpdateNumbers
from swerve.trainer.programs import Accumulated, DeviceBatch, Objective, Programs
from swerve.trainer.state import TrainerState, adopt, copy_params, to_host
from swerve.trainer.stats import BatchStats, StepStats, step_stats
from swerve.types import Float32Array, Group, PackedMicroBatch, SwerveError, Trajectory

Put: TypeAlias = Callable[[Mapping[str, Any], Any], Mapping[str, Any]]
"""Copies host arrays to where a sharding says, as `jax.device_put` does."""


class NonFiniteGradientError(SwerveError):
    """The gradient held an infinity or a NaN; the step was refused and nothing changed."""


class UpdateDeferredError(SwerveError):
    """The trainer holds an update back and was asked for something that has to wait for it."""


class StagingRefusedError(SwerveError):
    """The trainer did not take a micro-batch ahead of time; send it when its turn comes."""


class PlacedMicroBatch:
    """A micro-batch that is on the devices, or on its way."""

    def __init__(self, copied: Future[DeviceBatch]) -> None:
        self._copied = copied

    def wait(self) -> DeviceBatch:
        """Return it as soon as it is there; raises what went wrong on the way."""
        return self._copied.result()


class _Unsettled(NamedTuple):
    """A micro-batch of which it is not known yet whether all its (token, expert) pairs found a place."""

    batch: DeviceBatch
    dropped: jax.Array


class _Due(NamedTuple):
    """An update that is held back."""

    learning_rate: float
    batch: BatchStats
    start: float


class GrpoTrainer:
    """Trains a policy on groups of graded trajectories.

    Args:
        config: Shape of the model.
        params: Starting weights; copied, so the caller's stay valid.
        algorithm: Loss, corrections, filters, normaliser.
        optimizer: Adam's settings.
        temperature: The sampler's; log-probabilities are those of the distribution sampled from.
        context_length: Tokens one episode can hold.
        row_length: Token slots of a row; a batch with a longer sequence has rows twice as long, or four times, and
            compiles programs of its own.
        rows_per_micro_batch: Rows computed at once; fewer where they are longer.
        freeze_router: Keep the experts' router as it is.
        router_aux_coefficient: Weight of the router's balance term; 0 adds none.
        reference_params: Policy that `algorithm.kl_coefficient` pulls towards; by default the starting weights.
        execution: How the model is computed, and the shape of the mesh.
        devices: Of the mesh, in its order; JAX's own by default. Not used where the mesh is one device.
        parameter_dtype: Type in which the weights are kept.
        activation_dtype: Type of the activations.
        version: Updates that the starting weights have had.
        put: Copies a micro-batch's arrays to the devices.
    """

    def __init__(
        self,
        config: models.Qwen35MoeConfig,
        params: Params,
        *,
        algorithm: Algorithm,
        optimizer: Optimizer,
        temperature: float = 1.0,
        context_length: int,
        row_length: int,
        rows_per_micro_batch: int,
        freeze_router: bool = True,
        router_aux_coefficient: float = 0.0,
        reference_params: Params | None = None,
        execution: models.Execution | None = None,
        devices: Sequence[Any] | None = None,
        parameter_dtype: str = "float32",
        activation_dtype: str = "float32",
        version: int = 0,
        put: Put = jax.device_put,
    ) -> None:
        check_algorithm(algorithm)
        if algorithm.skip_zero_advantage and router_aux_coefficient:
            raise SwerveError(
                "algorithm.skip_zero_advantage would leave sequences out of the router's balance term: set it to "
                "false, or router_aux_coefficient to 0"
            )
        execution = execution or models.Execution()
        shape = execution.mesh
        models.check_mesh(config, shape, rows_per_micro_batch, row_length, execution.expert_chunks)
        self._row_length = row_length
        self._rows_per_micro_batch = rows_per_micro_batch
        self._least_rows = shape.size("fsdp", "expert")
        self._objective = Objective(
            config=config,
            algorithm=algorithm,
            temperature=temperature,
            context_length=context_length,
            freeze_router=freeze_router,
            router_aux_coefficient=router_aux_coefficient,
            execution=execution,
            activation_dtype=activation_dtype,
        )
        self._programs = Programs(
            self._objective, Adam(settings=optimizer), shape.make(devices) if shape.size() > 1 else None
        )
        self._params = self._placed(models.cast(params, parameter_dtype))
        self._moments: AdamState = self._programs.init_moments(self._params)
        self._version = version
        self._reference: Params | None = None
        if algorithm.kl_coefficient > 0:
            reference = params if reference_params is None else reference_params
            self._reference = self._placed(models.cast(reference, parameter_dtype))
        self._accumulated: Accumulated | None = None
        self._unsettled: _Unsettled | None = None
        self._num_replays = 0
        self._due: _Due | None = None
        self._put = put
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="copy-to-devices")

    # ---------------------------------------------------------------------------------------------- properties

    @property
    def params(self) -> Params:
        """The weights as they are, on the device; the next update consumes these arrays."""
        self._refuse_while_deferred("its weights")
        return self._params

    @property
    def version(self) -> int:
        """Updates that the weights have had."""
        return self._version

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far by `accumulate` and `update`; 2 in a run whose shapes are fixed and experts fit."""
        return self._programs.num_traced

    # ------------------------------------------------------------------------------------------------- training

    def warm_up(self) -> None:
        """Compile every program, on padding, so that the first step does not wait; nothing changes.

        It may run in a thread of its own while the trainer is not used otherwise.
        """
        self._refuse_while_deferred("a rehearsal")
        programs, padding = self._programs, self._on_device(self._untrained(()))
        nothing = Accumulated(programs.zeros(self._params), Sums.zero())
        accumulated, _ = programs.accumulate(self._params, self._reference, nothing, padding)
        if programs.may_drop:
            accumulated, _ = programs.accumulate_dropless(self._params, self._reference, accumulated, padding)
        copies = jax.tree.map(jnp.copy, (self._params, self._moments))
        programs.score(self._params, padding, jnp.float32(self._objective.temperature))
        jax.block_until_ready(programs.update(*copies, accumulated, jnp.float32(0.0)))

    def prepare(self, groups: Sequence[Group], *, ahead: int = 0) -> TrainingBatch:
        """Pack a step's groups. Host work only, at any time.

        Args:
            groups: The step's groups.
            ahead: Updates that the weights will have had by then, beyond those they have had.

        Returns:
            The batch, for `step` or `begin`.

        Raises:
            SwerveError: See `make_batch`; or an attempt's recorded routing is not of this model.
        """
        for group in groups:
            self._check_routing(group.trajectories)
        return make_batch(
            groups,
            algorithm=self._objective.algorithm,
            context_length=self._objective.context_length,
            row_length=self._row_length,
            rows_per_micro_batch=self._rows_per_micro_batch,
            least_rows=self._least_rows,
            weights_version=self._version + ahead,
        )

    def step(self, batch: TrainingBatch, *, learning_rate: float) -> StepStats:
        """Train on a batch: all its micro-batches, then one update.

        Args:
            batch: From `prepare`, of the present weights.
            learning_rate: Of this update.

        Returns:
            Every number of the step.

        Raises:
            NonFiniteGradientError: Nothing changed.
            SwerveError: The batch was made for other weights, or its filters left no token. Nothing changed.
        """
        start = time.perf_counter()
        self.begin(batch)
        for micro_batch in batch.packed.micro_batches:
            placed = self.place(micro_batch)
            self.wait()
            self.accumulate(placed)
        return self.update(learning_rate, batch.stats, start)

    def begin(self, batch: TrainingBatch) -> None:
        """Start a batch with what its skipped sequences add; drops what was accumulated before.

        Args:
            batch: From `prepare`, of the present weights.

        Raises:
            SwerveError: The batch was made for other weights.
        """
        self._refuse_while_deferred("another batch")
        if batch.weights_version != self._version:
            raise SwerveError(
                f"the batch was made for weights version {batch.weights_version}, the trainer is at {self._version}: "
                f"prepare it anew"
            )
        skipped = batch.stats.num_skipped_seqs, batch.stats.num_skipped_tokens
        self._begin(Sums.of_skipped(*skipped, self._objective.algorithm.normaliser))

    def place(self, micro_batch: PackedMicroBatch) -> PlacedMicroBatch:
        """Copy a micro-batch to the devices; returns once the copy has begun.

        Args:
            micro_batch: Of the trainer's shape.

        Raises:
            SwerveError: It has another shape.
        """
        self._check_shape(micro_batch)
        begun = threading.Event()

        def copy() -> DeviceBatch:
            begun.set()
            return self._to_device(micro_batch)

        copied = self._copier.submit(copy)
        begun.wait()
        return PlacedMicroBatch(copied)

    def wait(self) -> None:
        """Return when the devices are through with what was accumulated: two programs at once need twice the memory."""
        jax.block_until_ready(self._accumulated)

    def accumulate(self, micro_batch: PackedMicroBatch | PlacedMicroBatch) -> None:
        """Add a micro-batch's gradient and sums; returns before the device has computed them.

        Args:
            micro_batch: Of the trainer's shape; from `place`, or copied here and now.
        """
        self._refuse_while_deferred("another micro-batch")
        if self._accumulated is None:
            self._begin(Sums.zero())
        self._settle()
        placed = isinstance(micro_batch, PlacedMicroBatch)
        batch = micro_batch.wait() if placed else self._on_device(micro_batch)
        assert self._accumulated is not None
        self._accumulated, dropped = self._programs.accumulate(self._params, self._reference, self._accumulated, batch)
        if self._programs.may_drop:
            self._unsettled = _Unsettled(batch, dropped)

    def _begin(self, sums: Sums) -> None:
        self._accumulated = Accumulated(self._programs.zeros(self._params), sums)
        self._unsettled = None
        self._num_replays = 0

    def _settle(self) -> None:
        """Compute the last micro-batch again, with room for every pair, if one of its pairs found no place."""
        unsettled, self._unsettled = self._unsettled, None
        if unsettled is not None and int(unsettled.dropped):
            self._accumulated, _ = self._programs.accumulate_dropless(
                self._params, self._reference, self._accumulated, unsettled.batch
            )
            self._num_replays += 1

    def update(self, learning_rate: float, batch: BatchStats, start: float) -> StepStats:
        """Divide what has been accumulated, clip it and apply it.

        Args:
            learning_rate: Of this update.
            batch: What the accumulated batch held.
            start: `time.perf_counter()` at its first micro-batch.

        Returns:
            Every number of the step.

        Raises:
            NonFiniteGradientError: Nothing changed.
            SwerveError: Nothing was accumulated, or no token was left to train on. Nothing changed.
        """
        self.defer_update(learning_rate, batch, start)
        return self.finish_update()

    def defer_update(self, learning_rate: float, batch: BatchStats, start: float) -> None:
        """Declare a batch complete and hold its update back; for arguments and errors see `update`."""
        self._refuse_while_deferred("a second update")
        if self._accumulated is None:
            raise SwerveError("nothing to update with: no micro-batch was accumulated")
        self._due = _Due(learning_rate, batch, start)

    def stage(self, micro_batch: PackedMicroBatch) -> PlacedMicroBatch:
        """Take the next batch's first micro-batch while an update is held back; returns once its copy has begun.

        Args:
            micro_batch: Of the trainer's shape.

        Raises:
            StagingRefusedError: It was not taken, and nothing has happened.
        """
        if self._due is None:
            raise StagingRefusedError("no update is held back: a micro-batch is staged between a batch and its update")
        try:
            return self.place(micro_batch)
        except (SwerveError, RuntimeError) as error:  # another shape; no thread to be had
            raise StagingRefusedError(f"the micro-batch was not taken: {error}") from error

    def finish_update(self) -> StepStats:
        """Apply the update that was held back; for what it returns and raises see `update`."""
        due, self._due = self._due, None
        if due is None:
            raise SwerveError("no update is held back: call defer_update first")
        self._settle()
        accumulated, self._accumulated = self._accumulated, None
        assert accumulated is not None
        self._params, self._moments, numbers = self._programs.update(
            self._params, self._moments, accumulated, jnp.float32(due.learning_rate)
        )
        sums, numbers = jax.device_get((accumulated.sums, numbers))
        self._check_update(sums, numbers, due.batch)
        self._version += 1
        seconds = time.perf_counter() - due.start
        return step_stats(self._version, due.learning_rate, sums, numbers, due.batch, self._num_replays, seconds)

    def _check_update(self, sums: Sums, numbers: UpdateNumbers, batch: BatchStats) -> None:
        """Say why an update was refused, if it was."""
        number = self._version + 1
        if sums.num_tokens == 0 and np.isnan(sums.logprob_error_max):
            raise NonFiniteGradientError(
                f"step {number}: the trainer's log-probabilities are not a number: the update was refused and the "
                "weights are as before; look at the weights and the batch"
            )
        if sums.num_tokens == 0:
            raise SwerveError(
                f"step {number}: the filters left no token to train on: of {batch.num_sequences} sequences "
                f"{batch.kept_overlong_share:.0%} passed algorithm.overlong_filter and {sums.num_sequences} of "
                f"{sums.num_candidates} algorithm.logprob_error_threshold; raise rollout.context_length if episodes "
                f"fill it, or find out why sampler and trainer disagree"
            )
        if sums.dropped_used:
            raise SwerveError(
                f"step {number}: {sums.dropped_used} (token, expert) pairs were not computed although there was room "
                "for all: the step was refused; this is a fault of the program"
            )
        if not numbers.finite:
            raise NonFiniteGradientError(
                f"step {number}: the gradient's norm is {numbers.grad_norm}, the loss "
                f"{sums.numerator / sums.denominator}: the update was refused and the weights are as before; lower the "
                f"learning rate or look at the batch"
            )

    def _refuse_while_deferred(self, what: str) -> None:
        if self._due is not None:
            raise UpdateDeferredError(
                f"the trainer holds the update to version {self._version + 1} back and cannot be asked for {what}: "
                "finish the update first"
            )

    # -------------------------------------------------------------------------------------------------- scoring

    def logprobs(self, micro_batch: PackedMicroBatch) -> tuple[Float32Array, Float32Array]:
        """Score a micro-batch with the weights as they are.

        Args:
            micro_batch: Of the trainer's shape.

        Returns:
            Log-probabilities and entropies in nats, float32 `[rows, time]`; 0 at segment starts and in padding.
        """
        return self._score(micro_batch, self._objective.temperature)

    def trajectory_logprobs(self, trajectories: Sequence[Trajectory]) -> list[Float32Array]:
        """Score whole trajectories with the weights as they are.

        Args:
            trajectories: Valid samples.

        Returns:
            Per trajectory the log-probability of each token, float32 `[T]`; 0 for the first.

        Raises:
            SwerveError: A trajectory's recorded routing is not of this model.
        """
        self._check_routing(trajectories)
        nothing = np.zeros(len(trajectories), np.float32)
        rows, row_length = self._rows_for(max((len(one.tokens) for one in trajectories), default=0))
        batch = packing.pack(trajectories, nothing, row_length, rows)
        scored: list[Float32Array] = [np.zeros(0, np.float32)] * len(trajectories)
        for index, micro_batch in enumerate(batch.micro_batches):
            lp, _ = self.logprobs(micro_batch)
            for row, placements in enumerate(batch.plan.rows[index * rows : (index + 1) * rows]):
                for place in placements:
                    scored[place.sequence] = lp[row, place.start : place.start + place.length]
        return scored

    def token_logprobs(self, tokens: Sequence[int]) -> Float32Array:
        """Score one list of tokens at temperature 1 with the weights as they are, for the probe after a refit.

        Args:
            tokens: At most `row_length` token ids.

        Returns:
            float32 `[n]`; entry t is of `tokens[t]` given those before, entry 0 is 0.
        """
        lp, _ = self._score(self._untrained(tokens), 1.0)
        return lp[0, : len(tokens)]

    def sampler_trainer_gap(self, trajectories: Sequence[Trajectory]) -> SamplerTrainerGap:
        """Compare the sampler's log-probabilities with the trainer's for the same tokens.

        Args:
            trajectories: Sampled by the weights as they are; attempts without a verdict are left out.

        Returns:
            The gap; `check_gap` decides whether it is too large.
        """
        valid = [trajectory for trajectory in trajectories if trajectory.status.is_valid_sample]
        return measure_gap(valid, self.trajectory_logprobs(valid))

    def _score(self, micro_batch: PackedMicroBatch, temperature: float) -> tuple[Float32Array, Float32Array]:
        self._refuse_while_deferred("log-probabilities")
        lp, entropy = self._programs.score(self._params, self._on_device(micro_batch), jnp.float32(temperature))
        return np.asarray(lp), np.asarray(entropy)

    # ---------------------------------------------------------------------------------------------------- state

    def state(self) -> TrainerState:
        """Return a copy of everything that exact resume needs."""
        self._refuse_while_deferred("its state")
        moments = self._moments._asdict()
        return TrainerState(params=to_host(self._params), optimizer=to_host(moments), version=self._version)

    def weights(self) -> dict[str, Any]:
        """Return a copy of the weights on the host."""
        return to_host(self.params)

    def restore(self, state: TrainerState) -> None:
        """Go on exactly where another trainer stood.

        Args:
            state: Of a trainer of the same model.

        Raises:
            SwerveError: Names, shapes or types differ from the present ones.
        """
        self._refuse_while_deferred("other weights")
        self._params = adopt(self._params, state.params, "params")
        self._moments = AdamState(**adopt(self._moments._asdict(), state.optimizer, "optimizer"))
        self._version = state.version
        self._accumulated = None

    def restore_weights(self, params: Params, version: int) -> None:
        """Take weights without an optimizer's state: the moments start from zero.

        Args:
            params: Of the same model; copied.
            version: Updates they have had.
        """
        self._refuse_while_deferred("other weights")
        self._params = adopt(self._params, params, "params")
        self._moments = self._programs.init_moments(self._params)
        self._version = version
        self._accumulated = None

    # ------------------------------------------------------------------------------------------------- programs

    @property
    def _shape(self) -> tuple[int, int]:
        return self._rows_per_micro_batch, self._row_length

    def _untrained(self, tokens: Sequence[int]) -> PackedMicroBatch:
        """A micro-batch with one sequence and nothing to train on."""
        row, inside = np.zeros(self._shape, np.int32), np.zeros(self._shape, np.int32)
        row[0, : len(tokens)] = tokens
        inside[0, : len(tokens)] = 1
        nothing = np.zeros(self._shape, np.float32)
        return PackedMicroBatch(
            tokens=row,
            segment_ids=inside,
            positions=np.arange(self._row_length, dtype=np.int32) * inside,
            loss_mask=nothing,
            advantages=nothing,
            behaviour_logprobs=nothing,
            sequence_ids=inside - 1,
        )

    def _placed(self, params: Params) -> Params:
        """A copy of a tree of parameters, where this trainer's live."""
        # `device_put` may keep a piece of what it is given, whatever `may_alias` says, and `update` donates it.
        copies = copy_params(params)
        shardings = self._programs.parameter_shardings
        return copies if shardings is None else jax.device_put(copies, shardings)

    def _check_routing(self, trajectories: Sequence[Trajectory]) -> None:
        config = self._objective.config
        for one in trajectories:
            check_routing(one, config.num_hidden_layers, config.num_experts_per_tok, config.num_experts)

    def _rows_for(self, longest: int) -> tuple[int, int]:
        """Rows of a micro-batch that holds a sequence of this length, and token slots of each."""
        return fitting_rows(longest, self._row_length, self._rows_per_micro_batch, self._least_rows)

    def _check_shape(self, micro_batch: PackedMicroBatch) -> None:
        if micro_batch.tokens.shape != self._rows_for(micro_batch.tokens.shape[1]):
            raise SwerveError(
                f"a micro-batch of shape {micro_batch.tokens.shape} does not fit a trainer of shape {self._shape}"
            )

    def _on_device(self, micro_batch: PackedMicroBatch) -> DeviceBatch:
        self._check_shape(micro_batch)
        return self._to_device(micro_batch)

    def _to_device(self, micro_batch: PackedMicroBatch) -> DeviceBatch:
        names = [name for name in DeviceBatch._fields if getattr(micro_batch, name) is not None]
        arrays = {name: getattr(micro_batch, name) for name in names}
        return DeviceBatch(**{"routing": None, **self._put(arrays, self._programs.batch_sharding)})
