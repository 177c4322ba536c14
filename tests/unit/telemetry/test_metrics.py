"""One step axis for every number and every display; rates over the interval they were counted in."""

import io
import struct
import subprocess
import sys
from typing import Any

import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from swerve.telemetry import Metrics, PhaseTimer, TensorBoardSink, ThroughputMeter, open_progress, read_metrics

MESSAGES: Any = event_pb2


class Recorder:
    def __init__(self):
        self.seen = []

    def log(self, step, values):
        self.seen.append((step, dict(values)))

    def close(self):
        self.seen.append("closed")


def without_time(path):
    return [{k: v for k, v in record.items() if k != "unix_time_s"} for record in read_metrics(path)]


def test_every_consumer_is_handed_the_same_step(tmp_path):
    one, two = Recorder(), Recorder()
    metrics = Metrics(tmp_path / "m.jsonl", sinks=(one, two))
    metrics.log(0, {"pass_at_1": 0.25})
    metrics.log(1, {"reward": 0.5})
    metrics.log(1, {"pass_at_1": 0.5})
    metrics.close()
    assert one.seen == two.seen == [(0, {"pass_at_1": 0.25}), (1, {"reward": 0.5}), (1, {"pass_at_1": 0.5}), "closed"]
    assert without_time(tmp_path / "m.jsonl") == [{"step": step, **values} for step, values in one.seen[:-1]]


def test_steps_never_go_back_and_a_metric_has_one_value_per_step(tmp_path):
    metrics = Metrics(tmp_path / "m.jsonl")
    metrics.log(2, {"reward": 0.5})
    assert metrics.logged("reward")
    assert not metrics.logged("loss")
    with pytest.raises(ValueError, match="step 1 after those of step 2"):
        metrics.log(1, {"loss": 0.5})
    with pytest.raises(ValueError, match="already has a value of reward"):
        metrics.log(2, {"reward": 0.5})
    with pytest.raises(ValueError, match="reserved"):
        metrics.log(2, {"step": 0.5})
    metrics.close()
    assert without_time(tmp_path / "m.jsonl") == [{"step": 2, "reward": 0.5}]


def test_a_resumed_run_drops_what_it_will_do_again(tmp_path):
    path = tmp_path / "m.jsonl"
    metrics = Metrics(path)
    for step in range(4):
        metrics.log(step, {"reward": step})
    metrics.close()
    with path.open("a") as file:
        file.write('{"step": 4, "rew')
    metrics = Metrics(path, resume_step=2)
    assert metrics.step == 2
    assert metrics.logged("reward")
    metrics.log(3, {"reward": 30})
    metrics.close()
    assert [(record["step"], record["reward"]) for record in read_metrics(path)] == [(0, 0), (1, 1), (2, 2), (3, 30)]


def records(path):
    """Events of a TensorBoard file, checksums verified."""
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        assert struct.unpack("<I", data[8:12]) == (masked_crc32c(data[:8]),)
        content, data = data[12 : 12 + length], data[12 + length :]
        assert struct.unpack("<I", data[:4]) == (masked_crc32c(content),)
        data = data[4:]
        event = MESSAGES.Event()
        event.ParseFromString(content)
        yield event


def test_tensorboard_takes_the_numbers(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb", resume_step=3)
    sink.log(4, {"reward": 0.5, "cause": "text", "phase_s/train": 2})
    sink.close()
    sink.close()
    (path,) = (tmp_path / "tb").iterdir()
    first, purge, *scalars = records(path)
    assert first.file_version == "brain.Event:2"
    assert (purge.step, purge.session_log.status) == (4, MESSAGES.SessionLog.START)
    found = [(event.step, event.summary.value[0].tag, event.summary.value[0].simple_value) for event in scalars]
    assert found == [(4, "reward", 0.5), (4, "phase_s/train", 2.0)]


def test_a_full_disk_ends_tensorboard_with_one_line_and_whole_records(tmp_path):
    """In a process of its own, for the limit on file sizes stays; a thread that writes would hang the run instead."""
    code = f"""
import resource
from pathlib import Path
from swerve.telemetry import TensorBoardSink
from swerve.types import MachineError
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sink = TensorBoardSink(Path({str(tmp_path)!r}))
try:
    for step in range(100):
        sink.log(step, {{"a": 1.0, "b": 2.0}})
except MachineError as error:
    print(error)
sink.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.count("cannot be written"), done.stderr) == (1, "")
    (path,) = tmp_path.iterdir()
    steps = [event.step for event in records(path)][1:]
    assert steps == sorted([*range(len(steps) // 2)] * 2)
    assert len(steps) > 4


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_throughput_divides_an_interval_by_its_own_time():
    clock = Clock()
    meter = ThroughputMeter(clock)
    meter.add("tokens", 100)
    meter.add("token_slots", 200)
    clock.now += 10
    assert meter.interval() == {"tokens_per_s": 10, "token_slots_per_s": 20}
    clock.now += 2
    meter.add("tokens", 100)
    assert meter.interval() == {"tokens_per_s": 50, "token_slots_per_s": 0}
    assert meter.interval() == {"tokens_per_s": 0, "token_slots_per_s": 0}


def test_every_second_belongs_to_one_phase():
    clock = Clock()
    timer = PhaseTimer(clock)
    clock.now += 1
    with timer.phase("rollout"):
        clock.now += 2
        with timer.phase("grade"):
            clock.now += 4
            assert timer.current == "grade"
        clock.now += 8
    with timer.phase("grade"):
        clock.now += 16
    assert timer.lap() == {"other": 1, "rollout": 10, "grade": 20}
    with timer.phase("train"):
        clock.now += 1
        assert timer.lap() == {"other": 0, "train": 1}
        clock.now += 3
    assert timer.lap() == {"train": 3, "other": 0}


def test_a_phase_that_fails_is_still_counted():
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(KeyError), timer.phase("train"):
        clock.now += 1
        raise KeyError
    clock.now += 2
    assert timer.lap() == {"other": 2, "train": 1}


def test_plain_progress_is_a_line_per_step():
    stream = io.StringIO()
    progress = open_progress("auto", 20, stream)
    progress.waiting("episodes", 3, 128)
    progress.log(1, {"reward": 0.25, "tokens_per_s": 1234.5, "unknown": 1})
    progress.log(1, {"unknown": 2})
    progress.close()
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("step 1/20  reward 0.250  tokens/s 1,234")


def test_a_terminal_gets_a_live_line():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    progress = open_progress("auto", 20, stream)
    progress.waiting("episodes", 3, 128)
    progress.log(1, {"reward": 0.25})
    progress.say("[first] line")
    progress.close()
    progress.close()
    assert "[first] line" in stream.getvalue()
    assert "1/20" in stream.getvalue()


def test_silence_is_silent(capsys):
    stream = io.StringIO()
    progress = open_progress("none", 20, stream)
    progress.log(1, {"reward": 1.0})
    progress.waiting("episodes")
    progress.say("line")
    progress.close()
    assert stream.getvalue() == "".join(capsys.readouterr()) == ""
