from importlib import resources

import pytest

from swerve.rendering import ConversationRenderer, Template, Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with resources.as_file(resources.files("swerve") / "policies" / "tiny") as directory:
        return Tokenizer.load(directory)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ConversationRenderer:
    return ConversationRenderer(tokenizer, Template.load("tiny_repair"))
