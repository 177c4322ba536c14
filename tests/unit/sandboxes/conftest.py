"""One event loop and one warm pool for all tests of this folder, and eyes for what is left behind."""

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swerve.sandboxes import Mount, Sandbox, SandboxImage, SandboxLimits, SandboxPool

HARNESS = Path(__file__).with_name("harness.py")
LIMITS = SandboxLimits(
    memory_bytes=512 << 20,
    disk_bytes=4 << 20,
    file_bytes=2 << 20,
    num_processes=32,
    output_bytes=1000,
    read_bytes=50_000,
)

Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Marked:
    """An image whose processes can be recognised from outside by a mount point of theirs."""

    image: SandboxImage
    marker: str

    def processes(self) -> list[int]:
        """Host ids of every process that lives in the image's mount namespaces."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                seen = (entry / "mountinfo").read_text() + (entry / "cmdline").read_text()
            except OSError:
                continue
            if self.marker in seen:
                found.append(int(entry.name))
        return found

    def assert_gone(self, within_s: float = 0.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left == []
        assert self.marker not in Path("/proc/self/mountinfo").read_text()


def mark(directory: Path) -> Marked:
    marker = f"/opt/marker-{uuid.uuid4().hex}"
    directory.chmod(0o755)
    secret = directory / "answer.txt"
    secret.write_text("forty-two\n")
    image = SandboxImage(
        name="test",
        harness=HARNESS,
        harness_args={"answer": marker},
        mounts=(Mount(source=directory, target=marker),),
        hide=(marker,),
        distributions=("pytest",),
    )
    return Marked(image, marker)


@pytest.fixture
def marked(tmp_path: Path) -> Marked:
    directory = tmp_path / "answers"
    directory.mkdir()
    return mark(directory)


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Marked:
    return mark(tmp_path_factory.mktemp("answers"))


@pytest.fixture(scope="session")
def pool(run: Run, shared: Marked) -> Iterator[SandboxPool]:
    pool = SandboxPool([shared.image], LIMITS)
    yield pool
    run(pool.close())
    shared.assert_gone()


@pytest.fixture
def sandbox(run: Run, pool: SandboxPool) -> Iterator[Sandbox]:
    sandbox = run(pool.start("test"))
    yield sandbox
    run(sandbox.close())
