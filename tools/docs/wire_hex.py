"""Hex examples of wire version 1, from the golden files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "data" / "wire"
_COLUMN = 32


def frame_hex() -> str:
    """Return the beginning of the shortest frame header, with its meaning."""
    header = _read_parts("frame-jpeg")[1]
    items = list(msgpack.unpackb(header).items())[:3]
    groups = [header[:1], *(msgpack.packb(value) for item in items for value in item)]
    assert header.startswith(b"".join(groups))
    meaning = ", ".join(f"{key}: {json.dumps(value)}" for key, value in items)
    return f"    {' '.join(group.hex() for group in groups)}  …\n    {{{meaning}, …"


def bits_hex() -> str:
    """Return the bytes of the example mask in bits+zstd, with their meaning."""
    data = _read_mask("masks-bits")
    return "\n".join(
        [
            _line(_spaced(data[:4]), "zstd's magic"),
            _line(_spaced(data[4:6]), f"one segment; its content is {data[5]} bytes"),
            _line(_spaced(data[6:9]), f"last block, stored as it is, {len(data) - 9} bytes"),
            _line(_spaced(data[9:]), "the bits"),
        ]
    )


def rle_hex() -> str:
    """Return the counts of the example mask in rle, their differences and their bytes."""
    data = _read_mask("masks-rle")
    numbers = _decode_numbers(data)
    counts: list[int] = []
    for index, number in enumerate(numbers):
        counts.append(number + counts[index - 2] if index > 2 else number)
    return "\n".join(
        [
            _line(
                " ".join(map(str, counts)),
                f"counts: {counts[0]} zeros, {counts[1]} one, …; the sum is {sum(counts)}",
            ),
            _line(" ".join(map(str, numbers)), "from the fourth on: minus the count two before"),
            _line(_spaced(data), json.dumps(data.decode())),
        ]
    )


def request_hex() -> str:
    """Return the bytes of the status request, with their meaning."""
    (request,) = _read_parts("request-status")
    items = msgpack.unpackb(request)
    groups = [request[:1], *(msgpack.packb(value) for item in items.items() for value in item)]
    assert request == b"".join(groups)
    meaning = ", ".join(f"{key}: {json.dumps(value)}" for key, value in items.items())
    return f"    {' '.join(group.hex() for group in groups)}\n    {{{meaning}}}"


def _read_parts(name: str) -> list[bytes]:
    parts = json.loads((_GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["parts"]
    return [bytes.fromhex(part) for part in parts]


def _read_mask(name: str) -> bytes:
    instance: dict[str, Any] = msgpack.unpackb(_read_parts(name)[1])["instances"][0]
    return bytes(instance["mask"]["data"])


def _decode_numbers(data: bytes) -> list[int]:
    numbers, value, shift = [], 0, 0
    for byte in data:
        group = byte - 48
        value |= (group & 0x1F) << shift
        shift += 5
        if not group & 0x20:
            numbers.append(value - (1 << shift) if group & 0x10 else value)
            value, shift = 0, 0
    return numbers


def _spaced(data: bytes) -> str:
    return data.hex(" ")


def _line(left: str, right: str) -> str:
    return f"    {left.ljust(_COLUMN)}{right}"
