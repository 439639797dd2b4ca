"""Shows live frames and masks in a viewer: one thread receives and pairs them, another shows each camera's newest pair.

A viewer that is slow, or hangs, holds up its own thread only. Newer pairs replace waiting ones, so nothing grows.
"""

import logging
import threading
from typing import NamedTuple, Protocol

from ..errors import WireError
from ..processes.notify import Watchdog
from ..settings import Settings
from ..transport import Security
from ..transport.mask_pairing import MaskPair, MaskPairing
from ..transport.tap import StreamTap
from ..types import Frame, MaskFrame

POLL_MS = 100
"""Longest time between two looks at the stop event."""
QUEUE_BYTES = 64 << 20
"""Maximum size of the waiting messages, in bytes. Further ones are dropped and counted."""
VIEWER_CLOSE_S = 3.0
"""Longest time that a viewer has to take what is left, and to close."""

log = logging.getLogger(__name__)


class Viewer(Protocol):
    """A viewer, or a file for one. A thread of its own calls these methods, which may wait."""

    def show(self, frame: Frame | None, masks: MaskFrame) -> bool:
        """Show masks, empty ones if there are none, and their frame if it is known. Return False without a viewer."""

    def close(self) -> None:
        """Finish, and let go of sockets and files."""


class BridgeCounts(NamedTuple):
    """Counts of pairs that were shown, and skipped for newer ones. `closed` is False if the viewer still blocks.

    `dropped` messages were never read, because QUEUE_BYTES were waiting.
    """

    shown: int
    skipped: int
    closed: bool
    dropped: int = 0


def run_bridge(settings: Settings, viewer: Viewer, stop: threading.Event, watchdog: Watchdog) -> BridgeCounts:
    """Show frames and masks until `stop` is set, then close the viewer.

    Raises SettingsError for lossless delivery, TransportError for a malformed endpoint, and the error of a viewer that
    can show nothing more, such as OutputError. Cameras and node may start later, and again.
    """
    transport = settings.transport
    sender = _Sender(viewer)
    dropped = 0
    try:
        transport.require_newest("bridge")
        security = Security.from_settings(transport)
        with StreamTap(transport.frames, transport.masks, (), QUEUE_BYTES, security=security) as tap:
            pairing = MaskPairing()
            # until a signal, or until the viewer can show nothing more
            while not stop.is_set() and sender.failure is None:
                watchdog.tick()
                arrived = tap.take(POLL_MS)
                if arrived is not None:
                    pair = _accept(pairing, arrived.parts)
                    if pair is not None:
                        sender.put(pair)
            dropped = tap.dropped
            watchdog.begin_close()  # of the tap, and then of the viewer
    # whatever has ended the loop, the viewer is closed, and its error is the one to raise
    finally:
        watchdog.begin_close()
        outcome = sender.close()
    if sender.failure is not None:
        raise sender.failure
    return outcome._replace(dropped=dropped)


def _accept(pairing: MaskPairing, parts: list[memoryview]) -> MaskPair | None:
    try:
        return pairing.accept(parts)
    except WireError as error:
        log.warning("skipped a malformed message: %s", error)
        return None


class _Sender:
    """A thread that shows pairs. At most one pair of each camera waits, the newest."""

    def __init__(self, viewer: Viewer) -> None:
        self.failure: Exception | None = None
        """The error that ended the thread."""
        self._viewer = viewer
        self._shown = 0
        self._skipped = 0
        self._waiting: dict[str, MaskPair] = {}
        self._changed = threading.Condition()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="bridge", daemon=True)
        self._thread.start()

    def put(self, pair: MaskPair) -> None:
        """Queue a pair. It replaces the waiting pair of its camera."""
        with self._changed:
            self._skipped += pair.camera in self._waiting
            self._waiting[pair.camera] = pair  # keeps the camera's place: the longest wait is over first
            self._changed.notify()

    def close(self) -> BridgeCounts:
        """End the thread and close the viewer; wait at most VIEWER_CLOSE_S for it."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join(VIEWER_CLOSE_S)
        return BridgeCounts(self._shown, self._skipped, not self._thread.is_alive())

    def _run(self) -> None:
        try:
            try:
                # the viewer is closed in this thread: its library may expect that, and may hang
                while (pair := self._take()) is not None:
                    self._shown += self._viewer.show(pair.frame, pair.masks or _no_masks(pair))
            finally:
                self._viewer.close()
        except Exception as error:
            self.failure = error

    def _take(self) -> MaskPair | None:
        with self._changed:
            self._changed.wait_for(lambda: self._ending or bool(self._waiting))
            if self._ending:
                return None
            # the camera whose pair has waited longest
            return self._waiting.pop(next(iter(self._waiting)))


def _no_masks(pair: MaskPair) -> MaskFrame:
    # a frame without masks is shown all the same: the viewer has the camera's newest picture
    frame = pair.frame
    assert frame is not None
    return MaskFrame(*frame.key, frame.width, frame.height, clock=frame.clock)
