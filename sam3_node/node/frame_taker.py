"""Take the frames that wait: one after another, or those of several cameras to be encoded together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..perception.joint_encoding import JointEncoding
from ..transport import FrameSubscriber, ReceivedFrame
from ..types import Frame

Join = Callable[[Sequence[Frame]], JointEncoding | None]


class TakenFrame(NamedTuple):
    """A frame that is to be stepped now."""

    received: ReceivedFrame
    encoding: JointEncoding | None = None
    """what encodes it together with frames of other cameras; None: its step encodes it alone"""


class FrameTaker:
    """Takes the newest frame of the camera that is next, with those of up to `most` cameras that wait with it.

    They are stepped one by one in the order of their cameras' turns, and requests are answered in between. A frame that
    comes meanwhile waits for the next batch, as it would wait for the end of a step. So in each round every camera that
    waits has one step, and its frame is the newest when the round begins.
    """

    def __init__(self, frames: FrameSubscriber, most: int, join: Join) -> None:
        """`join` returns what encodes some frames together; None if it cannot."""
        self.most = most
        self._frames = frames
        self._join = join
        self._held: deque[TakenFrame] = deque()

    @property
    def holds(self) -> bool:
        """True if a frame was taken with others, and is not stepped yet."""
        return bool(self._held)

    @property
    def waits(self) -> bool:
        """True if `take` would return a frame now."""
        return self.holds or self._frames.waits

    def take(self) -> TakenFrame | None:
        """Return the frame to step next; None if none waits. Raises TransportError if the receiver has failed."""
        if not self._held:
            self._take_round()
        if not self._held:
            return None
        taken = self._held.popleft()
        # what memory did not suffice for once is not tried again
        if not self._held and taken.encoding is not None and taken.encoding.is_split:
            self.most = 1
        return taken

    def skip_held(self) -> None:
        """Count the frames that were taken with others, and are not stepped yet, as skipped."""
        while self._held:
            self._frames.skip(self._held.popleft().received)

    def _take_round(self) -> None:
        round_: list[ReceivedFrame] = []
        while len(round_) < self.most:
            received = self._frames.take(timeout_ms=0)
            if received is None:
                break
            # a camera that has just sent again begins a round of its own
            if any(received.frame.camera == one.frame.camera for one in round_):
                self._hold(round_)
                self._hold([received])
                return
            round_.append(received)
        self._hold(round_)

    def _hold(self, received: Sequence[ReceivedFrame]) -> None:
        encoding = self._join([one.frame for one in received]) if len(received) > 1 else None
        self._held.extend(TakenFrame(one, encoding) for one in received)
