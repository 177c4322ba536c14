"""Findings of checkers, each with what it means and what to do about it in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ERROR = "error"
WARNING = "warning"
OWN_CHECKER = "swerve"
"""Name of this package's own checks among the checkers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that a checker objects to, or would crash on, or passes though it should not.

    Attributes:
        checker: Who says so: a module of `mlperf-logging`, or `swerve`.
        kind: Which explanation applies, a key of `EXPLANATIONS`.
        severity: `error`: no valid result as it stands; `warning`: to be looked at.
        file: The log, the description or the folder.
        line: Line of the file, from 1; 0 where it is about the whole.
        key: The log key or the field, or empty.
        found: What was found, and what was expected.
    """

    kind: str
    file: Path
    found: str
    checker: str = OWN_CHECKER
    severity: str = ERROR
    line: int = 0
    key: str = ""

    @property
    def meaning(self) -> str:
        """What it means."""
        return EXPLANATIONS[self.kind][0]

    @property
    def remedy(self) -> str:
        """What to do."""
        return EXPLANATIONS[self.kind][1]

    def to_json(self) -> dict[str, object]:
        """The finding as JSON values."""
        return {
            "checker": self.checker,
            "severity": self.severity,
            "kind": self.kind,
            "file": str(self.file),
            "line": self.line,
            "key": self.key,
            "found": self.found,
            "meaning": self.meaning,
            "remedy": self.remedy,
        }


_AGAIN = "mend what writes the log and run again: a log is evidence and is not edited"

EXPLANATIONS: Mapping[str, tuple[str, str]] = {
    # The file
    "empty-log": ("the file holds no record, so nothing of a run", "name the file that the run logged to"),
    "torn-line": (
        "the writer was killed in the middle of its last line; the checker refuses the whole log for it, or does not "
        "see it where the cut is within the token",
        "run the evaluation again: it cuts the line off and goes on; without it, run again",
    ),
    "glued-lines": (
        "a record was appended to a torn line; the checkers read the last record of a line alone, and lose the others",
        _AGAIN,
    ),
    "broken-line": ("a line with the token is no JSON; the checker refuses the whole log for it", _AGAIN),
    "incomplete-line": (
        "a record without all of time_ms, event_type, key, value and metadata stops the checker with a traceback",
        _AGAIN,
    ),
    "checker-crash": (
        "the checker stopped with a traceback instead of a verdict, which a reviewer will see as well",
        "mend the other findings of this file first; they are the usual cause",
    ),
    # Keys
    "missing-key": ("the rules ask for this key, and the log does not hold it", "log it once, and run again"),
    "repeated-key": (
        "the rules ask for exactly one record of this key; with several, no reader can tell which one holds",
        "log it once, from one process, and run again; a log that two runs appended to belongs to neither",
    ),
    "wrong-value": (
        "the rules fix this value, and the run logged another",
        "run with the value of the rules; if the run used it, mend what it logs",
    ),
    "law-value": (
        "the closed division derives this value from the global batch size, and the run logged another",
        "run with the value by law, or submit to the open division",
    ),
    "wrong-order": (
        "the check of this key needs one that must be logged before it (global_batch_size before learning rate, clip "
        "and generations; num_prompts_per_step before num_generations_per_prompt)",
        "log in that order, and run again",
    ),
    "init-too-long": (
        "initialisation took longer than the rules allow: 30 minutes in the closed division, 240 in the open one",
        "compile and load in less, for instance from a warm compilation cache of the same machine image",
    ),
    "failed-check": ("the checker's test of this key fails", "compare the test with the record"),
    "unknown-benchmark": (
        "the ruleset does not know the benchmark; the checker stops with a traceback",
        "log submission_benchmark as the ruleset spells it",
    ),
    "unknown-division": (
        "the division is neither closed nor open; the checker stops with a traceback",
        "log submission_division as closed or open",
    ),
    "placeholder": (
        "the value still holds a placeholder that was to be filled in",
        "fill it in where the run is launched",
    ),
    "no-seed": ("every run of a closed submission logs its seed, an integer", "log the seed once, and run again"),
    # Outcome
    "not-finished": (
        "the clock was never stopped: the run is still going, was killed, or awaits its evaluation",
        "let it finish, or evaluate its checkpoints, which adds the evaluations and run_stop",
    ),
    "run-aborted": (
        "run_stop says that the run did not reach the target; compliance passes such a log, and it is no result: in a "
        "set of three one is dropped as the slowest, two sink the set",
        "train another seed",
    ),
    "bad-status": ("run_stop must say success or aborted; others read as not converged", _AGAIN),
    "accuracy-at-target": (
        "the rule says at least 0.69, the checker wants above 0.69: exactly 0.69 fails it",
        "evaluate the next checkpoint; on 251 tasks 174 are the first number that passes, so check the number of tasks",
    ),
    "accuracy-below-target": (
        "no evaluation is above the target of 0.69, so the log is no result",
        "train longer, or another seed; 174 of 251 tasks are the first number that passes",
    ),
    "bad-accuracy": (
        "an accuracy is no number from 0 to 1, or lacks metadata.samples_count; readers stop with a traceback",
        _AGAIN,
    ),
    "extra-evaluation": (
        "readers take the last evaluation before run_stop for the point of convergence: one after the first that "
        "passes worsens the score, or undoes it",
        "stop evaluating at the first checkpoint that passes",
    ),
    "evaluation-gap": (
        "evaluations must follow each other by one step, from the first one by law, in step order",
        "evaluate every checkpoint from the first evaluation step on, in order",
    ),
    "clock": ("the times of the log contradict each other, so it has no score", _AGAIN),
    # Readers that search for words
    "foreign-accuracy": (
        "the reader of convergence looks for the words eval_accuracy and eval_error anywhere in a line: without "
        "metadata.samples_count it stops with a traceback, with it this line counts as an evaluation",
        "keep these words out of other keys, values and metadata",
    ),
    "foreign-batch-size": (
        "the reader of convergence looks for the word global_batch_size anywhere in a line, and takes this line's "
        "value for the batch size",
        "keep the word out of other keys, values and metadata",
    ),
    "foreign-benchmark": (
        "the reader of convergence looks for the word submission_benchmark anywhere in a line, and takes this line's "
        "value for the benchmark",
        "keep the word out of other keys, values and metadata",
    ),
    # Sets of logs
    "number-of-results": (
        "a result of this benchmark is made of exactly three logs",
        "submit three, chosen before their outcome was known",
    ),
    "mixed-batch-sizes": ("all logs of a result share one global batch size", "keep one folder per batch size"),
    "mixed-benchmarks": ("all logs of a result are of one benchmark", "keep one folder per benchmark"),
    "mixed-divisions": ("all logs of a result are of one division", "keep one folder per division"),
    "equal-seeds": (
        "two logs have the same seed, so they are one run counted twice; the checker notices only where both were "
        "logged from the same line of the same file",
        "run again with a seed of its own",
    ),
    "one-bad-log": (
        "one log does not comply; olympic scoring drops the worst one, so the checker accepts the set",
        "nothing must be done, but a second one sinks the set",
    ),
    "bad-logs": ("several logs do not comply; olympic scoring drops one alone", "mend or replace them"),
    "unknown-file": (
        "the folder holds files that are not named result_0.txt and so on",
        "remove them, or name them so",
    ),
    # Reference convergence
    "no-reference": (
        "there is no reference convergence for this batch size and none on both sides to interpolate between (there "
        "are 256, 512 and 1024)",
        "choose a batch size from 256 to 1024, or submit a reference of your own before the deadline",
    ),
    "too-fast": (
        "the runs converged in fewer samples than the reference makes plausible",
        "look for leaks and for hyperparameters off the law; else ask the review committee",
    ),
    "not-converged": (
        "more than one run did not converge, so the set has no score",
        "replace the aborted runs by new seeds",
    ),
    "no-batch-size": (
        "the logs name no global batch size, or several",
        "log global_batch_size once, the same in all",
    ),
    "seeds": ("the seed checker refuses the seeds of the set", "log one seed in each run, each another"),
    # Systems
    "missing-system-field": (
        "the description of the system lacks a field that the rules ask for",
        "add it; where it does not apply, an empty text",
    ),
    "system-field-type": ("fields of a system's description are texts", "put it between quotes"),
    "system-status": ("the status must be one of four texts", "choose one of them"),
    "no-system": (
        "results need a description of their system; the checker stops with a traceback",
        "write systems/SYSTEM.json: swerve mlperf system --out FILE fills in what the machine tells",
    ),
    "bad-system": ("the description of the system is no JSON object", "write one: swerve mlperf system --out FILE"),
    "system-division": (
        "the division of the description is not that of the logs; the checkers believe the description, and skip seeds "
        "and convergence unless it says closed",
        "make them agree",
    ),
    "system-refused": ("the checker refuses the description of the system", "mend the fields it names"),
    "no-results": ("the tree holds no results of a benchmark that the ruleset knows", "see swerve mlperf package"),
    "no-code": (
        "a submission holds the code, or a pointer to it, under benchmarks/",
        "add benchmarks/BENCHMARK/implementations/SYSTEM with the commands to run",
    ),
    "package-refused": ("the package checker refuses the tree", "see its words"),
}
"""Meaning and remedy, by kind."""
