"""Encoding of frames and masks as Foxglove's protobuf messages, so that its viewers show a recording or a live node.

All messages about a frame have one timestamp: its time of capture, on its clock. Pixels are in the coordinate frame of
the camera's name, positions in the frame that the masks name.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from ...errors import WireError, require
from ...geometry import compute_ellipsoid
from ...types import NANOSECONDS, Buffer, Depth, Frame, FramePose, Instance, Intrinsics, Mask, MaskFrame
from ...visualization import pick_colour, tag_text
from ...wire import decode_depth
from ...wire import encode_depth as encode_depth_image
from ...wire.images import CHANNELS, MAX_DEPTH_PIXELS

MAX_EDGES = 1 << 16
"""Pixels of a mask's outline above which it is not drawn: a longer one is noise."""
FONT_SIZE = 14.0
"""Size of labels in the image, in pixels."""
FILL_ALPHA = 0.35
"""Opacity of masks and boxes."""
CAMERA = "camera"
"""Frame, in masks, of positions that are relative to the camera."""
SIGMAS = 2.0
"""Half of an ellipsoid's axes, in standard deviations."""
MARK_M = 0.01
"""Diameter of the mark at a position without a covariance."""
TEXT_M = 0.03
"""Height of labels in the scene."""

# number of coefficients of Foxglove's lens models
_COUNTS = {"plumb_bob": 5, "rational_polynomial": 8, "kannala_brandt": 4}


class Encoded(NamedTuple):
    """A message: its protobuf class and its bytes."""

    kind: Any
    data: bytes


def encode_image(frame: Frame) -> Encoded:
    """Return a foxglove.CompressedImage for jpeg and png, CompressedVideo for h264, else RawImage.

    The pixels' bytes stay.
    """
    pixel_bytes = CHANNELS.get(frame.encoding)
    return _encode_pixels(frame, (frame.width, frame.height), frame.encoding, pixel_bytes, frame.colour)


def encode_depth(frame: Frame, depth: Depth) -> Encoded:
    """Return a foxglove.CompressedImage for png16 depth, else a foxglove.RawImage (16UC1); in units of its scale.

    Raises WireError for z16+zstd that cannot be decompressed.
    """
    depth = decompress_depth(depth)
    size = (depth.width, depth.height)
    if depth.encoding == "png16":
        return _encode_pixels(frame, size, "png", None, depth.data)
    return _encode_pixels(frame, size, "16UC1", 2, depth.data)


def _encode_pixels(
    frame: Frame, size: tuple[int, int], encoding: str, pixel_bytes: int | None, data: Buffer
) -> Encoded:
    """Return a RawImage of `size` (width, height), or without `pixel_bytes` a CompressedImage or CompressedVideo."""
    stamped = {"timestamp": _time(frame.capture_ns), "frame_id": frame.camera}
    if pixel_bytes is None:
        kind = "CompressedVideo" if encoding == "h264" else "CompressedImage"
        return _with_data(_kind(kind)(**stamped, format=encoding), data)
    width, height = size
    raw = {"width": width, "height": height, "encoding": encoding, "step": width * pixel_bytes}
    return _with_data(_kind("RawImage")(**stamped, **raw), data)


def decompress_depth(depth: Depth) -> Depth:
    """Return z16 for z16+zstd, which viewers cannot show, and any other depth as it is. Raises WireError."""
    if depth.encoding != "z16+zstd":
        return depth
    if depth.width * depth.height > MAX_DEPTH_PIXELS:
        raise WireError(
            f"depth: expected at most {MAX_DEPTH_PIXELS} pixels, found {depth.width} x {depth.height}"
        )
    return encode_depth_image(decode_depth(depth), "z16", depth.scale_m, depth.aligned)


def encode_calibration(frame: Frame, intrinsics: Intrinsics) -> Encoded:
    """Return the foxglove.CameraCalibration of a camera whose images have the frame's size."""
    model, distortion = _distortion(intrinsics)
    fx = intrinsics.fx
    fy = intrinsics.fy
    cx = intrinsics.cx
    cy = intrinsics.cy
    # the images are not rectified: R is no rotation, and P the plain camera
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
    # viewers before 0.4 of the schemas read each annotation's time
    time = _time(masks.capture_ns)
    annotations = _kind("ImageAnnotations")(
        timestamp=time,
        points=[loop for instance in shown for loop in _outline(instance, time)],
        texts=[_tag(instance, time) for instance in shown],
    )
    return _encode(annotations)


def encode_transforms(masks: MaskFrame) -> Encoded:
    """Return foxglove.FrameTransforms: the known poses of camera and gripper in the robot's base."""
    poses = [pose for pose in (masks.camera_pose, masks.robot_pose) if pose is not None]
    transforms = [_transform(pose, masks) for pose in poses]
    return _encode(_kind("FrameTransforms")(transforms=transforms))


def encode_scene(masks: MaskFrame) -> Encoded:
    """Return a foxglove.SceneUpdate that replaces all of this camera's objects by those whose position is known.

    An object has its label, the box around its visible surface, and an ellipsoid of two standard deviations of its
    position, or a small ball where the covariance is unknown.
    """
    # objects of the previous frame would stay without the deletion
    deletion = _kind("SceneEntityDeletion")
    time = _time(masks.capture_ns)
    update = _kind("SceneUpdate")(
        deletions=[deletion(timestamp=time, type=deletion.ALL)],
        entities=[
            _entity(instance, instance.position_m, masks, time)
            for instance in masks.instances
            if instance.position_m is not None
        ],
    )
    return _encode(update)


def _transform(pose: FramePose, masks: MaskFrame) -> Any:
    return _kind("FrameTransform")(
        timestamp=_time(masks.capture_ns),
        parent_frame_id=pose.parent,
        child_frame_id=masks.camera if pose.frame == CAMERA else pose.frame,
        translation=_named("xyz", pose.position_m),
        rotation=_named("xyzw", pose.quaternion_xyzw),
    )


def _entity(instance: Instance, position_m: Sequence[float], masks: MaskFrame, time: Any) -> Any:
    colour = _colour(instance)
    faint = _colour(instance, FILL_ALPHA)

    # the box around the visible surface
    cubes = []
    if instance.extent_m is not None:
        box = _pose(instance.extent_centre_m or position_m, instance.extent_quaternion_xyzw)
        cubes.append({"pose": box, "size": _named("xyz", instance.extent_m), "color": faint})

    # the position, as large as it is uncertain
    sizes: Sequence[float] = (MARK_M,) * 3
    rotation = None
    if instance.covariance_m2 is not None:
        deviations, rotation = compute_ellipsoid(instance.covariance_m2)
        sizes = [2 * SIGMAS * deviation for deviation in deviations]
    ball = {"pose": _pose(position_m, rotation), "size": _named("xyz", sizes), "color": colour}
    text = _kind("TextPrimitive")(
        pose=_pose(position_m), billboard=True, font_size=TEXT_M, color=colour, text=tag_text(instance)
    )
    return _kind("SceneEntity")(
        timestamp=time,
        frame_id=masks.camera if instance.frame in (CAMERA, None) else instance.frame,
        id=str(instance.id),
        cubes=cubes,
        spheres=[ball],
        texts=[text],
    )


def _pose(position_m: Sequence[float], quaternion_xyzw: Sequence[float] | None = None) -> Any:
    orientation = _named("xyzw", quaternion_xyzw or (0.0, 0.0, 0.0, 1.0))
    return {"position": _named("xyz", position_m), "orientation": orientation}


def _named(names: str, values: Sequence[float]) -> dict[str, float]:
    """Return a vector or a quaternion as protobuf takes it."""
    return dict(zip(names, values, strict=True))


def _encode(message: Any) -> Encoded:
    return Encoded(type(message), message.SerializeToString())


def _with_data(message: Any, data: Buffer) -> Encoded:
    """Return the message with `data`, which is copied only once: protobuf fields may be joined as bytes."""
    # a field is its number with the type 2 (bytes), its length, and its content
    tag = _varint(message.DESCRIPTOR.fields_by_name["data"].number << 3 | 2)
    head = message.SerializeToString() + tag + _varint(memoryview(data).nbytes)
    return Encoded(type(message), b"".join((head, data)))


def _varint(number: int) -> bytes:
    """Encode seven bits per byte, the lowest first; the highest bit of a byte says that more follow."""
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


# an outline has hundreds of points, and importing a module again is slow
@cache
def _kind(name: str) -> Any:
    return getattr(require(f"foxglove_schemas_protobuf.{name}_pb2", "bags"), name)


def _time(time_ns: int) -> dict[str, int]:
    return {"seconds": time_ns // NANOSECONDS, "nanos": time_ns % NANOSECONDS}


def _distortion(intrinsics: Intrinsics) -> tuple[str, list[float]]:
    """Return Foxglove's name of the lens model and its coefficients, padded to the number that the model has."""
    coeffs = list(intrinsics.coeffs)
    if intrinsics.model == "none":
        return "", []
    # the number of coefficients tells the models of Brown and Conrady apart
    if intrinsics.model == "fisheye":
        model = "kannala_brandt"
    elif len(coeffs) <= 5:
        model = "plumb_bob"
    elif len(coeffs) <= 8:
        model = "rational_polynomial"
    else:
        return "thin_prism", coeffs
    return model, (coeffs + [0.0] * _COUNTS[model])[: _COUNTS[model]]


def _outline(instance: Instance, time: Any) -> list[Any]:
    """Return a closed polygon for each contour, through the centres of the outermost pixels."""
    # noise has so many points that viewers stall
    if _edges(instance.mask) > MAX_EDGES:
        return []
    x0, y0, _, _ = instance.box
    cv2 = require("cv2", "cli")
    contours, _ = cv2.findContours(
        instance.mask.crop.view(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE, offset=(x0, y0)
    )
    annotation = _kind("PointsAnnotation")
    line = _colour(instance)
    fill = _colour(instance, FILL_ALPHA)
    return [
        annotation(
            timestamp=time,
            type=annotation.LINE_LOOP,
            points=[{"x": x + 0.5, "y": y + 0.5} for x, y in contour[:, 0].tolist()],
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
    return _kind("TextAnnotation")(
        timestamp=time,
        position=_named("xy", instance.box[:2]),
        text=tag_text(instance),
        font_size=FONT_SIZE,
        text_color=dict.fromkeys("rgba", 1),
        background_color=_colour(instance),
    )


def _colour(instance: Instance, alpha: float = 1.0) -> Any:
    blue, green, red = (part / 255 for part in pick_colour(instance.id))
    return {"r": red, "g": green, "b": blue, "a": alpha}
