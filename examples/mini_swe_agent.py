"""mini-swe-agent as the agent of Swerve's episodes: `agent.command` of a recipe names this file.

    .venv-mini-swe-agent/bin/python examples/mini_swe_agent.py {task_file}

Its own default agent, its own Docker environment, its own OpenAI client: Swerve gives it a policy to ask, recorded
token by token, and a `docker` that leads into the episode's sandbox. `make mini-swe-agent` installs it.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it is fetched from the network

import yaml
from minisweagent import package_dir  # pyright: ignore[reportMissingImports]
from minisweagent.agents.default import DefaultAgent  # pyright: ignore[reportMissingImports]
from minisweagent.environments.docker import DockerEnvironment  # pyright: ignore[reportMissingImports]
from minisweagent.models.litellm_model import LitellmModel  # pyright: ignore[reportMissingImports]

SPARE_S = 10.0
"""Swerve's limit of a command comes first: it says what happened, and kills everything."""


def main(task_file: str) -> None:
    """Play one episode."""
    task = json.loads(Path(task_file).read_text())
    config = yaml.safe_load((package_dir / "config" / "mini.yaml").read_text())
    environment = DockerEnvironment(
        executable=os.environ["SWERVE_DOCKER"],
        image=task["image"],
        cwd=task["workdir"],
        timeout=int(task["command_timeout_s"] + SPARE_S),
        env=config["environment"]["env"],
    )
    model = LitellmModel(
        model_name=f"openai/{task['model']}",
        model_kwargs={"api_base": os.environ["OPENAI_BASE_URL"]},
        observation_template=config["model"]["observation_template"],
        format_error_template=config["model"]["format_error_template"],
        cost_tracking="ignore_errors",
    )
    agent = DefaultAgent(
        model,
        environment,
        system_template=config["agent"]["system_template"],
        instance_template=config["agent"]["instance_template"],
        cost_limit=0.0,
        max_consecutive_format_errors=0,
    )
    agent.run(task["problem_statement"])


if __name__ == "__main__":
    main(sys.argv[1])
