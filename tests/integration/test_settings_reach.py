"""No setting is ever silently ignored: each one of a recipe is read by what it sets."""

import ast
import asyncio
import dataclasses
import inspect
import random
import shutil
import sys
import typing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import swerve
from swerve.cli import pretraining, training
from swerve.cli.composition import TaskSets, load_policy, make_engine
from swerve.cli.training import read_inputs, train
from swerve.config import PretrainRecipe, TrainRecipe, settings
from swerve.config import schema as sections
from swerve.config.directories import TINY_POLICY
from swerve.engine import VllmEngine
from swerve.environments import load_tasks, save_tasks, shipped_file
from swerve.environments.demonstrations import Sources
from swerve.environments.demonstrations.corpus import CorpusFunction, skeleton
from swerve.environments.functions.mutations import sites
from swerve.environments.mini import generate
from swerve.models import initialise, save_hf
from swerve.rendering import Tokenizer
from swerve.telemetry import RunDirectory, choose_path
from swerve.trainer import pretrain
from swerve.trainer.objective import Scored, micro_batch_objective
from tiny import CONFIG

ABOUT_RECIPES = tuple(
    str(Path(swerve.__file__).parent / part) for part in ("config", "telemetry/run_directory.py")
) + tuple(filter(None, (dataclasses.__file__,)))
"""Code that reads every setting without heeding any: rendering, digests, comparisons, copies."""


def recorded(section: Any, seen: set[str], prefix: str = "") -> Any:
    """The section, and those in it; whoever reads a setting leaves its key in `seen`."""
    kind = type(section)
    names = [field.name for field in dataclasses.fields(kind)]

    def read(self: object, name: str) -> object:
        if name in names and not _reader().startswith(ABOUT_RECIPES):
            seen.add(prefix + name)
        return object.__getattribute__(self, name)

    copy = object.__new__(type(kind.__name__, (kind,), {"__slots__": (), "__getattribute__": read}))
    for name in names:
        value = getattr(section, name)
        inner = recorded(value, seen, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else value
        object.__setattr__(copy, name, inner)
    return copy


def _reader() -> str:
    """The file that reads; for a whole section taken apart by `dataclasses.asdict`, the one that asked for that."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == dataclasses.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename


def keys(schema: type) -> set[str]:
    return {setting.key for setting in settings(schema) if setting.key != "kind"}


@pytest.mark.timeout(900)
def test_every_setting_of_training_is_read(tmp_path):
    for split, count in (("train", 2), ("validation", 1)):
        save_tasks(tmp_path / f"{split}.jsonl", load_tasks(shipped_file("mini", split))[:count])
    recipe = TrainRecipe(
        run=sections.Run(name="r", directory=str(tmp_path)),
        policy=sections.Policy(checkpoint=str(_small_policy(tmp_path / "policy"))),
        tasks=sections.Tasks(
            family="files",
            train_file=str(tmp_path / "train.jsonl"),
            validation_file=str(tmp_path / "validation.jsonl"),
        ),
        agent=sections.Agent(max_turns=1),
        rollout=sections.Rollout(prompts_per_step=1, generations_per_prompt=3, num_slots=4, max_new_tokens=8),
        packing=sections.Packing(rows_per_micro_batch=2),
        training=sections.Training(num_steps=1),
        evaluation=sections.Evaluation(attempts=1),
        telemetry=sections.Telemetry(progress="none"),
    )
    seen: set[str] = set()
    watched = recorded(recipe, seen)
    path = choose_path(watched, Path("r.toml"))
    directory = RunDirectory.create(path, recipe, {})
    try:
        asyncio.run(train(read_inputs(watched), directory, resume=False, config_name="r.toml"))
    finally:
        directory.close()
    seen |= {"run.name", "run.directory"}  # read by `choose_path`, which lies among what reads every setting
    assert path == tmp_path / "r"
    _read_by_other_losses(seen)
    _read_by_scored_runs(seen, tmp_path)
    _read_by_remote_engines(seen, tmp_path)
    leaves = {key for key in seen if key in keys(TrainRecipe)}
    assert keys(TrainRecipe) - leaves == set()


def _small_policy(directory: Path) -> Path:
    """A policy that compiles in half the time of the one that ships, and reads the same texts."""
    vocab_size = Tokenizer.load(TINY_POLICY).vocab_size
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size)
    save_hf(directory, config, initialise(config, jax.random.key(0)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_POLICY / name, directory)
    return directory


def _read_by_other_losses(seen: set[str]) -> None:
    """Traces every loss with every correction, without computing any."""
    floats, integers = jnp.zeros((1, 4)), jnp.zeros((1, 4), jnp.int32)
    hints = typing.get_type_hints(sections.Algorithm)
    for loss in typing.get_args(hints["loss"]):
        for importance in typing.get_args(hints["importance"]):
            algorithm = recorded(
                sections.Algorithm(loss=loss, importance=importance, kl_coefficient=0.1), seen, "algorithm."
            )
            scored = Scored(floats, floats, floats, floats, floats, floats, integers)
            jax.eval_shape(lambda batch, a=algorithm: micro_batch_objective(a, batch, 4), scored)


def _read_by_scored_runs(seen: set[str], tmp_path: Path) -> None:
    """Opens the record of a scored run."""
    section = sections.Mlperf(
        enabled=True,
        org="Us",
        platform="a pod",
        log=str(tmp_path / "s.log"),
        first_evaluation_step=1,
        clear_cache=False,
    )
    recipe = TrainRecipe(mlperf=section)
    assert recipe.first_evaluation_step == 1
    seen.add("mlperf.first_evaluation_step")  # by this property, which lies among what reads every setting
    watched = recorded(recipe, seen)
    assert not training._begin_initialisation(watched)[1]
    nothing: Any = None
    inputs = training.TrainingInputs(
        recipe=watched, tasks=TaskSets(train=[], validation=[], files=(tmp_path, tmp_path)), policy=nothing
    )
    directory = RunDirectory.create(tmp_path / "scored", recipe, {})
    try:
        record = training._open_record(inputs, directory, "r.toml")
        record.updated(1)
        record.saved(1, tmp_path)
        record.close()
    finally:
        directory.close()


def _read_by_remote_engines(seen: set[str], tmp_path: Path) -> None:
    """Makes an engine that asks servers, without asking any."""
    section = sections.Engine(kind="vllm", urls=("http://127.0.0.1:1",), weights_directory=str(tmp_path / "weights"))
    recipe = TrainRecipe(engine=section)
    engine = make_engine(load_policy(recipe.policy, 0), recorded(recipe, seen))
    assert isinstance(engine, VllmEngine)
    engine.shutdown()


def test_every_setting_of_pretraining_is_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(pretraining, "load_sources", lambda train, held_out, cache: asked.append((train, held_out)))
    recipe = PretrainRecipe(
        run=sections.Run(name="r", directory=str(tmp_path)),
        model=sections.Model(hidden_size=16, num_hidden_layers=2, full_attention_interval=2, num_experts=2),
        data=sections.PretrainData(context_length=320, num_held_back=2),
        training=sections.Pretraining(num_tokens=1, row_length=320, rows_per_micro_batch=1),
        continuation=sections.Continuation(num_tokens=1),
    )
    seen: set[str] = set()
    watched = recorded(recipe, seen)
    pretraining.read_sources(watched, lambda line: None)
    families = ("functions", "mini")
    assert asked == [tuple([shipped_file(family, split) for family in families] for split in ("train", "validation"))]
    rng = random.Random(5)
    texts = sorted(text for text in {generate(rng).right for _ in range(30)} if sites(text))
    corpus = [
        CorpusFunction(package="p", file="p.py", line=1, text=text, num_sites=len(sites(text)), shape=skeleton(text))
        for text in texts
    ]
    sources = Sources(corpus=corpus[:-4], held_back=corpus[-4:], task_functions=(), forbidden=frozenset())
    directory = RunDirectory.create(choose_path(watched, Path("r.toml")), recipe, {})
    try:
        finished = pretraining.run_pretraining(watched, sources, directory, lambda line: None, lambda: False)
    finally:
        directory.close()
    assert finished is not None
    assert finished == directory.path / "continuation" / "hf-final"
    weights = [(path / "model.safetensors").read_bytes() for path in (finished, directory.path / "hf-final")]
    assert weights[0] != weights[1]
    seen |= {"run.name", "run.directory"}
    assert keys(PretrainRecipe) - seen == set()
    # What was handed over is used there: `settings.NAME` stands in the trainer for each of its own settings.
    tree = ast.parse(inspect.getsource(pretrain))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {field.name for field in dataclasses.fields(pretrain.PretrainSettings)} - used == set()
