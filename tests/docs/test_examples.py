"""The examples run as they are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(600)
def test_grpo_tiny_trains_a_step():
    script = EXAMPLES / "grpo_tiny.py"
    assert len(script.read_text().splitlines()) < 150
    done = subprocess.run([sys.executable, str(script), "1"], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^step 1: reward [01]\.\d+ ", done.stdout, re.M), done.stdout
    assert "held-out tasks: pass@1" in done.stdout
