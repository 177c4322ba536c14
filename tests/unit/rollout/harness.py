"""A harness for tests of episodes: one function, one visible test and one hidden test."""

from pathlib import Path


def prepare(payload):
    for path, text in payload["files"].items():
        Path(path).write_text(text)


def outcomes(text, tests):
    statuses = {}
    for name, (argument, wanted) in tests.items():
        try:
            namespace = {}
            exec(text, namespace)
            statuses[name] = "passed" if namespace["inc"](argument) == wanted else "failed"
        except Exception:
            statuses[name] = "failed"
    return statuses


def visible_tests(payload):
    status = outcomes(Path("repair.py").read_text(), {"test_inc": (1, 2)})["test_inc"]
    return "test_inc ok\nall passed" if status == "passed" else "test_inc FAILED AssertionError\n1 failed"


def grade(payload):
    return outcomes(payload["text"], {"test_inc": (1, 2), "test_hidden": (5, 6)})
