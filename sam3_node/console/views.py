"""Make views of a live node, which are pictures with the masks of exactly that frame, and pack them for the page.

A message is binary: the length of a header (uint32, little-endian), the header as JSON, the picture as JPEG or PNG, and
the bits of each mask. The bits are as in the wire's bits+zstd, without zstd: the crop inside the box, row after row
without padding, eight pixels in a byte, the first in the highest bit. `LiveViews` subscribes to cameras and node, and
pairs masks with their frames.
"""

import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..client.diagnosis import Wanted, diagnose, find_sending_camera
from ..errors import Sam3NodeError, TransportError, WireError
from ..resources import Closeable, closed_on_error
from ..schema.operations import FindObjects
from ..schema.replies import ObjectPlace
from ..settings import Settings
from ..transport import ControlClient, Security
from ..transport.mask_pairing import MAX_CAMERAS, MaskPairing
from ..transport.tap import StreamTap
from ..types import Buffer, Frame, Instance, Mask, MaskFrame, keep_newest
from ..wire import EVENTS_TOPIC, Event, decode_image, encode_image, unpack_event

JPEG_QUALITY = 85
"""Quality of pictures that are not compressed already, 1 to 100."""
POLL_MS = 100
"""Longest time between two looks at whether the console closes, or the node is connected."""
STATUS_S = 0.5
"""Time between two questions for the node's status."""
STATUS_TIMEOUT_MS = 1000
"""Longest time that such a question waits for the node."""
QUEUE_BYTES = 64 << 20
"""Maximum size of the waiting messages, in bytes. Further ones are dropped and counted."""
MAX_EVENTS = 100
"""Newest events that the page lists."""
MAX_TEXT = 200
"""Characters of an event's value that the page shows."""
MAX_LOST = 32
"""Lost objects that the page lists, those that were seen last."""
EVENT_FIELDS = ("camera", "id", "ids", "label", "prompts", "error", "seq", "episode", "keep", "absent_s")
"""Arguments of an event that the page shows."""
_COMPRESSED = ("jpeg", "png")
MASKS_LEFT_OUT = frozenset(
    # what the header has itself, and what has another form there
    {"camera", "seq", "capture_ns", "width", "height", "instances", "robot_mask", "before"}
)
"""Fields of masks that are not in the header of a view."""
INSTANCE_LEFT_OUT = frozenset({"mask", "points_m", "frames_since_seen"})
"""Fields of an instance that are not in the header: their bits follow it, or they have another name."""

Listener = Callable[[], None]


class FrameView:
    """A picture with its masks, either of which may be missing, and the masks of another result to compare with.

    The picture is encoded when the first page needs it, and then kept for the others.
    """

    def __init__(
        self, frame: Frame | None, masks: MaskFrame | None, other: MaskFrame | None = None, number: int = 0
    ) -> None:
        shown = frame or masks
        assert shown is not None
        self.camera, self.seq, self.capture_ns = shown.key
        self.width = shown.width
        self.height = shown.height
        self.frame = frame
        self.masks = masks
        self.other = other
        self.number = number
        """Place of the view: in a recording the index, live a number that grows with each view."""

    @cached_property
    def image(self) -> tuple[str, Buffer]:
        """The picture's media type and bytes. Raises WireError if the camera's picture is damaged."""
        if self.frame is None:
            return "", b""
        # a camera's own JPEG goes to the page as it came
        if self.frame.encoding in _COMPRESSED:
            return f"image/{self.frame.encoding}", self.frame.colour
        return "image/jpeg", encode_image(decode_image(self.frame), "jpeg", JPEG_QUALITY)

    @property
    def origin_ns(self) -> int | None:
        """Unix time from which the picture's age is measured; None if neither its clock nor its masks say it."""
        if self.frame is not None and self.frame.clock == "system":
            return self.capture_ns
        # a clock of the camera's own tells no age; the node has measured one
        if self.masks is None:
            return None
        return self.masks.age_origin_ns


def pack_view(view: FrameView, live: bool) -> bytes:
    """Return the message of a view. Raises WireError if its picture cannot be decoded."""
    media_type, image = view.image
    # the picture comes first, then the bits of each mask, in the order in which the header names them
    blobs: list[Buffer] = [image]
    header: dict[str, object] = {
        "camera": view.camera,
        "seq": view.seq,
        "number": view.number,
        "capture_ms": view.capture_ns / 1e6,
        "width": view.width,
        "height": view.height,
        "image": {"type": media_type, "bytes": memoryview(image).nbytes},
        "masks": _describe(view.masks, blobs),
        "other": _describe(view.other, blobs),
    }
    if live and view.origin_ns is not None:
        header["origin_ms"] = view.origin_ns / 1e6
    packed = msgspec.json.encode(header)
    return b"".join([struct.pack("<I", len(packed)), packed, *blobs])


def pack_bits(mask: Mask) -> bytes:
    """Return the bits of a mask's crop, row after row without padding."""
    return np.packbits(mask.crop).tobytes()


def _describe(masks: MaskFrame | None, blobs: list[Buffer]) -> Mapping[str, object] | None:
    """Return the fields of masks for the header, and append the bits of each, at last of the robot's mask."""
    if masks is None:
        return None
    # the bits are appended in the order of the instances, which is how the page finds them
    instances = [_describe_instance(instance, blobs) for instance in masks.instances]
    robot = None
    if masks.robot_mask is not None:
        blobs.append(pack_bits(masks.robot_mask))
        robot = {"box": masks.robot_mask.box, "bytes": len(blobs[-1])}
    # how old the masks were when they left the node
    latency_ms = None
    if masks.published_ns:
        latency_ms = (masks.published_ns - masks.age_origin_ns) / 1e6
    return {
        **_list_fields(masks, MASKS_LEFT_OUT),
        "latency_ms": latency_ms,
        "instances": instances,
        "robot": robot,
    }


def _describe_instance(instance: Instance, blobs: list[Buffer]) -> Mapping[str, object]:
    bits = pack_bits(instance.mask)
    blobs.append(bits)
    known = {
        name: value for name, value in _list_fields(instance, INSTANCE_LEFT_OUT).items() if value is not None
    }
    return {
        **known,
        "unseen": instance.frames_since_seen,
        "box": instance.box,
        "area": instance.area,
        "bytes": len(bits),
    }


def _list_fields(value: msgspec.Struct, left_out: frozenset[str]) -> dict[str, object]:
    return {name: getattr(value, name) for name in value.__struct_fields__ if name not in left_out}


class LiveViews(Closeable):
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
        self._pairing = MaskPairing()
        self._views: dict[str, FrameView] = {}
        self._events: deque[Mapping[str, object]] = deque(maxlen=MAX_EVENTS)
        self._number = 0  # of the newest view
        self._event_number = 0  # of the newest event
        self._malformed = 0  # messages that could not be read
        self._status: Mapping[str, Any] | None = None
        self._lost: Sequence[ObjectPlace] = ()
        self._description: Mapping[str, Any] | None = None
        self._problem = "connecting"
        self._connected = False
        self._closing = threading.Event()
        security = Security.from_settings(transport)
        self._control = ControlClient(transport.control, STATUS_TIMEOUT_MS, security)
        with closed_on_error(self._control):
            self._tap = StreamTap(transport.frames, transport.masks, (), QUEUE_BYTES, security=security)
        # two threads: the status is asked for even while nothing arrives, and waits for a node that hangs
        self._threads = [
            threading.Thread(target=run, name=f"console {run.__name__}", daemon=True)
            for run in (self._receive, self._ask)
        ]
        for thread in self._threads:
            thread.start()

    def next_view(self, seen: dict[str, int]) -> FrameView | None:
        """Return the newest view of the camera that has waited longest, if it is newer than `seen`, and note it there.

        `seen` maps cameras to the number of the view that a page has had last, the longest wait first.
        """
        with self._lock:
            # a camera that this page has never had comes first
            order = {camera: place for place, camera in enumerate(seen)}
            for camera in sorted(self._views, key=lambda name: order.get(name, -1)):
                view = self._views[camera]
                if view.number > seen.get(camera, -1):
                    # removed first, so that it goes to the end: the longest wait is over
                    seen.pop(camera, None)
                    seen[camera] = view.number
                    return view
        return None

    def state(self) -> Mapping[str, object]:
        """Return connection, status, what is wrong, the last events, and the objects that were lost."""
        with self._lock:
            return {
                "connected": self._connected and self._status is not None,
                "status": self._status,
                "problem": self._problem,
                "events": list(self._events),
                "lost": self._lost,
                "marks_s": self._settings("tracker").get("feature_cache_s"),
                "malformed": self._malformed,
                "dropped": self._tap.dropped,
            }

    @property
    def detector(self) -> Mapping[str, Any]:
        """Settings of the node's detector, as far as they are known."""
        with self._lock:
            # a node without a detector describes none, whatever its settings say
            if self._description is None or not self._description.get("detector"):
                return {}
            return self._settings("detector")

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
                    self._status = None
                    self._problem = "the node has gone: its connection has ended"
                if arrived is not None:
                    try:
                        changed |= self._accept(arrived.parts)
                    except WireError:
                        self._malformed += 1
            # told without the lock: the listener wakes tasks that ask for the state
            if changed:
                self._on_change()

    def _accept(self, parts: list[memoryview]) -> bool:
        """Take one message. Return True if it changed what the page shows."""
        if parts[0] == EVENTS_TOPIC:
            self._note(unpack_event(parts))
            return True
        pair = self._pairing.accept(parts)
        # masks without their frame cannot be shown
        if pair is None or pair.frame is None:
            return False
        # the number tells a page which view is newer than the one that it has
        self._number += 1
        keep_newest(self._views, pair.camera, FrameView(*pair, number=self._number), MAX_CAMERAS)
        return True

    def _note(self, event: Event) -> None:
        self._event_number += 1
        shown = {name: _to_text(event.args[name]) for name in EVENT_FIELDS if name in event.args}
        told = {"number": self._event_number, "time_ms": time.time() * 1000, "op": event.op[:MAX_TEXT]}
        self._events.append(shown | told)

    def _ask(self) -> None:
        """Ask for the status every STATUS_S, and for the description when the node's run is another one."""
        node: object = None
        while not self._closing.wait(STATUS_S):
            try:
                status = dict(self._control.call("status"))
                # the description changes with the node's run alone, and is larger than the status
                if self._description is None or status.get("node") != node:
                    node = status.get("node")
                    self._description = dict(self._control.call("describe"))
                found = self._explain({**self._description, **status})
                self._lost = self._find_lost()
            except TransportError:
                status = {}
                found = diagnose(None, self._wanted, self._endpoint in self._tap.connected)
            except Sam3NodeError as error:
                status = {}
                found = str(error)
            with self._lock:
                self._status = status or None
                self._problem = found
            self._on_change()

    def _find_lost(self) -> Sequence[ObjectPlace]:
        """Return the objects that the node tracks no longer and remembers, those first that were seen last."""
        # the answer comes between two frames, and an earlier version of the node has none
        try:
            reply = self._control.ask(FindObjects())
            places = [place for place in reply.objects if place.state == "lost"]
        except Sam3NodeError:
            return self._lost
        return places[:MAX_LOST]

    def _explain(self, description: Mapping[str, Any]) -> str:
        """Return one line that says what keeps masks from arriving; "" if nothing does."""
        connected = self._endpoint in self._tap.connected
        if connected and not description["paused"] and find_sending_camera(description, ()):
            return ""
        return diagnose(description, self._wanted, connected)

    def _settings(self, section: str) -> Mapping[str, Any]:
        return dict(((self._description or {}).get("settings") or {}).get(section, {}))


def _to_text(value: object) -> str:
    text = str(value)
    if isinstance(value, list):
        text = ", ".join(map(str, value))
    return text[:MAX_TEXT]
