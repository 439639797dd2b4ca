"""Makes messages of ROS 2 from masks, and reads prompts of its requests, without ROS.

sensor_msgs, geometry_msgs, vision_msgs 4, visualization_msgs, tf2_msgs and diagnostic_msgs.

All messages of a frame have the stamp of its image, and all but 3-D ones its frame_id. As in `types`, pixel
coordinates have their origin at the corner of the top-left pixel.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.bags.bit_depth import BitDepths
from sam3_node.bags.messages.ros_images import MessageError, read_payload
from sam3_node.bags.samples import Colour
from sam3_node.client import ObjectPlace, PhotoMask, Segmentation
from sam3_node.errors import BagError, RequestError
from sam3_node.types import Frame, Instance, MaskFrame
from sam3_node.wire import decode_image, encode_image
from sam3_node.wire.images import MAX_PHOTO_FILE

from .cdr import CdrWriter
from .parts import ID, Header, MessageParts, format_id, pose_of_plane, read_header

MAX_VALUE = 65534
"""Largest value of a label image; vision_msgs keeps 65535 for what has no label."""
ROTATION_VARIANCE_RAD2 = math.pi**2 / 3
"""Variance of an angle of which nothing is known: it is uniform within half a turn to either side."""
MARKER_S = 1
"""Seconds for which RViz shows a marker that no message renews."""
INSIDE = 255
"""Value of the object's pixels in its mask image."""
JPEG_QUALITY = 95
"""Quality of an image that is sent to be segmented and is too large as PNG"""
MAX_BOXES = 64
"""Boxes of one request to segment: the node decodes a mask for each."""
NO_POSE = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
"""Position and quaternion of a pose of which nothing is known"""
NO_COVARIANCE = (0.0,) * 36
UNSEEN_AGE = -1.0
"""Age, in an answer of Where, of an object that no sure mask has shown yet"""

# Marker.CUBE, .TEXT_VIEW_FACING and .DELETEALL
_CUBE = 1
_TEXT = 9
_DELETE_ALL = 3
_FLOAT32 = 7  # PointField.FLOAT32
_SURE = (0.1, 0.8, 0.2)
_DOUBTFUL = (0.9, 0.6, 0.1)


def assign_values(ids: Iterable[int]) -> list[int]:
    """Return a value of the label image for each object: its id, or the next free one beyond MAX_VALUE."""
    taken: dict[int, None] = {}
    for object_id in ids:
        value = (object_id - 1) % MAX_VALUE + 1
        while value in taken:
            value = value % MAX_VALUE + 1
        taken[value] = None
    return list(taken)


def choose_instance(masks: MaskFrame, wanted: str) -> Instance | None:
    """Return the instance of an id, else the best one of a label; without a name, the best sure one.

    None if it has no mask on this frame.
    """
    shown = _list_shown(masks)
    if match := ID.fullmatch(wanted):
        names = (match[1], format_id(int(match[1]), masks.epoch))
        return next((one for one in shown if wanted in names and one.id == int(match[1])), None)
    fitting = [one for one in shown if (one.label == wanted if wanted else one.is_sure)]
    return max(fitting, key=lambda one: (one.score, -one.id), default=None)


def make_mask_frame(
    camera: str, found: Sequence[Segmentation | PhotoMask], size: tuple[int, int]
) -> MaskFrame:
    """Return the masks of a request on an image of `size` (height, width) as a frame's, with ids from 1 on."""
    instances = tuple(
        Instance(number, getattr(one, "label", ""), one.score, "tracked", 0, 0, one.mask)
        for number, one in enumerate(found, 1)
    )
    return MaskFrame(camera, 0, 0, size[1], size[0], instances=instances)


class MaskMessages(MessageParts):
    """Makes messages of masks and the header of their image. Instances without a mask are skipped.

    Entry k of the table belongs to detection k of the same stamp.
    """

    def make_detections_2d(self, masks: MaskFrame, header: Header) -> Any:
        """Return the Detection2DArray: box, label and score of each instance, in pixels of the frame."""
        detections = [
            self._make(
                "vision_msgs/msg/Detection2D",
                header=self._header(header),
                results=[self._hypothesis(instance.label, instance.score)],
                bbox=self._box_2d(instance),
                id=format_id(instance.id, masks.epoch),
            )
            for instance in _list_shown(masks)
        ]
        return self._make(
            "vision_msgs/msg/Detection2DArray", header=self._header(header), detections=detections
        )

    def make_detections_3d(self, masks: MaskFrame, header: Header) -> Any:
        """Return the Detection3DArray of the instances with a position, in metres.

        Its frame_id is the image's, or `base_frame` if the node gives positions in the base. The hypothesis has the
        position and its covariance, which is zero if it is not known. The box is the oriented one around the visible
        surface; its size is zero where only the position is known.
        """
        placed, header = self._place(masks, header)
        detections = [
            self._make(
                "vision_msgs/msg/Detection3D",
                header=self._header(header),
                results=[
                    self._hypothesis(instance.label, instance.score, self._pose_with_covariance(instance))
                ],
                bbox=self._box_3d(instance),
                id=format_id(instance.id, masks.epoch),
            )
            for instance in placed
        ]
        return self._make(
            "vision_msgs/msg/Detection3DArray", header=self._header(header), detections=detections
        )

    def make_upright_boxes(self, masks: MaskFrame, header: Header) -> Any:
        """Return the Detection3DArray of the sure objects with an upright box, in `base_frame`.

        The box stands on the table, z up. Its centre is the pose, and the confidence of the mask the score.
        """
        header = header._replace(frame_id=self._base_frame)
        detections = []
        for instance in _list_shown(masks):
            if not instance.is_sure or instance.upright_centre_m is None or instance.frame != "base":
                continue
            pose = self._pose(instance.upright_centre_m, instance.upright_quaternion_xyzw)
            score = instance.score if instance.confidence is None else instance.confidence
            known = self._with_covariance(pose, NO_COVARIANCE)
            size = self._xyz("Vector3", instance.upright_size_m or ())
            detection = self._make(
                "vision_msgs/msg/Detection3D",
                header=self._header(header),
                results=[self._hypothesis(instance.label, score, known)],
                bbox=self._make("vision_msgs/msg/BoundingBox3D", center=pose, size=size),
                id=format_id(instance.id, masks.epoch),
            )
            detections.append(detection)
        return self._make(
            "vision_msgs/msg/Detection3DArray", header=self._header(header), detections=detections
        )

    def make_table(self, masks: MaskFrame, header: Header) -> Any:
        """Return the PoseStamped of the table in `base_frame`: z up, at its point nearest to the base; None without."""
        if masks.table is None:
            return None
        return self._stamped(self._in_frame(header, "base"), *pose_of_plane(masks.table))

    def fill_places(self, response: Any, places: Sequence[ObjectPlace], headers: Sequence[Header]) -> None:
        """Fill in the answer of Where. `headers` are those of the images that showed the objects last."""
        response.detections = [
            self._make_place(place, header) for place, header in zip(places, headers, strict=True)
        ]
        response.states = [place.state for place in places]
        response.in_view = [place.in_view for place in places]
        response.has_position = [place.position_m is not None for place in places]
        response.ages = [UNSEEN_AGE if place.age_s is None else place.age_s for place in places]
        response.held = [place.held for place in places]
        response.hidden_by = [place.hidden_by or "" for place in places]

    def _make_place(self, place: ObjectPlace, header: Header) -> Any:
        """Return the Detection3D of an object that was seen at a place, or at none that is known."""
        if place.frame == "base":
            header = header._replace(frame_id=self._base_frame)
        pose = None
        if place.position_m is not None:
            pose = self._pose_with_covariance(place)
        centre = self._pose(place.position_m or (0.0, 0.0, 0.0), None)
        size = self._xyz("Vector3", [place.size_m or 0.0] * 3)
        return self._make(
            "vision_msgs/msg/Detection3D",
            header=self._header(header),
            results=[self._hypothesis(place.label, place.confidence or 0.0, pose)],
            bbox=self._make("vision_msgs/msg/BoundingBox3D", center=centre, size=size),
            id=format_id(place.id, place.epoch),
        )

    def make_label_image(self, masks: MaskFrame, header: Header) -> Any:
        """Return the mono16 Image of the frame's size: 0 is no object, where masks overlap the best score is on top."""
        return self._image(_paint_labels(masks), "mono16", header)

    def make_label_table(self, masks: MaskFrame, header: Header) -> Any:
        """Return the LabelInfo of a label image: value and label of each instance, in the order of the detections."""
        shown = _list_shown(masks)
        classes = [
            self._make("vision_msgs/msg/VisionClass", class_id=value, class_name=instance.label)
            for instance, value in zip(shown, assign_values(instance.id for instance in shown), strict=True)
        ]
        return self._make(
            "vision_msgs/msg/LabelInfo", header=self._header(header), class_map=classes, threshold=0.0
        )

    def make_mask(self, masks: MaskFrame, header: Header, wanted: str) -> Any:
        """Return the mono8 Image of one object, INSIDE its mask and 0 elsewhere; see `choose_instance`."""
        return self._image(_paint_one(masks, wanted), "mono8", header)

    def fill_masks(self, response: Any, masks: MaskFrame, header: Header, with_label_image: bool) -> None:
        """Fill in the masks of a response of Segment or SegmentEverything, as the topics have them."""
        response.detections = self.make_detections_2d(masks, header)
        if with_label_image:
            response.label_image = self.make_label_image(masks, header)
            response.label_table = self.make_label_table(masks, header)
        response.masks = [
            self._image(one.mask.crop * np.uint8(INSIDE), "mono8", header) for one in _list_shown(masks)
        ]

    def make_points(self, points_m: npt.NDArray[np.float32], frame: str | None, header: Header) -> Any:
        """Return the PointCloud2 of points float32 [n, 3], in metres in the node's `frame`: "camera" or "base"."""
        fields = [
            self._make("sensor_msgs/msg/PointField", name=name, offset=offset, datatype=_FLOAT32, count=1)
            for name, offset in (("x", 0), ("y", 4), ("z", 8))
        ]
        count = len(points_m)
        return self._make(
            "sensor_msgs/msg/PointCloud2",
            header=self._header(self._in_frame(header, frame)),
            height=1,
            width=count,
            fields=fields,
            is_bigendian=False,
            point_step=12,
            row_step=12 * count,
            data=pack_pixels(points_m.astype("<f4")),
            is_dense=True,
        )

    def make_transforms(self, masks: MaskFrame, header: Header) -> Any:
        """Return the TFMessage of the sure objects with a position. Their frames are named camera/id.

        The origin is the position of the visible surface, the axes are those of its oriented box.
        """
        placed, header = self._place(masks, header)
        transforms = [
            self._make(
                "geometry_msgs/msg/TransformStamped",
                header=self._header(header),
                child_frame_id=f"{masks.camera}/{format_id(instance.id, masks.epoch)}",
                transform=self._make(
                    "geometry_msgs/msg/Transform",
                    translation=self._xyz("Vector3", instance.position_m or ()),
                    rotation=self._quaternion(instance.extent_quaternion_xyzw),
                ),
            )
            for instance in placed
            if instance.is_sure
        ]
        return self._make("tf2_msgs/msg/TFMessage", transforms=transforms)

    def make_markers(self, masks: MaskFrame, header: Header) -> Any:
        """Return the MarkerArray of the objects with a position: box and label. It replaces all earlier markers."""
        placed, header = self._place(masks, header)
        markers = [self._marker(header, "", 0, action=_DELETE_ALL)]
        for number, instance in enumerate(placed):
            red, green, blue = _SURE if instance.is_sure else _DOUBTFUL
            box = self._box_3d(instance)
            colour = {"r": red, "g": green, "b": blue}
            cube = {"type": _CUBE, "pose": box.center, "scale": box.size}
            markers.append(self._marker(header, "box", number, colour | {"a": 0.4}, **cube))
            text = f"{instance.label or 'object'} {instance.id}"
            size = self._xyz("Vector3", (0.0, 0.0, 0.03))
            label = {"type": _TEXT, "pose": self._pose(instance.position_m or (), None), "scale": size}
            markers.append(self._marker(header, "label", number, colour | {"a": 1.0}, text=text, **label))
        return self._make("visualization_msgs/msg/MarkerArray", markers=markers)

    def make_diagnostics(
        self, level: int, name: str, message: str, values: Mapping[str, Any], header: Header
    ) -> Any:
        """Return the DiagnosticArray of one camera: `level` is 0 (OK), 1 (warning) or 2 (error)."""
        pairs = [
            self._make("diagnostic_msgs/msg/KeyValue", key=key, value=str(value))
            for key, value in values.items()
        ]
        status = self._make(
            "diagnostic_msgs/msg/DiagnosticStatus",
            level=bytes([level]),
            name=name,
            message=message,
            hardware_id=name.rpartition(" ")[2],
            values=pairs,
        )
        return self._make("diagnostic_msgs/msg/DiagnosticArray", header=self._header(header), status=[status])

    def _place(self, masks: MaskFrame, header: Header) -> tuple[list[Instance], Header]:
        """Return the instances with a position, in one frame, and the header of that frame."""
        placed = [instance for instance in _list_shown(masks) if instance.position_m is not None]
        frame = placed[0].frame if placed else None
        return [instance for instance in placed if instance.frame == frame], self._in_frame(header, frame)

    def _image(self, pixels: npt.NDArray[Any], encoding: str, header: Header) -> Any:
        height, width = pixels.shape
        image = self._make(
            "sensor_msgs/msg/Image",
            header=self._header(header),
            height=height,
            width=width,
            encoding=encoding,
            is_bigendian=0,
            step=pixels.strides[0],
        )
        # as an argument, they would be copied two times more
        image.data.frombytes(pixels.view(np.uint8).data)
        return image

    def _marker(
        self,
        header: Header,
        namespace: str,
        number: int,
        colour: Mapping[str, float] | None = None,
        **fields: Any,
    ) -> Any:
        if colour:
            fields["color"] = self._make("std_msgs/msg/ColorRGBA", **colour)
            fields["lifetime"] = self._make("builtin_interfaces/msg/Duration", sec=MARKER_S)
        return self._make(
            "visualization_msgs/msg/Marker", header=self._header(header), ns=namespace, id=number, **fields
        )

    def _hypothesis(self, label: str, score: float, pose: Any = None) -> Any:
        pose = pose or self._with_covariance(self._pose((0.0, 0.0, 0.0), None), np.zeros(36))
        hypothesis = self._make("vision_msgs/msg/ObjectHypothesis", class_id=label, score=float(score))
        return self._make("vision_msgs/msg/ObjectHypothesisWithPose", hypothesis=hypothesis, pose=pose)

    def _box_2d(self, instance: Instance) -> Any:
        x0, y0, x1, y1 = instance.box
        position = self._make("vision_msgs/msg/Point2D", x=(x0 + x1) / 2, y=(y0 + y1) / 2)
        centre = self._make("vision_msgs/msg/Pose2D", position=position, theta=0.0)
        return self._make(
            "vision_msgs/msg/BoundingBox2D", center=centre, size_x=float(x1 - x0), size_y=float(y1 - y0)
        )

    def _box_3d(self, instance: Instance) -> Any:
        centre = self._pose(
            instance.extent_centre_m or instance.position_m or (), instance.extent_quaternion_xyzw
        )
        size = self._xyz("Vector3", instance.extent_m or (0.0, 0.0, 0.0))
        return self._make("vision_msgs/msg/BoundingBox3D", center=centre, size=size)

    def _pose_with_covariance(self, placed: Instance | ObjectPlace) -> Any:
        covariance = np.zeros((6, 6))
        if placed.covariance_m2 is not None:
            xx, xy, xz, yy, yz, zz = placed.covariance_m2
            covariance[:3, :3] = [[xx, xy, xz], [xy, yy, yz], [xz, yz, zz]]
            covariance[3:, 3:] = np.eye(3) * ROTATION_VARIANCE_RAD2
        quaternion = None
        if isinstance(placed, Instance):
            quaternion = placed.extent_quaternion_xyzw
        pose = self._pose(placed.position_m or (), quaternion)
        return self._with_covariance(pose, covariance.ravel())

    def _with_covariance(self, pose: Any, covariance: Any) -> Any:
        return self._make("geometry_msgs/msg/PoseWithCovariance", pose=pose, covariance=covariance)


def write_detections_2d(masks: MaskFrame, header: Header) -> bytes:
    """Return `MaskMessages.make_detections_2d` as serialised message."""
    shown = _list_shown(masks)
    cdr = CdrWriter()
    cdr.write_header(*header)
    cdr.write_count(shown)
    for instance in shown:
        cdr.write_header(*header)
        # one result: label, score, and a pose of which nothing is known
        cdr.write_numbers("I", 1)
        cdr.write_text(instance.label)
        cdr.write_numbers("d", instance.score, *NO_POSE, *NO_COVARIANCE)
        # the box: centre, theta, size
        x0, y0, x1, y1 = instance.box
        cdr.write_numbers("d", (x0 + x1) / 2, (y0 + y1) / 2, 0.0, x1 - x0, y1 - y0)
        cdr.write_text(format_id(instance.id, masks.epoch))
    return cdr.finish()


def write_label_image(masks: MaskFrame, header: Header) -> bytes:
    """Return `MaskMessages.make_label_image` as serialised message."""
    return _write_image(_paint_labels(masks), "mono16", header)


def write_mask(masks: MaskFrame, header: Header, wanted: str) -> bytes:
    """Return `MaskMessages.make_mask` as serialised message."""
    return _write_image(_paint_one(masks, wanted), "mono8", header)


def _write_image(pixels: npt.NDArray[Any], encoding: str, header: Header) -> bytes:
    cdr = CdrWriter()
    cdr.write_header(*header)
    cdr.write_numbers("I", *pixels.shape)
    cdr.write_text(encoding)
    cdr.write_numbers("B", 0)
    cdr.write_numbers("I", pixels.strides[0])
    return cdr.finish(pixels.data)


def read_prompt(request: Any) -> dict[str, Any]:
    """Return the points, labels, box and mask of a request, as arguments of the client. Raises RequestError."""
    prompt: dict[str, Any] = {}
    if len(request.points):
        prompt["points"] = [(float(point.x), float(point.y)) for point in request.points]
    if len(request.labels):
        prompt["labels"] = [int(label) for label in request.labels]
    if request.box.size_x or request.box.size_y:
        prompt["box"] = _read_box(request.box)
    if len(request.mask.data):
        prompt["mask"] = _read_mask(request.mask)
    return prompt


class Picture(NamedTuple):
    """An image to segment, and its header."""

    colour: Colour
    header: Header

    def pack(self) -> bytes:
        """Return it as file: JPEG and PNG as they are, pixels as PNG, or as JPEG where PNG is too large to be sent."""
        colour = self.colour
        if colour.encoding in ("jpeg", "png"):
            return bytes(colour.data)
        frame = Frame("", 0, 0, colour.width, colour.height, colour.encoding, colour.data)
        image = decode_image(frame)
        packed = encode_image(image, "png")
        if len(packed) > MAX_PHOTO_FILE:
            packed = encode_image(image, "jpeg", JPEG_QUALITY)
        return bytes(packed)


def read_picture(request: Any) -> Picture | None:
    """Return the image that a request of Segment has, None if it is about the camera's. Raises RequestError."""
    has_image = bool(len(request.image.data))
    has_photo = bool(len(request.photo.data))
    if not (has_image or has_photo):
        return None
    if has_image and has_photo:
        raise RequestError("expected an image or a photo, found both")
    if request.stamp.sec or request.stamp.nanosec:
        raise RequestError(
            "stamp: expected 0 beside an image that is sent; else it is that of the camera's image"
        )
    sent = request.image if has_image else request.photo
    name = "image" if has_image else "photo"
    kind = "Image" if has_image else "CompressedImage"
    try:
        payload = read_payload(sent, f"sensor_msgs/msg/{kind}", name)
    except BagError as error:
        raise RequestError(str(error)) from error
    if not isinstance(payload, Colour):
        form = getattr(sent, "encoding", "") or getattr(sent, "format", "")
        raise RequestError(f"{name}: expected a colour image, found encoding {form!r:.80}")
    return Picture(BitDepths().narrow(name, payload), read_header(sent))


class SegmentPrompt(NamedTuple):
    """What a request to segment asks for: prompts, each of an object, or names."""

    prompts: list[dict[str, Any]]
    """arguments of the client: points with labels, box"""
    names: list[str]
    scores: dict[str, float]
    """minimum scores of detections of some names"""


def read_segment_prompt(request: Any) -> SegmentPrompt:
    """Return what a request of Segment asks for. Raises RequestError unless it has points, boxes or names alone."""
    names = [str(name) for name in request.names]
    scores = read_scores(request.scores, names)
    boxes = [_read_box(box) for box in request.boxes]
    points: dict[str, Any] = {}
    if len(request.points):
        points["points"] = [(float(point.x), float(point.y)) for point in request.points]
    if len(request.labels):
        points["labels"] = [int(label) for label in request.labels]
    if bool(names) == bool(points or boxes):
        raise RequestError(f"expected points and boxes, or names, found {'both' if names else 'neither'}")
    if len(boxes) > MAX_BOXES:
        raise RequestError(f"boxes: expected at most {MAX_BOXES}, found {len(boxes)}")
    if points and len(boxes) > 1:
        raise RequestError(
            f"boxes: expected at most one beside points, of the same object, found {len(boxes)}; send a request for "
            "each object"
        )
    if request.multimask and (names or len(boxes) > 1):
        raise RequestError(
            "multimask: expected points or one box, which may mean several masks, found several objects"
        )
    prompts = [{"box": box} for box in boxes] or [{}]
    prompts[0] |= points
    return SegmentPrompt([] if names else prompts, names, scores)


def read_scores(scores: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Return the score of each name; none if there are none. Raises RequestError for another number of scores."""
    if len(scores) not in (0, len(names)):
        raise RequestError(f"scores: expected none, or {len(names)} as of names, found {len(scores)}")
    return {name: float(score) for name, score in zip(names, scores, strict=False)}


def read_exemplar(request: Any) -> dict[str, Any]:
    """Return the boxes and labels of a request, as arguments of the client. Raises RequestError."""
    boxes = [_read_box(box) for box in request.boxes]
    return {"boxes": boxes, "labels": [int(label) for label in request.labels] or None}


def read_prompts(request: Any) -> dict[str, dict[str, Any]]:
    """Return the prompt of each object of a request of Isaac ROS (AddObjects), by the id that the caller gives it.

    Raises RequestError for lists of different lengths, and for an id that stands twice.
    """
    points = request.point_coords
    labels = list(request.point_labels) or [1] * len(request.point_coords)
    for name, ids, values in (
        ("bbox_object_ids", request.bbox_object_ids, request.bbox_coords),
        ("point_object_ids", request.point_object_ids, points),
        ("point_labels", labels, points),
    ):
        if len(ids) != len(values):
            raise RequestError(f"{name}: expected {len(values)}, one for each box or point, found {len(ids)}")
    prompts: dict[str, dict[str, Any]] = {}
    for name, box in zip(request.bbox_object_ids, request.bbox_coords, strict=True):
        if name in prompts or name in request.point_object_ids:
            raise RequestError(f"bbox_object_ids: expected each id once, found {name[:40]!r} again")
        prompts[name] = {"box": _read_box(box)}
    for name, point, label in zip(request.point_object_ids, points, labels, strict=True):
        prompt = prompts.setdefault(name, {"points": [], "labels": []})
        prompt["points"].append((float(point.x), float(point.y)))
        prompt["labels"].append(int(label))
    return prompts


def _read_box(box: Any) -> tuple[float, float, float, float]:
    if box.center.theta:
        raise RequestError(f"box: expected theta 0, found {box.center.theta}")
    x = box.center.position.x
    y = box.center.position.y
    half_x = box.size_x / 2
    half_y = box.size_y / 2
    return (x - half_x, y - half_y, x + half_x, y + half_y)


def _read_mask(image: Any) -> Any:
    if image.encoding not in ("mono8", "8UC1"):
        raise RequestError(f"mask: expected an image of encoding mono8, found {image.encoding!r}")
    try:
        payload = read_payload(image, "sensor_msgs/msg/Image", "mask")
    except MessageError as error:
        raise RequestError(str(error)) from error
    assert isinstance(payload, Colour)
    return np.frombuffer(payload.data, np.uint8).reshape(payload.height, payload.width) != 0


def pack_pixels(values: npt.NDArray[Any]) -> Any:
    """Return the bytes of an array as the sequence that messages take at once."""
    data = array("B")  # other sequences are checked byte by byte in Python
    data.frombytes(np.ascontiguousarray(values).view(np.uint8).data)
    return data


def _paint_labels(masks: MaskFrame) -> npt.NDArray[np.uint16]:
    """Return the label image [h, w] of masks."""
    shown = _list_shown(masks)
    image = np.zeros((masks.height, masks.width), "<u2")
    pairs = zip(shown, assign_values(instance.id for instance in shown), strict=True)
    for instance, value in sorted(pairs, key=lambda pair: pair[0].paint_order):
        instance.mask.paint(image, value)
    return image


def _paint_one(masks: MaskFrame, wanted: str) -> npt.NDArray[np.uint8]:
    """Return the mask image [h, w] of one object."""
    image = np.zeros((masks.height, masks.width), np.uint8)
    instance = choose_instance(masks, wanted)
    if instance is not None:
        instance.mask.paint(image, INSIDE)
    return image


def _list_shown(masks: MaskFrame) -> list[Instance]:
    """Return the instances that have a mask on this frame."""
    return [instance for instance in masks.instances if instance.area]
