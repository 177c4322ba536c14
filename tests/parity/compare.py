"""Our model against the golden files: one row for each comparison, as a table by `python -m parity.compare`.

**float32.** Logits (whole rows, padded left, padded right, decoded with a cache) and the log-probabilities of our head
at a temperature differ by at most `F32_LIMIT`, relative to the largest expected; so does the gradient of every
parameter, by its sketch.

**bfloat16.** Two runs A and B of `transformers`, the same function with its sums in another order, land somewhere
around the exact (float32) result; how far is the spread that rounding to bfloat16 leaves open. Ours must land no
farther than the farther of the two, without any allowance, in two measures over 4,096 tokens:

- `typical`: the median over tokens of the root mean square error of a token's logits. A, B and other orders give the
  same to 2%.
- `rms`: the root mean square over all logits. A few tokens in a hundred, where a near-tie between experts falls the
  other way, make most of it; which ones is chance, and A and B differ by up to a fifth.

The distance between A and B is shown beside them, and is no measure: runs that round the same values to bfloat16 can
agree to the last bit (sums of a few exact products do) and be wrong together. The exact result itself lies farther from
A than B does.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swerve import models
from swerve.models.hf import to_hf_tensors

from .cases import BF16_KEPT, CASES, GOLDENS, PAD, PREFILL, ROWS, SHORT, TEMPERATURE
from .sketch import sketch, sketch_difference

F32_LIMIT = 1e-4
ZERO = 1e-3
"""A gradient this small beside the largest is nothing but rounding (a router that picks one expert has none)."""
WHOLE = {"logits": "logits", "left_logits": "logits, left", "right_logits": "logits, right"}
"""Golden arrays that one forward pass is compared with, and what the table calls the comparisons."""


class Row(NamedTuple):
    """One comparison.

    Attributes:
        case: The model.
        what: What is compared.
        found: The difference, or the error.
        limit: What it must not exceed.
        note: The parameter of the worst gradient, or the distance of runs A and B.
    """

    case: str
    what: str
    found: float
    limit: float
    note: str = ""


class Loaded(NamedTuple):
    """A case as its files have it."""

    config: models.Qwen35MoeConfig
    params: Any
    golden: dict[str, np.ndarray]
    execution: models.Execution


@functools.cache
def load(case: str) -> Loaded:
    """Read a case."""
    config, params = models.load_hf(GOLDENS / case)
    with np.load(GOLDENS / case / "expected.npz") as golden:
        layers = "scan" if CASES[case].scan else "unroll"
        execution = models.Execution(attention_block=16, delta_chunk=8, expert_block=8, layers=layers)
        return Loaded(config, params, dict(golden), execution)


def difference(found: Any, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest expected entry."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


def whole_rows(case: str) -> Iterator[Row]:
    """Logits, log-probabilities and gradients, and logits with padding: one program for all of them."""
    config, params, golden, execution = load(case)
    whole, short = golden["tokens"], golden["tokens"][:, :SHORT]
    sides = ((0, 0), (PAD, 0), (0, PAD))
    spans = [slice(pads[0], pads[0] + n) for pads, n in zip(sides, (whole.shape[1], SHORT, SHORT), strict=True)]
    tokens, segments, positions = (np.zeros((3, *whole.shape), np.int32) for _ in range(3))
    for i, (rows, span) in enumerate(zip((whole, short, short), spans, strict=True)):
        tokens[i, :, span], segments[i, :, span], positions[i, :, span] = rows, 1, np.arange(rows.shape[1])
    ids, within, at = (jnp.asarray(x.reshape(-1, x.shape[-1])) for x in (tokens, segments, positions))

    def loss(params: Any) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        hidden = models.forward(params, config, ids, within, at, execution=execution).hidden
        lp, _ = models.token_logprobs(params, config, hidden, ids, within, TEMPERATURE, execution=execution)
        return -lp[:ROWS, 1:].mean(), (lp[:ROWS, 1:], models.logits(params, config, hidden))

    (value, (lp, logits)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    logits = np.asarray(logits).reshape(*tokens.shape, -1)
    for i, (name, what) in enumerate(WHOLE.items()):
        yield Row(case, what, difference(logits[i, :, spans[i]], golden[name]), F32_LIMIT)
    scaled = golden["logits"].astype(np.float64) / TEMPERATURE
    scaled -= np.log(np.exp(scaled).sum(-1, keepdims=True))
    expected = np.take_along_axis(scaled[:, :-1], whole[:, 1:, None], axis=-1)[..., 0]
    yield Row(case, "log-probabilities", difference(lp, expected), F32_LIMIT)
    yield Row(case, "loss", difference(value, golden["loss"]), F32_LIMIT)
    named = to_hf_tensors(config, gradient)
    expected = {n.removeprefix("gradient."): x for n, x in golden.items() if n.startswith("gradient.")}
    assert named.keys() == expected.keys()
    floor = ZERO * max(x[0] for x in expected.values())
    worst = {n: sketch_difference(sketch(named[n]), x, floor) for n, x in expected.items()}
    name = max(worst, key=lambda n: worst[n])
    yield Row(case, "gradients", worst[name], F32_LIMIT, f"worst of {len(worst)}: {name}")


def cached_decoding(case: str) -> Iterator[Row]:
    """Logits of a prefill and of single steps."""
    config, params, golden, execution = load(case)
    tokens = jnp.asarray(golden["tokens"][:, :SHORT])

    def extend(params: Any, state: models.DecodeState, tokens: jax.Array) -> tuple[models.DecodeState, jax.Array]:
        num_valid = jnp.full(ROWS, tokens.shape[1], jnp.int32)
        hidden, state = models.extend(params, config, tokens, num_valid, state, execution=execution)
        return state, models.logits(params, config, hidden)

    @jax.jit
    def decode(params: Any) -> tuple[jax.Array, jax.Array]:
        state, first = extend(params, models.init_state(config, ROWS, SHORT), tokens[:, :PREFILL])
        step = functools.partial(extend, params)
        return first, jax.lax.scan(step, state, jnp.swapaxes(tokens[:, PREFILL:], 0, 1)[..., None])[1]

    first, others = decode(params)
    found = np.concatenate([np.asarray(first)[:, None], np.swapaxes(others, 0, 1)], axis=1)
    yield Row(case, "logits, cached", difference(found, golden["cached_logits"][:, PREFILL - 1 :]), F32_LIMIT)


def in_bfloat16(case: str) -> Iterator[Row]:
    """Errors of the forward pass with bfloat16 weights and activations."""
    config, params, golden, execution = load(case)
    tokens = jnp.asarray(golden["bf16_tokens"])

    @jax.jit
    def run(params: Any, tokens: jax.Array) -> jax.Array:
        segments, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        output = models.forward(params, config, tokens, segments, positions, execution=execution, dtype=jnp.bfloat16)
        return models.logits(params, config, output.hidden)

    logits = np.asarray(run(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens), np.float32)
    ours = logits[..., :: logits.shape[-1] // BF16_KEPT][..., :BF16_KEPT]
    truth, a, b = (golden[f"bf16_{n}"] for n in ("truth", "a", "b"))
    for what, measure in (("typical", typical), ("rms", rms)):
        spread = [measure(x - truth) for x in (a, b)]
        note = f"A {spread[0]:.2e}, B {spread[1]:.2e}, A to B {measure(a - b):.2e}, A to ours {measure(a - ours):.2e}"
        yield Row(case, f"bf16 error, {what}", measure(ours - truth), max(spread), note)


def rms(error: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.square(error, dtype=np.float64).mean()))


def typical(error: np.ndarray) -> float:
    """Median over tokens of the root mean square over a token's logits."""
    return float(np.median(np.sqrt(np.square(error, dtype=np.float64).mean(-1))))


def main() -> int:
    """Print the table; 1 if a limit is broken."""
    broken = 0
    for case in CASES:
        for compare in (whole_rows, cached_decoding, in_bfloat16):
            for row in compare(case):
                broken += not row.found <= row.limit
                verdict = "" if row.found <= row.limit else "  TOO FAR"
                print(
                    f"{row.case:12} {row.what:20} {row.found:9.2e} of {row.limit:8.2e}{verdict}  {row.note}", flush=True
                )
    print(f"{broken} of the limits broken" if broken else "every limit kept")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
