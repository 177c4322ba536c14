"""Our side of `swerve bench step`, in a process of its own; the requests are those of `_peer_trl`."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

from swerve import parallel
from swerve.cli.benches._peer_transformers import answer_requests, peak_bytes, timed
from swerve.telemetry import restart_with_huge_pages

_STEPS_TO_SETTLE = 8


class _Own:
    """The trainer, its rows split over as many devices as threads, as `mesh.fsdp` of a recipe splits them.

    Rows are as long as an episode may be, as in a run, whose programs are compiled before any episode is played; a
    micro-batch is one row for each device.
    """

    def __init__(self, directory: str, threads: int, settings: None) -> None:
        del settings  # the peer's alone
        parallel.tune_cpu()
        import jax

        from swerve import models
        from swerve.telemetry import read_trajectories
        from swerve.trainer import make_group

        jax.config.update("jax_num_cpu_devices", threads)
        jax.config.update("jax_enable_compilation_cache", False)
        self.threads = threads
        self.settings: dict[str, Any] = json.loads((Path(directory) / "step.json").read_text(encoding="utf-8"))
        self.config, self.params = models.load_hf(directory)
        attempts = [trajectory for _, trajectory in read_trajectories(Path(directory) / "trajectories.jsonl")]
        tasks = dict.fromkeys(attempt.task_id for attempt in attempts)
        self.groups = [make_group([a for a in attempts if a.task_id == task], "group_mean") for task in tasks]
        self.trainer: Any = None

    def versions(self) -> dict[str, Any]:
        """What runs, and on how many cores."""
        import jax

        import swerve

        device = jax.devices()[0].device_kind
        return {
            "versions": f"swerve {swerve.__version__}, jax {jax.__version__} ({device})",
            "threads": len(os.sched_getaffinity(0)),
        }

    def prepare(self) -> dict[str, Any]:
        """A first step from the weights as they were read, and what the other side must find as well.

        More follow until the process's memory has settled.
        """
        began = time.perf_counter()
        self.trainer = self._make_trainer()
        stats = self._step()
        seconds = time.perf_counter() - began
        held = 0
        for _ in range(_STEPS_TO_SETTLE):
            if peak_bytes() <= 1.01 * held:
                break
            held = peak_bytes()
            self._step()
        check = {
            "loss": stats.loss,
            "logprob_gap": stats.token_logdiff_absmean,
            "gradient_norm": stats.grad_norm,
            "update_norm": stats.update_norm,
        }
        settings = f"{self.threads} rows of {self.settings['row_length']} at a time, one a device"
        return {"settings": settings, "slots": stats.batch.num_slots, "seconds": seconds, "check": check}

    def run(self) -> dict[str, Any]:
        """Time one more step."""
        gc.collect()
        return timed(self._step)

    def _make_trainer(self) -> Any:
        from swerve import models
        from swerve.config.schema import Algorithm, Optimizer
        from swerve.trainer import GrpoTrainer

        of = self.settings
        names = {field.name for field in dataclasses.fields(Optimizer)}
        trainer = GrpoTrainer(
            self.config,
            self.params,
            algorithm=Algorithm(
                advantage="group_mean",
                importance="token",
                importance_cap=of["importance_cap"],
                overlong_filter=False,
                logprob_error_threshold=float("inf"),
            ),
            optimizer=Optimizer(**{name: value for name, value in of.items() if name in names}),
            context_length=of["row_length"],
            row_length=of["row_length"],
            rows_per_micro_batch=self.threads,
            version=max(int(one.weights_versions.max()) for group in self.groups for one in group.trajectories),
            execution=models.Execution(mesh=parallel.MeshShape(fsdp=self.threads)),
        )
        self.params = None
        return trainer

    def _step(self) -> Any:
        """Packing, every micro-batch, the update; the weights are ready when it returns."""
        import jax

        trainer = self.trainer
        batch = trainer.prepare(self.groups)
        stats = trainer.step(batch, learning_rate=self.settings["learning_rate"])
        jax.block_until_ready(trainer.params)
        return stats


if __name__ == "__main__":
    restart_with_huge_pages()
    answer_requests(_Own)
