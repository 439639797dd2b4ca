"""Views, which are pictures with the masks of exactly that frame, and the messages that carry them to the page.

A message is binary: the length of a header (uint32, little-endian), the header as JSON, the picture as JPEG or PNG, and
the bits of each mask. The bits are those of the wire's bits+zstd without zstd: the crop inside the box, row after row
without padding, eight pixels in a byte, the first in the highest bit.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..types import Buffer, Frame, Instance, Mask, MaskFrame
from ..wire import decode_image, encode_image

JPEG_QUALITY = 85
_COMPRESSED = ("jpeg", "png")


class View:
    """A picture with its masks, either of which may be missing, and the masks of another result to compare with.

    The picture is encoded when the first page needs it, and then kept for the others.
    """

    def __init__(
        self, frame: Frame | None, masks: MaskFrame | None, other: MaskFrame | None = None, number: int = 0
    ) -> None:
        shown = frame or masks
        assert shown is not None
        self.camera, self.seq, self.capture_ns = shown.key
        self.frame, self.masks, self.other = frame, masks, other
        self.number = number
        """Place of the view: in a recording the index, live a number that grows with each view."""
        self._image: tuple[str, Buffer] | None = None
        self._encoding = threading.Lock()

    def image(self) -> tuple[str, Buffer]:
        """Return the picture's media type and bytes. Raises WireError if the camera's picture is damaged."""
        with self._encoding:
            if self._image is None:
                self._image = _encode(self.frame)
            return self._image

    @property
    def origin_ns(self) -> int | None:
        """Unix time from which the picture's age is measured; None if neither its clock nor its masks say it."""
        if self.frame is not None and self.frame.clock == "system":
            return self.capture_ns
        return None if self.masks is None else self.masks.age_origin_ns


def pack_view(view: View, live: bool) -> bytes:
    """Return the message of a view. Raises WireError if its picture cannot be decoded."""
    media_type, image = view.image()
    blobs: list[Buffer] = [image]
    header: dict[str, Any] = {
        "camera": view.camera,
        "seq": view.seq,
        "number": view.number,
        "capture_ms": view.capture_ns / 1e6,
        "image": {"type": media_type, "bytes": memoryview(image).nbytes},
        "masks": _describe(view.masks, blobs),
        "other": _describe(view.other, blobs),
    }
    shown = view.frame or view.masks
    assert shown is not None
    header |= {"width": shown.width, "height": shown.height}
    if live and view.origin_ns is not None:
        header["origin_ms"] = view.origin_ns / 1e6
    packed = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(packed)), packed, *blobs])


def pack_bits(mask: Mask) -> bytes:
    """Return the bits of a mask's crop, row after row without padding."""
    return np.packbits(mask.crop).tobytes()


def _encode(frame: Frame | None) -> tuple[str, Buffer]:
    if frame is None:
        return "", b""
    if frame.encoding in _COMPRESSED:
        return f"image/{frame.encoding}", frame.colour
    return "image/jpeg", encode_image(decode_image(frame), "jpeg", JPEG_QUALITY)


def _describe(masks: MaskFrame | None, blobs: list[Buffer]) -> dict[str, Any] | None:
    """Return the fields of masks for the header, and append the bits of each."""
    if masks is None:
        return None
    return {
        "epoch": masks.epoch,
        "node": masks.node,
        "model": masks.model,
        "stages_us": dict(masks.stages_us),
        "skipped": masks.skipped,
        "shed": None if masks.shed is None else {"level": masks.shed.level, "held": masks.shed.held},
        "latency_ms": (masks.published_ns - masks.age_origin_ns) / 1e6 if masks.published_ns else None,
        "instances": [_describe_instance(instance, blobs) for instance in masks.instances],
    }


def _describe_instance(instance: Instance, blobs: list[Buffer]) -> Mapping[str, Any]:
    bits = pack_bits(instance.mask)
    blobs.append(bits)
    return {
        "id": instance.id,
        "label": instance.label,
        "score": instance.score,
        "state": instance.state,
        "doubtful": instance.doubtful,
        "confidence": instance.confidence,
        "name_confidence": instance.name_confidence,
        "age": instance.age,
        "unseen": instance.frames_since_seen,
        "area": instance.area,
        "box": instance.box,
        "position_m": instance.position_m,
        "bytes": len(bits),
    }
