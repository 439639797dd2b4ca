"""What the writers of outputs read: masks and frames that can be gone through again.

What a replay does, in order: steps on frames, and edits between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import ReplayError
from ..types import Frame, MaskFrame

Masks = Callable[[], Iterator[MaskFrame]]
"""Each call goes through all masks again, from the beginning; frames of one camera in the order of its frames."""

Frames = Callable[[], Iterator[Frame]]
"""Each call goes through the recording again, from the beginning."""

Progress = Callable[[int], None]
"""Told how many masks of an output are written."""


log = logging.getLogger(__name__)

RESTARTED = "restarted"
FORGOTTEN = "forgotten"
MAX_NOTES = 20


class Edit(NamedTuple):
    """A control operation; or of a node's events SERVED or DROPPED; RESTARTED: all is as it was at the
    start; FORGOTTEN: the camera's objects of this label are removed."""

    op: str
    args: Mapping[str, Any] = {}


class Step(NamedTuple):
    """A frame to track on, with what its masks message tells of it beside the masks.

    `failed`: the live node's step on it raised. `edits` are carried out on the frame once it is stepped; the masks that
    they answer are the frame's.
    """

    frame: Frame
    received_ns: int
    skipped: int = 0
    failed: bool = False
    edits: tuple[Edit, ...] = ()


Action = Step | Edit


class Notes:
    """What a recording lacks, in words. Each one is a ReplayError unless it is `lenient`."""

    def __init__(self, lenient: bool) -> None:
        self.lines: list[str] = []
        self._lenient = lenient

    def gap(self, text: str) -> None:
        """Something that cannot be repeated."""
        if not self._lenient:
            raise ReplayError(
                f"{text}; what came before is kept. --allow-gaps goes on nevertheless, with masks that may differ from "
                "here on; --every takes the frames without it"
            )
        self.tell(text)

    def tell(self, text: str) -> None:
        """Something worth knowing."""
        log.warning("%s", text)
        if len(self.lines) < MAX_NOTES:
            self.lines.append(text)
