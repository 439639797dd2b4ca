"""What outputs are made from, and the base of their formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from ..davis_png import MaskSource
from .pairs import FrameSource, name_images

Progress = Callable[[int], None]
"""Called with the number of masks that were written."""
Doubtful = Literal["marked", "drawn", "left-out"]
"""The treatment of doubtful objects in outputs.

marked    all outputs have them, and say which they are; outputs that cannot (`hides_doubt`) have none
drawn     also outputs that cannot say it have them
left-out  outputs that others train on and measure with (`is_label`) have none
"""


class Dataset(NamedTuple):
    """A dataset that the recording is, and the names to detect, in their order."""

    path: Path
    prompts: Sequence[str] = ()


class Sources(NamedTuple):
    """Masks, frames and name of a recording that outputs are made from, and its recorded masks if there are any.

    `has_images` is True if the images were written before. The kind lerobot needs the `dataset` that was replayed.
    `doubtful` says what the labels do with doubtful objects.
    """

    masks: MaskSource
    frames: FrameSource
    recording: str = "recording"
    has_images: bool = False
    dataset: Dataset | None = None
    recorded: MaskSource | None = None
    doubtful: Doubtful = "marked"

    @property
    def prompts(self) -> Sequence[str]:
        """The names to detect, which number the labels first."""
        if self.dataset is None:
            return ()
        return self.dataset.prompts

    @property
    def with_doubtful(self) -> bool:
        """True if outputs that cannot mark doubtful objects have them."""
        return self.doubtful == "drawn"

    @property
    def labels(self) -> MaskSource:
        """The masks that become labels."""
        if self.doubtful == "left-out":
            return lambda: (masks.without_doubtful() for masks in self.masks())
        return self.masks

    def name_images(self, masks: MaskSource) -> Iterator[str | None]:
        """Yield the path of the image of each of these masks; None for each without images. May be endless."""
        if not self.has_images:
            return repeat(None)
        return (name for name, _ in name_images(masks, self.frames))


class OutputFormat:
    """Base of the formats. A class says what the format is; its `write` makes the files of one recording."""

    file: ClassVar[str]
    """what it writes, for the table of the documentation"""
    hides_doubt: ClassVar[bool] = False
    """True: its readers do not see which objects are doubtful."""
    is_label: ClassVar[bool] = False
    """True: others train on it and measure with it."""
    names_images: ClassVar[bool] = False
    """True: it names the files of `images`, if there are any."""
    is_joined: ClassVar[bool] = False
    """True: several recordings also have one in common, in a folder of the format's name beside theirs."""
    has_frames: ClassVar[bool] = False
    """True: it keeps the frames as they were recorded."""
    frame_bytes: ClassVar[int] = 0
    """about what it adds for each frame, in bytes"""
    pixel_bytes: ClassVar[float] = 0.0
    """about what it adds for each pixel of a frame, in bytes"""

    @classmethod
    def check(cls, recording: Path) -> None:
        """Raise ReplayError before the first frame for a recording that it cannot be made from."""

    @classmethod
    def join(cls, folder: Path, parts: Sequence[Path]) -> str:
        """Write what the results in the folders `parts` have in common, if `is_joined`; return what there is to say."""
        raise NotImplementedError

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> str | None:
        """Write the files of a recording into `folder`. Return what there is to say about them."""
        raise NotImplementedError
