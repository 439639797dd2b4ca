"""What the writers of outputs read: masks and frames that can be gone through again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..types import Frame, MaskFrame

Masks = Callable[[], Iterator[MaskFrame]]
"""Each call goes through all masks again, from the beginning; frames of one camera in the order of its frames."""

Frames = Callable[[], Iterator[Frame]]
"""Each call goes through the recording again, from the beginning."""

Progress = Callable[[int], None]
"""Told how many masks of an output are written."""
