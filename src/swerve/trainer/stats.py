"""The numbers of a batch and of a step, each with its unit and its denominator."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from swerve.trainer.objective import Sums
from swerve.trainer.optimizer import UpdateNumbers


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStats:
    """What a batch holds, known before any of it is computed.

    "Sequence" is one trajectory with a verdict; lengths are of whole trajectories, whatever the filters mask.

    Attributes:
        num_groups: Groups of the batch, those without signal included. Count.
        num_sequences: Valid samples. Count.
        num_invalid: Attempts left out because they have no verdict (error, agent timeout, cancelled). Count.
        reward_mean: Reward, over `num_sequences`.
        signal_share: Groups whose advantages are not all 0, over `num_groups`.
        advantage_mean: Advantage, over `num_sequences`.
        advantage_std: Population standard deviation of the advantage, over `num_sequences`.
        advantage_min: Smallest advantage of a sequence.
        advantage_max: Largest advantage of a sequence.
        kept_overlong_share: Sequences that the overlong filter kept, over `num_sequences`; 1 where it is off.
        tool_call_share: Sequences with at least one well-formed tool call, over `num_sequences`.
        malformed_call_share: Tool calls that could not be read, over all tool calls of the sequences.
        truncation_share: Sequences that ended because the context was full, over `num_sequences`.
        max_turns_share: Sequences that ended at the turn limit, over `num_sequences`.
        turns_mean: Assistant turns, over `num_sequences`.
        length_mean: Tokens of a whole trajectory, over `num_sequences`.
        length_max: Tokens of the longest trajectory.
        sampled_tokens_mean: Tokens the policy produced in a trajectory, over `num_sequences`.
        staleness_histogram: Entry i counts the sequences whose oldest token was sampled i updates before the weights
            that the batch trains. Counts; they add up to `num_sequences`.
        staleness_mean: Updates, over `num_sequences`.
        staleness_max: Updates.
        num_skipped_seqs: Sequences trained on that are in no row, for their gradient is 0. Count.
        num_skipped_tokens: Their sampled tokens. Count.
        num_micro_batches: Micro-batches. Count.
        num_slots: Token slots of all micro-batches, padding included. Count.
        num_real_tokens: Slots that hold a token. Count.
        padding_share: Slots that hold padding, over `num_slots`.
    """

    num_groups: int
    num_sequences: int
    num_invalid: int
    reward_mean: float
    signal_share: float
    advantage_mean: float
    advantage_std: float
    advantage_min: float
    advantage_max: float
    kept_overlong_share: float
    tool_call_share: float
    malformed_call_share: float
    truncation_share: float
    max_turns_share: float
    turns_mean: float
    length_mean: float
    length_max: int
    sampled_tokens_mean: float
    staleness_histogram: tuple[int, ...]
    staleness_mean: float
    staleness_max: int
    num_skipped_seqs: int
    num_skipped_tokens: int
    num_micro_batches: int
    num_slots: int
    num_real_tokens: int
    padding_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Every number of one optimizer step.

    "Tokens trained on" have m = 1: sampled, of a sequence that no filter rejected. The gate does not change m.

    Attributes:
        step: Number of the update, from 1; the one axis of all metrics. Equals the version of the resulting weights.
        learning_rate: Of this update.
        loss: Sum of the weighted token losses over the normaliser's count (`global_valid_tokens` with `token`).
        grad_norm: Global norm of the gradient, after the division, before clipping.
        clip_scale: What the gradient was multiplied by; 1 where its norm was within the limit.
        update_norm: Global norm of the change of the parameters.
        entropy: Nats per token of the distribution each token was scored under, over the tokens trained on that were
            computed: `global_valid_tokens` less `batch.num_skipped_tokens`.
        token_logdiff_absmean: |lp - lp_gen| in nats, likewise.
        importance_weight_mean: Importance weight before the gate, likewise; 1 without weights.
        kl: Estimated divergence from the reference policy in nats per token, likewise; 0 without one.
        logprob_error_max: Largest `mean_t exp|lp_gen - lp|` of any sequence with a token in the loss mask, before the
            filter on it.
        global_valid_tokens: Tokens trained on, T. Count.
        global_valid_seqs: Sequences with a token trained on. Count.
        kept_logprob_error_share: Sequences that the log-probability filter kept, over the sequences that the overlong
            filter kept and that have a sampled token.
        kept_sequence_gate_share: Sequences that passed the gate, over `global_valid_seqs`; 1 where there is no gate.
        kept_share: Sequences that entered the loss (all filters and the gate), over `batch.num_sequences`.
        dropped_assignments_used: (token, expert) pairs that were not computed in any micro-batch that counts; always 0.
        dropless_replays: Micro-batches computed again because an expert's buffer was too small. Count.
        train_s: Wall-clock seconds from the first micro-batch's hand-over to the end of the update.
        slots_per_s: `batch.num_slots` over `train_s`.
        real_tokens_per_s: `batch.num_real_tokens` over `train_s`.
        batch: What the batch held.
    """

    step: int
    learning_rate: float
    loss: float
    grad_norm: float
    clip_scale: float
    update_norm: float
    entropy: float
    token_logdiff_absmean: float
    importance_weight_mean: float
    kl: float
    logprob_error_max: float
    global_valid_tokens: int
    global_valid_seqs: int
    kept_logprob_error_share: float
    kept_sequence_gate_share: float
    kept_share: float
    dropped_assignments_used: int
    dropless_replays: int
    train_s: float
    slots_per_s: float
    real_tokens_per_s: float
    batch: BatchStats

    def scalars(self) -> dict[str, float]:
        """Return every number by name, those of the batch beside those of the step, for a metrics sink.

        The histogram becomes one number per lag, `staleness_0` and on.
        """
        named = asdict(self)
        named.update(named.pop("batch"))
        for lag, count in enumerate(named.pop("staleness_histogram")):
            named[f"staleness_{lag}"] = count
        return named


def share(part: float, whole: float, default: float = 0.0) -> float:
    """Return `part / whole`, or the default where there is nothing to divide by."""
    return float(part) / float(whole) if whole else default


def mean(values: ArrayLike) -> float:
    """Return the mean in float64; 0 of nothing."""
    array = np.asarray(values, np.float64)
    return float(array.mean()) if array.size else 0.0


def step_stats(
    step: int,
    learning_rate: float,
    sums: Sums,
    numbers: UpdateNumbers,
    batch: BatchStats,
    num_replays: int,
    seconds: float,
) -> StepStats:
    """Divide a step's sums by their denominators.

    Args:
        step: Number of the update, from 1.
        learning_rate: Of the update.
        sums: Over all micro-batches, on the host.
        numbers: Of the update, on the host.
        batch: What the batch held.
        num_replays: Micro-batches computed again without a limit on experts.
        seconds: Wall-clock time of the step.

    Returns:
        The step's numbers.
    """
    tokens = int(sums.num_tokens)
    computed = tokens - batch.num_skipped_tokens
    return StepStats(
        step=step,
        learning_rate=learning_rate,
        loss=share(float(sums.numerator), float(sums.denominator)),
        grad_norm=float(numbers.grad_norm),
        clip_scale=float(numbers.clip_scale),
        update_norm=float(numbers.update_norm),
        entropy=share(float(sums.entropy), computed),
        token_logdiff_absmean=share(float(sums.logdiff), computed),
        importance_weight_mean=share(float(sums.weight), computed),
        kl=share(float(sums.kl), computed),
        logprob_error_max=float(sums.logprob_error_max),
        global_valid_tokens=tokens,
        global_valid_seqs=int(sums.num_sequences),
        kept_logprob_error_share=share(int(sums.num_sequences), int(sums.num_candidates), 1.0),
        kept_sequence_gate_share=share(int(sums.num_gate_passed), int(sums.num_sequences), 1.0),
        kept_share=share(int(sums.num_gate_passed), batch.num_sequences),
        dropped_assignments_used=int(sums.dropped_used),
        dropless_replays=num_replays,
        train_s=seconds,
        slots_per_s=share(batch.num_slots, seconds),
        real_tokens_per_s=share(batch.num_real_tokens, seconds),
        batch=batch,
    )
