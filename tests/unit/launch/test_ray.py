"""Jobs for a Ray cluster: what is submitted, and what is refused."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from swerve.launch import Launch, Request, plan, read_site
from swerve.launch.ray import RayLauncher
from swerve.types import MachineError, SwerveError

RECIPE = Path(__file__).parents[3] / "recipes" / "demo.toml"
ADDRESS = "http://127.0.0.1:8265"
Make = Callable[..., Launch]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Launches of two jobs on a site with the lines given."""

    def build(*lines: str, address: str = ADDRESS) -> Launch:
        file = tmp_path / "site.toml"
        file.write_text("\n".join([f'paths.work = "{tmp_path}"', *lines, ""]))
        site = read_site(file, {"ray.address": address})
        request = Request(
            launcher="ray", site=site, site_file=file, recipe=RECIPE, replicas=2, seed_base=7, name="night"
        )
        return plan(request)

    return build


def test_the_entrypoint_runs_the_job(make: Make, tmp_path: Path):
    files = RayLauncher().files(make('paths.python = "/opt/swerve/venv/bin/python"'))
    assert set(files) == {"1/job.sh", "2/job.sh"}
    assert f"folder={tmp_path}/jobs/night/2\n" in files["2/job.sh"]
    assert files["2/job.sh"].endswith('exec /opt/swerve/venv/bin/python -m swerve.cli launch run "$folder"\n')


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('environment.inherit = ["HF_TOKEN"]', "the dashboard would show the value of HF_TOKEN"),
        ('container = {runtime = "apptainer", image = "/i.sif"}', "jobs run as the nodes of the cluster do"),
    ],
)
def test_what_ray_cannot_do_is_refused(make: Make, line: str, told: str):
    with pytest.raises(SwerveError, match=told):
        RayLauncher().files(make(line))


def test_an_address_is_needed_and_is_one(make: Make):
    with pytest.raises(SwerveError, match=r"ray\.address is missing: give --address"):
        RayLauncher().files(make(address=""))
    with pytest.raises(SwerveError, match="without a user or a password"):
        make(address="http://me:secret@head:8265")
    with pytest.raises(SwerveError, match="write NAME=AMOUNT"):
        make('ray.resources = ["TPU:4"]')


def test_without_ray_the_remedy_is_named(make: Make, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MachineError, match=r"pip install 'swerve\[ray\]'"):
        RayLauncher().check(make())
