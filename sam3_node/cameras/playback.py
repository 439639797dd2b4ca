"""Plays recordings at their own pace: bag:FILE, video:FILE, images:FOLDER, and the bundled scene:tabletop."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

from ..bags.bag import open_bag
from ..bags.native.reader import TABLETOP
from ..errors import BagError, CameraError
from ..types import NANOSECONDS, RobotMessage
from .camera_source import CapturedImage
from .live_source import PlayedSource

__all__ = ["TABLETOP", "BagSource", "open_files"]

# what chooses a camera of a recording
_CAMERA = "?camera="
# time after an image up to which the robot's messages go before it: a node needs poses on both sides of an image
_LEAD_NS = NANOSECONDS // 10
_log = logging.getLogger(__name__)


class BagSource(PlayedSource):
    """Plays the frames of one camera of a recording in order: FILE?camera=NAME, or the first camera of FILE.

    Each frame is captured anew. Colour and depth stay encoded as they were recorded. Intrinsics and device times are
    kept, and `times` gains `media_ns`, the time since the first frame. With `robot`, an image brings what the recorded
    robot published until then, in the image's new time. `fps` 0 keeps the recorded pace.

    A recording that loops starts again at its first frame. The image of `seq` is then the recorded one of seq % its
    length. A damaged recording is played up to the damage. Raises BagError if there is no frame at all.
    """

    def __init__(
        self, name: str, path: Path, fps: float, loop: bool, stop: threading.Event, robot: bool = False
    ) -> None:
        super().__init__(name, fps, loop, stop)
        # a file may have ? in its name
        file = str(path)
        camera = ""
        if not path.exists():
            file, _, camera = file.partition(_CAMERA)
        try:
            with open_bag(Path(file)) as bag:
                camera = camera or bag.cameras[0]
            self._bag = open_bag(Path(file), (camera,))
            first = next(iter(self._bag), None)
        except BagError as error:
            raise BagError(f"{name}: {error}") from error
        if first is None:
            raise BagError(f"{name}: expected frames, found none that is whole ({self._bag.lost})")
        self._start_ns = first.capture_ns
        self._has_robot = robot

    def close(self) -> None:
        super().close()
        self._bag.close()

    def _play(self) -> Iterator[CapturedImage]:
        """Play the recording once, up to its end or to the damage."""
        moves: Iterator[RobotMessage] = self._bag.robot() if self._has_robot else iter(())
        move = next(moves, None)
        for frame in self._bag:
            # what the robot published since the previous image, and shortly after this one
            robot = list[RobotMessage]()
            while move is not None and move.stamp_ns <= frame.capture_ns + _LEAD_NS:
                robot.append(move)
                move = next(moves, None)
            times = {**frame.times, "media_ns": frame.capture_ns - self._start_ns}
            yield CapturedImage(frame, frame.capture_ns, frame.depth, frame.intrinsics, times, robot=robot)
        # what was lost is known at the end alone
        for text in filter(None, (self._bag.lost, *self._bag.notes)):
            _log.warning("%s: %s", self.name, text)


def open_files(name: str, kind: str, path: Path, fps: float, loop: bool, stop: threading.Event) -> BagSource:
    """Open a file of kind "video", or a folder of kind "images", as a BagSource.

    Raises CameraError if it does not exist, or has no frame that can be decoded.
    """
    is_video = kind == "video"
    if is_video and not path.is_file():
        raise CameraError(f"expected a video file, found no file at {path}")
    if not is_video and not path.is_dir():
        raise CameraError(f"expected a folder of images, found no folder at {path}")
    try:
        return BagSource(name, path, fps, loop, stop)
    except BagError as error:
        reason = str(error)
        if is_video:
            reason = f"{path} holds no readable video: damaged, or of an unknown format"
        raise CameraError(reason) from error
