"""Reinforcement learning of the shipped policy on generated repairs, on the public API, in one readable piece.

    python examples/grpo_tiny.py [number of steps]

What `swerve train` adds: evaluation on all held-out tasks, checkpoints and exact resume, metrics, progress, settings.
"""

import asyncio
import sys

from swerve.config import TINY_POLICY
from swerve.config.schema import Algorithm, Optimizer
from swerve.engine import EmbeddedEngine
from swerve.environments import Grader, load_split, shipped_file
from swerve.environments.mini import MiniEnvironment
from swerve.evaluation import evaluate
from swerve.models import load_hf
from swerve.rendering import ConversationRenderer, Template, Tokenizer
from swerve.rollout import EpisodeRoles, EpisodeSettings, collect
from swerve.sandboxes import SandboxPool
from swerve.trainer import GrpoTrainer, check_gap, make_group
from swerve.types import Limits, SamplingParams
from swerve.weights import WeightsPublisher

PROMPTS, ATTEMPTS, CONTEXT = 4, 4, 512


async def main(num_steps: int) -> list[float]:
    # The policy: a small Qwen3.5-style hybrid, its weights and its tokenizer.
    tokenizer = Tokenizer.load(TINY_POLICY)
    config, params = load_hf(TINY_POLICY)
    train, validation = load_split(shipped_file("mini", "train"), shipped_file("mini", "validation"))

    # Who samples, and who learns. They share the model's code and nothing else.
    engine = EmbeddedEngine(
        config,
        params,
        num_slots=PROMPTS * ATTEMPTS,
        context_length=CONTEXT,
        end_of_turn_id=tokenizer.end_of_turn_id,
        pad_id=tokenizer.pad_id,
    )
    engine.warmup()  # compiles, so that no episode's time runs meanwhile
    trainer = GrpoTrainer(
        config,
        params,
        algorithm=Algorithm(),
        optimizer=Optimizer(eps=1.0),
        context_length=CONTEXT,
        row_length=CONTEXT,
        rows_per_micro_batch=4,
    )
    probe = tokenizer.encode_content(train[0].problem_statement)
    publisher = WeightsPublisher(engine, score=trainer.token_logprobs, probe_tokens=probe)

    # Where episodes happen: a sandbox each, and a fresh one for the hidden tests.
    environment = MiniEnvironment()
    settings = EpisodeSettings(sampling=SamplingParams(temperature=1.0), limits=Limits(max_turns=6))
    rewards: list[float] = []
    async with SandboxPool(environment.images()) as pool:
        roles = EpisodeRoles(
            policy=engine,
            pool=pool,
            environment=environment,
            grader=Grader(pool, environment),
            renderer=ConversationRenderer(tokenizer, Template.load("tiny_repair")),
        )
        for step in range(1, num_steps + 1):
            # 1. Every task gets several attempts. 2. Attempts are compared within their group.
            first = (step - 1) * PROMPTS
            chosen = train[first : first + PROMPTS]
            attempts = await collect(chosen, ATTEMPTS, roles=roles, settings=settings, seed=0, step=step)
            batch = trainer.prepare([make_group(group) for group in attempts])
            if step == 1:
                check_gap(trainer.sampler_trainer_gap([one for group in attempts for one in group]), limit=1e-3)
            # 3. One forward and backward pass, one update. 4. The sampler gets the new weights, and proves it.
            stats = trainer.step(batch, learning_rate=0.5)
            publisher.publish(trainer.params, trainer.version)
            rewards.append(stats.batch.reward_mean)
            print(f"step {step}: reward {rewards[-1]:.3f}  loss {stats.loss:+.4f}  grad norm {stats.grad_norm:.3f}")
        report = await evaluate(validation[:4], ATTEMPTS, roles=roles, settings=settings, seed=1)
        print(f"4 held-out tasks: pass@1 {report.pass_at(1):.2f}, pass@4 {report.pass_at(4):.2f}")
    engine.shutdown()
    return rewards


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10))
