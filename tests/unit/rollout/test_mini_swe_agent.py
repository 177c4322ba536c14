"""The real mini-swe-agent plays an episode: its agent loop, its Docker environment, its OpenAI client."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swerve.agents.outside import OutsideAgents
from swerve.rendering import Template, render_calls
from swerve.rollout import run_episode
from swerve.types import EpisodeStatus, Limits

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("SWERVE_MINI_SWE_AGENT", ROOT / ".venv-mini-swe-agent" / "bin" / "python"))
LIMITS = Limits(max_turns=8, episode_timeout_s=120.0, command_timeout_s=10.0)
LOOK = [("bash", {"command": "cat repair.py"})]
NOTHING = "I think it is the constant."
FIX = [("bash", {"command": "sed -i 's/+ 2/+ 1/' repair.py"}), ("bash", {"command": "./run_tests"})]
SUBMIT = [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]
SCRIPT = [LOOK, NOTHING, FIX, SUBMIT]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"NOT TESTED: no {PYTHON}: run make mini-swe-agent"),
]


def test_mini_swe_agent_repairs_and_every_token_is_recorded(run, world, words, renderer):
    here = world(lambda session_id, number: list(SCRIPT))
    here.policy.context_length = 16_384
    tokenizer = renderer.tokenizer

    async def play():
        line = f"{PYTHON} {ROOT / 'examples' / 'mini_swe_agent.py'} {{task_file}}"
        async with OutsideAgents(line, tokenizer, Template.load("codeact")) as outside:
            roles = replace(here.roles, outside=outside)
            return await run_episode(words.task(limits=LIMITS), 0, roles=roles, settings=here.settings, seed=0)

    trajectory = run(asyncio.wait_for(play(), 150))
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 1.0), trajectory.error
    assert [turn.tool_names for turn in trajectory.turns] == [("bash",), (), ("bash", "bash"), ("bash",)]
    assert words.BROKEN.splitlines()[1].strip() in trajectory.turns[0].observations[0]
    assert "all passed" in trajectory.turns[2].observations[1]
    assert trajectory.requests.num_answered == 4
    assert trajectory.requests.num_dropped_answers == 1  # it leaves answers without a command out; the record does not
    # The sampled tokens are the policy's, to the last one, and so are their log-probabilities.
    said = [tokenizer.encode(turn if isinstance(turn, str) else render_calls(turn)) for turn in SCRIPT]
    said = [[*tokens, tokenizer.end_of_turn_id] for tokens in said]
    assert trajectory.tokens[trajectory.sampled].tolist() == [token for tokens in said for token in tokens]
    logprobs = [-1.0 / (3 + i) for tokens in said for i in range(len(tokens))]
    assert np.allclose(trajectory.behaviour_logprobs[trajectory.sampled], logprobs, rtol=1e-7)
    assert (trajectory.behaviour_logprobs[~trajectory.sampled] == 0).all()
    # And the whole is one conversation in the policy's own format, each part of it once.
    text = tokenizer.decode(trajectory.tokens.tolist())
    assert text.count("<|im_start|>assistant\n") == 4
    assert text.count(words.task().problem_statement) == 1
    assert text.index("Please solve this issue") < text.index(NOTHING) < text.index("Tool call error")
