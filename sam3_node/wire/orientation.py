"""The orientation that EXIF gives to a picture: how its pixels must be turned to stand as people see it.

Frames of cameras are taken as they are. Photos are turned as every viewer turns them. Pictures that are written with
labels have no orientation, because labels are of the pixels as they are, and usual readers turn the pixels.
"""

from __future__ import annotations

import re
import struct
import zlib

from ..types import Image
from ..types import lazy_numpy as np

# what comes before EXIF in JPEG, PNG and WebP
_EXIF = re.compile(rb"(?:Exif\0\0|eXIf|EXIF.{4}(?:Exif\0\0)?)(?=II\*\0|MM\0\*)", re.DOTALL)
_TIFF = (b"II*\0", b"MM\0*")
"""Beginnings of a TIFF file, and of EXIF, which has the same layout."""
_PLACE = 1 << 16
"""Bytes from the beginning and from the end of a file in which writers put EXIF."""
_ORIENTATION = 0x0112
"""Number of the tag."""
_SHORT = 3
"""Number of the tag's type, a whole number of two bytes."""
MAX_TAGS = 1000
"""Tags that are looked through."""
UPRIGHT = 1
"""Orientation of a picture without the tag."""


def find_orientation(data: bytes) -> int:
    """Return the EXIF orientation (1 to 8) of a JPEG, PNG, WebP or TIFF; 1, which is upright, without one."""
    place = _find_value(data)
    if place is None:
        return UPRIGHT
    (value,) = struct.unpack_from(f"{place[1]}H", data, place[0])
    return int(value) if 1 <= value <= 8 else UPRIGHT


def turn_upright(image: Image, orientation: int) -> Image:
    """Return an image [h, w, ...] as a viewer shows it, whose file has this orientation."""
    turned = image
    # 5 to 8 have rows and columns exchanged
    if orientation >= 5:
        turned = turned.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        turned = turned[::-1]
    if orientation in (2, 3, 6, 7):
        turned = turned[:, ::-1]
    return np.ascontiguousarray(turned)


def without_orientation(data: bytes) -> bytes:
    """Return the bytes of a JPEG or PNG file whose orientation, if it has one, says upright. The pixels stay."""
    place = _find_value(data)
    if place is None or find_orientation(data) == UPRIGHT:
        return data
    changed = bytearray(data)
    struct.pack_into(f"{place[1]}H", changed, place[0], UPRIGHT)
    # a chunk of a PNG ends with a checksum of its name and content, and begins with its length before the name
    name = data.rfind(b"eXIf", 0, place[0])
    if data.startswith(b"\x89PNG") and name >= 4:
        (length,) = struct.unpack_from(">I", data, name - 4)
        end = name + 4 + length
        struct.pack_into(">I", changed, end, zlib.crc32(changed[name:end]))
    return bytes(changed)


def _find_value(data: bytes) -> tuple[int, str] | None:
    """Return the place of the orientation's value and the order of its bytes; None for a file without it."""
    begin = 0
    if data[:4] not in _TIFF:
        found = _EXIF.search(data, 0, _PLACE) or _EXIF.search(data, max(len(data) - _PLACE, _PLACE))
        if found is None:
            return None
        begin = found.end()
    order = "<" if data[begin : begin + 2] == b"II" else ">"
    try:
        (tags,) = struct.unpack_from(f"{order}I", data, begin + 4)
        (count,) = struct.unpack_from(f"{order}H", data, begin + tags)
        for number in range(min(count, MAX_TAGS)):
            place = begin + tags + 2 + 12 * number
            tag, kind, values = struct.unpack_from(f"{order}HHI", data, place)
            if (tag, kind, values) == (_ORIENTATION, _SHORT, 1):
                struct.unpack_from(f"{order}H", data, place + 8)
                return place + 8, order
    except struct.error:
        return None
    return None
