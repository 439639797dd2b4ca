"""Addresses of sockets: host and port, and whether only this machine reaches them."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

MAX_PORT = 65535

_HOST_HEADER = re.compile(r"(?:\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?")
"""HOST, HOST:PORT and the same with [IPV6]. Nothing else, such as a user's name, belongs into a header Host."""


def is_loopback(host: str) -> bool:
    """Return True if only this machine reaches a socket on `host`, an address without brackets or a name."""
    import ipaddress  # here, because it slows the start of a client

    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    # an IPv4 address in IPv6 form is that of IPv4
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class Address(NamedTuple):
    """Host and port to listen on."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """True if only this machine can connect."""
        return is_loopback(self.host)

    def make_url(self, scheme: str, port: int) -> str:
        """Return the URL of the port that was bound."""
        # without brackets, the colons of an IPv6 address would seem to begin a port
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{port}"


def split_address(text: str) -> Address | None:
    """Return the parts of HOST:PORT or [IPV6]:PORT, None for anything else."""
    # from the right, because an IPv6 address has colons of its own
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    return Address(host, int(port)) if host and port.isdecimal() and int(port) <= MAX_PORT else None


def read_host_header(text: str) -> str | None:
    """Return the host that a browser has named in its header Host, in lower case and without brackets and port.

    None for anything but HOST, HOST:PORT and the same with [IPV6]: what a lenient reader would skip, such as the part
    before or after `@`, may be the name of another host.
    """
    found = _HOST_HEADER.fullmatch(text)
    if found is None:
        return None
    ipv6, name, port = found.groups()
    if port is not None and int(port) > MAX_PORT:
        return None
    return (ipv6 or name).lower()


def is_loopback_header(values: Sequence[str]) -> bool:
    """Return True if a request's headers Host name this machine: exactly one, and that well-formed.

    A page of another site whose name resolves to this machine (DNS rebinding) makes its browser send that name.
    """
    if len(values) != 1:
        return False
    host = read_host_header(values[0])
    return host is not None and is_loopback(host)


def split_host(endpoint: str) -> str:
    """Return the host of a tcp endpoint, without the brackets of IPv6 and without a source address; else ""."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(";")[2].rpartition(":")[0].removeprefix("[").removesuffix("]")
    return host if scheme == "tcp" else ""


def are_same_endpoint(first: str, second: str) -> bool:
    """Return True if two endpoints of ZeroMQ are one socket, however they are spelt. A free port is none.

    `*` and the like include the loopback addresses. Names of other hosts are not looked up.
    """
    host, place = _split_endpoint(first)
    other_host, other_place = _split_endpoint(second)
    if not place or place != other_place:
        return False
    hosts = {host, other_host}
    return len(hosts) == 1 or ("*" in hosts and all(name == "*" or is_loopback(name) for name in hosts))


def _split_endpoint(endpoint: str) -> tuple[str, str]:
    """Return host and port, or "" and the path, in one spelling; the place is empty for a free port."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "ipc":
        # * is a new path at each bind, @ a name that is no path
        if address.startswith("*"):
            return "", ""
        if address.startswith("@"):
            return "", address
        return "", os.path.realpath(address)
    port = address.rpartition(":")[2]
    place = ""
    if scheme == "tcp" and port.isdecimal() and int(port):
        place = str(int(port))  # 05550 is 5550
    return _normalise_host(split_host(endpoint).lower()), place


def _normalise_host(host: str) -> str:
    if host in ("localhost", "lo"):
        return "127.0.0.1"
    import ipaddress  # here, because it slows the start of a client

    with suppress(OSError, ValueError):  # a name stays as it is
        if re.fullmatch(r"[0-9.]+", host):  # 127.1 is 127.0.0.1
            host = socket.inet_ntoa(socket.inet_aton(host))
        address = ipaddress.ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        if address.is_unspecified:
            return "*"
        return str(address)
    return host
