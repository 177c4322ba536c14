"""A real vLLM samples for Swerve, on this machine's processor; `make vllm` installs it.

It serves random weights of the policy's family whose Gated DeltaNet heads are 128 wide, as its kernels for CPUs want
them, in bfloat16: trainer and server agree to that type's rounding.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.cli.composition import LoadedPolicy, save_policy
from swerve.config.directories import TINY_POLICY
from swerve.config.schema import Engine
from swerve.engine import EngineError, VllmEngine
from swerve.engine.remote_http import HttpClient
from swerve.engine.remote_process import ServerProcess
from swerve.engine.remote_server import VllmServer
from swerve.models.hf import read_config
from swerve.rendering import Tokenizer
from swerve.telemetry import read_trajectories
from swerve.types import Completion, FinishReason, SamplingParams, SwerveError, WeightsVersion
from swerve.weights import WeightsError, WeightsPublisher

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"NOT TESTED: no {PYTHON}: run make vllm"),
]

CONTEXT = 1024
TOLERANCE = 0.05
"""Nats by which bfloat16 may move one log-probability of these models; other weights move some by far more."""
LOAD_S = 400.0
SETTINGS = "OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1"
RAW = (
    f"env {SETTINGS} HF_HUB_OFFLINE=1 {PYTHON} -m vllm.entrypoints.openai.api_server --model {{weights}} "
    f"--host {{host}} --port {{port}} --enable-scale-out --enforce-eager --dtype bfloat16 "
    f"--max-model-len {CONTEXT} --max-num-seqs 16 --no-enable-prefix-caching --max-num-batched-tokens {2 * CONTEXT}"
)
"""On a CPU the server dies of a prompt that it reads in parts if the request has a seed: it is to read each at once."""
COMMAND = f"{RAW} --logprobs-mode processed_logprobs"
TEXT = "def add(a, b):\n    return a - b\n\n\ndef mean(xs):\n    return add(*xs) / len(xs)\n"


def wide_policy(seed: int, num_active: int = 8) -> LoadedPolicy:
    """A policy of random weights, with the shipped one's tokenizer.

    Where a token visits some experts only, bfloat16 now and then sends it to another one, which moves it by tenths.
    """
    tokenizer = Tokenizer.load(TINY_POLICY)
    config = dataclasses.replace(
        read_config(TINY_POLICY),
        head_dim=64,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        num_experts=8,
        num_experts_per_tok=num_active,
    )
    params = models.initialise(config, jax.random.key(seed))
    return LoadedPolicy(directory=TINY_POLICY, config=config, params=params, tokenizer=tokenizer)


@pytest.fixture
def url() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def make_engine(policy: LoadedPolicy, url: str, directory: Path, **settings: Any) -> VllmEngine:
    section = Engine(
        kind="vllm",
        urls=(url,),
        weights_directory=str(directory),
        load_timeout_s=LOAD_S,
        **{"command": COMMAND, **settings},
    )
    return VllmEngine(
        section,
        lambda path, params: save_policy(path, policy, params),
        policy.params,
        num_slots=8,
        context_length=CONTEXT,
        end_of_turn_id=policy.tokenizer.end_of_turn_id,
        sample_tokens=policy.tokenizer.encode_content(TEXT),
    )


def publisher(engine: VllmEngine, scored: LoadedPolicy, tokens: list[int]) -> WeightsPublisher:
    return WeightsPublisher(
        engine,
        score=lambda tokens: models.score_tokens(scored.params, scored.config, tokens),
        probe_tokens=tokens,
        tolerance=TOLERANCE,
        digests=False,
    )


def scaled_logprobs(policy: LoadedPolicy, tokens: list[int], temperature: float) -> np.ndarray:
    """The trainer's log-probabilities of a conversation."""
    row = jnp.asarray(tokens, jnp.int32)[None]
    segments, positions = jnp.ones_like(row), jnp.arange(row.shape[1])[None]
    hidden = models.forward(policy.params, policy.config, row, segments, positions).hidden
    return np.asarray(models.token_logprobs(policy.params, policy.config, hidden, row, segments, temperature)[0][0])


async def converse(engine: VllmEngine, prompt: list[int], temperature: float, seed: int) -> tuple[list[int], Any]:
    """Two turns; the whole conversation, and its completions with the place where each begins."""
    session = await engine.open(f"conversation {seed}", seed)
    sampling = SamplingParams(temperature=temperature, max_new_tokens=24)
    turns: list[tuple[int, Completion]] = []
    for new in (prompt, prompt[:5]):
        begin = len(session.tokens) + len(new)
        turns.append((begin, await session.generate(new, sampling)))
    session.close()
    return session.tokens, turns


def test_tokens_are_sampled_as_the_trainer_scores_them_and_reloads_of_experts_are_caught(
    url: str, tmp_path: Path
) -> None:
    policy = wide_policy(0)
    prompt = list(policy.tokenizer.encode_content(TEXT))
    engine = make_engine(policy, url, tmp_path)
    try:
        engine.warmup()
        publisher(engine, policy, prompt).check(WeightsVersion(number=0))

        async def several() -> Any:
            return await asyncio.gather(*(converse(engine, prompt, (1.0, 0.5)[i % 2], i) for i in range(6)))

        gaps = []
        for index, (tokens, turns) in enumerate(asyncio.run(several())):
            scores = scaled_logprobs(policy, tokens, (1.0, 0.5)[index % 2])
            for begin, turn in turns:
                assert turn.tokens == tuple(tokens[begin : begin + len(turn.tokens)])
                gaps.append(np.abs(scores[begin : begin + len(turn.tokens)] - turn.logprobs))
        assert float(np.concatenate(gaps).mean()) < TOLERANCE / 2
        assert float(np.concatenate(gaps).max()) < 2 * TOLERANCE
        asyncio.run(_aborts(engine, prompt))
        # The kernels for CPUs mix up experts whose weights are loaded anew: every answer is 200, and the weights wrong.
        with pytest.raises(WeightsError, match="serves other weights"):
            publisher(engine, policy, prompt).publish(policy.params, 1)
        asyncio.run(_dies(engine, prompt))
    finally:
        engine.shutdown()


async def _aborts(engine: VllmEngine, prompt: list[int]) -> None:
    session = await engine.open("aborted", 1)
    asyncio.get_running_loop().call_later(1.5, session.abort)
    answer = await session.generate(prompt, SamplingParams(temperature=1.0, max_new_tokens=900))
    assert answer.finish_reason is FinishReason.ABORT
    assert 0 < len(answer.tokens) < 900
    assert len(answer.tokens) == len(answer.logprobs)
    assert (await session.generate(prompt[:3], SamplingParams(temperature=1.0, max_new_tokens=4))).tokens
    session.close()


async def _dies(engine: VllmEngine, prompt: list[int]) -> None:
    (process,) = [one._process for one in engine._processes.values()]
    assert process is not None
    session = await engine.open("doomed", 1)
    asyncio.get_running_loop().call_later(1.0, os.killpg, process.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(EngineError, match=session.url):
        await session.generate(prompt, SamplingParams(temperature=1.0, max_new_tokens=900))
    assert time.monotonic() - began < 10
    session.close()


def test_a_restart_serves_the_new_weights(url: str, tmp_path: Path) -> None:
    first, second = wide_policy(0), wide_policy(1)
    prompt = list(first.tokenizer.encode_content(TEXT))
    engine = make_engine(first, url, tmp_path, refit="restart")
    try:
        engine.warmup()
        before = asyncio.run(converse(engine, prompt, 1.0, 1))[1]
        publisher(engine, second, prompt).publish(second.params, 1)
        after = asyncio.run(converse(engine, prompt, 1.0, 1))[1]
        assert before[0][1].tokens != after[0][1].tokens
        assert [turn.weights_version for _, turn in (*before, *after)] == [0, 0, 1, 1]
    finally:
        engine.shutdown()
    assert not list(tmp_path.glob("version_*"))
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 1):
        pass


def test_log_probabilities_before_the_temperature_are_refused(url: str, tmp_path: Path) -> None:
    engine = make_engine(wide_policy(0), url, tmp_path, command=RAW)
    try:
        with pytest.raises(SwerveError, match="start it with --logprobs-mode processed_logprobs"):
            engine.warmup()
    finally:
        engine.shutdown()


DENSE = """
import sys, torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
for path, seed in zip(sys.argv[2:], (0, 1)):
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=int(sys.argv[1]), hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128,
        linear_value_head_dim=128, max_position_embeddings=4096,
    )
    Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
"""


def test_a_running_server_reloads_a_model_without_experts(url: str, tmp_path: Path) -> None:
    policy = wide_policy(0)
    prompt = list(policy.tokenizer.encode_content(TEXT))
    files = [tmp_path / "a", tmp_path / "b"]
    subprocess.run([PYTHON, "-c", DENSE, str(policy.tokenizer.vocab_size), *map(str, files)], check=True)
    for path in files:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (path / name).write_bytes((TINY_POLICY / name).read_bytes())
    client = HttpClient(url, 120.0)
    process = ServerProcess(COMMAND, client, tmp_path / "log", LOAD_S)
    server = VllmServer(client, model="", end_of_turn_id=policy.tokenizer.end_of_turn_id, load_timeout_s=LOAD_S)
    try:
        process.start(files[0])
        server.examine(prompt, CONTEXT)
        answers = [server.probe(prompt)]
        for label, path in (("1", files[1]), ("2", files[0])):
            server.reload(path)
            server.name_weights(label)
            answers.append(server.probe(prompt))
        process.stop()
        process.start(files[1])
        server.examine(prompt, CONTEXT)
        cold = server.probe(prompt)
    finally:
        process.stop()
    np.testing.assert_allclose(answers[2], answers[0], atol=TOLERANCE / 2)
    np.testing.assert_allclose(answers[1], cold, atol=TOLERANCE / 2)
    assert np.abs(answers[1] - answers[0]).max() > 4 * TOLERANCE


def test_swerve_trains_with_it(url: str, tmp_path: Path) -> None:
    policy = wide_policy(0, num_active=2)
    save_policy(tmp_path / "policy", policy, policy.params)
    recipe = tmp_path / "vllm.toml"
    recipe.write_text(
        f"""
kind = "train"
[run]
name = "run"
directory = "{tmp_path}"
[policy]
checkpoint = "{tmp_path / "policy"}"
[tasks]
family = "mini"
[agent]
max_turns = 2
episode_timeout_s = 300.0
[rollout]
prompts_per_step = 2
generations_per_prompt = 3
max_new_tokens = 16
context_length = {CONTEXT}
num_slots = 6
[engine]
kind = "vllm"
urls = ["{url}"]
command = {json.dumps(COMMAND)}
refit = "restart"
weights_directory = "{tmp_path / "weights"}"
load_timeout_s = {LOAD_S}
probe_tolerance = 0.6         # of a token that visits another expert
[algorithm]
max_logprob_gap = {TOLERANCE}
[optimizer]                # random weights earn nothing, and what moves them is their decay
learning_rate = 0.01
weight_decay = 5.0
[packing]
row_length = {CONTEXT}
[training]
num_steps = 2
[evaluation]
before = false
after = false
[telemetry]
progress = "plain"
""",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "swerve.cli", "train", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": "src"})
    assert done.returncode == 0, done.stderr
    assert "sampler and trainer agree to" in done.stderr
    versions: dict[int, set[int]] = {}
    for step, one in read_trajectories(tmp_path / "run" / "trajectories.jsonl"):
        assert one.status.is_valid_sample and one.num_sampled_tokens
        versions.setdefault(step, set()).update(one.weights_versions[one.sampled].tolist())
    assert versions == {1: {0}, 2: {1}}
    assert not list((tmp_path / "weights").glob("version_*"))
