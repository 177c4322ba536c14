"""What fraction of a plain matrix product's speed the model's kernels reach, each alone.

The product is measured on the same device in the same run. On an accelerator the kernels have the sizes of the 35B
model and bfloat16 inputs, elsewhere small ones and float32. Counted are the operations that the result takes: causal
scores once, the delta rule as its recurrence, backward as twice forward; what a kernel computes again or pads is not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from swerve.cli.benches import Figure
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.models import Qwen35MoeConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares sizes."""
    parser.add_argument(
        "--kernels", nargs="+", choices=list(_KERNELS), default=list(_KERNELS), metavar="KERNEL",
        help=f"which, of {', '.join(_KERNELS)} (all)",
    )  # fmt: skip
    parser.add_argument("--row-length", type=int, default=0, metavar="INT", help="tokens (8192, on a CPU 1024)")
    parser.add_argument("--repetitions", type=int, default=5, metavar="INT", help="of every measurement (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench kernels --help`."""
    from swerve import parallel

    parallel.tune_cpu()
    import jax
    import jax.numpy as jnp

    if arguments.repetitions < 1 or arguments.row_length < 0:
        raise SwerveError("bench kernels: --repetitions and --row-length are positive numbers")
    accelerated = jax.default_backend() != "cpu"
    dtype, size = (jnp.bfloat16, 8192) if accelerated else (jnp.float32, 1024)
    tokens = arguments.row_length or size
    square = _random(0, (size, size), dtype)
    product = jax.jit(lambda a, b: a @ b)
    timed = _time(product, (square, square), 2 * size**3, arguments.repetitions)
    peak = timed.rate
    device = jax.devices()[0].device_kind
    yield _figure(f"product {size}^3, {jnp.dtype(dtype).name}, {device}", peak / 1e12, "TFLOP/s", timed)
    for name in arguments.kernels:
        case = _KERNELS[name](_config(accelerated), tokens, dtype)
        for label, program, operations in (
            ("forward", jax.jit(case.compute), case.operations),
            ("forward+backward", jax.jit(_with_gradients(case)), 3 * case.operations),
        ):
            timed = _time(program, case.arrays, operations, arguments.repetitions)
            yield _figure(f"{name}, {label}", timed.rate / peak, "of the product", timed)
            yield _figure(f"{name}, {label}: time", timed.seconds * 1e3, "ms", timed)


class _Case(NamedTuple):
    """One kernel: a function of float arrays, and the operations that its result takes."""

    compute: Callable[..., Any]
    arrays: tuple[Any, ...]
    operations: float


class _Timed(NamedTuple):
    """Median seconds, seconds in all, operations per second by the median, and repetitions."""

    seconds: float
    spent: float
    rate: float
    repetitions: int


def _time(program: Any, arrays: tuple[Any, ...], operations: float, repetitions: int) -> _Timed:
    """The median over repetitions; compilation and the first call are not among them."""
    import jax

    jax.block_until_ready(program(*arrays))
    seconds = []
    for _ in range(repetitions):
        began = time.perf_counter()
        jax.block_until_ready(program(*arrays))
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    return _Timed(median, sum(seconds), operations / median, repetitions)


def _figure(name: str, value: float, unit: str, timed: _Timed) -> Figure:
    return Figure(name=name, value=value, unit=unit, count=timed.repetitions, seconds=round(timed.spent, 3))


def _with_gradients(case: _Case) -> Callable[..., Any]:
    import jax

    def compute(*arrays: Any) -> Any:
        out, pull = jax.vjp(case.compute, *arrays)
        return out, pull(out)

    return compute


def _random(seed: int, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
    import jax

    return (scale * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def _config(accelerated: bool) -> Qwen35MoeConfig:
    """One block of layers of the 35B model, or of the shipped one."""
    from swerve.models import TINY, Qwen35MoeConfig

    if not accelerated:
        return TINY
    return Qwen35MoeConfig(
        vocab_size=248_320, hidden_size=2048, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=2,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
        linear_value_head_dim=128, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    )  # fmt: skip


def _attention(config: Qwen35MoeConfig, tokens: int, dtype: Any) -> _Case:
    import jax
    import jax.numpy as jnp

    from swerve import kernels

    heads, width = config.num_attention_heads, config.head_dim
    segments = jnp.ones((1, tokens), jnp.int32)
    arrays = tuple(
        _random(i, (1, tokens, n, width), dtype, scale)
        for i, (n, scale) in enumerate([(heads, width**-0.5), *[(config.num_key_value_heads, 1.0)] * 2])
    )

    def compute(q: Any, k: Any, v: Any) -> Any:
        if jax.default_backend() == "tpu":
            return kernels.splash_attention(q, k, v, segments, segments, stretch=0)
        return kernels.packed_attention(q, k, v, segments)

    return _Case(compute, arrays, 2 * heads * width * tokens * (tokens + 1))


def _delta_net(config: Qwen35MoeConfig, tokens: int, dtype: Any) -> _Case:
    import jax
    import jax.numpy as jnp

    from swerve import kernels

    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    key_width, value_width = config.linear_key_head_dim, config.linear_value_head_dim
    q, k = (_random(i, (1, tokens, keys, key_width), jnp.float32, key_width**-0.5) for i in range(2))
    v = _random(2, (1, tokens, values, value_width), jnp.float32)
    decay, beta = (jax.nn.sigmoid(_random(i, (1, tokens, values), jnp.float32)) for i in (3, 4))
    state = jnp.zeros((1, values, key_width, value_width), jnp.float32)
    starts = jnp.arange(tokens)[None] == 0

    def compute(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
        return kernels.delta_chunked(q, k, v, g, beta, starts, state)[0]

    return _Case(compute, (q, k, v, -decay, beta), 6 * tokens * values * key_width * value_width)


def _experts(config: Qwen35MoeConfig, tokens: int, dtype: Any) -> _Case:
    import jax
    import jax.numpy as jnp

    from swerve import kernels
    from swerve.models.layers import expert_block

    hidden, inner, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    top_k, valid = config.num_experts_per_tok, jnp.ones(tokens, bool)
    x = _random(0, (tokens, hidden), dtype)
    router = _random(1, (hidden, experts), jnp.float32, hidden**-0.5)
    gate_up = _random(2, (experts, hidden, 2, inner), dtype, hidden**-0.5)
    down = _random(3, (experts, inner, hidden), dtype, inner**-0.5)
    routing = jax.jit(lambda x: kernels.route(x, router, valid, top_k))(x)

    def compute(x: Any, gate_up: Any, down: Any) -> Any:
        if jax.default_backend() == "tpu":
            pairs = kernels.capacity_of(tokens, top_k, 1, None, kernels.row_tile(tokens * top_k))
            return kernels.experts_grouped(x, routing, gate_up, down, valid, capacity=pairs)[0]
        block = expert_block(tokens, config, 128)
        return kernels.experts_sorted(x, routing, gate_up, down, valid, block=block)[0]

    return _Case(compute, (x, gate_up, down), 6 * tokens * top_k * hidden * inner)


def _head(config: Qwen35MoeConfig, tokens: int, dtype: Any) -> _Case:
    import jax.numpy as jnp

    from swerve import models

    hidden, vocab = config.hidden_size, config.vocab_size
    targets, segments = jnp.arange(tokens, dtype=jnp.int32)[None] % vocab, jnp.ones((1, tokens), jnp.int32)

    def compute(x: Any, head: Any) -> Any:
        return models.token_logprobs({"head": head}, config, x, targets, segments)[0]

    arrays = (_random(0, (1, tokens, hidden), dtype), _random(1, (hidden, vocab), dtype, hidden**-0.5))
    return _Case(compute, arrays, 2 * tokens * hidden * vocab)


_KERNELS: dict[str, Callable[[Qwen35MoeConfig, int, Any], _Case]] = {
    "delta-net": _delta_net,
    "attention": _attention,
    "experts": _experts,
    "head": _head,
}
