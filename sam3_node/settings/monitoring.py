"""Settings of what watches a process: its health endpoint and its log."""

from __future__ import annotations

import ipaddress
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
