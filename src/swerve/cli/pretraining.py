"""Runs a pre-training recipe."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swerve.cli.composition import copy_tokenizer, load_template
from swerve.config import PretrainRecipe, cache_directory, policy_directory
from swerve.environments import shipped_file
from swerve.environments.demonstrations import Mixture, Noise, Sources, load_sources
from swerve.models import Qwen35MoeConfig, save_hf
from swerve.rendering import ConversationRenderer, Tokenizer
from swerve.telemetry import RunDirectory
from swerve.trainer.pretrain import Pretrainer, PretrainSettings, pretrain


def read_sources(recipe: PretrainRecipe, say: Callable[[str], None]) -> Sources:
    """What the policy imitates.

    Args:
        recipe: What to do.
        say: Takes a line for the user.
    """
    say("reading the corpus (the first time it is downloaded and parsed, which takes minutes)")
    families = recipe.data.families
    return load_sources(
        [shipped_file(family, "train") for family in families],
        [shipped_file(family, "validation") for family in families],
        cache=cache_directory(),
    )


def run_pretraining(
    recipe: PretrainRecipe,
    sources: Sources,
    directory: RunDirectory,
    say: Callable[[str], None],
    stop: Callable[[], bool],
) -> Path | None:
    """Imitate until the recipe's number of tokens.

    Args:
        recipe: What to do.
        sources: What to imitate.
        directory: Of the run, held; goes on from the state in it.
        say: Takes a line for the user.
        stop: Asked after each step; true ends the run early, resumably.

    Returns:
        Directory of the finished policy's Hugging Face files, or `None` if the run was ended early.
    """
    data = recipe.data
    folder = policy_directory(data.tokenizer)
    tokenizer = Tokenizer.load(folder)
    renderer = ConversationRenderer(tokenizer, load_template(data.template))
    noise = Noise(**dataclasses.asdict(recipe.noise))
    mixture = Mixture(
        mini_share=data.mini_share,
        task_share=data.task_share,
        short_first=data.short_first,
        files_first=data.files_first,
        lines_first=data.lines_first,
    )
    seed = recipe.run.seed
    config = Qwen35MoeConfig(vocab_size=tokenizer.vocab_size, **dataclasses.asdict(recipe.model))
    held_back_stream = sources.held_back_stream(renderer, seed=seed + 1, max_tokens=data.context_length)
    held_back = [held_back_stream.sequence(position) for position in range(data.num_held_back)]

    def export(path: Path, params: Any) -> None:
        save_hf(path, config, params)
        copy_tokenizer(folder, path)

    def imitate(trainer: Pretrainer, path: Path) -> bool:
        of = trainer.settings.num_tokens
        for line in pretrain(trainer, path, held_back, export=export, stop=stop):
            exact = f"  exact repairs {line['eval_exact']:.3f}" if "eval_exact" in line else ""
            say(
                f"{line['tokens'] / 1e6:.2f} of {of / 1e6:g} M tokens  loss {line['loss']:.3f}  "
                f"right edits {line['call_nll']:.3f} nats/token  {line['tokens_per_s']:,.0f} tokens/s{exact}"
            )
        return trainer.num_tokens >= of

    draw = functools.partial(sources.stream, renderer, max_tokens=data.context_length)
    path = directory.path
    trainer = Pretrainer(config, pretrain_settings(recipe), draw(seed=seed, noise=noise, mixture=mixture))
    if not imitate(trainer, path):
        return None
    then = recipe.continuation
    if then.num_tokens:
        say(f"going on for {then.num_tokens / 1e6:g} M tokens with the demonstrations of [continuation]")
        path = path / "continuation"
        noise = dataclasses.replace(
            noise,
            right_edit=then.right_edit,
            give_up=then.give_up,
            max_attempts=then.max_attempts,
            wrong_by_kind=then.wrong_by_kind,
        )
        mixture = Mixture(
            mini_share=then.mini_share, task_share=data.task_share, short_first=0, files_first=0, lines_first=0
        )
        stream = draw(seed=seed + 2, noise=noise, mixture=mixture)
        if not imitate(Pretrainer(config, continuation_settings(recipe), stream, trainer.params), path):
            return None
    return path / "hf-final"


def pretrain_settings(recipe: PretrainRecipe) -> PretrainSettings:
    """The settings of the pre-trainer that a recipe asks for."""
    training, optimizer = dataclasses.asdict(recipe.training), dataclasses.asdict(recipe.optimizer)
    training["micro_batches"] = tuple((int(start), int(count)) for start, count in recipe.training.micro_batches)
    return PretrainSettings(optimizer=optimizer.pop("kind"), seed=recipe.run.seed, **training, **optimizer)


def continuation_settings(recipe: PretrainRecipe) -> PretrainSettings:
    """The settings of the pre-trainer in a recipe's second phase."""
    then = recipe.continuation
    return dataclasses.replace(
        pretrain_settings(recipe),
        num_tokens=then.num_tokens,
        learning_rate=then.learning_rate,
        warmup_tokens=then.warmup_tokens,
        micro_batches=((0, then.micro_batches),),
        decay_share=1.0,
        export_tokens=0,
    )
