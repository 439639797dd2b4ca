"""Masks as palette PNGs in DAVIS' layout: <camera>/<seq>.png, whose pixels are 0 or the index of an object.

Beside them <camera>/objects.json tells which object an index is: a list of {index, id, label, first_seq}.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import ReplayError, WireError
from ..types import Buffer, Mask, MaskFrame
from .actions import Masks, Progress

Labels = npt.NDArray[np.uint8]
INDICES = 255
TABLE = "objects.json"

_PALETTE_TYPE = 3
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def colours() -> Labels:
    """DAVIS' and Pascal VOC's palette, RGB [256, 3]: the bits of the index, dealt to the channels from the top."""
    index = np.arange(256)
    table = np.zeros((256, 3), np.uint8)
    for shift in range(8):
        for channel in range(3):
            table[:, channel] |= (((index >> channel) & 1) << (7 - shift)).astype(np.uint8)
        index = index >> 3
    return table


def encode_labels(labels: Labels) -> bytes:
    """An 8-bit palette PNG, which OpenCV does not write, of uint8 [h, w] indices."""
    height, width = labels.shape
    rows = np.zeros((height, width + 1), np.uint8)  # each row begins with its filter: none
    rows[:, 1:] = labels
    header = struct.pack(">IIBBBBB", width, height, 8, _PALETTE_TYPE, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"PLTE", colours().tobytes()), (b"IDAT", zlib.compress(rows.tobytes(), 6)))
    return _SIGNATURE + b"".join(_chunk(kind, body) for kind, body in (*chunks, (b"IEND", b"")))


def decode_labels(data: Buffer) -> Labels:
    """The indices, uint8 [h, w], of a palette PNG, or the values of a grey one, in which 255 alone means one object: 1.

    Raises WireError for anything else.
    """
    pixels = _decode(data)
    if pixels is None or pixels.dtype != np.uint8:
        raise WireError(f"expected a palette or 8-bit grey PNG, found {_kind(pixels)}")
    if pixels.ndim == 2:
        return np.where(pixels == 255, 1, pixels).astype(np.uint8) if _is_binary(pixels) else pixels
    table = _packed(_palette_of(bytes(data)))
    order = np.argsort(table, kind="stable")
    place = np.searchsorted(table[order], _packed(pixels[..., 2::-1]))
    return order[np.minimum(place, len(order) - 1)].astype(np.uint8)


def read_mask(path: Path, value: int | None = None) -> Mask:
    """What a label image has as `value`, without one all that is not 0. ReplayError where that is nothing."""
    labels = read_labels(path)
    mask = Mask.from_full(labels == value if value is not None else labels != 0)
    if not mask.area:
        raise ReplayError(
            f"mask {path}: expected a pixel of {'an object' if value is None else value}, found none"
        )
    return mask


def read_labels(path: Path) -> Labels:
    """`decode_labels` of a file; ReplayError names it."""
    try:
        return decode_labels(path.read_bytes())
    except OSError as error:
        raise ReplayError(f"mask {path}: expected a PNG, found none to read ({error.strerror})") from error
    except WireError as error:
        raise ReplayError(f"mask {path}: {error}") from error


def index_of(object_id: int) -> int:
    """The palette index of an object: 1..255, its id as far as those reach, then they repeat."""
    return 1 + (object_id - 1) % INDICES


def paint(masks: MaskFrame) -> Labels:
    """All masks of a frame as one image of indices, uint8 [h, w]; where some overlap, the best score is on top."""
    image = np.zeros((masks.height, masks.width), np.uint8)
    for instance in sorted(masks.instances, key=lambda instance: (instance.score, -instance.id)):
        _fill(image, instance.mask, index_of(instance.id))
    return image


def write_palette(folder: Path, masks: Masks, progress: Progress) -> None:
    """Write the PNGs and tables of all cameras into `folder`; of frames of one camera and seq the last stays."""
    tables: dict[str, dict[int, dict[str, Any]]] = {}
    for count, found in enumerate(masks(), start=1):
        place = folder / found.camera
        if found.camera not in tables:
            place.mkdir(parents=True, exist_ok=True)
        _enter(tables.setdefault(found.camera, {}), found)
        (place / f"{found.seq:05d}.png").write_bytes(encode_labels(paint(found)))
        progress(count)
    for camera, table in tables.items():
        (folder / camera / TABLE).write_text(json.dumps(list(table.values()), indent=1) + "\n")


def _enter(table: dict[int, dict[str, Any]], found: MaskFrame) -> None:
    for instance in found.instances:
        row = {
            "index": index_of(instance.id),
            "id": instance.id,
            "label": instance.label,
            "first_seq": found.seq,
        }
        table.setdefault(instance.id, row)


def _fill(image: Labels, mask: Mask, index: int) -> None:
    x0, y0, x1, y1 = mask.box
    image[y0:y1, x0:x1][mask.crop] = index


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _decode(data: Buffer) -> npt.NDArray[Any] | None:
    if bytes(data[: len(_SIGNATURE)]) != _SIGNATURE:
        return None
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None


def _kind(pixels: npt.NDArray[Any] | None) -> str:
    return "no PNG, or a broken one" if pixels is None else f"one of {pixels.dtype} values"


def _is_binary(pixels: Labels) -> bool:
    return bool(((pixels == 0) | (pixels == 255)).all())


def _palette_of(data: bytes) -> Labels:
    start = data.find(b"PLTE")
    if start < 0 or data[25] != _PALETTE_TYPE:
        raise WireError("expected a palette or 8-bit grey PNG, found one of full colour")
    (length,) = struct.unpack(">I", data[start - 4 : start])
    return np.frombuffer(data[start + 4 : start + 4 + length], np.uint8).reshape(-1, 3)


def _packed(rgb: Labels) -> npt.NDArray[np.int32]:
    return rgb.astype(np.int32) @ np.array([65536, 256, 1], np.int32)
