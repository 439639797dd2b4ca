"""The actions of a replay: steps on frames, edits between them, and notes on what the recording lacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ReplayError
from ..types import Frame, FramePose

log = logging.getLogger(__name__)

RESTARTED = "restarted"
"""Edit: the node started again, and with it all state."""
REMOVED = "removed"
"""Edit: remove the objects of a camera that have this label."""
ADD_EVERYTHING = "add_everything"
"""Edit: segment everything on a frame, and add an object for each mask while slots are free."""
MAX_NOTES = 20


class Edit(NamedTuple):
    """A change between steps: a control operation, another event of the node but FAILED, or one of those above."""

    op: str
    args: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A frame to track on, with the fields that its masks message has beside the masks."""

    frame: Frame
    received_ns: int
    skipped: int = 0
    failed: bool = False
    """True if the live node's step on this frame raised an exception."""
    withheld: bool = False
    """True if the live node did not publish the masks of this frame, because they were too old."""
    edits: tuple[Edit, ...] = ()
    """Edits to make on the frame after its step. Masks that they return become the frame's masks."""
    robot_pose: FramePose | None = None
    """The gripper's pose that the live node used for this frame, None if it had none."""
    shed_level: int = 0
    """How much the live node left out on this frame"""


Action = Step | Edit


class Notes:
    """Remarks on a recording. A gap raises ReplayError unless the notes are `lenient`."""

    def __init__(self, lenient: bool) -> None:
        self.lines: list[str] = []
        self._lenient = lenient

    def add_gap(self, text: str) -> None:
        """Note that something cannot be repeated. Raises ReplayError unless lenient."""
        if not self._lenient:
            raise ReplayError(
                f"{text}; earlier results are kept. --allow-gaps goes on, with masks that may differ after this point; "
                "--every needs no recorded steps"
            )
        self.add(text)

    def add(self, text: str) -> None:
        """Log a remark, and keep it if there are fewer than MAX_NOTES."""
        log.warning("%s", text)
        if len(self.lines) < MAX_NOTES:
            self.lines.append(text)
