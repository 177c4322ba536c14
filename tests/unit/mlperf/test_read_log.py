"""Logs as writers leave them, whole or killed, become records; what is no record is named by its line."""

import pytest

from swerve.mlperf.read_log import read_log
from swerve.types import SwerveError

from .logs import line


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "run.log"
        path.write_bytes(text.encode())
        return read_log(path)

    return write


def test_records_are_read_wherever_the_token_stands_and_keep_their_line(written):
    log = written(
        f"starting\n{line('seed', 7)}\nrank 0: {line('eval_accuracy', 0.5, 2_000, samples_count=512, step=2)}\r\n"
        f"90%\r{line('seed', 8)}\n"
    )
    assert [(record.key, record.value, record.line) for record in log.records] == [
        ("seed", 7, 2),
        ("eval_accuracy", 0.5, 3),
        ("seed", 8, 5),
    ]
    accuracy = log.first("eval_accuracy")
    assert (accuracy.time_ms, accuracy.event_type, accuracy.samples_count) == (2_000, "POINT_IN_TIME", 512)
    assert accuracy.metadata["step"] == 2
    assert log.value("seed") == 7
    assert log.last("seed").value == 8
    assert len(log.all("seed")) == 2
    assert (log.value("nothing", 3), log.first("nothing")) == (3, None)
    assert log.token_lines == (2, 3, 5)
    assert (log.faults, log.torn, log.ends_with_newline) == ((), None, True)


def test_a_log_torn_at_any_byte_keeps_its_whole_lines_and_says_where_to_go_on(written):
    first, second = line("run_start"), line("eval_accuracy", 0.7, samples_count=512)
    for cut in range(len(second)):
        log = written(f"{first}\n{second[:cut]}")
        assert [record.key for record in log.records] == ["run_start"]
        assert (log.torn is not None) == (cut > 0), cut
        assert log.num_whole_bytes == len(first) + 1
        assert log.ends_with_newline
    log = written(f"{first}\n{second}")
    assert [record.key for record in log.records] == ["run_start", "eval_accuracy"]
    assert log.torn is None
    assert (log.num_whole_bytes, log.ends_with_newline) == (len(first) + len(second) + 1, False)


def test_a_torn_line_that_was_appended_to_is_named_and_what_follows_is_read(written):
    log = written(f"{line('run_start')[:40]}{line('run_stop', status='success')}\n{line('seed', 1)}\n")
    assert [(fault.line, fault.kind) for fault in log.faults] == [(1, "glued")]
    assert [record.key for record in log.records] == ["run_stop", "seed"]


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (":::MLLOG {nonsense}", "broken", "no JSON"),
        (":::MLLOG [1]", "incomplete", "not a JSON object"),
        (line("seed", 1).replace(', "value": 1', ""), "incomplete", "has no value"),
        (line("seed", 1, time_ms="1.2.3"), "incomplete", "time_ms is no number: 1.2.3"),
        (line("seed", 1, event=3), "incomplete", "must be texts"),
        (':::MLLOG {"time_ms":1,"event_type":"","key":"a","value":1,"metadata":[]}', "incomplete", "metadata"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_the_next_one_read(written, text, kind, reason):
    log = written(f"{text}\n{line('seed', 1)}\n")
    [fault] = log.faults
    assert (fault.line, fault.kind) == (1, kind)
    assert reason in fault.reason
    assert log.value("seed") == 1


def test_a_log_that_is_not_there_is_one_clear_line(tmp_path):
    for path in (tmp_path / "none.log", tmp_path):
        with pytest.raises(SwerveError, match="no such log"):
            read_log(path)


def test_an_empty_log_is_empty(written):
    log = written("")
    assert (log.records, log.faults, log.num_whole_bytes, log.ends_with_newline) == ((), (), 0, True)
