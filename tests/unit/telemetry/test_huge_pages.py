"""A process that starts anew in huge pages: the same words, the same number, and nothing of it inherited."""

import json
import os
import subprocess
import sys

import pytest

from swerve.telemetry import has_huge_pages
from swerve.telemetry.resources import _offered

SCRIPT = """
import json, os, subprocess, sys
from swerve.telemetry import has_huge_pages, restart_with_huge_pages
restart_with_huge_pages()
child = subprocess.run(["env"], capture_output=True, text=True).stdout
print(json.dumps([os.getpid(), sys.argv[1:], has_huge_pages(), os.environ.get("GLIBC_TUNABLES"), "hugetlb" in child]))
"""


@pytest.mark.parametrize("given", [None, "glibc.malloc.check=0"])
def test_a_process_is_started_anew_once_and_passes_nothing_on(given: str | None) -> None:
    assert not has_huge_pages()  # this one was not
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if given:
        environment["GLIBC_TUNABLES"] = given
    words = [sys.executable, "-c", SCRIPT, "two words", "--option"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        told, _ = process.communicate(timeout=60)
    number, arguments, huge, tunables, inherited = json.loads(told)
    assert number == process.pid
    assert arguments == ["two words", "--option"]
    assert huge == _offered()
    assert tunables == given
    assert not inherited
