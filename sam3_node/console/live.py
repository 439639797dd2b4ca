"""The live source of views: it subscribes to cameras and node, and pairs masks with their frames."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Protocol

from ..client.diagnosis import Wanted, diagnose, find_sending_camera
from ..errors import Sam3NodeError, TransportError, WireError
from ..settings import Settings
from ..transport import ControlClient, Security, StreamTap
from ..types import Closeable, Frame, MaskFrame
from ..wire import EVENTS_TOPIC, Event, unpack_event, unpack_frame, unpack_masks
from .views import View

POLL_MS = 100
STATUS_S = 0.5
STATUS_TIMEOUT_MS = 1000
QUEUE_BYTES = 64 << 20
MAX_FRAMES = 90
MAX_BYTES = 256 << 20
MAX_CAMERAS = 16
MAX_EVENTS = 100
MAX_TEXT = 200
MASKS_LATE_S = 1.0
"""Seconds without masks after which pictures are shown without them."""

Listener = Callable[[], None]


class Source(Protocol):
    """A source of the page's views: a live node or a recording."""

    mode: str

    def state(self) -> dict[str, Any]:
        """Return what the page shows beside the views, as JSON values."""


class RecentFrames:
    """The newest frames of a camera that wait for their masks, at most MAX_FRAMES and a share of MAX_BYTES."""

    def __init__(self) -> None:
        self.newest: Frame | None = None
        self._frames: OrderedDict[int, Frame] = OrderedDict()
        self._bytes = 0

    def add(self, frame: Frame, max_bytes: int) -> None:
        """Add the newest frame. One with the same seq is from before a restart of the camera, and is replaced."""
        self._drop(frame.seq)
        self._frames[frame.seq] = self.newest = frame
        self._bytes += memoryview(frame.colour).nbytes
        while len(self._frames) > 1 and (len(self._frames) > MAX_FRAMES or self._bytes > max_bytes):
            self._drop(next(iter(self._frames)))

    def find(self, masks: MaskFrame) -> Frame | None:
        """Return the frame of these masks if it is here."""
        frame = self._frames.get(masks.seq)
        return frame if frame is not None and frame.key == masks.key else None

    def _drop(self, seq: int) -> None:
        frame = self._frames.pop(seq, None)
        if frame is not None:
            self._bytes -= memoryview(frame.colour).nbytes


class CameraViews:
    """The views of one camera: the newest masks with their frame, or the newest frame alone if masks are late."""

    def __init__(self) -> None:
        self.frames = RecentFrames()
        self.view: View | None = None
        self._waiting: MaskFrame | None = None
        self._masks_s = -MASKS_LATE_S

    def add_frame(self, frame: Frame, number: int, now_s: float, max_bytes: int) -> bool:
        """Add a frame. Return True if there is a new view."""
        self.frames.add(frame, max_bytes)
        if self._waiting is not None and self._waiting.key == frame.key:
            return self._show(frame, self._waiting, number, now_s)
        if now_s - self._masks_s > MASKS_LATE_S:
            self.view = View(frame, None, number=number)
            return True
        return False

    def add_masks(self, masks: MaskFrame, number: int, now_s: float) -> bool:
        """Add masks. Return True if there is a new view. Masks that overtook their frame wait for it."""
        frame = self.frames.find(masks)
        if frame is None:
            self._waiting = masks
            return False
        return self._show(frame, masks, number, now_s)

    def _show(self, frame: Frame, masks: MaskFrame, number: int, now_s: float) -> bool:
        self._waiting, self._masks_s = None, now_s
        self.view = View(frame, masks, number=number)
        return True


class LiveSource(Closeable):
    """Subscribes to frames, masks and events, and asks the node for its status. A context manager.

    `on_change` is called from its threads when there is a new view or state. Raises TransportError for a malformed
    endpoint; cameras and node may start later.
    """

    mode = "live"

    def __init__(self, settings: Settings, on_change: Listener) -> None:
        transport = settings.transport
        self._endpoint = transport.masks
        self._wanted = Wanted(transport.masks, transport.control, transport.delivery, ())
        self._on_change = on_change
        self._lock = threading.Lock()
        self._cameras: dict[str, CameraViews] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._number = self._event_number = self._malformed = 0
        self._status: dict[str, Any] | None = None
        self._description: dict[str, Any] | None = None
        self._problem = "connecting"
        self._connected = False
        self._closing = threading.Event()
        security = Security.from_settings(transport)
        self._control = ControlClient(transport.control, STATUS_TIMEOUT_MS, security)
        try:
            self._tap = StreamTap(transport.frames, transport.masks, (), QUEUE_BYTES, security=security)
        except BaseException:
            self._control.close()
            raise
        self._threads = [
            threading.Thread(target=run, name=f"console {run.__name__}", daemon=True)
            for run in (self._receive, self._ask)
        ]
        for thread in self._threads:
            thread.start()

    def next_view(self, seen: dict[str, int]) -> View | None:
        """Return the newest view of the camera that has waited longest, if it is newer than `seen`, and note it there.

        `seen` maps cameras to the number of the view that a page has had last, that of the longest wait first.
        """
        with self._lock:
            order = {camera: place for place, camera in enumerate(seen)}
            for camera in sorted(self._cameras, key=lambda name: order.get(name, -1)):
                view = self._cameras[camera].view
                if view is not None and view.number > seen.get(camera, -1):
                    seen.pop(camera, None)
                    seen[camera] = view.number
                    return view
        return None

    def state(self) -> dict[str, Any]:
        """Return connection, status, what is wrong, and the last events."""
        with self._lock:
            return {
                "connected": self._connected and self._status is not None,
                "status": self._status,
                "problem": self._problem,
                "events": list(self._events),
                "max_prompt_age_s": self._read_setting("tracker", "max_prompt_age_s"),
                "malformed": self._malformed,
                "dropped": self._tap.dropped,
            }

    @property
    def detector(self) -> dict[str, Any]:
        """Settings of the node's detector, as far as they are known."""
        with self._lock:
            description = self._description or {}
        found = description.get("settings", {}).get("detector", {})
        return dict(found) if description.get("detector") else {}

    def close(self) -> None:
        """Stop receiving. Idempotent."""
        self._closing.set()
        self._tap.close()
        for thread in self._threads:
            thread.join()
        self._control.close()

    def _receive(self) -> None:
        while not self._closing.is_set():
            arrived = self._tap.take(POLL_MS)
            connected = self._endpoint in self._tap.connected
            with self._lock:
                changed = connected != self._connected
                self._connected = connected
                if changed and not connected:
                    self._status, self._problem = None, "the node has gone: its connection has ended"
                if arrived is not None:
                    try:
                        changed |= self._accept(arrived.parts)
                    except WireError:
                        self._malformed += 1
            if changed:
                self._on_change()

    def _accept(self, parts: list[memoryview]) -> bool:
        """Take one message. Return True if it changed what the page shows."""
        now_s = time.monotonic()
        topic = bytes(parts[0][:6])
        if topic == b"frame/":
            frame = unpack_frame(parts)
            views = self._find(frame.camera)
            self._number += 1
            return views.add_frame(frame, self._number, now_s, MAX_BYTES // len(self._cameras))
        if topic == b"masks/":
            masks = unpack_masks(parts)
            views = self._find(masks.camera)
            self._number += 1
            return views.add_masks(masks, self._number, now_s)
        if parts[0] == EVENTS_TOPIC:
            self._note(unpack_event(parts))
            return True
        return False

    def _find(self, camera: str) -> CameraViews:
        """Return the views of a camera. Beyond MAX_CAMERAS, forget the one that has sent nothing for longest."""
        views = self._cameras.pop(camera, None) or CameraViews()
        self._cameras[camera] = views
        if len(self._cameras) > MAX_CAMERAS:
            del self._cameras[next(iter(self._cameras))]
        return views

    def _note(self, event: Event) -> None:
        self._event_number += 1
        words = {name: value for name, value in event.args.items() if name != "mask"}
        text = " ".join(f"{name}={_format(value)}" for name, value in words.items())
        self._events.append(
            {
                "number": self._event_number,
                "time_ms": time.time() * 1000,
                "op": event.op[:MAX_TEXT],
                "text": text[:MAX_TEXT],
            }
        )

    def _ask(self) -> None:
        """Ask for the status every STATUS_S, and for the description when the node's run is another one."""
        node: object = None
        while not self._closing.wait(STATUS_S):
            try:
                status = dict(self._control.call("status"))
                if self._description is None or status.get("node") != node:
                    node, self._description = status.get("node"), dict(self._control.call("describe"))
                found = self._explain({**self._description, **status})
            except TransportError:
                status, found = {}, diagnose(None, self._wanted, self._endpoint in self._tap.connected)
            except Sam3NodeError as error:
                status, found = {}, str(error)
            with self._lock:
                self._status, self._problem = status or None, found
            self._on_change()

    def _explain(self, description: dict[str, Any]) -> str:
        """Return one line that says what keeps masks from arriving; "" if nothing does."""
        connected = self._endpoint in self._tap.connected
        if connected and not description["paused"] and find_sending_camera(description, ()):
            return ""
        return diagnose(description, self._wanted, connected)

    def _read_setting(self, section: str, name: str) -> Any:
        return ((self._description or {}).get("settings") or {}).get(section, {}).get(name)


def _format(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_format, value)) + "]"
    return str(value)
