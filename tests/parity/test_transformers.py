"""Our model against `transformers`' own: each comparison of `compare.py` within its limit."""

import pytest

from .cases import CASES
from .compare import cached_decoding, in_bfloat16, whole_rows


@pytest.mark.parametrize("case", CASES)
def test_logits_log_probs_gradients_and_padding_agree(case: str) -> None:
    rows = list(whole_rows(case))
    assert [row for row in rows if not row.found <= row.limit] == []
    assert {row.what for row in rows} == {
        "logits", "logits, left", "logits, right", "log-probabilities", "loss", "gradients"
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_cached_decoding_agrees(case: str) -> None:
    (row,) = cached_decoding(case)
    assert row.found <= row.limit


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_is_as_close_to_the_exact_result_as_theirs(case: str) -> None:
    rows = list(in_bfloat16(case))
    assert [row for row in rows if not row.found <= row.limit] == []
    assert len(rows) == 2
