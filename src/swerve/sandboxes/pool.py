"""A pool of sandboxes: keeps one warm container per image and forks sandboxes from it.

    start(image) --> [gate: max_concurrent_starts] --> container of the image --> sandbox
                                                       launched at first use,
                                                       and again if it died in service, or made room

With `warm=False`, and in every backend but bubblewrap, each sandbox gets a container of its own: slower, and the same
in every result.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Iterable
from types import TracebackType

from swerve.sandboxes import reaper, solo
from swerve.sandboxes.backends import Backend, BubblewrapBackend
from swerve.sandboxes.container import Container, ForkedSandbox, OneShotSandbox
from swerve.sandboxes.protocol import Json, Sandbox, SandboxImage, SandboxLimits, SandboxLostError
from swerve.types import MachineError, SwerveError


class SandboxPool:
    """Starts sandboxes of a fixed set of images. Use as an asynchronous context manager, or call `close`.

    One event loop owns a pool. A sandbox that dies raises `SandboxLostError` from whatever is asked of it.
    """

    def __init__(
        self,
        images: Iterable[SandboxImage],
        limits: SandboxLimits | None = None,
        *,
        backend: Backend | None = None,
        warm: bool = True,
        max_containers: int = 64,
        max_concurrent_starts: int = 8,
        start_timeout_s: float = 30.0,
        preload_timeout_s: float = 300.0,
    ) -> None:
        """Create the pool; no process is started yet.

        Args:
            images: Distinctly named.
            limits: Of every sandbox.
            backend: What isolates them; bubblewrap if `None`.
            warm: With bubblewrap, fork sandboxes from one warm interpreter per image; else give each a container and an
                interpreter of its own, which is slow and must make no difference.
            max_containers: Warm containers kept; one that holds no sandbox, the longest unused first, makes room for
                another. Images may be many more.
            max_concurrent_starts: Sandboxes being started at once.
            start_timeout_s: Wall-clock seconds one start may take, `prepare` included.
            preload_timeout_s: Wall-clock seconds a container may take to load its harness.

        Raises:
            SwerveError: If two images share a name.
        """
        self._images: dict[str, SandboxImage] = {}
        for image in images:
            if image.name in self._images:
                raise SwerveError(f"two sandbox images are named {image.name}")
            self._images[image.name] = image
        self._limits = limits or SandboxLimits()
        self._backend = backend or BubblewrapBackend()
        self._warm = warm
        self._max_containers = max_containers
        self._gate = asyncio.Semaphore(max_concurrent_starts)
        self._start_timeout_s = start_timeout_s
        self._preload_timeout_s = preload_timeout_s
        self._containers: dict[str, asyncio.Task[Container]] = {}
        self._starting: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()
        self._one_shots: set[Container] = set()
        self._solos: set[solo.SoloSandbox] = set()
        self._reaped = False
        self._closed = False

    async def __aenter__(self) -> SandboxPool:
        """Return the pool itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the pool."""
        await self.close()

    async def warm_up(self) -> None:
        """Start the containers of the images, as many as are kept, so that a fault shows before any work is done.

        A backend whose every sandbox is a container starts one of the first image instead, and closes it.
        """
        if not isinstance(self._backend, BubblewrapBackend):
            if self._images:
                await (await self.start(next(iter(self._images)))).close()
        elif self._warm:
            first = itertools.islice(self._images.values(), self._max_containers)
            await asyncio.gather(*(self._container(image) for image in first))

    async def start(self, image_name: str, prepare: Json = None) -> Sandbox:
        """Start a sandbox.

        Args:
            image_name: One of the pool's images.
            prepare: Payload of the harness's `prepare`, which runs unless it is `None`.

        Raises:
            SwerveError: If the image is unknown, its files or its harness are at fault, or `prepare` raises.
            MachineError: If the machine cannot provide the sandbox.
        """
        image = self._images.get(image_name)
        if image is None:
            raise SwerveError(f"no sandbox image is named {image_name}; there are {', '.join(sorted(self._images))}")
        async with self._gate:
            if self._closed:
                raise MachineError("the sandbox pool is closed")
            if not isinstance(self._backend, BubblewrapBackend):
                return await self._start_solo(self._backend, image, prepare)
            if not self._warm:
                return await self._start_one_shot(image, prepare)
            self._starting[image.name] += 1
            try:
                return await self._start_forked(image, prepare)
            finally:
                self._starting[image.name] -= 1

    async def _start_forked(self, image: SandboxImage, prepare: Json) -> Sandbox:
        for attempt in (1, 2):
            container = await self._container(image)
            try:
                return await container.start(prepare, self._start_timeout_s, ForkedSandbox)
            except SandboxLostError:
                if attempt == 2 or container.is_alive:
                    raise
        raise AssertionError("unreachable")

    async def _start_solo(self, backend: solo.SoloBackend, image: SandboxImage, prepare: Json) -> Sandbox:
        if not self._reaped:
            self._reaped = True
            await asyncio.to_thread(reaper.reap)
        timeout_s = self._start_timeout_s + self._preload_timeout_s
        sandbox = await solo.start(backend, image, self._limits, prepare, timeout_s)
        if self._closed:
            await sandbox.close()
            raise MachineError("the sandbox pool is closed")
        self._solos = {other for other in self._solos if other.process_id is not None}
        self._solos.add(sandbox)
        return sandbox

    async def _start_one_shot(self, image: SandboxImage, prepare: Json) -> Sandbox:
        container = await self._new_container(image)
        self._one_shots = {other for other in self._one_shots if other.is_alive}
        self._one_shots.add(container)
        await container.launch(self._preload_timeout_s)
        try:
            return await container.start(prepare, self._start_timeout_s, OneShotSandbox)
        except BaseException:
            await asyncio.shield(container.close())
            raise

    async def _container(self, image: SandboxImage) -> Container:
        task = self._containers.get(image.name)
        if task is not None and task.done() and not task.cancelled() and task.exception() is None:
            container = task.result()
            if not container.is_alive and not self._closed:
                if container.num_started == 0:
                    raise SandboxLostError(f"sandbox image {image.name}: its container died before its first sandbox")
                await container.close()
                current = self._containers.get(image.name)
                task = None if current is task else current
        if task is None:
            self._make_room()
            task = asyncio.create_task(self._launch(image), name=f"container {image.name}")
        self._containers.pop(image.name, None)
        self._containers[image.name] = task  # the last: used most recently
        return await asyncio.shield(task)

    def _make_room(self) -> None:
        """Close containers that nobody uses, the longest unused first, until there is room for another."""
        for name, task in list(self._containers.items()):
            if len(self._containers) < self._max_containers:
                break
            is_ready = task.done() and not task.cancelled() and task.exception() is None
            if is_ready and not self._starting[name] and task.result().is_idle:
                del self._containers[name]
                closing = asyncio.create_task(task.result().close(), name=f"close container {name}")
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _launch(self, image: SandboxImage) -> Container:
        container = await self._new_container(image)
        await container.launch(self._preload_timeout_s)
        return container

    async def _new_container(self, image: SandboxImage) -> Container:
        assert isinstance(self._backend, BubblewrapBackend)
        root = await asyncio.to_thread(self._backend.root, image)
        return Container(image, self._limits, root)

    def process_ids(self) -> list[int]:
        """Return the host's process ids of the pool's containers; their sandboxes are below them."""
        tasks = [task for task in self._containers.values() if task.done() and not task.cancelled()]
        containers = [task.result() for task in tasks if task.exception() is None]
        living = (*containers, *self._one_shots, *self._solos)
        return [pid for container in living if (pid := container.process_id) is not None]

    async def close(self) -> None:
        """Kill every sandbox and container; wait until they are gone. Idempotent."""
        self._closed = True
        tasks = list(self._containers.values())
        self._containers.clear()
        for task in tasks:
            if not task.done():
                task.cancel()
        for task in tasks:
            with contextlib.suppress(SwerveError, asyncio.CancelledError):
                await (await task).close()
        await asyncio.gather(*self._closing)
        one_shots, self._one_shots = self._one_shots, set()
        solos, self._solos = self._solos, set()
        await asyncio.gather(*(one.close() for one in (*one_shots, *solos)))
