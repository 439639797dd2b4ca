"""A running node to push frames through: as its camera and the one reader of its masks, without loss."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...errors import SettingsError, TransportError, WireError
from ...transport import ControlClient, FramePublisher, MaskSubscriber
from ...types import Closeable, Frame
from .in_flight import Counts, InFlightFrames, Settled

MAX_IN_FLIGHT = 8
TURN_MS = 100
STATUS_MS = 3000
ANSWER_MS = 30_000
SILENT_S = 0.5
GONE_S = 2.0
CONNECT_S = 10.0
REST_S = 60.0
ELSEWHERE_S = 10.0
PATIENCE_S = 300.0  # what is compiled on its first frame takes minutes for that
QUIET_TURNS = 3


_NOT_THERE = "to publish masks where its settings say", "nobody there; --transport.masks says where it is"


class StoppedWaitingError(TransportError):
    """Who waited for the node was told to stop, and the node had been silent for a while."""


class LiveNode(Closeable):
    """The node of lossless delivery (`every`) that answers at `control`. A context manager.

    `frames` is bound and `masks` connected to, without them the first of the node's own `transport.frames`, and its
    `transport.masks`. No other camera or reader may take part. `stop` ends waiting for a node that is silent. Raises
    TransportError where nobody answers or the endpoint of frames is taken, SettingsError for a node of live delivery.
    """

    def __init__(
        self,
        control: str,
        frames: str | None = None,
        masks: str | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._endpoint = control
        self._stop = stop or threading.Event()
        with ExitStack() as opened:
            self._asking = opened.enter_context(ControlClient(control, STATUS_MS))
            self.description: dict[str, Any] = self._asking.call("describe")
            """All that the node tells of itself."""
            transport = self.description["settings"]["transport"]
            _check_delivery(transport["delivery"], control)
            self._control = opened.enter_context(ControlClient(control, ANSWER_MS))
            self._frames = FramePublisher(frames or transport["frames"][0], "every")
            opened.callback(self._frames.close, 0)
            masks = masks or _seen_from(control, transport["masks"])
            self._masks = opened.enter_context(MaskSubscriber(masks, "every"))
            self._opened = opened.pop_all()
        self._begin((), Counts())

    @property
    def in_flight(self) -> int:
        """How many frames are sent and not settled."""
        return len(self._ledger.in_flight)

    @property
    def settled(self) -> deque[Settled]:
        """Frames that are done with, in the order in which they were sent, to be taken out by whoever sent them."""
        return self._ledger.settled

    def begin(self, cameras: Sequence[str]) -> list[str]:
        """Have the node without objects, looking for what it is configured to -> those of `cameras` it had before.

        What others have sent it is waited for, and thrown away. Raises SettingsError where it has no room for these
        cameras, TransportError where it does not come to rest.
        """
        self._until(lambda: bool(self._masks.connected), CONNECT_S, *_NOT_THERE)
        self.ask("resume")
        self._begin(cameras, self._rest(cameras))
        status = self._status()
        self._check_room(sorted({*cameras, *status["cameras"]}))
        self.ask("reset")
        prompts = self.description["settings"]["detector"]["prompts"]
        if status["prompts"] != prompts:
            self.ask("set_prompts", prompts=prompts)
        return [camera for camera in cameras if camera in status["cameras"]]

    def ask(self, op: str, **args: Any) -> Any:
        """A control request, carried out at once: `settle` before one that belongs between two frames.

        Raises RequestError and its kin, or TransportError where the node does not answer.
        """
        self._until(lambda: bool(self._masks.connected), GONE_S, f"to answer '{op}'", "that it is gone")
        return self._control.call(op, **args)

    def push(self, frame: Frame) -> None:
        """Send the next frame, once fewer than MAX_IN_FLIGHT are on their way and the node takes it.

        Raises WireError for a frame that contradicts itself or is too large, which is not sent, and as `settle`.
        """
        idle_s = time.monotonic()
        while self.in_flight >= MAX_IN_FLIGHT or not self._send(frame):
            self._turn()
            idle_s = time.monotonic() if self.in_flight else idle_s
            if time.monotonic() - idle_s > CONNECT_S:
                raise self._error(
                    f"to take frames from {self._frames.endpoint}", "that it does not connect there"
                )
        self._ledger.send(frame)

    def settle(self) -> None:
        """Wait until no frame is in flight.

        Raises TransportError where the node ends, hangs or was started again, or another reader takes masks, and its
        StoppedWaitingError after a stop.
        """
        while self.in_flight:
            self._turn()

    def check(self) -> None:
        """Raise TransportError unless the node has stepped the frames whose masks came, and no others."""
        done = self._done()
        if done.stepped != self._ledger.received:
            raise self._differs(done)

    def close(self) -> None:
        """Let go of the node; what is in flight is not waited for. Idempotent."""
        self._opened.close()

    def _begin(self, cameras: Sequence[str], before: Counts) -> None:
        self._cameras, self._before = cameras, before
        self._ledger, self._last_done = InFlightFrames(), Counts()
        self._asked_s = self._moved_s = time.monotonic()

    def _send(self, frame: Frame) -> bool:
        """Whether there was room."""
        try:
            return self._frames.send(frame, timeout_ms=0)
        except TransportError as error:  # more than one message may hold
            raise WireError(str(error)) from error

    def _turn(self) -> None:
        """Wait a moment for masks."""
        masks, now_s = self._masks.take(TURN_MS), time.monotonic()
        if masks is not None:
            self._asked_s = self._moved_s = now_s
            if self._ledger.receive(masks):
                self._done()
        elif now_s - self._asked_s > SILENT_S:
            self._ask_why()
            self._asked_s = time.monotonic()

    def _ask_why(self) -> None:
        """Find out what has become of frames whose masks do not come."""
        if self._stop.is_set():
            raise StoppedWaitingError(f"stopped waiting for the masks of {self.in_flight} frames")
        done = self._done()
        if done != self._last_done:
            self._last_done, self._moved_s = done, time.monotonic()
        self._ledger.hear(done)
        still_s = time.monotonic() - self._moved_s
        if self.in_flight and still_s > (ELSEWHERE_S if done.stepped > self._ledger.received else PATIENCE_S):
            raise self._differs(done)

    def _status(self) -> dict[str, Any]:
        """The node's answer to `status`, which it gives between frames: that may take long."""
        begin_s = connected_s = time.monotonic()
        while True:
            try:
                status: dict[str, Any] = self._asking.call("status")
                return status
            except TransportError as error:
                now_s = time.monotonic()
                connected_s = now_s if self._masks.connected else connected_s
                if now_s - connected_s > GONE_S:
                    raise self._error(f"to answer {self.in_flight} more frames", "that it is gone") from error
                if self._stop.is_set() or now_s - begin_s > PATIENCE_S:
                    raise

    def _done(self) -> Counts:
        """What the node has done with the frames since `begin`."""
        done = Counts.of(self._status(), self._cameras).since(self._before)
        if self._ledger.contradicts(done):
            raise self._differs(done)
        return done

    def _rest(self, cameras: Sequence[str]) -> Counts:
        """Take masks until none come any more -> what the node has done by then."""
        seen: deque[Counts] = deque(maxlen=QUIET_TURNS)

        def rests() -> bool:
            taken = self._masks.take(TURN_MS)
            seen.append(Counts.of(self._status(), cameras))
            if taken is not None:
                seen.clear()
            return len(seen) == QUIET_TURNS and len(set(seen)) == 1

        self._until(rests, REST_S, "to come to rest", "that frames of others keep it busy; stop its cameras")
        return seen[-1]

    def _until(self, holds: Callable[[], bool], within_s: float, expected: str, found: str) -> None:
        begin_s = time.monotonic()
        while not holds():
            if time.monotonic() - begin_s > within_s:
                raise self._error(expected, found)
            time.sleep(0.01)

    def _check_room(self, cameras: Sequence[str]) -> None:
        most = self.description["settings"]["tracker"]["max_cameras"]
        if len(cameras) > most:
            raise SettingsError(
                f"the node at {self._endpoint}: expected room for {len(cameras)} cameras, {', '.join(cameras)}, those "
                f"that it has served before among them, found {most}; start it anew with --tracker.max_cameras"
            )

    def _differs(self, done: Counts) -> TransportError:
        ledger = self._ledger
        return self._error(
            f"to have stepped {ledger.received} frames, whose masks came, and to have failed on {ledger.lost}, of "
            f"{ledger.sent} that were sent",
            f"{done.stepped} and {done.lost}; it hangs, or was started again, or another camera or reader takes part, "
            "of which each takes messages away from the others",
        )

    def _error(self, expected: str, found: str) -> TransportError:
        return TransportError(f"expected the node at {self._endpoint} {expected}; found {found}")


def _check_delivery(found: str, control: str) -> None:
    if found != "every":
        raise SettingsError(
            f"the node at {control}: expected lossless delivery, found {found!r}, with which it skips frames; start it "
            "with sam3-node run --transport.delivery every"
        )


def _seen_from(control: str, endpoint: str) -> str:
    """An endpoint of the node as it is reached from here: one that is bound on all addresses is at the control's."""
    host = re.match("tcp://.+:", control)
    return re.sub(r"^tcp://(\*|0\.0\.0\.0):", host[0], endpoint) if host else endpoint
