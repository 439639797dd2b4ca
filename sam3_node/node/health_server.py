"""An HTTP server for probes: a thread of its own answers GET, bounded in connections, bytes and time.

It is no web server: each connection carries one request, and each answer is a small text that is made at once.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple

from ..errors import SettingsError, TransportError
from ..settings import split_address
from ..types import Closeable

log = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_CONNECTIONS = 16
MAX_CONNECTION_S = 5.0
POLL_S = 0.2
TEXT = "text/plain; charset=utf-8"


class Page(NamedTuple):
    """An answer: HTTP status, content type and body."""

    status: int
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[str], Page]]
"""Makes the page of each path. The argument is the request's Accept header."""


class HealthServer(Closeable):
    """Serves `pages` at `bind`, HOST:PORT. `url` has the port that was bound. A context manager.

    At MAX_CONNECTIONS the oldest connection is closed for a new one, so that slow peers keep no probe out; each is
    closed after MAX_CONNECTION_S. Raises SettingsError for a malformed address, TransportError for one that is taken.
    """

    def __init__(self, bind: str, pages: Pages) -> None:
        address = split_address(bind)
        if address is None:
            raise SettingsError(f"health.bind: expected HOST:PORT such as 127.0.0.1:9464, found {bind!r:.80}")
        try:
            self._server = _Server(address, pages)
        except OSError as error:
            raise TransportError(
                f"cannot bind the health endpoint to {bind}: {(error.strerror or str(error)).lower()}; stop the "
                "process that uses it, or set health.bind"
            ) from error
        host = f"[{address.host}]" if ":" in address.host else address.host
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections, and keeps account of those that are open."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.pages = pages
        self.checks_host = address[0] in LOOPBACK
        self._opened_s: dict[socket.socket, float] = {}
        self._changing = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> Any:
        """Accept a connection. Wait a moment where that fails, such as for want of descriptors."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(POLL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; close the oldest connection if there are too many."""
        with self._changing:
            if len(self._opened_s) >= MAX_CONNECTIONS:
                _hang_up(next(iter(self._opened_s)))
                del self._opened_s[next(iter(self._opened_s))]
            self._opened_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered."""
        with self._changing:
            self._opened_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on connections that are too old. The server's loop calls this at least every POLL_S."""
        oldest_s = time.monotonic() - MAX_CONNECTION_S
        with self._changing:
            for request in [found for found, opened_s in self._opened_s.items() if opened_s < oldest_s]:
                _hang_up(request)
                del self._opened_s[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore peers that leave early."""


def _hang_up(request: socket.socket) -> None:
    """End a connection, so that its thread ends, too."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers one GET or HEAD. On loopback it refuses requests for other hosts, which a foreign web page makes."""

    server: _Server
    server_version, sys_version = "sam3-node", ""
    timeout = MAX_CONNECTION_S

    def do_GET(self) -> None:
        """Send a page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Send a page's head."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes come every second."""

    def _answer(self, with_body: bool) -> None:
        page = self._make_page()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def _make_page(self) -> Page:
        host = self.headers.get("Host", "")
        name = host if host.endswith("]") else host.rpartition(":")[0] or host
        if self.server.checks_host and name.strip("[]") not in ("", *LOOPBACK):
            return Page(403, TEXT, b"expected a request for 127.0.0.1, found one for another host\n")
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            return Page(404, TEXT, f"expected one of {', '.join(self.server.pages)}\n".encode())
        try:
            return make(self.headers.get("Accept", ""))
        except Exception:
            log.exception("health: %s failed", self.path)
            return Page(500, TEXT, b"this page failed in the node; see its log\n")
