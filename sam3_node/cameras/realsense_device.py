"""Reads a RealSense camera, realsense[:SERIAL], or a recording of the SDK played as the device, realsense:FILE.

An image has its aligned depth, its lens and the stamps of the device.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ..errors import CameraError
from ..settings import CameraSettings
from ..types import NANOSECONDS, Depth, DepthImage, Image, count_missing_frames
from ..wire import encode_depth
from . import realsense_sdk
from .camera_source import CameraSource, CapturedImage
from .clock_fit import ClockFit
from .live_source import DeviceSource, PlayedSource

SILENT_S = 3.0
"""Time without an image after which a camera counts as lost."""

# units of exposure in a millisecond of a separate colour sensor, which counts in 100 us as UVC does
_UVC_UNITS_PER_MS = 10
# units of exposure in a millisecond of a stereo sensor, which counts in us
_STEREO_UNITS_PER_MS = 1000
# frames that wait between the SDK's thread and the reader
_QUEUE_FRAMES = 8
# colour images of a live camera that wait for depth: more would delay them
_LIVE_PATIENCE = 2
# share of a period between colour and its depth: the sensors may run half a period apart
_MAX_GAP = 0.55
# time of one wait for a frame
_POLL_S = 0.1
# the SDK's names of clocks that are the host's
_HOST_CLOCKS = ("system_time", "global_time")
# delay of an image above which its stamp is not believed to be the host's
_MAX_DELAY_NS = NANOSECONDS
# polls after the end of a recording in which frames may still come
_POLLS_AFTER_END = 2
# further stamps of a frame, and its exposure: their names in `times`, and the factor of their units there
_METADATA = {
    "sensor_timestamp": ("sensor_timestamp_ns", 1000),
    "frame_timestamp": ("frame_timestamp_ns", 1000),
    "backend_timestamp": ("backend_timestamp_ns", 10**6),
    "time_of_arrival": ("time_of_arrival_ns", 10**6),
    "actual_exposure": ("actual_exposure", 1),
}
_log = logging.getLogger(__name__)
# endings of recordings
_RECORDINGS = (".db3", ".bag")


def open_realsense(address: str, settings: CameraSettings, stop: threading.Event) -> CameraSource:
    """Open the camera with the serial number `address`, the only camera if it is empty, or a recording.

    A camera that is unplugged is opened again when it is back, and only that one. Raises CameraError if it is absent,
    used by another program, or refuses a setting, and MissingExtraError without the extra `realsense`.
    """
    name = f"realsense:{address}" if address else "realsense"
    if address.endswith(_RECORDINGS):
        return RealSenseRecording(name, Path(address).expanduser(), settings, stop)
    rs = realsense_sdk.load_sdk()
    context = rs.context()

    # the serial number of the first device that was opened, so that another one does not take its place
    serial = address

    def open_device() -> RealSenseDevice:
        nonlocal serial
        try:
            device = realsense_sdk.find_device(rs, list(context.query_devices()), serial)
        except RuntimeError as error:
            raise realsense_sdk.explain(name, error) from error
        opened = RealSenseDevice(rs, device, settings, name)
        serial = opened.serial
        return opened

    return DeviceSource(name, open_device, settings.fps, stop)


class RealSenseRecording(PlayedSource):
    """Plays a recording of the RealSense SDK as the device would: every image once, at its own pace.

    `fps` 0 keeps the recorded pace. Images are captured anew. `times` holds the recorded stamps.
    """

    def __init__(self, name: str, path: Path, settings: CameraSettings, stop: threading.Event) -> None:
        super().__init__(name, settings.fps, settings.loop, stop)
        self._path = path
        self._settings = settings
        self._rs = realsense_sdk.load_sdk()
        self._lost = 0
        self._device: RealSenseDevice | None = self._open()

    @property
    def lost(self) -> int:
        """Frame numbers that the recording lacks."""
        if self._device is None:
            return self._lost
        return self._lost + self._device.lost

    def close(self) -> None:
        super().close()
        self._release()

    def _play(self) -> Iterator[CapturedImage]:
        # the device is open already when the recording is played for the first time
        if self._device is None:
            self._device = self._open()
        device = self._device
        with contextlib.suppress(RecordingEnded):
            while not (self._closed or self._stop.is_set()):
                if not device.grab():
                    continue
                image = device.retrieve()
                if image is not None:
                    yield replace(image, capture_ns=device.stamp_ns)
        self._release()

    def _release(self) -> None:
        device = self._device
        self._device = None
        if device is not None:
            self._lost += device.lost
            device.close()

    def _open(self) -> RealSenseDevice:
        expected = f"{self.name}: expected a recording of the RealSense SDK"
        if not self._path.is_file():
            raise CameraError(f"{expected}, found no file at {self._path}")
        try:
            device = self._rs.context().load_device(str(self._path))
        except RuntimeError as error:
            raise CameraError(
                f"{expected}, which refuses the file: {error}; try bag:FILE, which reads damaged recordings"
            ) from error
        return RealSenseDevice(self._rs, device, self._settings, self.name)


class RecordingEnded(CameraError):  # noqa: N818 - an occurrence, such as StopIteration
    """Raised at the end of a recording that is played as the device."""


@dataclass(frozen=True, slots=True)
class StampedFrame:
    """A frame of a device, with its stamp in the device's clock `domain`, and when it arrived on the host's clocks."""

    frame: Any
    stamp_ns: int
    domain: str
    arrival_ns: int
    """Time of the monotonic clock."""
    arrival_unix_ns: int


Pair = tuple[StampedFrame, StampedFrame | None]


class FramePairer:
    """Yields every colour image once, in order, with the depth image at most `tolerance_ns` away, else alone.

    Each stream arrives in order of time. A colour image waits until later depth arrives, or until more than `patience`
    colour images wait. Stamps of two clock domains cannot be compared, so times of arrival are compared instead.
    """

    def __init__(self, tolerance_ns: int, patience: int = 1) -> None:
        self._tolerance_ns = tolerance_ns
        self._patience = patience
        self._colours: deque[StampedFrame] = deque()
        self._depths: deque[StampedFrame] = deque(maxlen=patience + 1)

    def add_colour(self, colour: StampedFrame) -> list[Pair]:
        """Take a colour image. Return the pairs that it completes."""
        self._colours.append(colour)
        return self._complete(self._patience)

    def add_depth(self, depth: StampedFrame) -> list[Pair]:
        """Take a depth image. Return the pairs that it completes."""
        self._depths.append(depth)
        return self._complete(self._patience)

    def flush(self) -> list[Pair]:
        """Return what still waits, when nothing more will come."""
        return self._complete(0)

    def _complete(self, patience: int) -> list[Pair]:
        pairs: list[Pair] = []
        while self._colours:
            # depth that is too early for this image is too early for all later ones
            colour = self._colours[0]
            while self._depths and _gap_ns(colour, self._depths[0]) > self._tolerance_ns:
                self._depths.popleft()

            # without later depth, an image waits as long as there is patience
            if not self._depths and len(self._colours) <= patience:
                break
            depth = None
            if self._depths and -_gap_ns(colour, self._depths[0]) <= self._tolerance_ns:
                depth = self._depths.popleft()
            pairs.append((colour, depth))
            self._colours.popleft()
        return pairs


def _gap_ns(colour: StampedFrame, depth: StampedFrame) -> int:
    """Return how much later the colour image is."""
    if colour.domain == depth.domain:
        return colour.stamp_ns - depth.stamp_ns
    return colour.arrival_ns - depth.arrival_ns


def apply_options(rs: Any, colour: Any, depth: Any | None, settings: CameraSettings, name: str) -> None:
    """Set the preset, then the exposure and the emitter, which the preset would overwrite.

    `colour` and `depth` are sensors, the same one in some cameras. Warns about an option that the camera lacks. Raises
    CameraError for a value out of the option's range.
    """
    if settings.exposure_ms:
        units = _STEREO_UNITS_PER_MS if _is_same(colour, depth) else _UVC_UNITS_PER_MS
        _set_exposure(rs, colour, settings.exposure_ms, units, f"{name}: camera.exposure_ms")
    if depth is None:
        return
    if settings.preset != "keep":
        preset = int(getattr(rs.rs400_visual_preset, settings.preset))
        _set(depth, rs.option.visual_preset, preset, f"{name}: camera.preset")
    if settings.depth_exposure_ms:
        exposure_ms = settings.depth_exposure_ms
        _set_exposure(rs, depth, exposure_ms, _STEREO_UNITS_PER_MS, f"{name}: camera.depth_exposure_ms")
    if settings.emitter != "keep":
        _set(depth, rs.option.emitter_enabled, settings.emitter == "on", f"{name}: camera.emitter")


def _is_same(colour: Any, depth: Any | None) -> bool:
    """Return True if the colour sensor is the one of depth."""
    if depth is None:
        return False
    return any(profile.stream_type().name == "depth" for profile in colour.get_stream_profiles())


def _set_exposure(rs: Any, sensor: Any, exposure_ms: float, units_per_ms: int, what: str) -> None:
    if sensor.supports(rs.option.enable_auto_exposure):
        sensor.set_option(rs.option.enable_auto_exposure, 0)
    _set(sensor, rs.option.exposure, exposure_ms * units_per_ms, what, units_per_ms)


def _set(sensor: Any, option: Any, value: float, what: str, units: int = 1) -> None:
    if not sensor.supports(option):
        _log.warning("%s is not used: the camera has no such option", what)
        return
    limits = sensor.get_option_range(option)
    if not limits.min <= value <= limits.max:
        raise CameraError(
            f"{what}: expected {limits.min / units:g} to {limits.max / units:g}, found {value / units:g}"
        )
    # the SDK refuses values between the steps
    step = limits.step or 1
    sensor.set_option(option, limits.min + round((value - limits.min) / step) * step)


class RealSenseDevice:
    """A LiveDevice that streams colour, and depth if the camera has it. Raises CameraError if it cannot be opened.

    A recording yields each of its images once. A camera that is read too slowly loses the oldest images.
    """

    def __init__(self, rs: Any, device: Any, settings: CameraSettings, name: str) -> None:
        self._rs = rs
        self._device = device
        self._name = name
        self.serial = realsense_sdk.read_info(rs, device, "serial_number")
        self._playback = device.as_playback() if device.is_playback() else None
        self._sensors: list[Any] = []
        self._frames: queue.Queue[StampedFrame] = queue.Queue(_QUEUE_FRAMES)
        self._closed = threading.Event()
        # the clocks of the device, by their domains
        self._fits: dict[str, ClockFit] = {}
        # complete pairs; the first one is the grabbed one
        self._pairs: deque[Pair] = deque()
        self._heard_s = time.monotonic()
        self._last_number: int | None = None
        self._polls_after_end = 0
        self.lost = 0
        self.stamp_ns = 0
        """Stamp of the image that was retrieved last, on the device's clock."""
        try:
            colour, depth = realsense_sdk.choose_streams(rs, device, settings, name)
            if self._playback is None:
                depth_sensor = None if depth is None else depth.sensor
                apply_options(rs, colour.sensor, depth_sensor, settings, name)
            self._lens = realsense_sdk.read_lens(colour.profile, name)

            # how long colour waits for depth, which must say how it lies to colour to be aligned
            patience = 0
            self._aligner: _Aligner | None = None
            streams = [colour]
            if depth is not None:
                patience = _LIVE_PATIENCE
                # the streams of a recording come in threads of their own, one of which may be far ahead
                if self._playback is not None:
                    patience = _QUEUE_FRAMES
                if realsense_sdk.has_extrinsics(depth.profile, colour.profile):
                    self._aligner = _Aligner(rs)
                streams.append(depth)
            tolerance_ns = round(_MAX_GAP * NANOSECONDS / colour.mode.fps)
            self._pairer = FramePairer(tolerance_ns, patience)
            self._start(streams)
        except RuntimeError as error:
            raise realsense_sdk.explain(name, error) from error
        if depth is not None and self._aligner is None:
            _log.warning("%s: the camera does not say how depth lies to colour: depth is not aligned", name)

    def grab(self) -> bool:
        # one frame may complete several pairs
        if len(self._pairs) > 1:
            self._pairs.popleft()
            return True
        self._pairs.clear()
        try:
            frame = self._frames.get(timeout=_POLL_S)
        except queue.Empty:
            self._check_silence()
            return bool(self._pairs)

        # any frame is a sign of life, also one of depth
        self._heard_s = time.monotonic()
        self._polls_after_end = 0
        if frame.frame.get_profile().stream_type() == self._rs.stream.color:
            self._count_lost(frame.frame.get_frame_number())
            self._pairs.extend(self._pairer.add_colour(frame))
        else:
            self._pairs.extend(self._pairer.add_depth(frame))
        return bool(self._pairs)

    def retrieve(self) -> CapturedImage | None:
        if not self._pairs:
            return None
        colour, depth = self._pairs[0]
        self.stamp_ns = colour.stamp_ns
        try:
            capture_ns = self._map_to_host(colour)
            image = _to_bgr(colour.frame)
            depth_image = self._read_depth(colour, depth) if depth is not None else None
            times = self._collect_times(colour, depth)
        except RuntimeError as error:
            raise realsense_sdk.explain(self._name, error) from error
        return CapturedImage(image, capture_ns, depth_image, self._lens, times)

    def close(self) -> None:
        self._closed.set()
        for sensor in self._sensors:
            with contextlib.suppress(RuntimeError):  # it is unplugged
                sensor.stop()
            with contextlib.suppress(RuntimeError):
                sensor.close()
        self._sensors = []

    def _start(self, streams: Sequence[realsense_sdk.Stream]) -> None:
        """Open all sensors, then start them. A recording pauses meanwhile: it would play from the first start on."""
        # colour and depth may come from one sensor, which is opened once
        by_sensor: dict[int, tuple[Any, list[Any]]] = {}
        for stream in streams:
            by_sensor.setdefault(id(stream.sensor), (stream.sensor, []))[1].append(stream.profile)
        if self._playback is not None:
            self._playback.set_real_time(False)
            self._playback.pause()
        try:
            for sensor, profiles in by_sensor.values():
                sensor.open(profiles)
                self._sensors.append(sensor)
            for sensor in self._sensors:
                sensor.start(self._take)
            if self._playback is not None:
                self._playback.resume()
        except RuntimeError:
            self.close()
            raise

    def _take(self, frame: Any) -> None:
        """Queue a frame, in the SDK's thread. A frame_queue of the SDK deadlocks with a recording's reader."""
        arrival_ns = time.monotonic_ns()
        arrival_unix_ns = time.time_ns()
        domain = frame.get_frame_timestamp_domain().name
        frame.keep()
        stamp_ns = round(frame.get_timestamp() * 1e6)
        stamped = StampedFrame(frame, stamp_ns, domain, arrival_ns, arrival_unix_ns)
        # a recording waits for its reader; a live camera drops its oldest frame
        timeout_s = _POLL_S if self._playback is not None else 0.0
        while not self._closed.is_set():
            try:
                self._frames.put(stamped, timeout=timeout_s)
                return
            except queue.Full:
                if self._playback is None:
                    with contextlib.suppress(queue.Empty):
                        self._frames.get_nowait()

    def _check_silence(self) -> None:
        """Raise CameraError for a camera that has been silent too long, RecordingEnded at the end of a recording."""
        if self._playback is None:
            if time.monotonic() - self._heard_s > SILENT_S:
                raise CameraError(f"no image for {SILENT_S:g} s: is the cable loose?")
            return

        # frames may still be on their way to the queue when the player says that it has stopped
        if self._playback.current_status() == self._rs.playback_status.stopped:
            self._polls_after_end += 1
        if self._polls_after_end > _POLLS_AFTER_END:
            self._pairs.extend(self._pairer.flush())
            if not self._pairs:
                raise RecordingEnded("the recording has ended")

    def _count_lost(self, number: int) -> None:
        if self._last_number is not None:
            self.lost += count_missing_frames(self._last_number, number)
        self._last_number = number

    def _map_to_host(self, frame: StampedFrame) -> int:
        """Return the Unix time of a frame's stamp: as the SDK says if its clock is the host's, else by the fit."""
        # the fit sees each frame, so that it is ready if the SDK changes to another clock
        delay_ns = self._fits.setdefault(frame.domain, ClockFit()).delay_ns(frame.stamp_ns, frame.arrival_ns)
        if frame.domain in _HOST_CLOCKS and 0 <= frame.arrival_unix_ns - frame.stamp_ns <= _MAX_DELAY_NS:
            return frame.stamp_ns
        return frame.arrival_unix_ns - delay_ns

    def _collect_times(self, colour: StampedFrame, depth: StampedFrame | None) -> dict[str, int | float]:
        """Return all stamps in nanoseconds of their own clocks. The name of a stamp of the SDK tells its clock."""
        times: dict[str, int | float] = {}
        for prefix, stamped in (("", colour), ("depth_", depth)):
            if stamped is None:
                continue
            times[f"{prefix}{stamped.domain}_ns"] = stamped.stamp_ns
            for name, (key, unit) in _METADATA.items():
                value = getattr(self._rs.frame_metadata_value, name)
                if stamped.frame.supports_frame_metadata(value):
                    times[f"{prefix}{key}"] = stamped.frame.get_frame_metadata(value) * unit
        times["arrival_ns"] = colour.arrival_unix_ns
        times["clock_drift_ppm"] = round(self._fits[colour.domain].drift_ppm, 3)
        return times

    def _read_depth(self, colour: StampedFrame, depth: StampedFrame) -> Depth:
        """Return depth that is registered to colour, or as it is if the camera does not say how it lies to colour."""
        scale_m = depth.frame.as_depth_frame().get_units()
        if self._aligner is None:
            pixels = np.array(depth.frame.get_data())
        else:
            pixels = self._aligner.align(colour.frame, depth.frame)
        return encode_depth(pixels, "z16+zstd", scale_m, aligned=self._aligner is not None)


class _Aligner:
    """Registers depth to colour with the SDK's own filter, which takes both as one set of frames."""

    def __init__(self, rs: Any) -> None:
        # the frames of the set that is being made
        self._waiting: list[Any] = []
        self._sets = rs.frame_queue(1, True)
        self._bundler = rs.processing_block(self._bundle)
        self._bundler.start(self._sets)
        self._filter = rs.align(rs.stream.color)

    def align(self, colour: Any, depth: Any) -> DepthImage:
        """Return depth uint16 [h, w] of the size of the colour image."""
        self._waiting = [colour, depth]
        self._bundler.invoke(depth)
        self._waiting = []
        frames = self._filter.process(self._sets.wait_for_frame(1000).as_frameset())
        return np.array(frames.get_depth_frame().get_data())

    def _bundle(self, _: Any, source: Any) -> None:
        source.frame_ready(source.allocate_composite_frame(self._waiting))


def _to_bgr(frame: Any) -> Image:
    """Copy the pixels, which the SDK uses again, as BGR uint8 [h, w, 3]."""
    pixels = np.asanyarray(frame.get_data())
    form = frame.get_profile().format().name
    if form == "bgr8":
        return np.array(pixels, np.uint8)
    if form == "rgb8":
        return np.ascontiguousarray(pixels[:, :, ::-1])
    if form == "y8":
        return np.asarray(cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR), np.uint8)
    packed = pixels.view(np.uint8).reshape(*pixels.shape[:2], 2)
    return np.asarray(cv2.cvtColor(packed, cv2.COLOR_YUV2BGR_YUY2), np.uint8)
