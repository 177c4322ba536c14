"""Every fault that the documentation says is held by a test is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_every_test_named_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "faults.md").read_text())
    assert len(named) > 30
    missing = []
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text()) if (ROOT / path).is_file() else ast.Module([], [])
        if name not in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}:
            missing.append(f"{path}::{name}")
    assert missing == []
