"""What a run says of where its numbers come from: every input by digest, and no secret."""

import hashlib
import json
import re
from pathlib import Path

import pytest

from swerve.config import TrainRecipe, digest
from swerve.config.schema import Run
from swerve.telemetry import collect_provenance, folder_facts, provenance
from swerve.types import MachineError

ROOT = Path(__file__).parents[3]


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def test_it_names_what_ran_and_no_secret(monkeypatch):
    monkeypatch.setenv("SWERVE_TEST_TOKEN", "hunter2")
    facts = collect_provenance(["swerve", "serve", "--url", "https://me:hunter2@example.org/x"])
    text = json.dumps(facts)
    assert "hunter2" not in text
    assert "https://***@example.org/x" in text
    assert {"numpy", "pytest"} <= set(facts["packages"])  # pyright: ignore[reportArgumentType]
    assert facts["host"]["num_cores"] >= 1  # pyright: ignore[reportIndexIssue]


def test_source_lock_packages_and_recipe_are_told_by_digest():
    recipe = TrainRecipe()
    facts = collect_provenance([], recipe=recipe, inputs={"tasks": "x"})
    assert facts["recipe_sha256"] == digest(recipe)
    assert facts["recipe_sha256"] != collect_provenance([], recipe=TrainRecipe(run=Run(seed=1)))["recipe_sha256"]
    assert facts["inputs"] == {"tasks": "x"}
    assert facts["lock_sha256"] == sha256((ROOT / "requirements.lock").read_bytes())
    packages = facts["packages"]
    lines = [f"{name}=={version}\n" for name, version in sorted(packages.items())]  # pyright: ignore[reportAttributeAccessIssue]
    assert facts["packages_sha256"] == sha256("".join(lines).encode())
    assert provenance.packages_digest({"b": "1", "a": "2"}) == provenance.packages_digest({"a": "2", "b": "1"})
    if (ROOT / ".git").exists():
        assert re.fullmatch("[0-9a-f]{40}", facts["source"]["commit"])  # pyright: ignore[reportIndexIssue]


def test_outside_of_a_checkout_an_image_says_what_it_was_built_from(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_ROOT", tmp_path)
    assert provenance.lock_digest() is None
    assert provenance.source_revision() == {"commit": "", "dirty": False}
    image = tmp_path / "provenance.json"
    assert provenance.container_facts(image) is None
    said = {"source_commit": "0" * 40, "base_image": "python@sha256:1", "locks": {"requirements.lock": "2"}}
    image.write_text(json.dumps(said))
    monkeypatch.setattr(provenance, "CONTAINER", image)
    container = provenance.container_facts(image)
    assert container == said
    assert provenance.source_revision(container) == {"commit": "0" * 40, "dirty": False}


@pytest.mark.parametrize(("text", "fault"), [("{", "cannot be read: Expecting"), ("[1]", "no JSON object")])
def test_an_image_that_says_nothing_readable_is_the_machines_fault(tmp_path, text, fault):
    path = tmp_path / "provenance.json"
    path.write_text(text)
    with pytest.raises(MachineError, match=rf"provenance\.json: {fault}.*: build the image again"):
        provenance.container_facts(path)


def test_files_of_a_folder_are_told_by_digest_and_large_ones_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "SMALL_FILE_BYTES", 4)
    (tmp_path / "b.json").write_bytes(b"1234")
    (tmp_path / "a.safetensors").write_bytes(b"12345")
    (tmp_path / "folder").mkdir()
    assert folder_facts(tmp_path) == {
        "a.safetensors": {"bytes": 5},
        "b.json": {"bytes": 4, "sha256": sha256(b"1234")},
    }
