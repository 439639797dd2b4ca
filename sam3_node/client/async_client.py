"""The client for policies that use asyncio: the same core, awaited."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Self, TypeVar

from ..errors import NodeRestarted, TransportError
from ..resumable import resume
from ..transport import Security
from ..types import Delivery, MaskFrame
from . import values
from .mask_reader import Deadline, FoundObject, LabelSearch
from .perception_client import POLL_S, PerceptionClient
from .requests import AwaitedRequests

T = TypeVar("T")
MAX_REQUEST_THREADS = 32
"""Threads for the requests of one client. Requests take turns, and each waits for its turn in a thread."""


class AsyncPerceptionClient(AwaitedRequests):
    """The asyncio counterpart of PerceptionClient: its arguments, methods and errors, with `await` and `async for`.

    It is an async context manager, for one event loop. Masks are awaited without a thread of their own for each call;
    requests run in threads. A request that is cancelled is still carried out. `on_restart` is called in the event loop.
    """

    def __init__(
        self,
        masks: str | None = None,
        control: str | None = None,
        *,
        delivery: Delivery = "newest",
        cameras: Sequence[str] = (),
        timeout_ms: int = 2000,
        on_restart: Callable[[NodeRestarted], object] | None = None,
        sure_only: bool = False,
        security: Security | None = None,
    ) -> None:
        self._on_restart = on_restart
        # the same client, whose blocking calls run in threads; its errors of restarts come back to the event loop
        self._client: PerceptionClient = PerceptionClient(
            masks,
            control,
            delivery=delivery,
            cameras=cameras,
            timeout_ms=timeout_ms,
            on_restart=None if on_restart is None else self._pass_on,
            sure_only=sure_only,
            security=security,
        )
        self._threads = ThreadPoolExecutor(MAX_REQUEST_THREADS, "sam3-node requests")
        # bound at the first use: the client may be made before the loop runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrival: asyncio.Future[None]

    async def __aenter__(self) -> Self:
        self._bind()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        self._client._require_open()
        return self

    async def __anext__(self) -> MaskFrame:
        """Return the newest masks as they arrive, until `close`. NodeRestarted does not end the iteration."""
        masks = await self._wait(lambda: self._client._read_latest(0), None)
        if masks is None:
            raise StopAsyncIteration
        return masks

    @property
    def connected(self) -> bool:
        """True while a peer is connected at the masks endpoint of the node."""
        return self._client.connected

    def newest(self, camera: str | None = None) -> MaskFrame | None:
        """Return the newest masks of a camera at once, as `PerceptionClient.newest` does."""
        return self._client.newest(camera)

    async def latest(self, timeout_ms: int | None = None) -> MaskFrame | None:
        """Return the newest masks that were not returned before, as `PerceptionClient.latest` does."""
        self._client._require_open()
        return await self._wait(lambda: self._client._read_latest(0), Deadline(timeout_ms).left_s)

    async def latest_of_all(
        self, cameras: Sequence[str], timeout_ms: int | None = None, max_spread_ms: float = math.inf
    ) -> values.MasksOfCameras | None:
        """Return the newest masks of each of `cameras`, as `PerceptionClient.latest_of_all` does."""
        # checked at once, before the first wait
        values.check_names(cameras, "cameras")
        self._client._require_open()
        return await self._wait(
            lambda: self._client._read_latest_of_all(cameras, 0, max_spread_ms), Deadline(timeout_ms).left_s
        )

    async def wait_for(
        self,
        label: str,
        timeout_ms: int | None = 30_000,
        *,
        camera: str | None = None,
        most: int | None = None,
    ) -> FoundObject:
        """Wait until an object with `label` is tracked, as `PerceptionClient.wait_for` does."""
        return await self._wait_for(self._client._search(label, camera, most), timeout_ms)

    async def wait_for_held(
        self, id: int, timeout_ms: int | None = 30_000, *, camera: str | None = None
    ) -> FoundObject:
        """Wait until the gripper holds an object, as `PerceptionClient.wait_for_held` does."""
        return await self._wait_for(self._client._search_held(id, camera), timeout_ms)

    async def wait_until_seen(
        self, name_or_id: int | str, timeout_ms: int | None = 30_000, *, camera: str | None = None
    ) -> FoundObject:
        """Wait until a sure mask shows an object, as `PerceptionClient.wait_until_seen` does."""
        return await self._wait_for(self._client._search_seen(name_or_id, camera), timeout_ms)

    async def _wait_for(self, search: LabelSearch, timeout_ms: int | None) -> FoundObject:
        deadline = Deadline(timeout_ms)
        found = await self._wait(search.find, deadline.before_reason_s)
        return await self._run(partial(self._client._settle, search, found, deadline))

    async def wait_for_camera(self, timeout_ms: int | None = 30_000) -> str:
        """Wait until a camera sends and its frame was processed, as `PerceptionClient.wait_for_camera` does."""
        search = self._client._search_camera(timeout_ms)
        while (camera := await self._run(partial(resume, search))) is None:
            await asyncio.sleep(POLL_S)
        return camera

    async def diagnosis(self) -> str:
        """Return one line that says what keeps masks from arriving, as `PerceptionClient.diagnosis` does."""
        return await self._run(self._client.diagnosis)

    async def close(self) -> None:
        """Close both connections. Coroutines that wait for masks return None, later ones raise. Idempotent."""
        if self._client._is_forked:  # its threads are not here
            self._client.close()
            return
        # closing waits for threads, which must not stop the event loop
        await asyncio.get_running_loop().run_in_executor(None, self._client.close)
        self._threads.shutdown(wait=False)

    async def _run(self, call: Callable[[], T]) -> T:
        """Run a call of the client in a thread, and return its result."""
        self._client._require_open()
        # the context goes along, so that the request has the id of the caller's block
        try:
            return await self._bind().run_in_executor(self._threads, copy_context().run, call)
        except RuntimeError as error:  # the executor was shut down meanwhile
            if self._client.closed:
                raise TransportError("this client is closed: make another one") from error
            raise

    async def _wait(self, find: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Return the first result of `find` that is not None, called now and after each arrival; None at the end."""
        self._bind()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            # the future is taken before the look: an arrival during the look ends the wait at once
            arrival = self._arrival
            found = find()
            if found is not None or self._client.closed:
                return found
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            done, _ = await asyncio.wait((arrival,), timeout=left_s)
            if not done:
                return None

    def _bind(self) -> asyncio.AbstractEventLoop:
        """Listen for arrivals, from the first use in an event loop on."""
        loop = asyncio.get_running_loop()
        self._client._require_process()
        if self._loop is None:
            self._loop = loop
            self._arrival = loop.create_future()
            self._client._masks.newest.listen(self._wake)
        # a future belongs to its loop, so a second one would wait for ever
        if self._loop is not loop:
            raise TransportError("this client belongs to another event loop: open one in each")
        return loop

    def _wake(self) -> None:
        """Wake the coroutines that wait. Called by the receiving thread, which must outlive the event loop."""
        if self._loop is not None and not self._loop.is_closed():
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        # a new future for the next arrival, before those wake that wait for this one
        arrival = self._arrival
        self._arrival = asyncio.get_running_loop().create_future()
        arrival.set_result(None)

    def _pass_on(self, restart: NodeRestarted) -> None:
        """Call `on_restart` in the event loop."""
        if self._on_restart is None or self._loop is None:
            return
        # called in the loop by `newest`, or in a thread by a request
        try:
            is_here = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            is_here = False
        if is_here:
            self._on_restart(restart)
        else:
            self._loop.call_soon_threadsafe(self._on_restart, restart)
