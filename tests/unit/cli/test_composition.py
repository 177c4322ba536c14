"""What a recipe's agent becomes, with an engine that does nothing and sandboxes that are real."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swerve.agents import NUMBERED, PLAIN
from swerve.cli.commands.rollout import describe
from swerve.cli.composition import episode_roles, make_renderer, read_tasks, style_of
from swerve.config import TINY_POLICY, TrainRecipe
from swerve.config.schema import Agent, Tasks
from swerve.rendering import Tokenizer
from swerve.rollout import EpisodeSettings, run_episode
from swerve.types import EpisodeStatus, MachineError


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(TINY_POLICY)


def test_a_template_brings_its_prompt_its_tools_and_its_observations(tokenizer, tmp_path):
    full = Agent(template="codeact")
    assert style_of(full) is NUMBERED
    text = tokenizer.decode(make_renderer(full, tokenizer).initial("Mend it."))
    assert text.startswith("<|im_start|>system\n# Tools\n")
    assert '"name": "execute_bash"' in text
    assert '"timeout": {"type": "number"' in text
    assert "in every turn until you are done.<|im_end|>\n<|im_start|>user\nMend it.<|im_end|>" in text
    tiny = Agent()
    assert style_of(tiny) is PLAIN
    assert tokenizer.decode(make_renderer(tiny, tokenizer).initial("Mend it.")).startswith("<|im_start|>user\nMend it.")
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}")
    assert style_of(Agent(template=str(own))) is PLAIN
    assert style_of(Agent(template=str(own), observations="numbered")) is NUMBERED


class NoEngine:
    """Takes no conversation."""

    context_length = 512

    def warmup(self, truncated=False):
        pass

    def shutdown(self):
        pass

    async def open(self, session_id, seed):
        return SimpleNamespace(generate=self.generate, close=lambda: None)

    async def generate(self, new_tokens, sampling):
        raise MachineError("no engine")


@pytest.mark.parametrize("command", ["", "python3 examples/outside_agent.py"])
def test_the_command_of_a_recipe_plays_its_episodes(tokenizer, command):
    recipe = TrainRecipe(tasks=Tasks(family="mini"), agent=Agent(command=command))
    task = read_tasks(recipe.tasks).validation[0]

    async def play():
        engine: Any = NoEngine()
        async with episode_roles(recipe, [task], tokenizer, engine) as roles:
            assert (roles.outside is not None) == bool(command)
            return await run_episode(task, 0, roles=roles, settings=EpisodeSettings(), seed=0)

    trajectory = asyncio.run(play())
    assert (trajectory.status, trajectory.error) == (EpisodeStatus.ERROR, "no engine")
    assert (trajectory.requests is not None) == bool(command)


def test_a_rollout_says_what_guards_saw(tokenizer):
    import numpy as np

    from swerve.types import OutsideRequests, Trajectory, Turn

    empty = np.zeros(0, np.int32)
    trajectory = Trajectory(
        task_id="t",
        sample_index=0,
        tokens=empty,
        sampled=empty.astype(bool),
        behaviour_logprobs=empty.astype(np.float32),
        weights_versions=empty,
        status=EpisodeStatus.MAX_TURNS,
        reward=0.0,
        turns=(Turn(text="hm", tool_names=(), num_malformed_calls=0, observations=("error: no",), no_call=True),),
        requests=OutsideRequests(num_ignored_settings=2),
    )
    task = read_tasks(Tasks(family="mini")).validation[0]
    told = describe(task, trajectory)
    assert "guards: 1 turns without a call, 2 ignored settings of requests" in told
