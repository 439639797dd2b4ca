"""The console's web application: the page, its requests, and the socket over which it gets views.

A page has at most one view on its way. It asks for the next one when it has drawn the last, so a slow page gets fewer
views, and never older ones. Nothing waits in a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..errors import NoAnswerError, RequestError, Sam3NodeError, WireError
from .access import AccessControl, Binding
from .controls import Controls
from .live import LiveSource
from .player import RecordedSource
from .views import View, pack_view

STATIC = Path(__file__).parent / "static"
MAX_BODY_BYTES = 64 << 10
STATE_S = 1.0
MAX_PAGES = 32

AnySource = LiveSource | RecordedSource


class Changes:
    """A count of changes that tasks of an event loop wait for, and any thread may raise."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def start(self) -> None:
        """Take the running event loop as the one that is woken."""
        self._loop = asyncio.get_running_loop()

    def notify(self) -> None:
        """Wake the tasks that wait. Any thread may call it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next change, or until `timeout_s` has passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)

    def _wake(self) -> None:
        event, self._event = self._event, asyncio.Event()
        event.set()


class Console:
    """The routes of the page, for one source. `controls` is None if the page may change nothing."""

    def __init__(
        self, source: AnySource, controls: Controls | None, changes: Changes, binding: Binding
    ) -> None:
        self._source, self._controls, self._changes = source, controls, changes
        self._pages = 0
        routes = [
            Route("/", self._get_page),
            Route("/login", self._log_in, methods=["POST"]),
            Route("/api/words", self._suggest),
            Route("/api/{op}", self._call, methods=["POST"]),
            WebSocketRoute("/views", self._serve_page),
            Mount("/static", StaticFiles(directory=STATIC)),
        ]
        self.access = AccessControl(Starlette(routes=routes, lifespan=self._run), binding)

    @contextlib.asynccontextmanager
    async def _run(self, app: Any) -> AsyncIterator[None]:
        self._changes.start()
        yield

    async def _get_page(self, request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    async def _log_in(self, request: Request) -> Response:
        try:
            body = await _read_json(request)
        except RequestError as error:
            return _fail(400, error.code, str(error))
        cookie = self.access.log_in(body.get("token"))
        if cookie is None:
            return _fail(401, "token", "this token is not the one that `sam3-node console` has printed")
        return JSONResponse({}, headers={"set-cookie": cookie})

    async def _suggest(self, request: Request) -> Response:
        typed = request.query_params.get("typed", "")[:200]
        words = await run_in_threadpool(self._controls.suggest, typed) if self._controls else []
        return JSONResponse({"words": words})

    async def _call(self, request: Request) -> Response:
        if self._controls is None:
            return _fail(403, "read_only", "this console shows and changes nothing: console.read_only is set")
        try:
            args = await _read_json(request)
            result = await run_in_threadpool(self._controls.call, request.path_params["op"], args)
        except Sam3NodeError as error:
            return _fail(504 if isinstance(error, NoAnswerError) else 400, error.code, str(error))
        return JSONResponse(result)

    async def _serve_page(self, socket: WebSocket) -> None:
        if self._pages >= MAX_PAGES:
            await socket.close(1013, f"expected at most {MAX_PAGES} pages")
            return
        await socket.accept()
        self._pages += 1
        page = _Page(socket, self._source, self._changes, self._describe)
        tasks = [asyncio.create_task(run()) for run in (page.receive, page.send_views, page.send_states)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pages -= 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _describe(self) -> dict[str, Any]:
        recording = self._controls.recording.state() if self._controls else None
        return {
            "type": "state",
            "mode": self._source.mode,
            "read_only": self._controls is None,
            "recorder": recording,
            **self._source.state(),
        }


class _Page:
    """One open page: what it has had, and what it asked for."""

    def __init__(
        self, socket: WebSocket, source: AnySource, changes: Changes, describe: Callable[[], dict[str, Any]]
    ) -> None:
        self._socket, self._source, self._changes, self._describe = socket, source, changes, describe
        self._asked = asyncio.Event()
        self._index = 0
        self._seen: dict[str, int] = {}
        self._compared = 0

    async def receive(self) -> None:
        """Take requests for views until the page goes."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, ValueError):
            while True:
                message = json.loads(await self._socket.receive_text())
                if message["type"] == "ping":
                    await self._send({"type": "pong", "time": message.get("time"), "now": time.time() * 1000})
                elif message["type"] in ("next", "get"):
                    self._index = int(message.get("index", 0))
                    self._asked.set()

    async def send_views(self) -> None:
        """Send one view for each request."""
        while True:
            await self._asked.wait()
            view = await self._find_view()
            self._asked.clear()
            live = self._source.mode == "live"
            try:
                data = await run_in_threadpool(pack_view, view, live)
            except WireError as error:
                await self._send({"type": "damaged", "number": view.number, "text": str(error)})
                continue
            await self._socket.send_bytes(data)

    async def send_states(self) -> None:
        """Send the state when it changes, and every STATE_S, by which the page knows that the console runs."""
        sent: dict[str, Any] = {}
        sent_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            state = self._describe()
            if _without_counts(state) != sent or loop.time() - sent_s >= STATE_S:
                sent, sent_s = _without_counts(state), loop.time()
                await self._send(state)
                await self._send_timeline()
            await self._changes.wait(STATE_S / 2)

    async def _send_timeline(self) -> None:
        if isinstance(self._source, RecordedSource):
            rows = self._source.timeline(self._compared)
            if rows:
                await self._send({"type": "timeline", "start": self._compared, "rows": rows})
                self._compared += len(rows)

    async def _find_view(self) -> View:
        if isinstance(self._source, RecordedSource):
            view: View = await run_in_threadpool(self._source.view, self._index)
            return view
        while (found := self._source.next_view(self._seen)) is None:
            await self._changes.wait(STATE_S)
        return found

    async def _send(self, message: dict[str, Any]) -> None:
        await self._socket.send_text(json.dumps(message, separators=(",", ":")))


def _without_counts(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state whose change the page shows at once."""
    status = state.get("status") or {}
    events = state.get("events") or [{}]
    kept = {name: value for name, value in state.items() if name not in ("status", "events", "dropped")}
    return kept | {
        "node": status.get("node"),
        "paused": status.get("paused"),
        "prompts": status.get("prompts"),
        "event": events[-1].get("number"),
    }


async def _read_json(request: Request) -> dict[str, Any]:
    """Return the body's map. Raises RequestError for anything else, and for more than MAX_BODY_BYTES."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise RequestError(f"expected a request of at most {MAX_BODY_BYTES} bytes, found more")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError("expected a map in JSON, found something else")
    return found


def _fail(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
