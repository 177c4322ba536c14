"""Our side of `swerve bench model`, in a process of its own; the requests are those of `_peer_transformers`."""

from __future__ import annotations

import functools
import gc
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax import P

from swerve import parallel
from swerve.cli.benches._peer_transformers import answer_requests, timed
from swerve.telemetry import restart_with_huge_pages

if TYPE_CHECKING:
    import jax


class _Own:
    """The model as read from the directory, and its compiled programs.

    The rows are split over as many devices as divide them, each with a thread of its own, as `mesh.fsdp` of a recipe
    splits them: many small products use one thread each.
    """

    def __init__(self, directory: str, threads: int) -> None:
        parallel.tune_cpu()
        import jax
        import numpy as np

        from swerve import models

        tokens = np.load(Path(directory) / "tokens.npy")
        rows = tokens.shape[0]
        jax.config.update("jax_num_cpu_devices", max(n for n in range(1, threads + 1) if rows % n == 0))
        jax.config.update("jax_enable_compilation_cache", False)
        self.config, params = models.load_hf(directory)
        num_devices = len(jax.devices()) if rows % len(jax.devices()) == 0 else 1
        self.mesh = jax.make_mesh((num_devices,), ("rows",), devices=jax.devices()[:num_devices])
        self.everywhere = jax.NamedSharding(self.mesh, P())
        self.tokens = jax.device_put(tokens, jax.NamedSharding(self.mesh, P("rows")))
        self.params: Any = {"float32": jax.device_put(models.unstack_blocks(params), self.everywhere)}
        self.programs: dict[tuple[str, str], Any] = {}

    def versions(self) -> dict[str, Any]:
        """What runs, and on how many cores."""
        import jax

        import swerve

        device = jax.devices()[0].device_kind
        return {
            "versions": f"swerve {swerve.__version__}, jax {jax.__version__} ({device})",
            "threads": len(os.sched_getaffinity(0)),
        }

    def prepare(self, measurement: str, precision: str, limit_s: float | None) -> dict[str, Any]:
        """Compile; the first call is not timed, and nothing takes so long that it had to be given up."""
        del limit_s
        import jax
        import jax.numpy as jnp

        if precision not in self.params:
            self.params[precision] = jax.tree.map(lambda x: x.astype(precision), self.params["float32"])
        of_rows = P() if measurement == "forward_backward" else P("rows")
        compute = self._forward_backward if measurement == "forward_backward" else self._prefill
        program = jax.shard_map(
            functools.partial(compute, precision), mesh=self.mesh, in_specs=(P(), P("rows")), out_specs=of_rows,
            check_vma=False,
        )  # fmt: skip
        began = time.perf_counter()
        compiled = jax.jit(program).lower(self.params[precision], self.tokens).compile()
        seconds = time.perf_counter() - began
        self.programs[measurement, precision] = compiled
        out, rest = compiled(self.params[precision], self.tokens)
        if measurement == "prefill":
            check: dict[str, Any] = {"logits": out.reshape(-1).tolist()}
        else:
            squares = sum(float((x.astype(jnp.float32) ** 2).sum()) for x in jax.tree.leaves(rest))
            check = {"loss": float(out), "gradient_norm": squares**0.5}
        settings = f"rows over {self.mesh.size} devices" if self.mesh.size > 1 else "one device"
        return {"preparation": "compilation", "seconds": seconds, "settings": settings, "check": check}

    def run(self, measurement: str, precision: str) -> dict[str, Any]:
        """Time one repetition."""
        import jax

        gc.collect()
        program, params = self.programs[measurement, precision], self.params[precision]
        return timed(lambda: jax.block_until_ready(program(params, self.tokens)))

    def _forward_backward(self, precision: str, params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Mean loss of all rows and its gradient, of one device's rows `[B, T]`."""
        import jax
        import jax.numpy as jnp

        from swerve import models

        num_targets = self.tokens.shape[0] * (self.tokens.shape[1] - 1)
        segments = jnp.ones_like(tokens)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)

        def loss(params: Any) -> jax.Array:
            hidden = models.forward(params, self.config, tokens, segments, positions, dtype=precision).hidden
            return -models.token_logprobs(params, self.config, hidden, tokens, segments)[0].sum() / num_targets

        return jax.tree.map(lambda x: jax.lax.psum(x, "rows"), jax.value_and_grad(loss)(params))

    def _prefill(self, precision: str, params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        """Logits of the last token and the filled cache, of one device's rows."""
        import jax.numpy as jnp

        from swerve import models

        rows, row_length = tokens.shape
        state = models.init_state(self.config, rows, row_length, precision)
        lengths = jnp.full(rows, row_length, jnp.int32)
        hidden, state = models.extend(params, self.config, tokens, lengths, state)
        return models.logits(params, self.config, hidden), state


if __name__ == "__main__":
    restart_with_huge_pages()
    answer_requests(_Own)
