"""Diffs: made and applied in both directions, and refused where they do not fit."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.environments.patches import apply_patch, make_patch, patched_paths, whole_texts
from swerve.types import SwerveError

_LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "-- a\n", "+++ b\n", "@@\n", "\x0c\r\n", "end"]), max_size=8)
_TEXTS = st.builds(lambda lines: "".join(lines), _LINES)


@given(before=_TEXTS, after=_TEXTS)
def test_a_patch_leads_there_and_back(before: str, after: str) -> None:
    patch = make_patch({"x/y.py": before}, {"x/y.py": after})
    assert (patch == "") == (before == after)
    if patch:
        assert apply_patch({"x/y.py": before}, patch) == {"x/y.py": after}
        assert apply_patch({"x/y.py": after}, patch, reverse=True) == {"x/y.py": before}
        assert patched_paths(patch) == ["x/y.py"]


def test_files_come_and_go_and_git_agrees(tmp_path: Path) -> None:
    before = {"a.py": "1\n2\n3\n", "gone.py": "x\n", "same.py": "s\n"}
    after = {"a.py": "1\n2\n4", "new/b.py": "y\n", "same.py": "s\n"}
    patch = make_patch(before, after)
    assert apply_patch(before, patch) == {"a.py": "1\n2\n4", "gone.py": None, "new/b.py": "y\n"}
    assert apply_patch(after, patch, reverse=True) == {"a.py": "1\n2\n3\n", "gone.py": "x\n", "new/b.py": None}
    for path, text in before.items():
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    found = {str(path.relative_to(tmp_path)): path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == after


def test_empty_files_come_and_go(tmp_path: Path) -> None:
    before, after = {"gone.py": "", "same.py": ""}, {"come.py": "", "same.py": "x\n"}
    patch = make_patch(before, after)
    assert apply_patch(before, patch) == {"gone.py": None, "come.py": "", "same.py": "x\n"}
    assert apply_patch(after, patch, reverse=True) == {"gone.py": "", "come.py": None, "same.py": ""}
    for path, text in before.items():
        (tmp_path / path).write_text(text)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == after


@given(before=_TEXTS, after=_TEXTS)
def test_a_patch_of_whole_files_needs_no_files(before: str, after: str) -> None:
    patch = make_patch({"a": before, "b": None, "c": before}, {"a": after, "b": after, "c": None}, whole=True)
    assert whole_texts(patch) == ({} if before == after else {"a": after}) | {"b": after, "c": None}
    with pytest.raises(SwerveError, match="does not hold all of a"):
        whole_texts(make_patch({"a": "1\n" * 9 + "2\n"}, {"a": "1\n" * 9}))


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-other\n+x\n", "does not fit f at line 1"),
        ("--- a/f\n+++ b/f\n@@ -1 +1 @@\n-a\n", "other lines than it says"),
        ("--- a/f\n+++ b/f\n", "a file without a hunk"),
        ("--- a/f\n", "without its"),
        ("--- /dev/null\n+++ /dev/null\n@@ -1 +1 @@\n-a\n+b\n", "names no file"),
        ("--- a/g\n+++ b/g\n@@ -1 +1 @@\n-a\n+x\n", "about g, which is not there"),
        ("words", "not a unified diff"),
    ],
)
def test_what_does_not_fit_is_refused(patch: str, message: str) -> None:
    with pytest.raises(SwerveError, match=message):
        apply_patch({"f": "a\n"}, patch)
