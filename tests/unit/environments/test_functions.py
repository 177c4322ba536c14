"""The `functions` family: shipped data, real sandboxes, cheats, and the factory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from swerve.environments import REPAIR_FILE, Grader, gold_text, load_split, save_tasks
from swerve.environments.functions import packages as packaging
from swerve.environments.functions.baseline import baseline, count_passing, repairs
from swerve.environments.functions.drafts import VISIBLE_FILE, confirm, structure, verify
from swerve.environments.functions.environment import FunctionsEnvironment
from swerve.environments.functions.mint import mint
from swerve.environments.functions.mutations import apply, normalise_function, sites
from swerve.environments.functions.recipe import MintRecipe
from swerve.environments.grading import judge
from swerve.sandboxes import SandboxPool
from swerve.types import EpisodeStatus, SwerveError, Task

DATA = Path(packaging.__file__).parent.parent / "data"
SAMPLED_PACKAGES = ("inflection", "schema", "toolz")

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    train, validation = load_split(DATA / "functions_train.jsonl.xz", DATA / "functions_validation.jsonl.xz")
    return [*train, *validation]


@pytest.fixture(scope="module")
def sampled(tasks: list[Task]) -> list[Task]:
    """Two tasks of each of a few packages that load quickly."""
    found: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        assert task.provenance is not None
        found[task.provenance.package].append(task)
    return [task for name in SAMPLED_PACKAGES for task in found[name][:2]]


@dataclasses.dataclass(frozen=True)
class Bench:
    """A pool for the sampled tasks, and the loop it lives on."""

    run: Run
    pool: SandboxPool
    environment: FunctionsEnvironment
    grader: Grader


@pytest.fixture(scope="module")
def bench(sampled: list[Task]) -> Iterator[Bench]:
    environment = FunctionsEnvironment(sampled)
    with asyncio.Runner() as runner:
        pool = SandboxPool(environment.images())
        yield Bench(runner.run, pool, environment, Grader(pool, environment))
        runner.run(pool.close())


# ---------------------------------------------------------------------------------------------------- the data


def test_archives_are_permissive_and_small() -> None:
    known = packaging.packages()
    assert len(known) >= 10
    total = sum((packaging.ARCHIVES_DIR / package.file).stat().st_size for package in known.values())
    assert total <= 5_000_000
    assert {package.license for package in known.values()} <= packaging.PERMISSIVE
    for package in known.values():
        tree = packaging.source_tree(package)
        assert any(path.name.lower().startswith(("licen", "copying", "mit-")) for path in tree.iterdir()), package.name


def test_altered_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = packaging.packages()["inflection"]
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "cache"))
    assert (packaging.source_tree(package) / "inflection").is_dir()
    altered = dataclasses.replace(package, sha256="0" * 64)
    with pytest.raises(SwerveError, match=r"inflection-.*: SHA-256 is .*, expected 000"):
        packaging.source_tree(altered)
    assert len(list((tmp_path / "cache" / "archives").iterdir())) == 1
    with pytest.raises(SwerveError, match="missing"):
        packaging.source_tree(dataclasses.replace(altered, file="none.tar.gz"))


def test_subset_archives_are_reproducible(tmp_path: Path) -> None:
    archive = packaging.ARCHIVES_DIR / packaging.packages()["inflection"].file
    for name in ("a.tar.xz", "b.tar.xz"):
        packaging.write_subset(archive, tmp_path / name, ("inflection/", "LICENSE"))
    assert (tmp_path / "a.tar.xz").read_bytes() == (tmp_path / "b.tar.xz").read_bytes()


def test_shipped_tasks_are_what_they_say(tasks: list[Task]) -> None:
    by_split = defaultdict(list)
    for task in tasks:
        by_split[task.split].append(task)
    assert {split: len(group) for split, group in by_split.items()} == {"train": 700, "validation": 251}
    known = packaging.packages()
    lines: dict[tuple[str, str], list[str]] = {}
    for task in tasks:
        origin = task.provenance
        assert origin is not None
        package = known[origin.package]
        assert (origin.version, origin.archive_sha256, origin.license) == (
            package.version,
            package.sha256,
            package.license,
        )
        key = (origin.package, origin.file)
        if key not in lines:
            path = packaging.source_tree(package) / origin.file
            lines[key] = path.read_text("utf-8").split("\n")
        gold, broken = gold_text(task), task.workspace[REPAIR_FILE]
        assert lines[key][origin.line - 1].strip().startswith(f"def {origin.qualname.rpartition('.')[2]}(")
        assert normalise_function(gold) == gold
        assert broken in {apply(gold, edit) for edit in sites(gold)}
        changed = [
            n for n, pair in enumerate(zip(gold.split("\n"), broken.split("\n"), strict=True), 1) if len({*pair}) > 1
        ]
        assert changed == [origin.mutation.line]
        assert origin.mutation.before in gold and origin.mutation.after in broken
        assert 1 <= len(task.visible_tests) <= 3 and task.hidden_tests
        assert len(broken) <= 421 and 3 <= broken.count("\n") <= 20
        assert len(repairs(task)) >= 6
        assert set(task.workspace) == {REPAIR_FILE, VISIBLE_FILE}


def test_nothing_is_in_both_splits(tasks: list[Task]) -> None:
    seen: dict[str, dict[str, set[Any]]] = {name: defaultdict(set) for name in ("train", "validation")}
    for task in tasks:
        assert task.provenance is not None
        gold = gold_text(task)
        seen[task.split]["file"].add((task.provenance.package, task.provenance.file))
        seen[task.split]["text"].add("".join(gold.split()))
        seen[task.split]["structure"].add(structure(gold))
        seen[task.split]["broken"].add(task.workspace[REPAIR_FILE])
    for kind, values in seen["train"].items():
        assert not values & seen["validation"][kind], kind


def test_no_package_dominates(tasks: list[Task]) -> None:
    for split in ("train", "validation"):
        group = [task for task in tasks if task.split == split]
        counts: dict[str, int] = defaultdict(int)
        for task in group:
            assert task.provenance is not None
            counts[task.provenance.package] += 1
        assert len(counts) >= 10
        assert max(counts.values()) <= 0.25 * len(group) + 1


# ---------------------------------------------------------------------------------------------- real sandboxes


def test_gold_earns_one_and_the_bug_nothing(bench: Bench, sampled: list[Task]) -> None:
    async def check() -> list[str]:
        return [await confirm(task, bench.pool, bench.environment) for task in sampled]

    assert bench.run(check()) == [""] * len(sampled)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_shipped_task_holds(tasks: list[Task]) -> None:
    assert verify(tasks) == {}


CHEATS = {
    "early exit": "    import os\n    os._exit(0)\n",
    "quiet exit": "    raise SystemExit(0)\n",
    "equal to everything": (
        "    class Anything:\n        __hash__ = None\n        def __eq__(self, other): return True\n"
        "        def __ne__(self, other): return False\n    return Anything()\n"
    ),
    "patched pytest": (
        "    import _pytest.reports as reports\n"
        "    make = reports.TestReport.from_item_and_call.__func__\n"
        "    def passed(cls, item, call):\n        report = make(cls, item, call)\n"
        "        report.outcome = 'passed'\n        report.longrepr = None\n        return report\n"
        "    reports.TestReport.from_item_and_call = classmethod(passed)\n"
    ),
    "printed results": (
        "    import sys\n    sys.__stdout__.write('all passed\\n')\n    sys.__stdout__.flush()\n"
        '    import os\n    [os.write(fd, b\'["passed", ""]\\n\') for fd in (1, 2)]\n    os._exit(0)\n'
    ),
    "killed grader": "    import os, signal\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "skipped": "    import pytest\n    pytest.skip('done')\n",
    "nothing": "    pass\n",
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_earn_nothing(bench: Bench, sampled: list[Task], name: str) -> None:
    task = sampled[0]
    assert task.provenance is not None
    function = task.provenance.qualname.rpartition(".")[2]
    text = f"def {function}(*args, **kwargs):\n{CHEATS[name]}"
    result = bench.run(bench.grader.grade(task, {REPAIR_FILE: text, "test_visible.py": "", "run_tests": "exit 0"}))
    assert result.reward == 0.0, result
    assert result.status is EpisodeStatus.SUCCEEDED


@pytest.mark.parametrize(
    "text", ["", "def other():\n    pass\n", "x = 1\n", "def f(:\n", "import os\nos._exit(0)\n", "\0"]
)
def test_texts_that_define_something_else_earn_nothing(bench: Bench, sampled: list[Task], text: str) -> None:
    result = bench.run(bench.grader.grade(sampled[0], {REPAIR_FILE: text}))
    assert (result.reward, result.status) == (0.0, EpisodeStatus.SUCCEEDED)


def test_editing_the_tests_changes_nothing(bench: Bench, sampled: list[Task]) -> None:
    task = sampled[0]

    async def play() -> tuple[str, str, Any, Any]:
        sandbox = await bench.pool.start(task.image, bench.environment.prepare_payload(task))
        try:
            before = await sandbox.exec("./run_tests", 20)
            await sandbox.write_file("test_visible.py", "def test_ok():\n    pass\n")
            await sandbox.write_file("run_tests", "#!/bin/sh\necho all passed\n", 0o755)
            after = await sandbox.exec("./run_tests", 20)
            work = await bench.environment.collect(task, sandbox)
        finally:
            await sandbox.close()
        return before.output, after.output, await bench.grader.grade(task, work), work

    before, after, result, work = bench.run(play())
    error = task.problem_statement.rpartition(" ")[2].rstrip(".")
    assert f" FAILED {error}\n" in before and before.endswith(" failed\n")
    assert after == "all passed\n"
    assert set(work) == {REPAIR_FILE}
    assert result.reward == 0.0


def test_the_agent_finds_neither_fix_nor_hidden_tests(bench: Bench, sampled: list[Task]) -> None:
    task = sampled[0]
    assert task.provenance is not None
    function = task.provenance.qualname.rpartition(".")[2]
    spy = (
        f"def {function}(*args, **kwargs):\n"
        "    import json, sys, types\n"
        "    frame, found = sys._getframe(), set()\n"
        "    while frame:\n"
        "        names = [n for n, v in frame.f_globals.items() if isinstance(v, types.FunctionType)]\n"
        "        found |= {n for n in names if n.startswith('test_')}\n"
        "        frame = frame.f_back\n"
        "    items = sorted(sys.modules['swerve_harness']._STATE.items)\n"
        "    open('/testbed/found', 'w').write(json.dumps([sorted(found), items]))\n"
    )

    async def look() -> tuple[str, str]:
        sandbox = await bench.pool.start(task.image, bench.environment.prepare_payload(task))
        try:
            await sandbox.write_file(REPAIR_FILE, spy)
            await sandbox.exec("./run_tests", 20)
            listing = await sandbox.exec(f"grep -rls 'def {function}(' /opt /tmp /run /testbed", 20)
            return await sandbox.read_file("found"), listing.output
        finally:
            await sandbox.close()

    found, listing = bench.run(look())
    names, items = json.loads(found)
    assert items == sorted(task.visible_tests)
    assert set(names) <= {identifier.partition("[")[0].rpartition("::")[2] for identifier in items}
    assert [line for line in listing.split("\n") if line] == [f"/testbed/{REPAIR_FILE}"]


def test_a_hanging_repair_is_a_grader_timeout(bench: Bench, sampled: list[Task]) -> None:
    task = sampled[0]
    assert task.provenance is not None
    function = task.provenance.qualname.rpartition(".")[2]
    result = bench.run(
        bench.grader.grade(task, {REPAIR_FILE: f"def {function}(*a, **k):\n    while True:\n        pass\n"})
    )
    assert (result.reward, result.status) == (0.0, EpisodeStatus.GRADER_TIMEOUT)


def test_changed_defaults_count(bench: Bench, sampled: list[Task]) -> None:
    task = sampled[0]
    head, _, rest = gold_text(task).partition(")")
    result = bench.run(bench.grader.grade(task, {REPAIR_FILE: f"{head}, unused=3){rest}"}))
    assert result.reward == 1.0


def test_a_grader_that_cannot_run_is_an_error(bench: Bench, sampled: list[Task]) -> None:
    foreign = dataclasses.replace(sampled[0], image="functions/none")
    unknown = dataclasses.replace(
        sampled[0],
        hidden_tests=(*sampled[0].hidden_tests, "gone.py::test"),
        pass_to_pass=(*sampled[0].pass_to_pass, "gone.py::test"),
    )

    async def closed_pool() -> Any:
        pool = SandboxPool(bench.environment.images())
        await pool.close()
        return await Grader(pool, bench.environment).grade(sampled[0], {})

    results = [bench.run(bench.grader.grade(task, {REPAIR_FILE: gold_text(task)})) for task in (foreign, unknown)]
    for result in [*results, bench.run(closed_pool())]:
        assert (result.reward, result.status) == (None, EpisodeStatus.ERROR)
        assert result.error.startswith(sampled[0].id) and "\n" not in result.error


def test_statuses_and_counts_must_be_exact(sampled: list[Task]) -> None:
    task = sampled[0]
    statuses = dict.fromkeys((*task.fail_to_pass, *task.pass_to_pass), "passed")
    right = {"statuses": statuses, "canary": "failed", "num_results": len(statuses) + 1}
    assert judge(task, right).reward == 1.0
    first = task.fail_to_pass[0]
    wrong = [
        {**right, "canary": "passed"},
        {**right, "canary": "crashed"},
        {**right, "num_results": len(statuses)},
        {**right, "num_results": len(statuses) + 2},
        {**right, "statuses": {**statuses, first: "skipped"}},
        {**right, "statuses": {**statuses, "another": "passed"}},
        {**right, "statuses": {name: status for name, status in statuses.items() if name != first}},
    ]
    assert [judge(task, answer).reward for answer in wrong] == [0.0] * len(wrong)
    assert judge(task, {**right, "statuses": {**statuses, first: "timeout"}}).status is EpisodeStatus.GRADER_TIMEOUT
    for broken in ({}, {"statuses": None}, {**right, "statuses": 3}):
        assert judge(task, broken).status is EpisodeStatus.ERROR


def test_tasks_of_unknown_archives_are_refused(sampled: list[Task]) -> None:
    task = sampled[0]
    assert task.provenance is not None
    other = dataclasses.replace(task.provenance, archive_sha256="0" * 64)
    with pytest.raises(SwerveError, match=r"key provenance\.archive_sha256"):
        FunctionsEnvironment([dataclasses.replace(task, provenance=other)])
    with pytest.raises(SwerveError, match="key family"):
        FunctionsEnvironment([dataclasses.replace(task, family="mini")])


# ------------------------------------------------------------------------------------- factory and baseline


def test_minting_twice_gives_equal_bytes(tmp_path: Path) -> None:
    recipe = MintRecipe(
        packages=("ordered-set", "schema"), num_train=2, num_validation=1, max_tests=3, max_mutants_tried=2
    )
    for name in ("a", "b"):
        result = mint(recipe)
        save_tasks(tmp_path / f"{name}.train.jsonl.xz", result.train)
        save_tasks(tmp_path / f"{name}.validation.jsonl.xz", result.validation)
    for split, number in (("train", 2), ("validation", 1)):
        files = [tmp_path / f"{name}.{split}.jsonl.xz" for name in ("a", "b")]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert len(result.train if split == "train" else result.validation) == number


def test_minting_says_what_is_wrong() -> None:
    with pytest.raises(SwerveError, match="'flask' is unknown"):
        mint(MintRecipe(packages=("flask",)))


def test_baseline_is_the_hypergeometric_one(sampled: list[Task]) -> None:
    numbers = [len(repairs(task)) for task in sampled]
    one = baseline(sampled, 1, passing=dict.fromkeys((task.id for task in sampled), 1))
    assert one.pass_at_1 == pytest.approx(sum(1 / number for number in numbers) / len(numbers))
    three = baseline(sampled[:1], 3, passing={sampled[0].id: 1})
    assert three.pass_at_1 == pytest.approx(3 / numbers[0])
    assert three.pass_at_4 == pytest.approx(1 - (1 - 3 / numbers[0]) ** 4)
    assert baseline(sampled[:1], 1000).pass_at_1 in (0.0, 1.0)


def test_other_repairs_than_the_gold_one_count(sampled: list[Task], tmp_path: Path) -> None:
    task = min(sampled, key=lambda task: len(repairs(task)))
    cache = tmp_path / "passing.json"
    counts = count_passing([task], cache)
    assert counts[task.id] >= (gold_text(task) in repairs(task))
    assert count_passing([task], cache) == counts
