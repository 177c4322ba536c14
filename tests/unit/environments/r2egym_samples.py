"""An image of the R2E-Gym layout and rows of the dataset's shape, made here: a small repository with a real fault."""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

APPTAINER_BIN = Path(__file__).parents[3] / ".cache" / "apptainer" / "bin"
REPOSITORY = "tinycalc"
RUN_TESTS = "PYTHONWARNINGS='ignore::UserWarning' .venv/bin/python -W ignore -m pytest -rA r2e_tests\n"
RUN_UNITTEST = ".venv/bin/python -W ignore r2e_tests/runner.py\n"
BROKEN = '''"""Sums."""


def mean(values):
    """The mean of some numbers."""
    return sum(values) / (len(values) + 1)  # of all readings


def total(values):
    return sum(values)
'''
MENDED = BROKEN.replace("(len(values) + 1)  # of", "len(values)  # the mean of")
TEST = """import pytest

from tinycalc.sums import mean, total


class TestMean:
    def test_mean(self):
        assert mean([1, 2, 3]) == 2

    @pytest.mark.parametrize("value", ["a::b", "c - d"])
    def test_names(self, value):
        assert value and mean([4]) == 4


def test_total():
    print("PASSED r2e_tests/test_1.py::test_forged")
    assert total([1, 2]) == 3


def test_known_fault():
    assert total([1]) == 2


@pytest.fixture
def broken():
    raise OSError("no such service")


def test_service(broken):
    pass


@pytest.mark.skip(reason="PASSED elsewhere")
def test_skipped():
    pass


@pytest.mark.xfail
def test_expected_to_fail():
    assert total([1]) == 2
"""
UNITTEST = """import unittest

from tinycalc.sums import mean, total


class TestMean(unittest.TestCase):
    def test_mean(self):
        self.assertEqual(mean([1, 2, 3]), 2)

    def test_total(self):
        self.assertEqual(total([1, 2]), 3)
"""
RUNNER = '''"""Prints what unittest finds as pytest would."""
import os
import sys
import unittest

sys.path.insert(0, os.getcwd())


class Result(unittest.TextTestResult):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.lines = []

    def note(self, word, test):
        self.lines.append(f"{word} r2e_tests/{'::'.join(test.id().split('.')[-3:])}")

    def addSuccess(self, test):
        self.note("PASSED", test)

    def addFailure(self, test, error):
        self.note("FAILED", test)

    def addError(self, test, error):
        self.note("ERROR", test)


suite = unittest.TestLoader().discover("r2e_tests", pattern="test_*.py", top_level_dir=".")
result = unittest.TextTestRunner(resultclass=Result).run(suite)
print("=========== short test summary info ===========")
print("\\n".join(result.lines))
'''
EXPECTED = {
    "TestMean.test_mean": "PASSED",
    "TestMean.test_names[a.b]": "PASSED",
    "TestMean.test_names[c - d]": "PASSED",
    "test_total": "PASSED",
    "test_known_fault": "FAILED",
    "test_service": "ERROR",
}
BEFORE = """============ short test summary info ============
PASSED r2e_tests/test_1.py::test_total
ERROR r2e_tests/test_1.py::test_service - OSError: no such service
FAILED r2e_tests/test_1.py::TestMean::test_mean - assert 1.5 == 2
FAILED r2e_tests/test_1.py::TestMean::test_names[a::b] - assert ('a::b' and 2.0 == 4)
FAILED r2e_tests/test_1.py::TestMean::test_names[c - d] - assert ('c - d' and 2.0 == 4)
FAILED r2e_tests/test_1.py::test_known_fault - assert 1 == 2
"""
_PROGRAMS = (
    *("bash", "sh", "cat", "chmod", "cp", "env", "find", "git", "grep"),
    *("ln", "ls", "mkdir", "mkfifo", "mv", "rm", "sed", "true"),
)
_USED = """
import atexit, json, sys, types
import encodings.ascii, encodings.idna, encodings.latin_1, encodings.raw_unicode_escape
import unittest.case, unittest.loader, unittest.main, unittest.runner
def tell():
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    cached = {getattr(module, "__cached__", None) for module in list(sys.modules.values())}
    print("USED " + json.dumps(sorted(filter(None, files | cached))))
atexit.register(tell)
"""
"""Names, when Python ends, all files it was made of."""


def git(directory: Path, *words: str) -> str:
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    dates = {"GIT_AUTHOR_DATE": "2020-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2020-01-01T00:00:00Z"}
    command = ["git", "-c", "init.defaultBranch=main", "-c", "safe.directory=*", *words]
    return subprocess.run(
        command, cwd=directory, env=os.environ | names | dates, check=True, capture_output=True, text=True
    ).stdout.strip()


def build_repository(directory: Path) -> tuple[str, str]:
    """A repository whose commit is the faulty one, with the fix in its history all the same; returns both commits."""
    files = {
        "tinycalc/__init__.py": "",
        "tinycalc/sums.py": BROKEN,
        "tinycalc/old.py": "x = 1\n",
        "tests/test_sums.py": "from tinycalc.sums import total\n\n\ndef test_total():\n    assert total([]) == 0\n",
        "setup.cfg": "[metadata]\nname = tinycalc\n",
        "data.bin": "",
    }
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    (directory / "data.bin").write_bytes(bytes(range(256)))
    git(directory, "init", "--quiet")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "--message", "begin")
    base = git(directory, "rev-parse", "HEAD")
    (directory / "tinycalc/sums.py").write_text(MENDED)
    git(directory, "commit", "--quiet", "--all", "--message", "mend the mean")
    fix = git(directory, "rev-parse", "HEAD")
    git(directory, "checkout", "--quiet", base)
    return base, fix


def build_image(root: Path, *, run_tests: str = RUN_TESTS, tests: dict[str, str] | None = None) -> tuple[str, str]:
    """Fill a directory with an image's root file system: programs, an interpreter with pytest, repository and tests."""
    for name in ("usr/bin", "usr/lib/git-core", "tmp", "etc", "proc", "dev", "sys", "run", "root", "testbed", "opt"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to("usr/bin" if name == "bin" else "usr/lib")
    for name, content in (("passwd", "root:x:0:0::/root:/bin/sh\n"), ("group", "root:x:0:\n"), ("hosts", "")):
        (root / "etc" / name).write_text(content)
    (root / "etc/resolv.conf").write_text("")
    for name in _PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        _copy_program(root, Path(program), root / "usr/bin" / name)
    for name in ("git", "git-upload-pack"):
        (root / "usr/lib/git-core" / name).symlink_to("/usr/bin/git")
    _copy_python(root)
    testbed = root / "testbed"
    commits = build_repository(testbed)
    (testbed / "run_tests.sh").write_text(run_tests)
    (testbed / "expected_test_output.json").write_text(json.dumps(EXPECTED))
    (root / "r2e_tests").mkdir()
    for name, content in ({"test_1.py": TEST} if tests is None else tests).items():
        (root / "r2e_tests" / name).write_text(content)
    (root / "r2e_tests/__init__.py").write_text("")
    return commits


def _copy_program(root: Path, program: Path, target: Path) -> None:
    shutil.copy(program, target)
    _copy_libraries(root, program)


def _copy_libraries(root: Path, program: Path) -> None:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=False).stdout
    for library in map(Path, re.findall(r"(/\S+) \(0x", told)):
        inside = str(library).split("/lib/")[-1] if library.is_relative_to("/lib") else library.name
        place = root / "usr/lib" / ("" if library.name.startswith("ld-") else Path(inside).parent) / library.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, place)


def _copy_python(root: Path) -> None:
    """As much of this interpreter as running the tests takes: below /opt/python, with /testbed/.venv made from it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base, environment = root / "opt/python", root / "testbed/.venv"
    packages = environment / "lib" / version / "site-packages"
    for directory in (base / "bin", environment / "bin", packages):
        directory.mkdir(parents=True)
    _copy_program(root, Path(sys.executable).resolve(), base / "bin/python3")
    library, installed = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    for file in map(Path, _files_used(root / "tmp")):
        whence, target = (installed, packages) if file.is_relative_to(installed) else (library, base / "lib" / version)
        if file.is_relative_to(whence) and file.is_file():
            place = target / file.relative_to(whence)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, place)
            if file.suffix == ".so":
                _copy_libraries(root, file)
    for package in ("pytest", "_pytest"):
        shutil.copytree(installed / package, packages / package, dirs_exist_ok=True)
    for metadata in (*installed.glob("pluggy-*.dist-info"), *installed.glob("pytest-[0-9]*.dist-info")):
        shutil.copytree(metadata, packages / metadata.name)
    (environment / "bin/python").symlink_to("/opt/python/bin/python3")
    (environment / "pyvenv.cfg").write_text("home = /opt/python/bin\ninclude-system-site-packages = false\n")
    (environment / ".gitignore").write_text("*\n")


def _files_used(directory: Path) -> list[str]:
    """Files of Python and of pytest that a run of the tests reads."""
    for name, content in (("test_1.py", TEST), ("test_2.py", UNITTEST), ("used.py", _USED)):
        (directory / name).write_text(content)
    (directory / "tinycalc").mkdir()
    (directory / "tinycalc/sums.py").write_text(BROKEN)
    words = [sys.executable, "-c", "import used, runpy, os; runpy.run_module('pytest', run_name='__main__')", "-rA"]
    variables = {"PYTHONPATH": str(directory), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPYCACHEPREFIX": ""}
    told = subprocess.run(
        [*words, "-c", os.devnull, f"--rootdir={directory}", "-p", "no:cacheprovider", str(directory)],
        env={key: value for key, value in (os.environ | variables).items() if not key.startswith("PYTEST_X")},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    shutil.rmtree(directory)
    directory.mkdir()
    found = re.search("^USED (.*)$", told, re.MULTILINE)
    assert found is not None, told
    return json.loads(found[1])


def row(base: str = "b" * 40, fix: str = "f" * 40, **changes: Any) -> dict[str, Any]:
    """A row of the dataset's shape."""

    def difference(path: str, before: str, after: str) -> dict[str, Any]:
        return {
            "old_file_content": before,
            "new_file_content": after,
            "header": {"file": {"path": path}, "misc_line": None},
            "index_line": {"old_commit_hash": "1111111", "new_commit_hash": "2222222", "mode": "100644"},
            "is_binary_file": False,
            "binary_line": None,
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "hunks": [],
        }

    commit = {
        "file_diffs": [
            difference("tinycalc/sums.py", BROKEN, MENDED),
            difference("tests/test_sums.py", "# secret before\n", "# secret after\n"),
        ],
        "old_commit_hash": base,
        "new_commit_hash": fix,
        "commit_message": "mend the mean",
        "commit_date": "2020-01-01T00:00:00",
        "metadata": {},
    }
    execution = {
        "repo_name": REPOSITORY,
        "new_commit_hash": fix,
        "test_file_codes": [TEST],
        "test_file_names": ["test_1.py"],
        "old_commit_res_stdout": BEFORE,
        "new_commit_res_stdout": "",
    }
    return {
        "repo_name": REPOSITORY,
        "docker_image": f"namanjain12/{REPOSITORY}_final:{fix}",
        "commit_hash": fix,
        "parsed_commit_content": json.dumps(commit),
        "execution_result_content": json.dumps(execution),
        "modified_files": ["tinycalc/sums.py"],
        "modified_entity_summaries": [{"name": "mean", "type": "function"}],
        "relevant_files": ["tinycalc/sums.py"],
        "num_non_test_files": 1,
        "num_non_test_func_methods": 1,
        "num_non_test_lines": 2,
        "prompt": "Write an issue.",
        "problem_statement": "[ISSUE]\n\n**Title:** The mean is too small\n[/ISSUE]",
        "expected_output_json": json.dumps(EXPECTED),
    } | changes


def save_docker(root: Path, path: Path, *, compress: bool = False) -> None:
    """Pack a directory as `docker save` would: one image of two layers, the second without a file of the first."""
    layers = []
    for number, names in enumerate((None, ["opt/leftover"])):
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as layer:
            if names is None:
                layer.add(root, ".")
                layer.addfile(_empty("opt/leftover"))
            else:
                layer.addfile(_empty("opt/.wh.leftover"))
        layers.append((f"{number}/layer.tar", data.getvalue()))
    write_docker(path, layers, compress=compress)


def write_docker(path: Path, layers: list[tuple[str, bytes]], *, compress: bool = False) -> str:
    """Write an archive of `docker save`; returns the image's id."""
    digests = [f"sha256:{hashlib.sha256(data).hexdigest()}" for _, data in layers]
    config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": digests}})
    name = f"{hashlib.sha256(config.encode()).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": ["tinycalc:1"], "Layers": [name for name, _ in layers]}]
    with tarfile.open(path, "w") as archive:
        for member, data in [(name, config.encode()), ("manifest.json", json.dumps(manifest).encode()), *layers]:
            data = gzip.compress(data, 1) if compress and member.endswith(".tar") else data
            information = tarfile.TarInfo(member)
            information.size = len(data)
            archive.addfile(information, io.BytesIO(data))
    return f"sha256:{name.removesuffix('.json')}"


def _empty(name: str) -> tarfile.TarInfo:
    return tarfile.TarInfo(name)
