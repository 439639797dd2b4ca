"""Access to the console: checks of host, origin and token before anything else sees a request.

A page of another site cannot speak to a console on loopback: browsers name that site in `Origin`, and a name that
resolves to this machine later (DNS rebinding) is refused by `Host`. Elsewhere a page needs the token, which is in the
fragment of the printed URL and so in no server's log, and then a cookie.
"""

from __future__ import annotations

import contextlib
import http.cookies
import secrets
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SettingsError
from ..settings import Address, Settings, split_address

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_LOGINS = 64
OPEN_PATHS = ("/", "/login")
"""What a browser without a cookie may load, beside the static files: the page that logs in."""
STATIC = "/static/"
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

    host: str
    port: int
    certificate: Path | None
    key: Path | None
    asks_token: bool

    @property
    def scheme(self) -> str:
        """http, or https with a certificate."""
        return "https" if self.certificate else "http"

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return Address(self.host, self.port).is_loopback


def read_binding(settings: Settings) -> Binding:
    """Return where to listen. Raises SettingsError for another address than loopback without TLS."""
    console = settings.console
    address = split_address(console.bind)
    if address is None:
        raise SettingsError(
            f"console.bind: expected HOST:PORT such as 127.0.0.1:8460, found {console.bind!r:.80}"
        )
    if (console.certificate is None) != (console.key is None):
        raise SettingsError("console.certificate and console.key: expected both or none, found one")
    for name, path in (("certificate", console.certificate), ("key", console.key)):
        if path is not None and not path.is_file():
            raise SettingsError(f"console.{name}: expected a PEM file, found none at {path}")
    if not address.is_loopback and console.certificate is None:
        raise SettingsError(
            f"console.bind: expected 127.0.0.1, or TLS for others; found {address.host} without console.certificate "
            "and console.key. On this network, everybody could read the token and see the pictures"
        )
    return Binding(*address, console.certificate, console.key, console.token or not address.is_loopback)


class AccessControl:
    """An ASGI application in front of another one. It refuses strangers, and adds HEADERS to every answer."""

    def __init__(self, app: Application, binding: Binding) -> None:
        self.port = binding.port
        """Port of the socket, which is known after it is bound."""
        self.token = secrets.token_urlsafe(24) if binding.asks_token else None
        self._app, self._binding = app, binding
        self._sessions: deque[str] = deque(maxlen=MAX_LOGINS)

    def log_in(self, token: object) -> str | None:
        """Return the value of a new Set-Cookie header for the right token, None for a wrong one."""
        if self.token is None or not secrets.compare_digest(str(token).encode(), self.token.encode()):
            return None
        session = secrets.token_urlsafe(24)
        self._sessions.append(session)
        secure = "; Secure" if self._binding.certificate else ""
        return f"{self._cookie}={session}; Path=/; HttpOnly; SameSite=Strict{secure}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        refusal = self._find_refusal(scope)
        if refusal is None:
            await self._app(scope, receive, _with_headers(send))
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 4401 if refusal[0] == 401 else 4403})
        else:
            await _refuse(_with_headers(send), *refusal)

    @property
    def _cookie(self) -> str:
        return f"sam3_console_{self.port}"  # cookies of one host are shared by its ports

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        name = host.rpartition(":")[0] or host
        hosts = (*LOOPBACK, self._binding.host)
        if self._binding.is_loopback and name.strip("[]") not in hosts:  # a tunnel may have another port
            return 403, f"expected a request for {LOOPBACK[0]}, found one for another host"
        changes = scope["type"] == "websocket" or scope.get("method") not in ("GET", "HEAD")
        if changes and headers.get("origin") != f"{self._binding.scheme}://{host}":
            return 403, "expected a request from the console's own page, found another origin"
        path = scope["path"]
        if self.token is None or path in OPEN_PATHS or path.startswith(STATIC):
            return None
        cookies = http.cookies.SimpleCookie()
        with contextlib.suppress(http.cookies.CookieError):
            cookies.load(headers.get("cookie", ""))
        found = cookies[self._cookie].value if self._cookie in cookies else ""
        if any(secrets.compare_digest(found.encode(), session.encode()) for session in self._sessions):
            return None
        return 401, "open the console with the URL that `sam3-node console` has printed: it has the token"


def _with_headers(send: Send) -> Send:
    extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), *extra]
        await send(message)

    return send_with_headers


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text.encode()})
