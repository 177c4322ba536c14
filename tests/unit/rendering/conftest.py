from importlib import resources

import pytest
from hypothesis import settings

from swerve.rendering import ConversationRenderer, Template, Tokenizer

# A machine that is busy with other tests is no reason to fail.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    with resources.as_file(resources.files("swerve") / "policies" / "tiny") as directory:
        return Tokenizer.load(directory)


@pytest.fixture(scope="session")
def renderer(tokenizer: Tokenizer) -> ConversationRenderer:
    return ConversationRenderer(tokenizer, Template.load("tiny_repair"))
