"""Settings of what watches a process: its health endpoint and its log."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from typing import Literal, NamedTuple

from pydantic import Field

from .section import Section


class Address(NamedTuple):
    """Host and port to listen on."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def split_address(text: str) -> Address | None:
    """Return the parts of HOST:PORT or [IPV6]:PORT, None for anything else."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    return Address(host, int(port)) if host and port.isdecimal() and int(port) <= 65535 else None


def are_same_endpoint(first: str, second: str) -> bool:
    """Return True if two endpoints of ZeroMQ are one socket, however they are spelt. A free port is none.

    `*` and the like stand for the loopback addresses, too; of other hosts, nothing is looked up.
    """
    (host, place), (other_host, other_place) = _split_endpoint(first), _split_endpoint(second)
    if not place or place != other_place:
        return False
    hosts = {host, other_host}
    return len(hosts) == 1 or ("*" in hosts and all(name == "*" or _is_loopback(name) for name in hosts))


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port, or "" and the path, in one spelling; the place is empty for a free port."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        is_abstract = address.startswith("@")
        return "", "" if address.startswith("*") else address if is_abstract else os.path.realpath(address)
    host, _, port = address.rpartition(";")[2].rpartition(":")
    place = str(int(port)) if scheme == "tcp" and port.isdecimal() and int(port) else ""
    return _normalise_host(host.strip("[]").lower()), place


def _normalise_host(host: str) -> str:
    if host in ("localhost", "lo"):
        return "127.0.0.1"
    if re.fullmatch(r"[0-9.]+", host):  # 127.1 is 127.0.0.1
        try:
            host = socket.inet_ntoa(socket.inet_aton(host))
        except OSError:
            return host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    return "*" if address.is_unspecified else str(address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class HealthSettings(Section):
    bind: str = ""
    """Address and port of the node's /healthz, /readyz and /metrics, such as 127.0.0.1:9464; port 0 takes a free one.
    Empty: none. There is no authentication: use loopback, or a network that you trust."""
    deadline_s: float = Field(5.0, gt=0.0, le=86400.0)
    """The node is ready while it has published masks of some camera within this many seconds."""


class LoggingSettings(Section):
    format: Literal["text", "json"] = "text"
    """Format of the log on stderr. json: one object a line, with camera and seq where a line is about a frame."""
    limit: int = Field(20, ge=0, le=1_000_000)
    """Maximum number of lines of one kind in ten seconds; further ones are counted, and the count is logged. 0: no
    limit."""
