"""The cameras that the node serves: new ones take free places, or that of one that sends no frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..perception.perception import Perception
from ..settings import Settings
from ..transport import choose_replaced
from ..wire import DROPPED, SERVED
from .stats import CameraStats

log = logging.getLogger(__name__)

CAMERA_IDLE_S = 10.0


class ServedCameras:
    """Serves up to `tracker.max_cameras` cameras.

    `stats` gives the statistics of each. `publish` publishes an event. `forget` is called before a camera is dropped.
    """

    def __init__(
        self,
        settings: Settings,
        perception: Perception,
        stats: Callable[[], Mapping[str, CameraStats]],
        publish: Callable[[str, dict[str, Any]], None],
        forget: Callable[[str], None],
    ) -> None:
        self._max_cameras = settings.tracker.max_cameras
        self._fair_share = max(1, self._max_cameras // len(settings.transport.frames))
        self._perception, self._stats = perception, stats
        self._publish, self._forget = publish, forget
        self._endpoints: dict[str, str] = {}
        self.refused = 0
        """Number of frames of cameras that are not served."""

    def admit(self, camera: str, endpoint: str) -> bool:
        """Return True if the camera is served. A new camera may replace one that sends no frames."""
        served = self._perception.pipelines
        if camera in served:
            self._endpoints[camera] = endpoint
            return True
        if len(served) >= self._max_cameras and not self._drop_camera_for(endpoint):
            self.refused += 1
            if self.refused == 1:
                log.warning("camera %s is not served: tracker.max_cameras cameras are served already", camera)
            return False
        log.info("camera %s: new, served", camera)
        self._perception.serve(camera)
        self._publish(SERVED, {"camera": camera})
        self._endpoints[camera] = endpoint
        return True

    def _drop_camera_for(self, endpoint: str) -> bool:
        """Drop a camera for a new one of `endpoint`, so that an endpoint with many names takes nothing from others."""
        camera = choose_replaced(
            {
                name: (self._endpoints.get(name, ""), stats.idle_s >= CAMERA_IDLE_S)
                for name, stats in sorted(self._stats().items(), key=lambda item: -item[1].idle_s)
            },
            endpoint,
            self._fair_share,
        )
        if camera is None:
            return False
        log.warning("camera %s is dropped for a new camera of %s", camera, endpoint)
        self._forget(camera)
        self._perception.drop(camera)
        self._endpoints.pop(camera, None)
        self._publish(DROPPED, {"camera": camera})
        return True
