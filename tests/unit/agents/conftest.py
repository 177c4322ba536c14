"""One event loop, one pool of real sandboxes, and a fresh sandbox per test."""

import asyncio
from importlib import resources

import pytest

from swerve.rendering import ConversationRenderer, Template, Tokenizer, ToolCall
from swerve.sandboxes import SandboxImage, SandboxPool


@pytest.fixture(scope="session")
def run():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def pool(run):
    pool = SandboxPool([SandboxImage(name="plain")])
    yield pool
    run(pool.close())


@pytest.fixture
def sandbox(run, pool):
    sandbox = run(pool.start("plain"))
    yield sandbox
    run(sandbox.close())


@pytest.fixture
def do(run, toolbox):
    """Has the test file's toolbox run a call; returns the observation."""

    def do(name, **arguments):
        return run(toolbox.run(ToolCall(name=name, arguments=arguments)))

    return do


@pytest.fixture(scope="session")
def renderer() -> ConversationRenderer:
    with resources.as_file(resources.files("swerve") / "policies" / "tiny") as directory:
        return ConversationRenderer(Tokenizer.load(directory), Template.load("tiny_repair"))
