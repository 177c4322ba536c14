"""The site file is read as strictly as a recipe, and no secret is in it or repeated from it."""

from pathlib import Path

import pytest

from swerve.launch import Site, read_site
from swerve.launch.site import find_site
from swerve.types import SwerveError

DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[slurm]\npartitoin = "x"', "slurm.partitoin is unknown; did you mean slurm.partition?"),
        ("[slurm]\nnodes = 0", "slurm.nodes = 0 must be an integer at least 1"),
        ('[slurm]\ntime = "2h"', 'slurm.time = "2h" must be [D-]HH:MM[:SS]'),
        ('[slurm]\naccount = "a b"', "slurm.account"),
        ('[paths]\nruns = "runs"', 'paths.runs = "runs" must be absolute'),
        ('[paths]\nwork = "/a/%j"', "paths.work"),
        ('[container]\nruntime = "apptainer"', "container.image is missing"),
        ('[container]\nimage = "a@sha256:12"', "container.image"),
        ('[container]\nbinds = ["/a"]', "container.binds"),
        ('[environment]\ninherit = ["HF_TOKEN=abc"]', "environment.inherit"),
        ('[environment]\nvalues = ["HF_TOKEN"]', "write NAME=VALUE"),
        ('[environment]\ninherit = ["A"]\nvalues = ["A=1"]', "environment.values"),
        ('[slurmm]\nx = 1', "slurmm is unknown"),
    ],
)  # fmt: skip
def test_a_fault_names_file_and_key(tmp_path, text, complaint):
    path = tmp_path / "site.toml"
    path.write_text(text)
    with pytest.raises(SwerveError) as caught:
        read_site(path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{path}: ")
    assert complaint in line


def test_a_secret_written_down_is_refused_and_not_repeated(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text('[environment]\nvalues = ["HF_TOKEN=hf_abc"]')
    with pytest.raises(SwerveError, match=r"environment.values holds HF_TOKEN") as caught:
        read_site(path)
    assert "hf_abc" not in str(caught.value)


def test_what_is_left_out_is_left_to_others(tmp_path):
    assert read_site(None) == Site()
    with pytest.raises(SwerveError, match="no such site file"):
        read_site(tmp_path / "none.toml")


def test_the_default_file_counts_where_there_is_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_site(None) is None
    (tmp_path / "swerve").mkdir()
    (tmp_path / "swerve" / "site.toml").write_text("")
    assert find_site(None) == tmp_path / "swerve" / "site.toml"
    assert find_site(tmp_path / "own.toml") == tmp_path / "own.toml"


def test_an_image_is_pinned_by_digest_only(tmp_path):
    path = tmp_path / "site.toml"
    for image, pinned in (("docker://a/b:1", False), (f"docker://a/b:1@sha256:{DIGEST}", True)):
        path.write_text(f'[container]\nruntime = "apptainer"\nimage = "{image}"')
        assert read_site(path).container.pinned == pinned


def test_the_example_in_the_documentation_reads(tmp_path):
    page = (Path(__file__).resolve().parents[3] / "docs" / "launch.md").read_text()
    block = page[page.index('    recipe = "recipes') : page.index("A scored run is refused an image")]
    path = tmp_path / "site.toml"
    path.write_text(block.replace("sha256:...", f"sha256:{DIGEST}", 1))
    site = read_site(path)
    assert site.slurm.gres == "tpu:8"
    assert site.container.pinned
