"""realsense[:SERIAL] - a RealSense camera, and realsense:FILE - a recording of the SDK played as the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CameraError
from ..settings import CameraSettings
from .base import CameraSource, CapturedImage
from .live import LiveSource
from .pacing import Pacer, StampPacer
from .realsense_device import RealSenseDevice, RecordingEnded
from .realsense_sdk import explain, find_device, load_sdk

_RECORDINGS = (".db3", ".bag")


class RealSenseRecording:
    """A recording of the RealSense SDK that plays as the device would give it, every image once, at its own pace.

    `fps` 0 keeps the recorded pace. Images are captured anew; `times` holds the recorded stamps.
    """

    def __init__(self, name: str, path: Path, settings: CameraSettings, stop: threading.Event) -> None:
        self.name, self._path, self._settings, self._stop = name, path, settings, stop
        self.is_finite = not settings.loop
        self._rs = load_sdk()
        self._lost = 0
        self._device: RealSenseDevice | None = self._open()
        self._grid = Pacer(settings.fps, stop) if settings.fps else None
        self._pacer = StampPacer(stop)

    @property
    def lost(self) -> int:
        """Frame numbers that the recording lacks."""
        return self._lost + (self._device.lost if self._device is not None else 0)

    def __iter__(self) -> Iterator[CapturedImage]:
        while self._device is not None and not self._stop.is_set():
            try:
                image = self._device.retrieve() if self._device.grab() else None
            except RecordingEnded:
                self.close()
                self._device = self._open() if self._settings.loop else None
                continue
            if image is not None:
                if not self._wait(self._device.stamp_ns):
                    return
                yield replace(image, capture_ns=time.time_ns())

    def close(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            self._lost += device.lost
            device.close()

    def _wait(self, stamp_ns: int) -> bool:
        return self._grid.wait() if self._grid is not None else self._pacer.wait(stamp_ns)

    def _open(self) -> RealSenseDevice:
        device = load_recording(self._rs, self._path, self.name)
        return RealSenseDevice(self._rs, device, self._settings, self.name)


def load_recording(rs: Any, path: Path, name: str) -> Any:
    """Load a recording of the SDK as a device; CameraError if it cannot be read."""
    if not path.is_file():
        raise CameraError(f"{name}: expected a recording of the RealSense SDK, found no file at {path}")
    try:
        return rs.context().load_device(str(path))
    except RuntimeError as error:
        raise CameraError(
            f"{name}: expected a recording of the RealSense SDK, which refuses the file: {error}; "
            "try bag:FILE, which reads damaged recordings"
        ) from error


def open_realsense(address: str, settings: CameraSettings, stop: threading.Event) -> CameraSource:
    """Open the camera with the serial number `address`, the only camera if it is empty, or a recording.

    A camera that is unplugged is opened again when it is back, and only that one. Raises CameraError if it is absent,
    used by another program, or refuses a setting, and MissingExtraError without the extra `realsense`.
    """
    name = f"realsense:{address}" if address else "realsense"
    if address.endswith(_RECORDINGS):
        return RealSenseRecording(name, Path(address).expanduser(), settings, stop)
    rs, serial = load_sdk(), address
    context = rs.context()

    def open_device() -> RealSenseDevice:
        nonlocal serial
        try:
            device = find_device(rs, list(context.query_devices()), serial)
        except RuntimeError as error:
            raise explain(name, error) from error
        opened = RealSenseDevice(rs, device, settings, name)
        serial = opened.serial
        return opened

    return LiveSource(name, open_device, settings.fps, stop)
