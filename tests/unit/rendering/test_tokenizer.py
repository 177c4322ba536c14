import json
import keyword
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.rendering import SPECIAL_TOKENS, Template, Tokenizer
from swerve.rendering.tokenizer_training import STRUCTURAL_TOKENS, save_tokenizer, train_tokenizer
from swerve.types import SwerveError

SOURCE = """def clamp(max_value, minValue, x2):
    if x2 >= max_value and not x2 == -1:
        return max_value

    return max(minValue, x2[0])"""


def test_the_shipped_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 1536
    assert [tokenizer.token_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.pad_id == 0
    assert tokenizer.token_text(tokenizer.end_of_turn_id) == "<|im_end|>"
    for token in (*SPECIAL_TOKENS, *STRUCTURAL_TOKENS):
        assert len(tokenizer.encode(token)) == 1
    for phrase in ("\n\n", "\n    ", "\n        ", "repair.py", "./run_tests", "str_replace", "undo_edit", " == "):
        assert len(tokenizer.encode_content(phrase)) == 1, phrase


def test_the_shipped_chat_template_is_the_recorded_one():
    config = json.loads((resources.files("swerve") / "policies" / "tiny" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == Template.load("tiny_repair").text
    assert (config["eos_token"], config["pad_token"]) == ("<|im_end|>", "<|endoftext|>")


@given(st.text(max_size=80))
def test_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode_content(text)) == text


@given(st.lists(st.sampled_from([*SPECIAL_TOKENS, *STRUCTURAL_TOKENS, "x", "\n", " "]), max_size=12).map("".join))
def test_content_cannot_speak_in_special_tokens(tokenizer, text):
    ids = tokenizer.encode_content(text)
    assert not set(ids) & {tokenizer.token_id(token) for token in SPECIAL_TOKENS}
    assert tokenizer.decode(ids) == text


def test_any_ids_can_be_decoded(tokenizer):
    assert "�" in tokenizer.decode(range(tokenizer.vocab_size))


NAMES = st.from_regex(r"[a-zA-Z_][a-zA-Z_0-9]{0,12}", fullmatch=True)
BEFORE = ["", " = ", "(", ", ", "\n    ", ".", " + ", "[", "-", "'"]


@given(NAMES, st.sampled_from(BEFORE), st.sampled_from(["", " = ", ")", ", ", ":", ".", "\n", " + "]))
def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer, name, before, after):
    if keyword.iskeyword(name) or name == "the":
        return
    ids = tokenizer.encode_content(name)
    whole = tokenizer.encode_content(before + name + after)
    start = len(tokenizer.encode_content(before))
    assert whole[start : start + len(ids)] == ids


def test_source_code_costs_about_what_was_planned(tokenizer):
    source = resources.files("swerve.rendering").joinpath("tool_calls.py").read_text()
    assert 2.2 < len(source) / len(tokenizer.encode_content(source)) < 4.0


def texts():
    for i in range(40):
        yield f"<|im_start|>user\n{SOURCE}{i}<|im_end|>\n"
        yield SOURCE.replace("max", "low").replace("value", "bound")


def test_training_is_repeatable_and_exact_in_size(tmp_path):
    size = 256 + len(SPECIAL_TOKENS) + len(STRUCTURAL_TOKENS) + 40
    serialized = train_tokenizer(texts(), vocab_size=size)
    assert serialized == train_tokenizer(texts(), vocab_size=size)
    save_tokenizer(tmp_path / "new", serialized, chat_template="{{ messages }}", context_length=512)
    tokenizer = Tokenizer.load(tmp_path / "new")
    assert tokenizer.vocab_size == size
    assert tokenizer.decode(tokenizer.encode(SOURCE)) == SOURCE
    with pytest.raises(SwerveError, match="give more text"):
        train_tokenizer(texts(), vocab_size=5000)


def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path):
    with pytest.raises(SwerveError, match=r"tokenizer\.json: cannot read"):
        Tokenizer.load(tmp_path)
    for text in ("{", "{}", "[]"):
        (tmp_path / "tokenizer.json").write_text(text)
        with pytest.raises(SwerveError, match=r"tokenizer\.json: not a tokenizer") as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)
