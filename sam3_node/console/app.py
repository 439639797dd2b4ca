"""The console's web application: the page, its requests, the socket over which it gets views, and who may use them.

A page of another site cannot speak to a console on loopback: browsers name that site in `Origin`, and a name that
resolves to this machine later (DNS rebinding) is refused by `Host`. Elsewhere a page needs the token, which is in the
fragment of the printed URL and so in no server's log, and then a cookie. A page has at most one view on its way. It
asks for the next one when it has drawn the last, so a slow page gets fewer views, and never older ones.
"""

import asyncio
import contextlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..addresses import Address, is_loopback_header
from ..errors import NoAnswerError, RequestError, Sam3NodeError, SettingsError, WireError
from ..settings import Settings, read_address
from .controls import Controls
from .marking import MarkControls
from .recorded import RecordedViews
from .views import FrameView, LiveViews, pack_view

MAX_LOGINS = 64
"""Cookies that are valid at once. The oldest login loses its cookie to a new one."""
OPEN_PATHS = ("/", "/login")
"""What a browser without a cookie may load, beside the static files: the page that logs in."""
STATIC = "/static/"
STATIC_FOLDER = Path(__file__).parent / "static"
MAX_BODY_BYTES = 64 << 10
"""Longest body of a request. Prompts are points and boxes, which are short."""
STATE_S = 1.0
"""Longest time between two states that a page gets, by which it knows that the console runs."""
MAX_PAGES = 32
"""Pages that may be open at once. Each of them gets pictures of its own."""
# no script, style or picture of another origin, and nothing that a browser would keep
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob:; "
    "connect-src 'self'; worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Binding(NamedTuple):
    """The console's address. Without certificate it speaks HTTP, on loopback only."""

    address: Address
    certificate: Path | None
    key: Path | None
    asks_token: bool

    @property
    def scheme(self) -> str:
        """http, or https with a certificate."""
        if self.certificate:
            return "https"
        return "http"


def read_binding(settings: Settings) -> Binding:
    """Return where to listen. Raises SettingsError for another address than loopback without TLS."""
    console = settings.console
    address = read_address("console.bind", console.bind, "127.0.0.1:8460")
    if (console.certificate is None) != (console.key is None):
        raise SettingsError("console.certificate and console.key: expected both or none, found one")
    for name, path in (("certificate", console.certificate), ("key", console.key)):
        if path is not None and not path.is_file():
            raise SettingsError(f"console.{name}: expected a PEM file, found none at {path}")
    # without TLS, everybody on the network could read the pictures, and the token with them
    if not address.is_loopback and console.certificate is None:
        raise SettingsError(
            f"console.bind: expected 127.0.0.1, or TLS for others; found {address.host} without console.certificate "
            "and console.key. On this network, everybody could read the token and see the pictures"
        )
    asks_token = console.token or not address.is_loopback
    return Binding(address, console.certificate, console.key, asks_token)


class AccessControl:
    """An ASGI application in front of another one. It refuses strangers, and adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp, binding: Binding) -> None:
        self.port = binding.address.port
        """Port of the socket, which is known after it is bound."""
        self.token: str | None = None
        """The token of the printed URL; None if the console asks for none."""
        if binding.asks_token:
            self.token = secrets.token_urlsafe(24)
        # the application behind, which strangers never reach
        self._app = app
        self._binding = binding
        self._sessions: deque[str] = deque(maxlen=MAX_LOGINS)

    def log_in(self, token: object) -> str | None:
        """Return the value of a new Set-Cookie header for the right token, None for a wrong one."""
        # compared in constant time, so that the time of the answer tells nothing of the token
        if self.token is None or not secrets.compare_digest(str(token).encode(), self.token.encode()):
            return None
        # a cookie of its own for each login: the token itself is never stored by a browser
        session = secrets.token_urlsafe(24)
        self._sessions.append(session)
        cookie = f"{self._cookie}={session}; Path=/; HttpOnly; SameSite=Strict"
        if self._binding.certificate:
            cookie += "; Secure"
        return cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        # messages of the server's own start and end are for the application behind
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._find_refusal(scope)
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            # a socket is refused before it is accepted, with the status in the code of closing
            await receive()
            code = 4401 if refusal[0] == 401 else 4403
            await send({"type": "websocket.close", "code": code})
        else:
            status, text = refusal
            await PlainTextResponse(text, status)(scope, receive, _with_headers(send))

    @property
    def _cookie(self) -> str:
        return f"sam3_console_{self.port}"  # cookies of one host are shared by its ports

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        # DNS rebinding: a page of a name that now resolves to this machine sends that name as host
        request = HTTPConnection(scope)
        hosts = request.headers.getlist("host")
        # a tunnel may have another port
        if self._binding.address.is_loopback and not is_loopback_header(hosts):
            return 403, "expected a request for 127.0.0.1, found one for another host"
        # a page of another site may send requests here, but its browser names the origin
        changes = scope["type"] == "websocket" or scope.get("method") not in ("GET", "HEAD")
        host = request.headers.get("host", "")
        if changes and request.headers.get("origin") != f"{self._binding.scheme}://{host}":
            return 403, "expected a request from the console's own page, found another origin"
        # the page itself and its files hold nothing secret: they ask for the token
        path = scope["path"]
        if self.token is None or path in OPEN_PATHS or path.startswith(STATIC):
            return None
        found = request.cookies.get(self._cookie, "")
        if any(secrets.compare_digest(found.encode(), session.encode()) for session in self._sessions):
            return None
        return 401, "open the console with the URL that `sam3-node console` has printed: it has the token"


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    # every answer gets them, those of errors and files, too
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return send_with_headers


AnySource = LiveViews | RecordedViews
AnyControls = Controls | MarkControls


class Answers(Protocol):
    """What carries out the requests of a page."""

    def call(self, op: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """Carry out a request and return its reply as JSON values. Raises Sam3NodeError if that fails."""


class Changes:
    """A count of changes that tasks of an event loop wait for, and any thread may raise."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake the tasks that wait. Any thread may call it."""
        # before the first wait there is no loop, and nobody to wake
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self._wake)

    async def wait(self, timeout_s: float) -> None:
        """Wait for the next change, or until `timeout_s` has passed."""
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)

    def _wake(self) -> None:
        # a new event for the next change, before those wake that wait for this one
        event = self._event
        self._event = asyncio.Event()
        event.set()


class Console:
    """A page with its routes, and its requests, which `controls` answers: None if the page may change nothing."""

    def __init__(
        self, page: str, routes: Sequence[BaseRoute], controls: Answers | None, binding: Binding
    ) -> None:
        self._controls = controls
        every = [
            Route("/", lambda request: FileResponse(STATIC_FOLDER / page)),
            Route("/login", self._log_in, methods=["POST"]),
            *routes,
            Route("/api/{op}", self._call, methods=["POST"]),
            Mount("/static", StaticFiles(directory=STATIC_FOLDER)),
        ]
        # each error of ours becomes an answer with its code and its sentence
        handlers: Any = {Sam3NodeError: _refuse}
        app = Starlette(routes=every, exception_handlers=handlers)
        self.access = AccessControl(app, binding)

    async def _log_in(self, request: Request) -> Response:
        # the token comes in the body: a URL would be in the browser's history
        cookie = self.access.log_in((await _read_json(request)).get("token"))
        if cookie is None:
            return _fail(401, "token", "this token is not the one that `sam3-node console` has printed")
        return JSONResponse({}, headers={"set-cookie": cookie})

    async def _call(self, request: Request) -> Response:
        if self._controls is None:
            return _fail(403, "read_only", "this console shows and changes nothing: console.read_only is set")
        # in a thread, because a request waits for the node, and other pages must not wait with it
        args = await _read_json(request)
        reply = await run_in_threadpool(self._controls.call, request.path_params["op"], args)
        return Response(msgspec.json.encode(reply), media_type="application/json")


class ViewRoutes:
    """The routes of the page that shows pictures with masks: the socket for views, and names for what is typed."""

    def __init__(self, source: AnySource, controls: AnyControls | None, changes: Changes) -> None:
        self.controls = controls
        """None if the page may change nothing."""
        self._source = source
        self._changes = changes
        self._pages = 0
        self.routes = [Route("/api/words", self._suggest), WebSocketRoute("/views", self._serve_page)]

    async def _suggest(self, request: Request) -> Response:
        typed = request.query_params.get("typed", "")[:200]
        words: list[str] = []
        if self.controls:
            # in a thread, because the first call reads a vocabulary
            words = await run_in_threadpool(self.controls.suggest, typed)
        return JSONResponse({"words": words})

    async def _serve_page(self, socket: WebSocket) -> None:
        if self._pages >= MAX_PAGES:
            await socket.close(1013, f"expected at most {MAX_PAGES} pages")
            return
        await socket.accept()
        # three tasks for one page; whichever ends first, because the page has gone, ends all
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

    def _describe(self) -> Mapping[str, object]:
        # of a recording, the page has marks in the place of a recorder
        recorder = self.controls.recording.state() if isinstance(self.controls, Controls) else None
        return {
            "type": "state",
            "mode": self._source.mode,
            "read_only": self.controls is None,
            "recorder": recorder,
            **self._source.state(),
        }


class _Page:
    """One open page: what it has had, and what it asked for."""

    def __init__(
        self,
        socket: WebSocket,
        source: AnySource,
        changes: Changes,
        describe: Callable[[], Mapping[str, object]],
    ) -> None:
        self._socket = socket
        self._source = source
        self._changes = changes
        self._describe = describe
        self._asked = asyncio.Event()
        self._index = 0  # of the view of a recording that the page has asked for
        self._seen: dict[str, int] = {}  # by camera: the number of the live view that it has had last
        self._compared = 0  # rows of the timeline that it has had
        self._revision = 0  # of the marks that it has had

    async def receive(self) -> None:
        """Take requests for views until the page goes."""
        # a page that sends anything else is closed: it is not ours
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, ValueError):
            while True:
                message = json.loads(await self._socket.receive_text())
                if message["type"] == "ping":
                    await self._send({"type": "pong", "time": message.get("time"), "now": time.time() * 1000})
                # only the last request counts: a page that scrolls asks faster than views can be sent
                elif message["type"] in ("next", "get"):
                    self._index = int(message.get("index", 0))
                    self._asked.set()

    async def send_views(self) -> None:
        """Send one view for each request."""
        while True:
            await self._asked.wait()
            view = await self._find_view()
            # cleared only now: what was asked while the view was looked for is answered by this view
            self._asked.clear()
            live = self._source.mode == "live"
            try:
                # encoding takes milliseconds, in which the loop serves other pages
                data = await run_in_threadpool(pack_view, view, live)
            except WireError as error:
                await self._send({"type": "damaged", "number": view.number, "text": str(error)})
                continue
            await self._socket.send_bytes(data)

    async def send_states(self) -> None:
        """Send the state when it changes, and every STATE_S, by which the page knows that the console runs."""
        sent: Mapping[str, object] = {}
        sent_s = 0.0
        loop = asyncio.get_running_loop()
        while True:
            state = self._describe()
            # counts change with every frame, and are not worth a message of their own
            if _without_counts(state) != sent or loop.time() - sent_s >= STATE_S:
                sent = _without_counts(state)
                sent_s = loop.time()
                await self._send(state)
                await self._send_timeline()
            await self._send_review()
            await self._changes.wait(STATE_S / 2)

    async def _send_timeline(self) -> None:
        if isinstance(self._source, RecordedViews):
            rows = self._source.timeline(self._compared)
            if rows:
                await self._send({"type": "timeline", "start": self._compared, "rows": rows})
                self._compared += len(rows)

    async def _send_review(self) -> None:
        """Send the marks and the queue if they are others than the page has had."""
        if isinstance(self._source, RecordedViews) and self._source.revision != self._revision:
            # in a thread, because the queue of a long recording takes time
            review = await run_in_threadpool(self._source.review)
            self._revision = review.revision
            await self._send({"type": "review", "marks": review.marks, "queue": review.queue})

    async def _find_view(self) -> FrameView:
        if isinstance(self._source, RecordedViews):
            view: FrameView = await run_in_threadpool(self._source.view, self._index)
            return view
        # live: wait for a view that this page has not had
        while (found := self._source.next_view(self._seen)) is None:
            await self._changes.wait(STATE_S)
        return found

    async def _send(self, message: Mapping[str, object]) -> None:
        await self._socket.send_text(msgspec.json.encode(message).decode())


def _without_counts(state: Mapping[str, Any]) -> Mapping[str, object]:
    """Return the part of a state whose change the page shows at once."""
    # the node's counts change with every frame; these values change when a person does something
    status = state.get("status") or {}
    events = state.get("events") or [{}]
    kept = {name: value for name, value in state.items() if name not in ("status", "events", "dropped")}
    return kept | {
        "node": status.get("node"),
        "paused": status.get("paused"),
        "episode": status.get("episode"),
        "prompts": status.get("prompts"),
        "event": events[-1].get("number"),
    }


async def _read_json(request: Request) -> Mapping[str, object]:
    """Return the body's map. Raises RequestError for anything else, and for more than MAX_BODY_BYTES."""
    # counted while it is read: a header may claim any length
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


async def _refuse(request: Request, error: Exception) -> Response:
    status = 400
    if isinstance(error, NoAnswerError):
        status = 504
    return _fail(status, getattr(error, "code", ""), str(error))


def _fail(status: int, code: str, message: str) -> Response:
    return JSONResponse({"error": {"code": code, "message": message}}, status_code=status)
