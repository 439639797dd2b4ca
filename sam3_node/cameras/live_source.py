"""Paces and plays images, and reads live devices. A thread keeps the newest image and opens a lost device again.

The time of an image follows from the time of the image before it, so that errors of waiting never add up.
"""

import logging
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

from ..errors import CameraError
from ..types import NANOSECONDS
from .camera_source import CapturedImage

# gap between images whose stamps tell none
_FALLBACK_GAP_NS = NANOSECONDS // 30
# longest gap that is waited for
_MAX_GAP_NS = 10 * NANOSECONDS
# first pause in seconds before a lost device is opened again. It doubles with each failure
_FIRST_RETRY_S = 0.25
# longest such pause
_LAST_RETRY_S = 4.0
# time of one wait for an image
_TURN_S = 0.1
# time that closing waits for the thread: a RealSense camera takes a second to stop
_JOIN_S = 2.0
_log = logging.getLogger(__name__)


class LiveDevice(Protocol):
    """An open device. Only the thread that reads uses it."""

    @property
    def lost(self) -> int:
        """Images that the device or its driver lost since it was opened, as far as it says so."""

    def grab(self) -> bool:
        """Wait for the next image; False if none came for a moment. Raises CameraError if the device is lost."""

    def retrieve(self) -> CapturedImage | None:
        """Return the grabbed image; None if it is damaged. Raises CameraError if the device is lost."""

    def close(self) -> None:
        """Release the device. Raises nothing."""


class DeviceSource:
    """Yields the newest image of a live device. A lost device is opened again, with growing pauses, until it is back.

    `open_device` opens the device, or raises CameraError, which the constructor passes on. A separate thread reads,
    because a driver may block a read for seconds and stopping must not wait for it. Images are limited to `fps` a
    second; 0 admits all.
    """

    def __init__(
        self, name: str, open_device: Callable[[], LiveDevice], fps: float, stop: threading.Event
    ) -> None:
        self.name = name
        self.is_finite = False
        self._open_device = open_device
        self._limit = RateLimit(fps)
        self._stop = stop
        self._closed = threading.Event()
        self._arrived = threading.Condition()
        self._newest: CapturedImage | None = None
        self._failure: BaseException | None = None
        self._lost = 0
        try:
            self._device: LiveDevice | None = open_device()
        except CameraError as error:  # it may be plugged in later
            error.may_pass = True
            raise
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Images that the device lost, or that gave way to newer ones before they were taken."""
        device = self._device  # the thread may release it meanwhile
        if device is None:
            return self._lost
        return self._lost + device.lost

    def __iter__(self) -> Iterator[CapturedImage]:
        while not self._ended():
            with self._arrived:
                self._arrived.wait_for(lambda: self._newest is not None, timeout=_TURN_S)
                newest = self._newest
                self._newest = None
            if newest is not None:
                yield newest
            elif self._failure is not None:
                raise self._failure

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._closed.is_set()

    def _run(self) -> None:
        try:
            self._read()
        except BaseException as error:  # the iteration raises it: a camera that says nothing would look alive
            self._failure = error
        finally:
            self._release()

    def _read(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._ended():
            try:
                if self._read_one():
                    pause_s = _FIRST_RETRY_S
            except CameraError as error:
                # other programs may hold the device for a while, so the pauses grow
                reason = str(error)
                if not reason.startswith(self.name):
                    reason = f"{self.name}: {reason}"
                _log.warning("%s; opening it again in %.2f s", reason, pause_s)
                self._release()
                self._closed.wait(pause_s)
                pause_s = min(2 * pause_s, _LAST_RETRY_S)

    def _read_one(self) -> bool:
        """Read one image, after opening a device that was released. Return True if the device has given one."""
        if self._device is None:
            self._device = self._open_device()
        if not self._device.grab():
            return False
        # an image that is not wanted is not decoded
        if not self._limit.admits(time.monotonic_ns()):
            return True
        image = self._device.retrieve()
        if image is not None:
            with self._arrived:
                self._lost += self._newest is not None
                self._newest = image
                self._arrived.notify()
        return image is not None

    def _release(self) -> None:
        device = self._device
        self._device = None
        if device is not None:
            self._lost += device.lost
            device.close()


class Pacer:
    """Spaces images by `fps`, or by the differences of their stamps if it is 0. Delays are not caught up.

    A stamp that is not later than the previous one, because a recording started again, repeats the previous gap. Gaps
    between stamps are limited to 10 s.
    """

    def __init__(self, fps: float, stop: threading.Event) -> None:
        self._stop = stop
        self._by_stamps = not fps
        self._gap_ns: float = NANOSECONDS / fps if fps else _FALLBACK_GAP_NS
        self._stamp_ns: int | None = None
        self._due_ns = 0.0

    def wait(self, stamp_ns: int = 0) -> bool:
        """Wait until the image with this stamp is due. Return False if stopped. The first image is due at once."""
        # due after the previous due time, not after the previous wait: errors of waiting never add up
        now = time.monotonic_ns()
        if self._stamp_ns is None:
            self._due_ns = now
        else:
            if self._by_stamps and stamp_ns > self._stamp_ns:
                self._gap_ns = min(stamp_ns - self._stamp_ns, _MAX_GAP_NS)
            self._due_ns = max(self._due_ns + self._gap_ns, now)
        self._stamp_ns = stamp_ns
        return not self._stop.wait((self._due_ns - now) / NANOSECONDS)


class PlayedSource:
    """Plays images once or in a loop, at the pace of their stamps, or at `fps` if it is not 0.

    Each image is captured anew, and what its robot has published with it.
    """

    def __init__(self, name: str, fps: float, loop: bool, stop: threading.Event) -> None:
        self.name = name
        self.is_finite = not loop
        self._loop = loop
        self._stop = stop
        self._closed = False
        self._wait = Pacer(fps, stop).wait

    @property
    def lost(self) -> int:
        """Images that are missing."""
        return 0

    def __iter__(self) -> Iterator[CapturedImage]:
        while not (self._closed or self._stop.is_set()):
            for image in self._play():
                self._closed |= not self._wait(image.capture_ns)
                if self._closed:
                    return
                # the robot's messages keep their distance from the image
                now_ns = time.time_ns()
                late_ns = now_ns - image.capture_ns
                robot = [
                    replace(move, stamp_ns=move.stamp_ns + late_ns, clock="system") for move in image.robot
                ]
                yield replace(image, capture_ns=now_ns, robot=robot)
            self._closed |= not self._loop

    def close(self) -> None:
        self._closed = True

    @abstractmethod
    def _play(self) -> Iterator[CapturedImage]:
        """Yield the images from the first to the last. `capture_ns` is their stamp."""


class RateLimit:
    """Limits a faster camera to `fps` images a second, evenly spaced. 0 admits all."""

    def __init__(self, fps: float) -> None:
        self._period_ns = NANOSECONDS / fps if fps else 0.0
        self._due_ns = 0.0

    def admits(self, monotonic_ns: int) -> bool:
        """Return True if the image taken at this time of the monotonic clock is to be passed on."""
        # a quarter of a period early counts as on time, else jitter would halve the rate of an equally fast camera
        if monotonic_ns < self._due_ns - self._period_ns / 4:
            return False
        # after a pause, count from now: the images that did not come are not caught up
        if monotonic_ns - self._due_ns > self._period_ns:
            self._due_ns = monotonic_ns
        self._due_ns += self._period_ns
        return True
