"""The one door to all cameras."""

from __future__ import annotations

import threading
from pathlib import Path

from ..errors import CameraError
from ..settings import CameraSettings
from .base import CameraSource

KNOWN = "scene:tabletop, scene:shapes, bag:FILE, video:FILE or webcam:INDEX"


def open_camera(uri: str, settings: CameraSettings, stop: threading.Event | None = None) -> CameraSource:
    """Open one of KNOWN with the rate and looping that `settings` asks for.

    Setting `stop` ends the iteration, a wait for the next image included. Raises CameraError for an unknown
    scheme, and for a device or file that cannot be opened or read; for a recording, BagError.
    """
    # each source is imported by its own scheme only, so that its dependencies are its own affair
    scheme, separator, address = uri.partition(":")
    stop = stop or threading.Event()
    if separator and scheme == "bag":
        from .bag import BagSource

        return BagSource(uri, Path(address).expanduser(), settings.fps, settings.loop, stop)
    if uri == "scene:tabletop":
        from .bag import TABLETOP, BagSource

        return BagSource(uri, TABLETOP, settings.fps, settings.loop, stop)
    if separator and scheme == "scene":
        from .scene import SceneSource

        return SceneSource(uri, settings.fps, settings.loop, stop)
    if separator and scheme == "video":
        from .video import VideoSource

        return VideoSource(address, settings.fps, settings.loop, stop)
    if separator and scheme == "webcam":
        from .webcam import open_webcam

        return open_webcam(address, settings, stop)
    raise CameraError(f"expected {KNOWN} as a camera source, found {uri!r}")
