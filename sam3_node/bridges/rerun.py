"""Logs frames and masks to Rerun's viewer, live or in an .rrd file.

Each entity has two timelines: `capture_time`, and `frame`, the camera's number of the frame. The ids of objects are
Rerun's class ids, with the colours of the overlay videos.

    cameras/CAMERA                 pose in the robot's base; labels and colours of the ids
    cameras/CAMERA/image           intrinsics, and the picture: JPEG and PNG bytes as they came
    cameras/CAMERA/image/masks     for each pixel the id of the smallest mask around it
    cameras/CAMERA/image/boxes     boxes with ids, labels and scores
    cameras/CAMERA/image/tracks    where the centres of the boxes were in the last TRACK_FRAMES frames
    cameras/CAMERA/image/depth     aligned depth; other depth is at cameras/CAMERA/depth
    FRAME/boxes, positions, points in 3-D; FRAME is cameras/CAMERA/objects, or objects/CAMERA if they are in the base
    gripper                        pose in the robot's base
    latency/CAMERA/STAGE           milliseconds of each stage, and `total` from the capture to the publication
    confidence/CAMERA/ID           probability that the mask is right
"""

import contextlib
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from ..errors import OutputError, SettingsError, WireError, require
from ..files import prepare_output
from ..geometry import camera_matrix, compute_ellipsoid
from ..transport.mask_pairing import MAX_CAMERAS
from ..types import Depth, Frame, FramePose, Instance, Intrinsics, MaskFrame, keep_newest
from ..visualization import pick_colour, tag_text
from ..wire import decode_depth
from ..wire.images import CHANNELS, MAX_DEPTH_PIXELS

EXTRA = "rerun"
APPLICATION = "sam3-node"
SUFFIX = ".rrd"
SCHEMES = ("rerun", "rerun+http", "rerun+https")
DEFAULT_PORT = 9876
TRACK_FRAMES = 64
"""Frames over which the path of an object's box is drawn."""
SIGMAS = 2.0
"""Standard deviations that the ellipsoid of a position shows."""
POINT_M = 0.005
"""Radius of the mark of a position, in metres."""
FLUSH_S = 0.5
"""Time between two flushes of a file."""
WRITE_S = 10.0
"""Longest time of a flush. The SDK's thread that writes the file may end without a word when the disk is full."""
CONNECT_S = 1.0
"""Longest time that an attempt to reach the viewer takes."""
RETRY_S = 1.0
"""Time between two attempts."""
ABANDONED: list[Any] = []
"""Streams whose file could not be written. The SDK would wait without limit for the thread that wrote it."""

log = logging.getLogger(__name__)


class RerunStream:
    """A stream to the viewer at an address such as rerun+http://127.0.0.1:9876/proxy, or into a new .rrd file.

    A viewer that is not there, or has gone, is tried again every second; pairs of that time are not shown. The file has
    no footer: a footer lists everything in the file, so memory would grow. Raises MissingExtraError without the extra
    `rerun`, SettingsError for another target, and OutputError if the file exists or cannot be written.
    """

    def __init__(self, target: str) -> None:
        self._path: Path | None = None
        self._url = target
        self._address: tuple[str, int] | None = None
        if "://" in target:
            self._address = _read_address(target)
        else:
            self._path = Path(target)
        self._sdk = require("rerun", EXTRA)
        self._stream = self._sdk.RecordingStream(APPLICATION, recording_id=uuid.uuid4())
        self._stream.set_log_tick_enabled(False)
        self._entities = Entities(self._sdk, self._stream)
        self._is_connected = False
        self._has_failed = False
        self._next_s = 0.0  # of the next flush, or of the next attempt to connect
        if self._path is not None:
            self._open_file(self._path)

    def show(self, frame: Frame | None, masks: MaskFrame) -> bool:
        """Log masks, and their frame if it is given. Return False if the viewer is not there.

        Waits while the viewer takes nothing. Raises OutputError if the file cannot be written any more.
        """
        # without a viewer nothing is logged: the SDK would keep it all in memory
        if self._path is None and not self._is_connected and not self._connect():
            return False
        self._entities.log(frame, masks)
        if self._path is None:
            return self._flush_to_viewer()
        # the file is flushed now and then: a reader may follow it while it is written
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + FLUSH_S
            self._try(lambda: self._stream.flush(timeout_sec=WRITE_S))
        return True

    def close(self) -> None:
        """Finish the file, or let go of the viewer."""
        # after a failed write, a flush would wait without limit
        if self._has_failed:
            return
        if self._path is not None:
            self._try(lambda: self._stream.flush(timeout_sec=WRITE_S))
        with contextlib.suppress(RuntimeError):
            self._stream.disconnect()

    def _open_file(self, path: Path) -> None:
        if path.suffix != SUFFIX:
            raise SettingsError(
                f"expected a file NAME{SUFFIX} or an address such as rerun+http://127.0.0.1:{DEFAULT_PORT}/proxy, "
                f"found {str(path)!r:.80}"
            )
        prepare_output(path, overwrite=False)
        self._try(lambda: self._stream.save(path, write_footer=False))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except RuntimeError as error:
            # kept for ever, because the SDK's destructor waits for the thread that has ended
            self._has_failed = True
            ABANDONED.append(self._stream)
            raise OutputError(
                f"cannot write {self._path}: {error}; free some space, and choose another file"
            ) from error

    def _connect(self) -> bool:
        """Connect if the viewer's port is open, and begin anew with all that is sent once."""
        if self._address is None or time.monotonic() < self._next_s:
            return False
        self._next_s = time.monotonic() + RETRY_S
        try:  # the SDK itself would wait, and keep all that is logged meanwhile
            socket.create_connection(self._address, CONNECT_S).close()
        except OSError:
            return False
        # a viewer that was started again knows nothing of what was sent once
        self._stream.connect_grpc(self._url)
        self._entities = Entities(self._sdk, self._stream)
        self._is_connected = True
        return True

    def _flush_to_viewer(self) -> bool:
        """Wait until everything is sent, so that nothing gathers here. Return False if the viewer has gone."""
        try:
            self._stream.flush()
        except RuntimeError as error:
            log.warning("the viewer has gone: %s", error)
            self._is_connected = False
        return self._is_connected


def _read_address(target: str) -> tuple[str, int]:
    """Return host and port of a viewer's address; SettingsError for anything else."""
    with contextlib.suppress(ValueError):  # of urlsplit, or of a port that is no number
        parts = urlsplit(target)
        if parts.scheme in SCHEMES and parts.hostname and parts.path == "/proxy":
            return parts.hostname, parts.port or DEFAULT_PORT
    raise SettingsError(
        f"expected a viewer's address such as rerun+http://127.0.0.1:{DEFAULT_PORT}/proxy, found {target!r:.80}"
    )


class _Camera:
    """State of a camera from one message to the next."""

    def __init__(self) -> None:
        # what was logged last, so that a thing that has not changed is not logged again
        self.epoch: int | None = None
        self.tracks: dict[int, deque[tuple[float, float]]] = {}
        self.classes: list[tuple[int, str, tuple[int, int, int, int]]] | None = None
        self.encoding = ""
        self.pinhole: tuple[Intrinsics, int, int] | None = None
        self.places: set[tuple[str, ...]] = set()
        """3-D entities that may show something, and must be emptied when there is nothing more"""

    def extend_tracks(self, masks: MaskFrame) -> None:
        """Add the centres of the boxes; forget objects that are gone, and all of another epoch."""
        if masks.epoch != self.epoch:
            self.epoch = masks.epoch
            self.tracks = {}
        self.tracks = {
            instance.id: self.tracks.get(instance.id) or deque(maxlen=TRACK_FRAMES)
            for instance in masks.instances
        }
        for instance in masks.instances:
            if instance.area:
                x0, y0, x1, y1 = instance.box
                self.tracks[instance.id].append(((x0 + x1) / 2, (y0 + y1) / 2))


class Entities:
    """Logs frames and masks as Rerun's entities."""

    def __init__(self, sdk: ModuleType, stream: Any) -> None:
        self._sdk = sdk
        self._stream = stream
        self._cameras: dict[str, _Camera] = {}
        stream.log("/", sdk.ViewCoordinates.RIGHT_HAND_Z_UP, static=True)

    def log(self, frame: Frame | None, masks: MaskFrame) -> None:
        """Log everything of a frame at its time."""
        camera = self._find(masks.camera)
        self._stream.set_time("capture_time", timestamp=np.datetime64(masks.capture_ns, "ns"))
        self._stream.set_time("frame", sequence=masks.seq)
        # poses, then the picture, then what lies on it and in space, then curves
        root = ["cameras", masks.camera]
        if masks.camera_pose is not None:
            self._log_pose(root, masks.camera_pose)
        if masks.robot_pose is not None:
            self._log_pose([masks.robot_pose.frame], masks.robot_pose)
        if frame is not None:
            self._log_frame(root, frame, camera)
        self._log_masks(root, masks, camera)
        self._log_positions(masks, camera)
        self._log_figures(masks)

    def _find(self, name: str) -> _Camera:
        """Return the state of a camera. Arrange the views again for a new one."""
        is_new = name not in self._cameras
        camera = self._cameras.get(name) or _Camera()
        keep_newest(self._cameras, name, camera, MAX_CAMERAS)
        if is_new:
            self._arrange()
        return camera

    def _arrange(self) -> None:
        """Have the viewer show the picture of each camera, the positions, and all curves of a kind in one view."""
        views = require("rerun.blueprint", EXTRA)
        pictures = []
        for name in sorted(self._cameras):
            contents = ["$origin/**", "- $origin/depth"]  # depth would cover the picture
            pictures.append(
                views.Spatial2DView(origin=f"/cameras/{name}/image", contents=contents, name=name)
            )
        curves = [views.TimeSeriesView(origin=f"/{kind}", name=kind) for kind in ("latency", "confidence")]
        places = views.Spatial3DView(origin="/", name="positions")
        layout = views.Horizontal(
            views.Grid(*pictures), views.Vertical(places, *curves), column_shares=[2, 1]
        )
        panel = views.TimePanel(timeline="capture_time", state="collapsed")
        self._stream.send_blueprint(views.Blueprint(layout, panel, collapse_panels=True))

    def _log_pose(self, path: list[str], pose: FramePose) -> None:
        quaternion = self._sdk.Quaternion(xyzw=pose.quaternion_xyzw)
        self._stream.log(path, self._sdk.Transform3D(translation=pose.position_m, quaternion=quaternion))

    def _log_frame(self, root: list[str], frame: Frame, camera: _Camera) -> None:
        # the lens, which does not change with every frame
        image = [*root, "image"]
        if frame.intrinsics is not None and camera.pinhole != (frame.intrinsics, frame.width, frame.height):
            camera.pinhole = frame.intrinsics, frame.width, frame.height
            matrix = camera_matrix(frame.intrinsics)
            matrix[:2, 2] += 0.5  # from the centre of the first pixel to its corner
            pinhole = self._sdk.Pinhole(image_from_camera=matrix, resolution=[frame.width, frame.height])
            self._stream.log(image, pinhole, static=True)
        # the picture: raw pixels, or the bytes as they came, which the viewer decodes
        if frame.encoding != camera.encoding:
            camera.encoding = frame.encoding
            self._stream.log(image, self._sdk.Clear(recursive=False))  # a raw picture hides no encoded one
        if frame.encoding in CHANNELS:
            shape = (frame.height, frame.width, CHANNELS[frame.encoding])
            model = {"bgr8": "BGR", "rgb8": "RGB", "mono8": "L"}[frame.encoding]
            self._stream.log(
                image, self._sdk.Image(np.frombuffer(frame.colour, np.uint8).reshape(shape), model)
            )
        else:
            media_type = f"image/{frame.encoding}"
            self._stream.log(
                image, self._sdk.EncodedImage(contents=bytes(frame.colour), media_type=media_type)
            )
        if frame.depth is not None:
            # depth of the colour camera lies on its picture, other depth has a view of its own
            place = image if frame.depth.aligned else root
            self._log_depth([*place, "depth"], frame.depth)

    def _log_depth(self, path: list[str], depth: Depth) -> None:
        meter = 1.0 / depth.scale_m
        if depth.encoding == "png16":
            image = self._sdk.EncodedDepthImage(bytes(depth.data), media_type="image/png", meter=meter)
        else:
            try:
                image = self._sdk.DepthImage(decode_depth(depth, MAX_DEPTH_PIXELS), meter=meter)
            except WireError as error:
                log.warning("skipped a depth image: %s", error)
                return
        self._stream.log(path, image)

    def _log_masks(self, root: list[str], masks: MaskFrame, camera: _Camera) -> None:
        sdk = self._sdk
        image = [*root, "image"]
        # name and colour of each id, sent when they change
        classes = [(0, "", (0, 0, 0, 0))]  # no mask, no tint
        for instance in masks.instances:
            colour = (*pick_colour(instance.id)[::-1], 255)
            classes.append((_class_id(instance), tag_name(instance), colour))
        if classes != camera.classes:
            camera.classes = classes
            self._stream.log(root, sdk.AnnotationContext(classes))
        # an object without a mask has no place in the picture
        shown = [instance for instance in masks.instances if instance.area]
        ids = [_class_id(instance) for instance in shown]
        boxes = np.array([instance.box for instance in shown], np.float32).reshape(-1, 4)
        self._stream.log([*image, "masks"], sdk.SegmentationImage(draw_ids(masks)))
        labels = [tag_text(instance) for instance in shown]
        self._stream.log(
            [*image, "boxes"],
            sdk.Boxes2D(mins=boxes[:, :2], sizes=boxes[:, 2:] - boxes[:, :2], labels=labels, class_ids=ids),
        )
        # the way of each object that has one of more than a point
        camera.extend_tracks(masks)
        tracks = {key & 0xFFFF: list(track) for key, track in camera.tracks.items() if len(track) > 1}
        strips = sdk.LineStrips2D(list(tracks.values()), class_ids=list(tracks), show_labels=False)
        self._stream.log([*image, "tracks"], strips)

    def _log_positions(self, masks: MaskFrame, camera: _Camera) -> None:
        # a place that was filled before is emptied, unless it is filled again
        placed = [instance for instance in masks.instances if instance.position_m is not None]
        by_place: dict[tuple[str, ...], list[Instance]] = {place: [] for place in camera.places}
        for instance in placed:
            place: tuple[str, ...] = ("objects", masks.camera)
            if instance.frame in ("camera", None):
                place = ("cameras", masks.camera, "objects")
            by_place.setdefault(place, []).append(instance)
        camera.places = {place for place, instances in by_place.items() if instances}
        for place, instances in by_place.items():
            self._log_place(list(place), instances)

    def _log_place(self, place: list[str], instances: Sequence[Instance]) -> None:
        sdk = self._sdk
        # a point with its label for each object, then their boxes, ellipsoids and points where they have them
        positions = [instance.position_m for instance in instances]
        ids = [_class_id(instance) for instance in instances]
        labels = [tag_text(instance) for instance in instances]
        # the colours of the class ids are those below the camera, which the objects in the base are not
        marks = sdk.Points3D(
            positions, radii=POINT_M, labels=labels, class_ids=ids, colors=_colours(instances)
        )
        self._stream.log([*place, "positions"], marks)
        boxed = [instance for instance in instances if instance.extent_m is not None]
        boxes = sdk.Boxes3D(
            centers=[instance.extent_centre_m or instance.position_m for instance in boxed],
            sizes=[instance.extent_m for instance in boxed],
            quaternions=[instance.extent_quaternion_xyzw or (0.0, 0.0, 0.0, 1.0) for instance in boxed],
            colors=_colours(boxed),
        )
        self._stream.log([*place, "boxes"], boxes)
        measured = [instance for instance in instances if instance.covariance_m2 is not None]
        shapes = [compute_ellipsoid(instance.covariance_m2 or ()) for instance in measured]
        ellipsoids = sdk.Ellipsoids3D(
            centers=[instance.position_m for instance in measured],
            half_sizes=[[SIGMAS * deviation for deviation in deviations] for deviations, _ in shapes],
            quaternions=[quaternion for _, quaternion in shapes],
            colors=_colours(measured),
        )
        self._stream.log([*place, "covariances"], ellipsoids)
        # all clouds as one entity, each in the colour of its object
        clouds = [np.frombuffer(instance.points_m or b"", "<f4").reshape(-1, 3) for instance in instances]
        counts = np.array([len(cloud) for cloud in clouds], np.intp)
        cloud = sdk.Points3D(
            np.concatenate([np.zeros((0, 3), np.float32), *clouds]),
            colors=_colours(instances).repeat(counts, axis=0),
        )
        self._stream.log([*place, "points"], cloud)

    def _log_figures(self, masks: MaskFrame) -> None:
        figures = {("latency", masks.camera, stage): us / 1000 for stage, us in masks.stages_us.items()}
        if masks.published_ns:
            figures["latency", masks.camera, "total"] = (masks.published_ns - masks.age_origin_ns) / 1e6
        for instance in masks.instances:
            if instance.confidence is not None:
                figures["confidence", masks.camera, str(instance.id)] = instance.confidence
        for path, value in figures.items():
            self._stream.log(list(path), self._sdk.Scalars(value))


def draw_ids(masks: MaskFrame) -> npt.NDArray[np.uint8 | np.uint16]:
    """Return an image [height, width] of the class id of the smallest mask around each pixel, 0 outside all masks."""
    # one byte a pixel as long as the ids fit
    dtype: type[np.uint8 | np.uint16] = np.uint8
    if any(_class_id(instance) > 255 for instance in masks.instances):
        dtype = np.uint16
    image: npt.NDArray[np.uint8 | np.uint16] = np.zeros((masks.height, masks.width), dtype)
    # large masks first, so that smaller ones within them are drawn over
    for instance in sorted(masks.instances, key=lambda instance: -instance.area):
        instance.mask.paint(image, _class_id(instance))
    return image


def tag_name(instance: Instance) -> str:
    """Return the name of an object that does not change while it is tracked."""
    return " ".join(filter(None, (str(instance.id), instance.label)))


def _class_id(instance: Instance) -> int:
    return instance.id & 0xFFFF  # all that Rerun has


def _colours(instances: Sequence[Instance]) -> npt.NDArray[np.uint8]:
    return np.array([pick_colour(instance.id)[::-1] for instance in instances], np.uint8).reshape(-1, 3)
