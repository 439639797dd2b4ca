"""Reads messages of other projects' camera servers: bytes to images, within bounds. Names the dialect of the bytes.

| dialect | a message |
|---|---|
| groot | one msgpack map `{"timestamps": {camera: s}, "images": {camera: JPEG}}`; JPEG as base64 text, or as bytes |
| lerobot | the same map as JSON; JPEG as base64 text |
| imagezmq | JSON `{"msg": name, "dtype", "shape"}`, then the pixels; or `{"msg": name}`, then a JPEG |
| jpeg | a JPEG or PNG, alone or after a topic that names its camera |

Red and blue: the servers of lerobot and GR00T hand RGB images to OpenCV's JPEG encoder, which takes them for BGR, so
red and blue are exchanged in their base64 images. The JPEGs that GR00T's server sends as bytes come from a camera's own
encoder and are right. imagezmq sends OpenCV's BGR. Bare JPEGs are taken as they are.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import WireError
from ..types import Buffer, ColourEncoding, Depth, Frame
from ..wire.codec import MAX_INT, MAX_SIDE, Limits, describe, unpack
from ..wire.images import MAX_FRAME_PIXELS, check_colour, compressed_size, identify_compressed, is_depth_png

Dialect = Literal["groot", "lerobot", "imagezmq", "jpeg"]

MAX_IMAGES = 32
"""Maximum number of entries of the images of one message: colour and depth of MAX_CAMERAS."""
MAX_ITEMS = 4096
MAX_HEAD_BYTES = 64 << 10
MAX_TOPIC_BYTES = 256
_DEPTH_SUFFIX, _DEPTH_ENCODING, _DEPTH_SCALE_M = "_depth", "uint16_mm_png", 0.001
_LAYOUTS: dict[str, str] = {
    "groot": "a msgpack map of timestamps and images (GR00T's camera server)",
    "lerobot": "JSON of timestamps and images (lerobot's ImageServer)",
    "imagezmq": "a JSON header with 'msg' and an image in a second part (imagezmq)",
    "jpeg": "a JPEG or PNG, alone or after a topic (jpeg)",
}


@dataclass(frozen=True, slots=True)
class ServerImage:
    """An image of a server: the server's name of the camera, the encoded image, and the server's stamp if it has one.

    `swapped` is True if this kind of server exchanges red and blue. Only sizes and structure are checked so far.
    """

    name: str
    frame: Frame
    stamp_s: float | None = None
    swapped: bool = False


class Contents(NamedTuple):
    """Images of a message, and the errors of its images that cannot be used."""

    images: list[ServerImage]
    rejected: list[WireError]


def read_message(dialect: Dialect, parts: Sequence[memoryview]) -> Contents:
    """Read a message of `dialect`. A map without images gives none.

    Raises WireError for anything else; it names the dialect that the bytes look like.
    """
    try:
        return _READERS[dialect](parts)
    except WireError as error:
        other = detect_dialect(parts)
        if other is None or other == dialect:
            raise
        remedy = (
            "the node reads this endpoint itself: name it in transport.frames"
            if other == "sam3-node"
            else f"use --dialect {other}"
        )
        layout = _LAYOUTS.get(other, "frames of a sam3-node camera")
        raise WireError(f"expected {_LAYOUTS[dialect]}, found {layout}; {remedy}") from error


def detect_dialect(parts: Sequence[memoryview]) -> str | None:
    """Return the dialect that the start of a message looks like, or "sam3-node"; None if none is recognised."""
    head = bytes(parts[0][:MAX_ITEMS]) if parts else b""
    if head.startswith((b"frame/", b"masks/")):
        return "sam3-node"
    is_json = head.lstrip()[:1] == b"{"
    if is_json and len(parts) == 2 and b'"msg"' in head:
        return "imagezmq"
    if len(parts) in (1, 2) and bytes(parts[-1][:3]) in (b"\xff\xd8\xff", b"\x89PN"):
        return "jpeg"
    if len(parts) != 1:
        return None
    if is_json:
        return "lerobot" if b'"images"' in head or b'"timestamps"' in head else None
    is_map = bool(head) and (head[0] & 0xF0 == 0x80 or head[0] in (0xDE, 0xDF))
    return "groot" if is_map and (b"images" in head or b"timestamps" in head) else None


def _read_groot(parts: Sequence[memoryview]) -> Contents:
    data = _require_one(parts, "groot")
    limits = Limits(data.nbytes, data.nbytes, MAX_ITEMS, MAX_ITEMS, depth=8)
    message = unpack(data, what="groot message", limits=limits)
    if isinstance(message, dict) and "images" not in message:
        message = _merge_cameras(message)
    return _read_maps(message, "groot")


def _merge_cameras(message: dict[Any, Any]) -> dict[Any, Any]:
    """Return one map of the maps in {camera: {"timestamps", "images"}}, which a server of a single camera sends."""
    inner = [value for value in message.values() if isinstance(value, dict) and "images" in value]
    if not inner:
        return message
    return {
        key: {name: value for part in inner for name, value in _read_map(part, key, "groot").items()}
        for key in ("timestamps", "images")
    }


def _read_lerobot(parts: Sequence[memoryview]) -> Contents:
    data = _require_one(parts, "lerobot")
    return _read_maps(_parse_json(data, "lerobot message", data.nbytes), "lerobot")


def _read_maps(message: object, dialect: Dialect) -> Contents:
    if not isinstance(message, dict) or "images" not in message:
        raise WireError(f"expected {_LAYOUTS[dialect]}, found {describe(message)} without 'images'")
    images, stamps = (_read_map(message, key, dialect) for key in ("images", "timestamps"))
    if len(images) > MAX_IMAGES:
        raise WireError(f"{dialect} message: expected at most {MAX_IMAGES} images, found {len(images)}")
    contents = Contents([], [])
    for name, value in images.items():
        try:
            if isinstance(name, str) and not (_is_depth(value) or _names_depth(name, images)):
                image = _read_entry(name, value, stamps.get(name))
                contents.images.append(image)
                depth = images.get(f"{name}{_DEPTH_SUFFIX}")
                if _is_depth(depth):
                    contents.images[-1] = replace(image, frame=_add_depth(image.frame, depth))
        except WireError as error:
            contents.rejected.append(error)
    return contents


def _read_map(message: Mapping[Any, Any], key: str, dialect: str) -> Mapping[Any, Any]:
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WireError(
            f"{dialect} message: expected '{key}' to be a map of cameras, found {describe(value)}"
        )
    return value


def _read_entry(name: str, value: object, stamp: object) -> ServerImage:
    what = f"image of {describe(name)}"
    if isinstance(value, str):
        data = _decode_base64(value, what)
    elif isinstance(value, bytes):
        data = value
    else:
        raise WireError(f"{what}: expected a JPEG as base64 text or bytes, found {describe(value)}")
    frame = _read_compressed(data)
    is_number = type(stamp) in (int, float) and abs(stamp) < MAX_INT  # type: ignore[arg-type]
    return ServerImage(name, frame, float(stamp) if is_number else None, isinstance(value, str))  # type: ignore[arg-type]


def _names_depth(name: str, images: Mapping[Any, Any]) -> bool:
    """Return True for depth beside its colour image. Older servers send it as a JPEG, whose 8 bits saturate."""
    return name.endswith(_DEPTH_SUFFIX) and name.removesuffix(_DEPTH_SUFFIX) in images


def _is_depth(value: object) -> bool:
    return isinstance(value, dict) and value.get("encoding") == _DEPTH_ENCODING


def _add_depth(frame: Frame, value: Any) -> Frame:
    """Return the frame with its depth in millimetres. GR00T's server aligns it to colour; then both have one size."""
    data = _decode_base64(value.get("data"), "depth image")
    size = compressed_size(data, "png")
    _check_size(*size)
    if not is_depth_png(data):
        raise WireError("depth image: expected a PNG of 16-bit grey, found another kind")
    return replace(
        frame, depth=Depth(*size, "png16", _DEPTH_SCALE_M, size == (frame.width, frame.height), data)
    )


def _decode_base64(text: object, what: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise WireError(f"{what}: expected base64, found {describe(text)}: {error}") from error


def _read_imagezmq(parts: Sequence[memoryview]) -> Contents:
    if len(parts) != 2:
        raise WireError(f"expected {_LAYOUTS['imagezmq']}, found a message of {len(parts)} parts")
    header = _parse_json(parts[0], "imagezmq header", MAX_HEAD_BYTES)
    if not isinstance(header, dict) or "msg" not in header:
        raise WireError(f"imagezmq header: expected a map with 'msg', found {describe(header)}")
    name, dtype, shape = (header.get(key) for key in ("msg", "dtype", "shape"))
    frame = _read_compressed(parts[1]) if dtype is None else _read_array(parts[1], dtype, shape)
    return Contents([ServerImage(name if isinstance(name, str) else "", frame)], [])


def _read_jpeg(parts: Sequence[memoryview]) -> Contents:
    if len(parts) not in (1, 2):
        raise WireError(f"expected {_LAYOUTS['jpeg']}, found a message of {len(parts)} parts")
    topic = bytes(parts[0][:MAX_TOPIC_BYTES]).decode(errors="replace").strip() if len(parts) == 2 else ""
    return Contents([ServerImage(topic, _read_compressed(parts[-1]))], [])


def _read_array(data: memoryview, dtype: object, shape: object) -> Frame:
    """Return a raw image: uint8 [h, w], or [h, w, channels] with 1, 3 (BGR) or 4 (BGR and alpha) channels."""
    sides = shape if isinstance(shape, list) and all(type(side) is int for side in shape) else []
    channels = sides[2] if len(sides) == 3 else 1
    if dtype != "uint8" or len(sides) not in (2, 3) or channels not in (1, 3, 4):
        raise WireError(
            f"imagezmq image: expected uint8 of shape [h, w], [h, w, 3] or [h, w, 4], found {describe(dtype)} of "
            f"{str(shape)[:60]}"
        )
    height, width = sides[:2]
    _check_size(width, height)
    if channels != 4:
        encoding: ColourEncoding = "bgr8" if channels == 3 else "mono8"
        check_colour(data, encoding, width, height)
        return Frame("", 0, 0, width, height, encoding, data)
    if data.nbytes != width * height * 4:
        raise WireError(f"imagezmq image: expected {width * height * 4} bytes, found {data.nbytes}")
    colour = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(height, width, 4)[:, :, :3])
    return Frame("", 0, 0, width, height, "bgr8", colour.data.cast("B"))


def _read_compressed(data: Buffer) -> Frame:
    encoding, width, height = identify_compressed(data)
    _check_size(width, height)
    return Frame("", 0, 0, width, height, encoding, data)


def _check_size(width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_FRAME_PIXELS:
        raise WireError(
            f"expected sides of 1 to {MAX_SIDE} and at most {MAX_FRAME_PIXELS} pixels, found {width} x {height}"
        )


def _require_one(parts: Sequence[memoryview], dialect: Dialect) -> memoryview:
    if len(parts) != 1:
        raise WireError(f"expected {_LAYOUTS[dialect]}, found a message of {len(parts)} parts")
    return parts[0]


def _parse_json(data: memoryview, what: str, max_bytes: int) -> Any:
    """Parse JSON of at most MAX_ITEMS items. They are counted first, because empty lists take 30 times their bytes."""
    if data.nbytes > max_bytes:
        raise WireError(f"{what}: expected at most {max_bytes} bytes, found {data.nbytes}")
    raw = bytes(data)
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        raise WireError(f"{what}: expected at most {MAX_ITEMS} items, found more")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what}: expected JSON, found {describe(raw[:40])}: {str(error)[:80]}") from error


_READERS: dict[Dialect, Callable[[Sequence[memoryview]], Contents]] = {
    "groot": _read_groot,
    "lerobot": _read_lerobot,
    "imagezmq": _read_imagezmq,
    "jpeg": _read_jpeg,
}
