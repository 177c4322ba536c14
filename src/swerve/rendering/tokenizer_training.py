"""Training the shipped policy's tokenizer: a byte-level BPE whose pre-tokens suit short edits of Python code.

What it wants, in order:

- The scaffolding of a tool call is one token between a name and a value, so that a call costs little more than what
  it says: `STRUCTURAL_TOKENS` enter the vocabulary whole and take no merges.
- A name has the same tokens wherever it stands. No blank is ever glued to an identifier, so what is copied into an
  edit are the very tokens of the source; blanks go with operators and with a closed set of short words instead.
- Identifiers fall apart at `_` and at camel case, digits are single, a newline holds the indentation that follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _HfTokenizer

from swerve.rendering.tokenizer import END_OF_TEXT, SPECIAL_TOKENS, TURN_END
from swerve.telemetry import write_atomic
from swerve.types import SwerveError

_FUNCTIONS: Mapping[str, tuple[str, ...]] = {
    "str_replace_editor": ("command",),
    "execute_bash": ("command",),
    "think": ("thought",),
}
_LATER_PARAMETERS = ("path", "old_str", "new_str", "file_text", "insert_line", "view_range")

STRUCTURAL_TOKENS: tuple[str, ...] = (
    *(f"\n<function={name}>\n<parameter={first}>\n" for name, (first, *_) in _FUNCTIONS.items()),
    "\n<function=finish>\n</function>\n",
    *(f"\n</parameter>\n<parameter={name}>\n" for name in _LATER_PARAMETERS),
    "\n</parameter>\n</function>\n",
)
"""Stretches of a tool call between names and values, each one token. They follow the merges in the id space."""

# Words that carry the blanks around them. None of them can be an identifier.
_SPACED_WORDS = (
    "and as assert def del elif else except for from if import in is lambda not or raise return the while with yield"
)

# What problem statements and test reports are made of.
_PHRASES = (r"Fix the function ", r" fails with ", r"all passed", r" FAILED ", r" (?:ok|failed)(?=\n|\z)")

_PATTERN = "|".join(
    (
        r"\A(?:system|user|assistant)\n",
        *_PHRASES,
        r"\A(?:view|create|str_replace|insert|undo_edit)\z",
        r"\./\w+",
        r"[a-z_]+\.py(?!\w)",
        r"\n+ *",
        rf" (?:{_SPACED_WORDS.replace(' ', '|')})(?!\w) ?",
        rf"(?<!\w)(?:{_SPACED_WORDS.replace(' ', '|')})(?!\w) ?",
        r"_*[A-Z]?[a-z]+",
        r"_*[A-Z]+(?![a-z])",
        r"_+",
        r"\d",
        r" ?[-+*/%=<>!&|^~@]+ ?",
        r"[,;:] ?",
        r"\(\)|\[\]|\{\}",
        r"[)\]}]+:?",
        r"[(\[{.\\]",
        r"[\"']+",
        r" +",
        r"\s",
        r"[^\w\s]",
        r"\w",
    )
)

_WHOLE = re.compile("|".join(re.escape(token) for token in (*STRUCTURAL_TOKENS, *SPECIAL_TOKENS)))


def new_tokenizer() -> _HfTokenizer:
    """A tokenizer without merges: the pre-tokenizer and the byte alphabet, ready to be trained."""
    tokenizer = _HfTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 1536, min_frequency: int = 2) -> str:
    """Train the tokenizer on texts; equal texts in equal order give equal bytes.

    Args:
        texts: Source code and rendered conversations, in the proportion the policy will see.
        vocab_size: Token ids in all: bytes, merges, special and structural tokens.
        min_frequency: A pair is merged only if it occurs at least this often.

    Returns:
        The text of `tokenizer.json`.

    Raises:
        SwerveError: The texts do not yield that many merges.
    """
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(STRUCTURAL_TOKENS),
        min_frequency=min_frequency,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_between_whole_tokens(texts), trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in STRUCTURAL_TOKENS])
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != vocab_size:
        raise SwerveError(
            f"the texts yield a vocabulary of {found} tokens, {vocab_size} were asked for: give more text"
        )
    return tokenizer.to_str(pretty=True)


def save_tokenizer(directory: Path, serialized: str, *, chat_template: str, context_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` in the layout Hugging Face tools read.

    Args:
        directory: Where the policy's files lie; made if missing.
        serialized: Text of `tokenizer.json`.
        chat_template: Text of the conversation's template.
        context_length: Tokens one conversation may hold.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_length,
        "chat_template": chat_template,
    }
    write_atomic(directory / "tokenizer.json", serialized)
    write_atomic(directory / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def _between_whole_tokens(texts: Iterable[str]) -> Iterator[str]:
    """The stretches between tokens that are never split; only these may become merges."""
    for text in texts:
        yield from filter(None, _WHOLE.split(text))
