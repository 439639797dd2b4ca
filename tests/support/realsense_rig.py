"""RealSense cameras without hardware: software devices of the SDK, and recordings of them by its own recorder."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.realsense_bags import RGB, SIZE, Z16, Stream

FPS = 30
UNITS = 0.001
BASELINE_M = 0.06
START_MS = 50_000.0
OPTIONS = {
    # name: minimum, maximum, default, step
    "exposure": (1, 165000, 8500, 1),
    "enable_auto_exposure": (0, 1, 1, 1),
    "emitter_enabled": (0, 2, 1, 1),
    "visual_preset": (0, 8, 0, 1),
}


def load_rs() -> Any:
    """Import the SDK; skip the test without it."""
    return pytest.importorskip("pyrealsense2", exc_type=ImportError)


def add_stream(rs: Any, sensor: Any, stream: Stream, uid: int, coeffs: Sequence[float] = (0.0,) * 5) -> Any:
    """Add a stream of SIZE to a sensor; return its profile."""
    lens = rs.intrinsics()
    lens.width, lens.height, lens.fx, lens.fy, lens.ppx, lens.ppy = *SIZE[::-1], 60.0, 61.0, 31.5, 23.5
    lens.model = rs.distortion.brown_conrady
    lens.coeffs = list(coeffs)
    profile = rs.video_stream()
    profile.type = getattr(rs.stream, stream.kind)
    profile.index = stream.number
    profile.uid = uid
    profile.width, profile.height, profile.fps, profile.bpp = *SIZE[::-1], FPS, stream.bytes_per_pixel
    profile.fmt = getattr(rs.format, stream.form)
    profile.intrinsics = lens
    return sensor.add_video_stream(profile).as_video_stream_profile()


def make_frame(
    rs: Any, stream: Stream, profile: Any, pixels: np.ndarray, index: int, stamp_ms: float, units: float
) -> Any:
    """Return an image of a software sensor; `units` are those of depth, in metres."""
    frame = rs.software_video_frame()
    frame.pixels = pixels
    frame.bpp = stream.bytes_per_pixel
    frame.stride = SIZE[1] * stream.bytes_per_pixel
    frame.timestamp = stamp_ms
    frame.frame_number = index
    frame.profile = profile
    if stream.kind == "depth":
        frame.depth_units = units
    return frame


class SoftCamera:
    """A software device with a colour and a depth sensor, BASELINE_M apart, that streams at FPS."""

    def __init__(self, serial: str = "123456", usb: str = "3.2", extrinsics: bool = True) -> None:
        self.rs = rs = load_rs()
        self.device = rs.software_device()
        for key, value in {"serial_number": serial, "name": "Soft D435", "usb_type_descriptor": usb}.items():
            self.device.register_info(getattr(rs.camera_info, key), value)
        self.colour_sensor = self.device.add_sensor("RGB Camera")
        self.depth_sensor = self.device.add_sensor("Stereo Module")
        self.colour = add_stream(rs, self.colour_sensor, RGB, 1)
        self.depth = add_stream(rs, self.depth_sensor, Z16, 0)
        if extrinsics:
            shift = rs.extrinsics()
            shift.rotation = [1, 0, 0, 0, 1, 0, 0, 0, 1]
            shift.translation = [BASELINE_M, 0, 0]
            self.depth.register_extrinsics_to(self.colour, shift)
        for name, values in OPTIONS.items():
            limits = rs.option_range()
            limits.min, limits.max, limits.default, limits.step = values
            self.depth_sensor.add_option(getattr(rs.option, name), limits, True)
        self._closed = threading.Event()
        self._index = 0
        self._thread: threading.Thread | None = None

    def push(self, index: int) -> None:
        """Give the images of this index: colour index % 256 with red 200, and depth 1000 + index."""
        stamp_ms = START_MS + index * 1000 / FPS
        red = np.full((*SIZE, 3), index % 256, np.uint8)
        red[:, :, 0] = 200
        for sensor, stream, profile, pixels in (
            (self.colour_sensor, RGB, self.colour, red),
            (self.depth_sensor, Z16, self.depth, np.full(SIZE, 1000 + index, np.uint16)),
        ):
            frame = make_frame(self.rs, stream, profile, pixels, index, stamp_ms, UNITS)
            frame.domain = self.rs.timestamp_domain.hardware_clock
            sensor.set_metadata(self.rs.frame_metadata_value.sensor_timestamp, round(1000 * stamp_ms) - 500)
            sensor.on_video_frame(frame)

    def stream(self, start: int = 0) -> None:
        """Give images at FPS from now on, from the index `start`."""
        self._index = start
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give no more images."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(1 / FPS):
            self.push(self._index)
            self._index += 1


def record(path: Path, frames: int, lost: tuple[int, ...] = (), extrinsics: bool = True) -> Path:
    """Record the images of a software device with the SDK's own recorder, but for those with the indices `lost`."""
    camera = SoftCamera(extrinsics=extrinsics)
    indices = [index for index in range(frames) if index not in lost]
    return record_device(path, camera.rs, camera.device, camera.push, indices)


def record_device(
    path: Path, rs: Any, device: Any, push: Callable[[int], None], indices: Sequence[int]
) -> Path:
    """Record what `push` gives for these indices, an image of each sensor."""
    recorder = rs.recorder(str(path), device)
    opened = recorder.query_sensors()
    queue = rs.frame_queue(len(opened) * len(indices))
    for sensor in opened:
        sensor.open(sensor.get_stream_profiles()[0])
        sensor.start(queue)
    for index in indices:
        push(index)
    awaited = time.monotonic() + PATIENCE_S
    for _ in range(len(opened) * len(indices)):
        queue.wait_for_frame(max(1, round(1000 * (awaited - time.monotonic()))))
    for sensor in opened:
        sensor.stop()
        sensor.close()
    return path
