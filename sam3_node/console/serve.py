"""Entry point of the console: it opens the source, binds the socket and serves the page until a signal."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import uvicorn

from ..errors import SettingsError, TransportError
from ..files import explain_os_error
from ..processes.notify import Watchdog
from ..settings import Settings
from ..unfinished_requests import BoundedProtocol
from .app import Binding, Changes, Console, ViewRoutes, read_binding
from .controls import Controls
from .episodes import EpisodeEditor
from .marking import MarkControls
from .recorded import RecordedViews
from .views import LiveViews

STOP_POLL_S = 0.1
"""Time between two looks at the stop event, in an event loop that signals do not reach."""
CLOSE_S = 1
"""Longest time that pages have to close."""


def run_console(
    settings: Settings,
    stop: threading.Event,
    recording: Path | None = None,
    against: Path | None = None,
    results: Path | None = None,
    dataset: Path | None = None,
    *,
    announce: Callable[[str], None],
    watchdog: Watchdog | None = None,
) -> None:
    """Serve the page until `stop` is set: of the live node, a recording or a dataset. `announce` gets its address.

    Raises SettingsError for an address that is not safe, for lossless delivery, and for a recording with a dataset;
    TransportError if the address is in use; BagError or OutputError if the recording or dataset cannot be read.
    """
    # contradictions of settings and options are errors before anything is opened
    binding = read_binding(settings)
    if recording is not None and dataset is not None:
        raise SettingsError("--dataset: expected it without --recording, found both; choose one")
    if recording is None and dataset is None:
        settings.transport.require_newest("console")
    for option, path in (("--against", against), ("--results", results)):
        if recording is None and path is not None:
            raise SettingsError(f"{option}: expected --recording with the pictures beside it, found none")
    with contextlib.ExitStack() as opened:
        # bound before the source is opened: an address in use is an error at once
        listener = opened.enter_context(_bind(binding))
        if dataset is not None:
            editor = EpisodeEditor(dataset, settings.console.read_only)
            controls = None if settings.console.read_only else editor
            console = Console("episodes.html", editor.routes, controls, binding)
        else:
            views = _open_views(opened, settings, recording, against, results)
            console = Console("index.html", views.routes, views.controls, binding)
        # with port 0, the kernel has chosen one
        console.access.port = listener.getsockname()[1]
        announce(_make_url(binding, console))
        asyncio.run(_serve(console, binding, listener, stop, watchdog or Watchdog()))


def _open_views(
    opened: contextlib.ExitStack,
    settings: Settings,
    recording: Path | None,
    against: Path | None,
    results: Path | None,
) -> ViewRoutes:
    """Return the routes of a recording's pictures, or of the live node's."""
    changes = Changes()
    read_only = settings.console.read_only
    if recording is not None:
        views = opened.enter_context(RecordedViews(recording, against, changes.notify, results))
        marks = None
        if views.can_mark and not read_only:
            marks = opened.enter_context(MarkControls(views))
        return ViewRoutes(views, marks, changes)
    live = opened.enter_context(LiveViews(settings, changes.notify))
    controls = None
    if not read_only:
        controls = opened.enter_context(Controls(settings, lambda: live.detector, changes.notify))
    return ViewRoutes(live, controls, changes)


async def _serve(
    console: Console, binding: Binding, listener: socket.socket, stop: threading.Event, watchdog: Watchdog
) -> None:
    config = uvicorn.Config(
        console.access,
        http=BoundedProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        ssl_certfile=binding.certificate,
        ssl_keyfile=binding.key,
        ws_max_size=1 << 16,
        ws_per_message_deflate=False,  # pictures and masks are compressed already
        timeout_graceful_shutdown=CLOSE_S,
    )
    server = uvicorn.Server(config)
    server.capture_signals = contextlib.nullcontext  # `stop` is set by the command's own handlers

    async def end_on_stop() -> None:
        # the loop's own life is the sign of life: a page that hangs stops nothing
        while not stop.is_set():
            watchdog.tick()
            await asyncio.sleep(STOP_POLL_S)
        watchdog.begin_close()
        server.should_exit = True

    ending = asyncio.create_task(end_on_stop())
    try:
        await server.serve([listener])
    finally:
        ending.cancel()


def _bind(binding: Binding) -> socket.socket:
    """Return a listening socket. Raises TransportError if the address is in use or not of this machine."""
    host, port = binding.address
    family = socket.AF_INET
    if ":" in host:
        family = socket.AF_INET6
    what = f"cannot bind the console to {host}:{port}"
    with explain_os_error(TransportError, what, "; stop the process that uses it, or set console.bind"):
        return socket.create_server(binding.address, family=family)


def _make_url(binding: Binding, console: Console) -> str:
    # a browser cannot open the address that stands for all addresses
    address = binding.address
    if address.host == "0.0.0.0":
        address = address._replace(host="127.0.0.1")
    url = f"{address.make_url(binding.scheme, console.access.port)}/"
    if console.access.token:
        # in the fragment, which a browser sends to no server
        url += f"#token={console.access.token}"
    return url
