"""Names and modes of V4L2 cameras, asked from the kernel (linux/videodev2.h)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .modes import Mode

DEVICES = Path("/dev")
_QUERYCAP, _ENUM_FMT, _ENUM_SIZES, _ENUM_INTERVALS = 0x80685600, 0xC0405602, 0xC02C564A, 0xC034564B
_CAPTURE, _HAS_DEVICE_CAPS = 0x1, 0x80000000
_DISCRETE = 1
_MAX_ENTRIES = 256

Ask = Callable[[int, bytearray], object]
"""An ioctl of an open device: it fills the structure of a request. Raises OSError at the end of a list."""


@dataclass(frozen=True, slots=True)
class V4l2Camera:
    """A device that captures video: its file, its name and its modes."""

    path: Path
    name: str
    modes: tuple[Mode, ...]

    @property
    def index(self) -> int:
        """N of /dev/videoN."""
        return int(self.path.name.removeprefix("video"))


def list_v4l2(folder: Path = DEVICES) -> list[V4l2Camera]:
    """Return the cameras of this machine, in the order of their files. One that cannot be opened has no modes."""
    paths = [path for path in folder.glob("video*") if path.name.removeprefix("video").isdecimal()]
    found = []
    for path in sorted(paths, key=lambda path: int(path.name.removeprefix("video"))):
        try:
            device = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            found.append(V4l2Camera(path, f"({error.strerror})", ()))
            continue
        try:
            camera = read_camera(path, partial(fcntl.ioctl, device))
        except OSError:  # not a video device
            camera = None
        finally:
            os.close(device)
        if camera is not None:
            found.append(camera)
    return found


def read_camera(path: Path, ask: Ask) -> V4l2Camera | None:
    """Return the camera at `path`; None if it captures no video, such as the metadata of a camera."""
    data = bytearray(104)
    ask(_QUERYCAP, data)
    _, card, _, _, capabilities, device_caps = struct.unpack_from("=16s32s32sIII", data)
    if not (device_caps if capabilities & _HAS_DEVICE_CAPS else capabilities) & _CAPTURE:
        return None
    return V4l2Camera(path, card.split(b"\0")[0].decode("utf-8", "replace"), tuple(_list_modes(ask)))


def _list_modes(ask: Ask) -> Iterator[Mode]:
    # an entry of a list is asked by its index, which lies before what it depends on; formats are of kind 1, capture
    for (code,) in _enumerate(ask, _ENUM_FMT, 64, struct.pack("=I", 1), "=I", 44):
        form = struct.pack("=I", code).decode("ascii", "replace").strip()
        for kind, width, height in _enumerate(ask, _ENUM_SIZES, 44, struct.pack("=I", code), "=III", 8):
            if kind != _DISCRETE:  # a range of sizes, whose smallest says little
                continue
            size = struct.pack("=III", code, width, height)
            for rate_kind, seconds, images in _enumerate(ask, _ENUM_INTERVALS, 52, size, "=III", 16):
                if rate_kind == _DISCRETE and seconds:
                    yield Mode(width, height, round(images / seconds, 3), form)


def _enumerate(
    ask: Ask, request: int, size: int, key: bytes, fields: str, offset: int
) -> Iterator[tuple[int, ...]]:
    """Yield the fields at `offset` of each entry of a list, until the device says that there is no more."""
    with contextlib.suppress(OSError):
        for index in range(_MAX_ENTRIES):
            data = bytearray(struct.pack("=I", index) + key)
            data.extend(bytes(size - len(data)))
            ask(request, data)
            yield struct.unpack_from(fields, data, offset)
