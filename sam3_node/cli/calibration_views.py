"""Views for calibration: boards found in image files, recordings and live frames, with a guide in the terminal."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import cv2
import numpy as np

from ..bags.bag import open_bag
from ..bags.samples import natural_order
from ..calibration.boards import Board, explain_absence
from ..calibration.bundle import View
from ..calibration.coverage import describe_missing, outline
from ..calibration.intrinsics import Rejected
from ..errors import CalibrationError, WireError
from ..settings import Settings
from ..transport import FrameSubscriber, PoseSubscriber, Security
from ..types import Frame, FramePose, Image
from ..wire import decode_image

LIVE = "live"
"""Source that means the frames of a running camera."""

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
GUIDE_VIEWS = 15
"""Minimum number of live views before the calibration begins."""

_STILL_SHARE, _NEW_SHARE = 0.004, 0.04  # of the width: motion between frames, distance from the views so far


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a source, with its capture time for recordings and live frames."""

    name: str
    image: Image
    stamp_ns: int | None = None
    digest: str = ""


@dataclass(slots=True)
class Views:
    """Views of a board in images of one size (height, width), in the order of the source."""

    views: list[View] = field(default_factory=list)
    stamps_ns: list[int | None] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    poses: list[FramePose] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)

    def add(self, view: View, stamp_ns: int | None) -> None:
        self.views.append(view)
        self.stamps_ns.append(stamp_ns)


def collect_views(sources: Sequence[str], board: Board, camera: str, every: int) -> Views:
    """Find the board in images, folders of images and recordings; use every `every`-th frame of a recording.

    Raises CalibrationError if the images differ in size or no image shows the board, with the reason.
    """
    found, sizes, advice = Views(), dict[tuple[int, int], list[str]](), ""
    for picture in _open_sources(sources, camera, every, found.inputs):
        sizes.setdefault((picture.image.shape[0], picture.image.shape[1]), []).append(picture.name)
        corners = board.detect(picture.image)
        if corners is not None:
            found.add(View(picture.name, corners.ids, corners.pixels), picture.stamp_ns)
            continue
        if not found.views and not advice:
            advice = explain_absence(board, picture.image) or ""
        if picture.stamp_ns is None:
            found.rejected.append(Rejected(picture.name, "the board was not found"))
    _require_one_size(sizes)
    if not found.views:
        total = sum(map(len, sizes.values()))
        raise CalibrationError(
            f"expected {board} in the images, found it in none of {total}"
            + (f": {advice}" if advice else "; check the board's description, light and sharpness")
        )
    found.size = next(iter(sizes))
    return found


def _require_one_size(sizes: dict[tuple[int, int], list[str]]) -> None:
    if len(sizes) > 1:
        listed = "; ".join(f"{len(names)} of {w}x{h} ({names[0]})" for (h, w), names in sizes.items())
        raise CalibrationError(
            f"expected images of one size, found {listed}; calibrate one mode of the camera at a time"
        )


def _open_sources(
    sources: Sequence[str], camera: str, every: int, inputs: dict[str, str]
) -> Iterator[Picture]:
    for source in sources:
        path = Path(source)
        images = sorted(path.iterdir(), key=natural_order) if path.is_dir() else [path]
        images = [image for image in images if image.suffix.lower() in IMAGE_SUFFIXES]
        if images:
            yield from (_read_image(image, inputs) for image in images)
        else:
            yield from _read_recording(path, camera, every, inputs)


def _read_image(path: Path, inputs: dict[str, str]) -> Picture:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}") from error
    image = (
        cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        if data
        else None
    )
    if image is None:
        raise CalibrationError(f"{path}: expected an image file, found other data")
    if path.name in inputs:
        raise CalibrationError(f"expected each image once, found two named {path.name}; rename one")
    inputs[path.name] = hashlib.sha256(data).hexdigest()
    return Picture(path.name, np.asarray(image, np.uint8))


def _read_recording(path: Path, camera: str, every: int, inputs: dict[str, str]) -> Iterator[Picture]:
    with open_bag(path, (camera,) if camera else ()) as bag:
        if len(bag.cameras) > 1:
            raise CalibrationError(
                f"{path} has the cameras {', '.join(bag.cameras)}: choose one with --topic"
            )
        for number, frame in enumerate(bag):
            if number % every == 0 and (image := _decode(frame)) is not None:
                yield Picture(f"{path.name}#{frame.seq}", image, frame.capture_ns)
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            inputs[str(file.relative_to(path.parent))] = compute_digest(file)


def _decode(frame: Frame) -> Image | None:
    try:
        return decode_image(frame)
    except WireError:
        return None


def compute_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises CalibrationError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CalibrationError(f"cannot read {path}: {error.strerror}") from error


class LiveViews:
    """Chooses views among live frames: the board is at rest, and unlike the views so far."""

    def __init__(self, board: Board, out: TextIO | None = None) -> None:
        self._board, self._out = board, out or sys.stderr
        self._last: np.ndarray | None = None
        self._outlines: list[np.ndarray] = []
        self.found = Views()

    @property
    def complete(self) -> bool:
        """True when GUIDE_VIEWS views are taken and no view is missing."""
        taken = self.found
        return len(taken.views) >= GUIDE_VIEWS and not describe_missing(taken.views, self._board, taken.size)

    def offer(self, picture: Picture) -> bool:
        """Take the view of this image if it is useful. Return True if it was taken.

        Raises CalibrationError for an image of another size than the first.
        """
        size = (picture.image.shape[0], picture.image.shape[1])
        if self.found.size == (0, 0):
            self.found.size = size
        _require_one_size({self.found.size: ["earlier frames"]} | {size: [picture.name]})
        corners = self._board.detect(picture.image)
        view = None if corners is None else View(picture.name, corners.ids, corners.pixels)
        place = None if view is None else outline(view, self._board, size)
        at_rest = self._last is not None and place is not None and _differ(place, self._last) < _STILL_SHARE
        self._last = place
        if view is None or place is None or not at_rest:
            return False
        if any(_differ(place, other) < _NEW_SHARE for other in self._outlines):
            return False
        self._outlines.append(place)
        self.found.add(view, picture.stamp_ns)
        self.found.inputs[picture.name] = picture.digest
        self._print(view)
        return True

    def _print(self, view: View) -> None:
        missing = describe_missing(self.found.views, self._board, self.found.size)
        more = GUIDE_VIEWS - len(self.found.views)
        text = (
            missing[0]
            if missing
            else f"{more} more views, different from the others"
            if more > 0
            else "complete"
        )
        print(
            f"view {len(self.found.views)}: {len(view.ids)} corners. Next: {text}", file=self._out, flush=True
        )


def _differ(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(((first - second) ** 2).mean()))


def collect_live(
    settings: Settings,
    board: Board,
    stop: threading.Event,
    poses: str = "",
    count: int = 0,
    out: TextIO | None = None,
) -> Views:
    """Collect views from live frames of camera `camera.name` until coverage is complete, `count` views, or `stop`.

    With the endpoint `poses`, poses of the gripper are collected beside them. The guide says which view comes next.
    Raises CalibrationError without any view, and TransportError for a malformed endpoint.
    """
    guide, out, clock = LiveViews(board, out), out or sys.stderr, ""
    print(
        f"looking for {board} from camera {settings.camera.name}; hold the board still for each view",
        file=out,
    )
    security = Security.from_settings(settings.transport)
    subscriber = PoseSubscriber(poses, ["gripper"], security) if poses else None
    try:
        cameras = [settings.camera.name]
        with FrameSubscriber(settings.transport.frames, cameras=cameras, security=security) as frames:
            while not stop.is_set() and not _is_enough(guide, count):
                received = frames.take(200)
                if received is not None and (image := _decode(received.frame)) is not None:
                    frame, clock = received.frame, received.frame.clock
                    guide.offer(Picture(f"seq {frame.seq}", image, frame.capture_ns, _digest(frame)))
                if subscriber is not None:
                    guide.found.poses += subscriber.take(0)
        if subscriber is not None:  # the pose after the last image
            guide.found.poses += subscriber.take(500)
            _require_one_clock(guide.found.poses, clock)
    finally:
        if subscriber is not None:
            subscriber.close()
    if not guide.found.views:
        raise CalibrationError(f"expected views of {board} from camera {settings.camera.name}, found none")
    return guide.found


def _require_one_clock(poses: Sequence[FramePose], clock: str) -> None:
    others = {pose.clock for pose in poses} - {clock}
    if others and clock:
        raise CalibrationError(
            f"expected poses stamped by the clock of the frames, {clock}, found {', '.join(sorted(others))}; "
            "publish both on one clock"
        )


def _is_enough(guide: LiveViews, count: int) -> bool:
    return len(guide.found.views) >= count if count else guide.complete


def _digest(frame: Frame) -> str:
    return hashlib.sha256(frame.colour).hexdigest()
