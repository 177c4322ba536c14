"""The factory of repository-level tasks: breaks a release, or undoes what it mended, and keeps what its tests notice.

    release --> survey: which test enters which code, what repeats      (in a sandbox of the factory)
            --> candidates, in a repeatable random order
            --> each tried twice: some tests fail, the same both times, and others still pass
            --> proved in sandboxes as episodes have them: no work earns 0, the gold patch earns 1
            --> tasks, until there are enough or the budget is spent

The result is a function of the lock: no measured time decides. Tests that sleep, fork, start threads or draw random
numbers are left out, as are those that do not repeat. Every verdict goes into a journal at once, so a minting that is
stopped goes on.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from swerve.environments.functions.mutations import Edit
from swerve.environments.functions.packages import test_source
from swerve.environments.functions.recipe import rank
from swerve.environments.grading import Grader
from swerve.environments.patches import make_patch
from swerve.environments.repository.candidates import Candidate, MutatedFunction, mutants, undone
from swerve.environments.repository.environment import (
    FAMILY,
    Release,
    RepositoryEnvironment,
    release_image,
    start_digest,
    visible_test_files,
)
from swerve.environments.repository.journal import Journal
from swerve.environments.repository.recipe import FactorySettings, LockedPackage, verdicts_identity
from swerve.environments.tasks import task_from_json, task_to_json
from swerve.sandboxes import CallError, SandboxPool
from swerve.types import Limits, MachineError, Provenance, SwerveError, Task

LIMITS = Limits(max_turns=30, episode_timeout_s=1800.0, command_timeout_s=60.0, test_timeout_s=60.0)
"""Of every task: those of the benchmark."""
_SURVEY_TIMEOUT_S = 1800.0
_TRIAL_TIMEOUT_S = 300.0
_MAX_SHOWN_CHARACTERS = 1500

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageReport:
    """What making tasks of one package met.

    Attributes:
        package: Its name.
        version: Its release.
        num_tests: Tests collected.
        num_usable_tests: Of these, tests that pass, repeat and are not too long.
        num_tried: Broken states tried.
        num_tasks: Of these, those that became tasks.
        dropped: The others, by reason.
        error: Why nothing could be made of it, or empty.
    """

    package: str
    version: str
    num_tests: int = 0
    num_usable_tests: int = 0
    num_tried: int = 0
    num_tasks: int = 0
    dropped: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Test:
    """A usable test: its id, the calls it makes, and the code that it enters."""

    id: str
    calls: int
    entered: frozenset[str]


class _Dropped(Exception):
    """A candidate that becomes no task; the argument says why, in a word or two."""


def mint(
    packages: Sequence[LockedPackage],
    settings: FactorySettings,
    journal: Journal,
    *,
    jobs: int = 2,
    progress: Progress | None = None,
) -> tuple[list[Task], list[PackageReport]]:
    """Make tasks; the same lock gives the same tasks.

    Args:
        packages: What to make them of.
        settings: How.
        journal: Of this minting.
        jobs: Candidates tried at once.
        progress: Told a line now and then.

    Returns:
        The tasks, all of split `train`, and a report per package, both in the order of `packages`.

    Raises:
        MachineError: Sandboxes cannot be started here.
    """
    return asyncio.run(_mint(packages, settings, journal, jobs, progress or (lambda line: None)))


async def _mint(
    packages: Sequence[LockedPackage], settings: FactorySettings, journal: Journal, jobs: int, progress: Progress
) -> tuple[list[Task], list[PackageReport]]:
    tasks: list[Task] = []
    reports: list[PackageReport] = []
    for number, locked in enumerate(packages, 1):
        line = f"[{number}/{len(packages)}] {locked.name} {locked.version}"
        maker = _PackageMaker(locked, settings, journal, jobs, lambda told, line=line: progress(f"{line}: {told}"))
        found, report = await maker.run()
        tasks += found
        reports.append(report)
        progress(f"{line}: {report.error or f'{report.num_tasks} tasks of {report.num_tried} candidates'}")
    return tasks, reports


class _PackageMaker:
    """Makes the tasks of one package."""

    def __init__(
        self, locked: LockedPackage, settings: FactorySettings, journal: Journal, jobs: int, progress: Progress
    ) -> None:
        self.locked = locked
        self.settings = settings
        self.journal = journal
        self.identity = verdicts_identity(settings, locked)
        self.jobs = jobs
        self.progress = progress
        self.tests: list[_Test] = []
        self.num_tests = 0
        self.gold_proved: set[tuple[str, ...]] = set()

    async def run(self) -> tuple[list[Task], PackageReport]:
        """Tasks and report; a fault of the package is in its report."""
        try:
            return await self._run()
        except MachineError:
            raise
        except SwerveError as error:
            told = " ".join(str(error).split())[:300]
            return [], PackageReport(package=self.locked.name, version=self.locked.version, error=told)

    async def _run(self) -> tuple[list[Task], PackageReport]:
        self.release = self.locked.release()
        report = PackageReport(package=self.locked.name, version=self.locked.version)
        if not self.release.layout.sources:
            return [], dataclasses.replace(report, error="has no Python sources")
        if not self.release.layout.tests:
            return [], dataclasses.replace(report, error="ships no tests in its source distribution")
        async with SandboxPool([release_image(self.release)]) as pool:
            self.pool = pool
            await self._survey()
            report = dataclasses.replace(report, num_tests=self.num_tests, num_usable_tests=len(self.tests))
            if not self.tests:
                return [], dataclasses.replace(report, error="none of its tests passes here and repeats")
            tasks, dropped = await self._try_all()
        num_tried = len(tasks) + sum(dropped.values())
        return tasks, dataclasses.replace(report, num_tried=num_tried, num_tasks=len(tasks), dropped=dict(dropped))

    async def _survey(self) -> None:
        rows = self.journal.get(self.identity, "survey")
        if rows is None:
            payload = {
                "tests": list(self.release.layout.tests),
                "sources": list(self.release.layout.sources),
                "max_calls": self.settings.max_calls_per_test,
            }
            self.progress("survey of its tests")
            found = await self._call("survey", payload, _SURVEY_TIMEOUT_S)
            passed = [row["id"] for row in found if row["status"] == "passed"]
            stable = set(passed)
            for _ in range(2):
                payload = {"files": {}, "tests": passed, "stop_on_loss": False}
                again = await self._call("trial", payload, _SURVEY_TIMEOUT_S)
                stable &= {identifier for identifier, (status, _) in again.items() if status == "passed"}
            kept = [[row["id"], row["calls"], row["entered"]] for row in found if row["id"] in stable]
            rows = {"num_tests": len(found), "tests": kept}
            self.journal.put(self.identity, "survey", rows)
        self.num_tests = rows["num_tests"]
        self.tests = [_Test(id=one[0], calls=one[1], entered=frozenset(one[2])) for one in rows["tests"]]

    async def _call(self, entry: str, payload: Any, timeout_s: float) -> Any:
        sandbox = await self.pool.start(self.release.image_name)
        try:
            return await sandbox.call(entry, payload, timeout_s)
        finally:
            await sandbox.close()

    # ------------------------------------------------------------------------------------------- candidates

    def _candidates(self) -> Iterator[Candidate]:
        """In the order in which they are tried: releases undone, then one mutant each of all functions, and so on."""
        previous = self.locked.previous() if "release" in self.settings.kinds else None
        if previous is not None:
            yield from undone(self.release, previous)
        if "mutation" not in self.settings.kinds:
            return
        covered = {place for test in self.tests for place in test.entered}

        queues: list[tuple[list[tuple[str, Edit]], MutatedFunction]] = []
        for function in mutants(self.release):
            if function.place in covered:
                ranked = [(rank(self.settings, self.locked.sha256, function.key(one)), one) for one in function.edits]
                queues.append((sorted(ranked), function))
        queues.sort(key=lambda queue: queue[0][0][0])
        for depth in range(max((len(edits) for edits, _ in queues), default=0)):
            yield from (function.candidate(edits[depth][1]) for edits, function in queues if depth < len(edits))

    async def _try_all(self) -> tuple[list[Task], Counter[str]]:
        """Try candidates in their order, a few at once, until there are enough tasks."""
        tasks: list[Task] = []
        dropped: Counter[str] = Counter()
        of_place: Counter[str] = Counter()
        pending: list[tuple[Candidate, asyncio.Task[Any]]] = []
        candidates = self._candidates()
        num_tried = 0
        try:
            while len(tasks) < self.settings.per_package:
                # What is started does not depend on what has ended: so neither does the result.
                while len(pending) < 2 * self.jobs and num_tried < self.settings.max_candidates:
                    candidate = next(candidates, None)
                    if candidate is None:
                        break
                    num_tried += 1
                    pending.append((candidate, asyncio.create_task(self._verdict(candidate))))
                if not pending:
                    break
                candidate, running = pending.pop(0)
                verdict = await running
                if isinstance(verdict, str):
                    dropped[verdict] += 1
                elif candidate.place and of_place[candidate.place] == self.settings.per_function:
                    dropped["enough of this function"] += 1
                else:
                    of_place[candidate.place] += 1
                    tasks.append(task_from_json(verdict))
                if (len(tasks) + sum(dropped.values())) % 25 == 0:
                    self.progress(f"{len(tasks)} tasks of {len(tasks) + sum(dropped.values())} candidates")
        finally:
            for _, running in pending:
                running.cancel()
            await asyncio.gather(*(running for _, running in pending), return_exceptions=True)
        return tasks, dropped

    async def _verdict(self, candidate: Candidate) -> Any:
        """The task that a candidate becomes, as JSON, or why it becomes none."""
        verdict = self.journal.get(self.identity, candidate.key)
        if verdict is None:
            try:
                verdict = task_to_json(await self._task(candidate))
            except _Dropped as reason:
                verdict = str(reason)
            except CallError as error:
                verdict = f"tests {type(error).__name__.removeprefix('Call').removesuffix('Error').lower()}"
            self.journal.put(self.identity, candidate.key, verdict)
        return verdict

    async def _task(self, candidate: Candidate) -> Task:
        tests = self._tests_for(candidate)
        first = await self._trial(candidate, tests)
        statuses = {status for status, _ in first.values()}
        if statuses & {"timeout", "crashed", "tampered"}:
            raise _Dropped("hangs or crashes")
        failing = [name for name in tests if first[name][0] != "passed"]
        if not failing:
            raise _Dropped("no test notices")
        if len(failing) > self.settings.max_failing:
            raise _Dropped("too many tests fail")
        if len(failing) == len(tests):
            raise _Dropped("every test fails")
        if await self._trial(candidate, tests) != first:
            raise _Dropped("does not repeat")
        task = self._draft(candidate, tests, first)
        await self._prove(task)
        return task

    async def _trial(self, candidate: Candidate, tests: list[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = await self._call(
            "trial", {"files": candidate.files, "tests": tests, "stop_on_loss": True}, _TRIAL_TIMEOUT_S
        )
        return found

    def _tests_for(self, candidate: Candidate) -> list[str]:
        """Usable tests that enter what is broken, the cheapest first; then others of the same test files."""
        if candidate.place:
            entering = [test for test in self.tests if candidate.place in test.entered]
        else:
            paths = tuple(f"{path}:" for path in candidate.files)
            entering = [test for test in self.tests if any(place.startswith(paths) for place in test.entered)]
            entering = entering or self.tests
        files = {test.id.partition("::")[0] for test in entering}
        known = {test.id for test in entering}
        others = [test for test in self.tests if test.id.partition("::")[0] in files and test.id not in known]
        chosen: set[str] = set()
        calls = 0
        for test in (*sorted(entering, key=lambda test: (test.calls, test.id)), *others):
            if len(chosen) < self.settings.max_tests and calls + test.calls <= self.settings.max_calls:
                calls += test.calls
                chosen.add(test.id)
        if not chosen:
            raise _Dropped("its tests take too long")
        return [test.id for test in self.tests if test.id in chosen]

    # ------------------------------------------------------------------------------------------------ tasks

    def _draft(self, candidate: Candidate, tests: list[str], results: dict[str, list[str]]) -> Task:
        failing = [name for name in tests if results[name][0] != "passed"]
        passing = [name for name in tests if results[name][0] == "passed"]
        cut = {name.partition("[")[0] for name in failing}
        visible = [name for name in passing if name.partition("[")[0] not in cut]
        release = self.release
        right = {path: release.text(path) for path in candidate.files if (release.tree / path).is_file()}
        identity = hashlib.sha256(json.dumps([release.sha256, candidate.key]).encode()).hexdigest()
        place = candidate.qualname or f"{candidate.previous_version}.{candidate.file.rpartition('/')[2]}"
        task = Task(
            id=f"{release.name}.{place}.{identity[:8]}",
            family=FAMILY,
            split="train",
            image=release.image_name,
            base_commit="",
            problem_statement=_problem(release, failing, results),
            workspace={},
            visible_tests=tuple(visible),
            hidden_tests=tuple(name for name in tests if name not in set(visible)),
            fail_to_pass=tuple(failing),
            pass_to_pass=tuple(passing),
            gold_patch=make_patch(candidate.files, right),
            limits=LIMITS,
            provenance=Provenance(
                package=release.name,
                version=release.version,
                archive_sha256=release.sha256,
                license=release.layout.license,
                file=candidate.file,
                line=candidate.line,
                qualname=candidate.qualname,
                mutation=candidate.mutation,
                previous_version=candidate.previous_version,
                requires=release.requires,
            ),
        )
        digest = start_digest(candidate.files | visible_test_files(task, release), release)
        return dataclasses.replace(task, base_commit=digest)

    async def _prove(self, task: Task) -> None:
        """Grade no work and the gold patch, as episodes are graded, until both verdicts have been given twice."""
        environment = RepositoryEnvironment([task])
        grader = Grader(self.pool, environment)
        gold = environment.gold_work(task)
        if any(text is not None and text != self.release.text(path) for path, text in gold.items()):
            raise _Dropped("the gold patch leads elsewhere")
        # The gold patch restores the release, whose verdict on these tests may have been given before.
        repeats = 1 if task.fail_to_pass + task.pass_to_pass in self.gold_proved else 2
        for work, wanted, count in ((environment.no_work(task), 0.0, 2), (gold, 1.0, repeats)):
            for _ in range(count):
                verdict = await grader.grade(task, work)
                if verdict.reward != wanted:
                    raise _Dropped("the gold patch fails" if wanted else "nothing done passes")
        self.gold_proved.add(task.fail_to_pass + task.pass_to_pass)


def _problem(release: Release, failing: list[str], results: dict[str, list[str]]) -> str:
    """What the agent is told: what fails, one example of it, and how to work."""
    shown = {name: test_source(release.tree, name) for name in failing}
    example = min(failing, key=lambda name: (not shown[name], len(shown[name]), name))
    text = shown[example]
    if len(text) > _MAX_SHOWN_CHARACTERS:
        text = text[:_MAX_SHOWN_CHARACTERS] + "...\n"
    parameters = example.partition("[")[2].rstrip("]")
    given = f" for the parameters {parameters}" if parameters else ""
    count = "one test fails" if len(failing) == 1 else f"{len(failing)} tests fail, among them this one"
    lines = [
        f"The working directory holds {release.name} {release.version}, a package. Something in it broke: {count}:",
        "",
        *(f"    {line}".rstrip() for line in (text or example).rstrip("\n").split("\n")),
        "",
        f"It ends with {results[example][1]}{given}. Find the cause "
        f"among the sources ({', '.join(release.layout.roots)}) and mend it there; tests that stand in the working "
        "directory still pass and must go on to. `./run_tests` runs them.",
    ]
    return "\n".join(lines)


def summary(reports: Sequence[PackageReport]) -> dict[str, Any]:
    """Numbers of a minting, fit for JSON."""
    if not any(report.num_tasks for report in reports):
        causes = "; ".join(f"{report.package}: {report.error or report.dropped}" for report in reports)
        raise SwerveError(f"no task could be made: {causes}")
    return {
        "tasks": sum(report.num_tasks for report in reports),
        "packages": sum(report.num_tasks > 0 for report in reports),
        "tried": sum(report.num_tried for report in reports),
        "reports": [dataclasses.asdict(report) for report in reports],
    }
