"""Encoding of frames and masks as Foxglove's protobuf messages, so that its viewers show a recording.

The timestamp is the frame's time of capture, on its clock; image, depth and annotations of a frame have the same one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...errors import require
from ...types import NANOSECONDS, Buffer, Depth, Frame, Instance, Intrinsics, Mask, MaskFrame
from ...visualization import pick_colour
from ...wire.images import CHANNELS

MAX_EDGES = 1 << 16  # pixels of a mask's outline; longer, noisy outlines are not drawn
FONT_SIZE = 14.0
FILL_ALPHA = 0.35

_COUNTS = {"plumb_bob": 5, "rational_polynomial": 8, "kannala_brandt": 4}


class Encoded(NamedTuple):
    """A message: its protobuf class and its bytes."""

    kind: Any
    data: bytes


def encode_image(frame: Frame) -> Encoded:
    """Return a foxglove.CompressedImage for jpeg and png, else a foxglove.RawImage; the pixel bytes stay unchanged."""
    stamped = {"timestamp": _time(frame.capture_ns), "frame_id": frame.camera}
    if frame.encoding not in CHANNELS:
        return _with_data(_kind("CompressedImage")(**stamped, format=frame.encoding), frame.colour)
    image = _kind("RawImage")(
        **stamped,
        width=frame.width,
        height=frame.height,
        encoding=frame.encoding,
        step=frame.width * CHANNELS[frame.encoding],
    )
    return _with_data(image, frame.colour)


def encode_depth(frame: Frame, depth: Depth) -> Encoded:
    """Return a foxglove.RawImage (16UC1) for z16 depth, a foxglove.CompressedImage for png16; in units of its scale."""
    stamped = {"timestamp": _time(frame.capture_ns), "frame_id": frame.camera}
    if depth.encoding == "png16":
        return _with_data(_kind("CompressedImage")(**stamped, format="png"), depth.data)
    image = _kind("RawImage")(
        **stamped, width=depth.width, height=depth.height, encoding="16UC1", step=depth.width * 2
    )
    return _with_data(image, depth.data)


def encode_calibration(frame: Frame, intrinsics: Intrinsics) -> Encoded:
    """Return the foxglove.CameraCalibration of a camera whose images have the frame's size."""
    model, distortion = _distortion(intrinsics)
    fx, fy, cx, cy = intrinsics.fx, intrinsics.fy, intrinsics.cx, intrinsics.cy
    calibration = _kind("CameraCalibration")(
        timestamp=_time(frame.capture_ns),
        frame_id=frame.camera,
        width=frame.width,
        height=frame.height,
        distortion_model=model,
        D=distortion,
        K=[fx, 0, cx, 0, fy, cy, 0, 0, 1],
        R=[1, 0, 0, 0, 1, 0, 0, 0, 1],
        P=[fx, 0, cx, 0, 0, fy, cy, 0, 0, 0, 1, 0],
    )
    return _encode(calibration)


def encode_annotations(masks: MaskFrame) -> Encoded:
    """Return foxglove.ImageAnnotations: the contours of each mask, and above it id, label and score."""
    shown = [instance for instance in masks.instances if instance.area]
    time = _time(masks.capture_ns)  # viewers before 0.4 of the schemas read that of each annotation
    annotations = _kind("ImageAnnotations")(
        timestamp=time,
        points=[loop for instance in shown for loop in _outline(instance, time)],
        texts=[_tag(instance, time) for instance in shown],
    )
    return _encode(annotations)


def _encode(message: Any) -> Encoded:
    return Encoded(type(message), message.SerializeToString())


def _with_data(message: Any, data: Buffer) -> Encoded:
    """Return the message with `data`, which is copied only once: protobuf fields may be joined as bytes."""
    tag = _varint(message.DESCRIPTOR.fields_by_name["data"].number << 3 | 2)
    head = message.SerializeToString() + tag + _varint(memoryview(data).nbytes)
    return Encoded(type(message), b"".join((head, data)))


def _varint(number: int) -> bytes:
    """Encode seven bits per byte, the lowest first; the highest bit of a byte says that more follow."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


def _kind(name: str) -> Any:
    return getattr(require(f"foxglove_schemas_protobuf.{name}_pb2", "bags"), name)


def _time(time_ns: int) -> Any:
    timestamp = require("google.protobuf.timestamp_pb2", "bags").Timestamp
    return timestamp(seconds=time_ns // NANOSECONDS, nanos=time_ns % NANOSECONDS)


def _distortion(intrinsics: Intrinsics) -> tuple[str, list[float]]:
    """Return Foxglove's name of the lens model and its coefficients, padded to the number that the model has."""
    coeffs = list(intrinsics.coeffs)
    if intrinsics.model == "none":
        return "", []
    if intrinsics.model == "fisheye":
        model = "kannala_brandt"
    elif len(coeffs) <= 8:
        model = "plumb_bob" if len(coeffs) <= 5 else "rational_polynomial"
    else:
        return "thin_prism", coeffs
    return model, (coeffs + [0.0] * _COUNTS[model])[: _COUNTS[model]]


def _outline(instance: Instance, time: Any) -> list[Any]:
    """Return a closed polygon for each contour, through the centres of the outermost pixels."""
    if _edges(instance.mask) > MAX_EDGES:
        return []
    x0, y0, _, _ = instance.box
    cv2 = require("cv2", "bags")
    contours, _ = cv2.findContours(
        instance.mask.crop.view(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(x0, y0)
    )
    annotation, line, fill = _kind("PointsAnnotation"), _colour(instance), _colour(instance, FILL_ALPHA)
    return [
        annotation(
            timestamp=time,
            type=annotation.LINE_LOOP,
            points=[_point(x + 0.5, y + 0.5) for x, y in contour[:, 0].tolist()],
            outline_color=line,
            fill_color=fill,
            thickness=2.0,
        )
        for contour in contours
    ]


def _edges(mask: Mask) -> int:
    """Count the neighbours in rows and columns that differ: nearly the length of the outline."""
    across = np.count_nonzero(mask.crop[:, 1:] != mask.crop[:, :-1])
    return int(across + np.count_nonzero(mask.crop[1:] != mask.crop[:-1]))


def _tag(instance: Instance, time: Any) -> Any:
    words = (str(instance.id), instance.label, f"{instance.score:.2f}")
    return _kind("TextAnnotation")(
        timestamp=time,
        position=_point(instance.box[0], instance.box[1]),
        text=" ".join(filter(None, words)),
        font_size=FONT_SIZE,
        text_color=_kind("Color")(r=1, g=1, b=1, a=1),
        background_color=_colour(instance),
    )


def _point(x: float, y: float) -> Any:
    return _kind("Point2")(x=x, y=y)


def _colour(instance: Instance, alpha: float = 1.0) -> Any:
    blue, green, red = (part / 255 for part in pick_colour(instance.id))
    return _kind("Color")(r=red, g=green, b=blue, a=alpha)
