"""Adam with f32 state, behind a clip by global norm that refuses what is not finite.

Written with optax. The learning rate is an argument of every update, not a constant of the program, so a schedule or
another recipe compiles nothing anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from swerve.config.schema import Optimizer

Params: TypeAlias = Any
"""A nested dict of arrays."""


class AdamState(NamedTuple):
    """Adam's memory of past gradients.

    Attributes:
        count: Updates made, int32 scalar.
        mu: Decayed mean of the gradient, a tree like the parameters, float32.
        nu: Decayed mean of the squared gradient, likewise.
    """

    # `count` hides a method of tuples that nobody needs here; it is the name that optimizers give it.
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    mu: Params
    nu: Params


class UpdateNumbers(NamedTuple):
    """What an update measured, as scalars on the device.

    Attributes:
        grad_norm: Global norm of the gradient before clipping, float32.
        clip_scale: What the gradient was multiplied by, float32; 1 where it was within the limit.
        update_norm: Global norm of the change of the parameters, float32.
        finite: Whether the gradient was finite, bool. Where it was not, nothing changed.
    """

    grad_norm: jax.Array
    clip_scale: jax.Array
    update_norm: jax.Array
    finite: jax.Array


@dataclass(frozen=True, kw_only=True, slots=True)
class Adam:
    """Decoupled-weight-decay Adam (Loshchilov & Hutter 2019, arXiv:1711.05101) after a global-norm clip.

    Attributes:
        settings: Decays, epsilon, weight decay, largest gradient norm.
    """

    settings: Optimizer

    def init(self, params: Params) -> AdamState:
        """Return moments of zero, float32, for these parameters."""
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return AdamState(count=jnp.zeros((), jnp.int32), mu=zeros, nu=jax.tree.map(jnp.zeros_like, zeros))

    def apply(
        self, params: Params, state: AdamState, gradients: Params, learning_rate: jax.Array
    ) -> tuple[Params, AdamState, UpdateNumbers]:
        """Make one update; a gradient that is not finite changes neither parameters nor state.

        With g the gradient times `min(1, max_grad_norm / norm)`: `p <- p - lr (mu_hat / (sqrt(nu_hat) + eps) + wd p)`.

        Args:
            params: Parameters.
            state: Moments.
            gradients: Like the parameters, float32.
            learning_rate: float32 scalar.

        Returns:
            New parameters, new moments, what was measured.
        """
        s = self.settings
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(norm)
        scale = jnp.minimum(1.0, jnp.float32(s.max_grad_norm) / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
        clipped = jax.tree.map(lambda g: g * scale, gradients)
        adam = optax.scale_by_adam(b1=s.beta1, b2=s.beta2, eps=s.eps)
        direction, moved = adam.update(clipped, optax.ScaleByAdamState(**state._asdict()), params)
        steps = jax.tree.map(lambda d, p: -learning_rate * (d + s.weight_decay * p), direction, params)
        updated = optax.apply_updates(params, steps)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new, old)

        numbers = UpdateNumbers(grad_norm=norm, clip_scale=scale, update_norm=optax.tree.norm(steps), finite=finite)
        after = AdamState(*cast(Any, moved))
        return jax.tree.map(choose, updated, params), jax.tree.map(choose, after, state), numbers


def learning_rate_at(settings: Optimizer, step: int) -> float:
    """Return the learning rate of an update.

    Args:
        settings: `learning_rate` and `warmup_steps`.
        step: Number of the update, from 1.

    Returns:
        The rate: linear from `learning_rate / warmup_steps` to `learning_rate` over the warm-up, then constant.
    """
    if step >= settings.warmup_steps:
        return settings.learning_rate
    return settings.learning_rate * step / settings.warmup_steps
