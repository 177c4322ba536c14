"""The tokenizer of a policy: a Hugging Face `tokenizer.json`, read twice over so that data stays data.

Text that Swerve writes itself (roles, tags) may name special tokens. Text that comes from elsewhere (a problem
statement, a tool's output, a source file) may not: `encode_content` knows no special token, so that a file that
contains `<|im_end|>` cannot end a turn.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _HfTokenizer

from swerve.types import SwerveError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESPONSE_OPEN, RESPONSE_CLOSE = "<tool_response>", "</tool_response>"

SPECIAL_TOKENS: tuple[str, ...] = (
    END_OF_TEXT,
    TURN_START,
    TURN_END,
    THINK_OPEN,
    THINK_CLOSE,
    CALL_OPEN,
    CALL_CLOSE,
    RESPONSE_OPEN,
    RESPONSE_CLOSE,
)
"""Special tokens of the Qwen chat format, in the order of their ids in the shipped policy."""


class Tokenizer:
    """Text to token ids and back, for one `tokenizer.json`."""

    def __init__(self, serialized: str, *, source: str = "tokenizer.json") -> None:
        """Build from the text of a `tokenizer.json`.

        Args:
            serialized: The file's text.
            source: Named in errors.

        Raises:
            SwerveError: The text is no tokenizer, or lacks the tokens that end a turn or pad.
        """
        try:
            data: dict[str, Any] = json.loads(serialized)
            self._full = _HfTokenizer.from_str(serialized)
            self._plain = _HfTokenizer.from_str(json.dumps({**data, "added_tokens": []}))
        except Exception as error:
            raise SwerveError(
                f"{source}: not a tokenizer.json this version of `tokenizers` can read: {error}"
            ) from None
        self.sha256: str = hashlib.sha256(serialized.encode()).hexdigest()
        self._source = source
        self.end_of_turn_id: int = self.token_id(TURN_END)
        self.pad_id: int = self.token_id(END_OF_TEXT)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read `tokenizer.json` in `directory`.

        Raises:
            SwerveError: The file is missing or cannot be read as a tokenizer.
        """
        path = Path(directory) / "tokenizer.json"
        try:
            serialized = path.read_text(encoding="utf-8")
        except OSError as error:
            raise SwerveError(
                f"{path}: cannot read the tokenizer ({error.strerror}); a policy directory holds one"
            ) from None
        return cls(serialized, source=str(path))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return self._full.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int:
        """Id of one token.

        Raises:
            SwerveError: The vocabulary has no such token.
        """
        token_id = self._full.token_to_id(token)
        if token_id is None:
            raise SwerveError(f"{self._source}: the vocabulary lacks {token}; Swerve needs the Qwen chat tokens")
        return token_id

    def encode(self, text: str) -> list[int]:
        """Token ids of text in which special tokens are recognised."""
        return self._full.encode(text, add_special_tokens=False).ids

    def encode_content(self, text: str) -> list[int]:
        """Token ids of text from outside: what looks like a special token is spelt out in ordinary ones."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens kept; bytes that are no UTF-8 become U+FFFD."""
        return self._full.decode(list(ids), skip_special_tokens=False)

    def token_text(self, token_id: int) -> str:
        """Text of one token, for people to read."""
        return self.decode([token_id])
