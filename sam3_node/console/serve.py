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
from .app import AnySource, Binding, Changes, Console, read_binding
from .controls import Controls
from .recorded import RecordedViews
from .views import LiveViews

STOP_POLL_S = 0.1
CLOSE_S = 1


def run_console(
    settings: Settings,
    stop: threading.Event,
    recording: Path | None = None,
    against: Path | None = None,
    *,
    announce: Callable[[str], None],
    watchdog: Watchdog | None = None,
) -> None:
    """Serve the page until `stop` is set: of the live node, or of a recording. `announce` gets its address.

    Raises SettingsError for an address that is not safe, and for lossless delivery; TransportError if the address is
    in use; BagError if the recording cannot be read.
    """
    binding = read_binding(settings)
    if recording is None:
        settings.transport.require_newest("console")
    if recording is None and against is not None:
        raise SettingsError("--against: expected --recording with the pictures beside it, found none")
    changes = Changes()
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(_bind(binding))
        source: AnySource
        controls = None
        if recording is not None:
            source = opened.enter_context(RecordedViews(recording, against, changes.notify))
        else:
            source = live = opened.enter_context(LiveViews(settings, changes.notify))
            if not settings.console.read_only:
                controls = opened.enter_context(Controls(settings, lambda: live.detector, changes.notify))
        console = Console(source, controls, changes, binding)
        console.access.port = listener.getsockname()[1]
        announce(_make_url(binding, console))
        asyncio.run(_serve(console, binding, listener, stop, watchdog or Watchdog()))


async def _serve(
    console: Console, binding: Binding, listener: socket.socket, stop: threading.Event, watchdog: Watchdog
) -> None:
    config = uvicorn.Config(
        console.access,
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    what = f"cannot bind the console to {host}:{port}"
    with explain_os_error(TransportError, what, "; stop the process that uses it, or set console.bind"):
        return socket.create_server(binding.address, family=family)


def _make_url(binding: Binding, console: Console) -> str:
    address = binding.address
    if address.host == "0.0.0.0":
        address = address._replace(host="127.0.0.1")
    fragment = f"#token={console.access.token}" if console.access.token else ""
    return f"{address.make_url(binding.scheme, console.access.port)}/{fragment}"
