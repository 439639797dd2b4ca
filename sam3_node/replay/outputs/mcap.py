"""The results as a recording."""

from collections.abc import Iterator
from pathlib import Path

from ...bags.native import COLOUR
from ...bags.native.writer import RecordingWriter, describe_compression
from ...types import Frame
from ...wire import pack_masks
from .output import OutputFormat, Progress, Sources
from .pairs import compress_frame, join_frames

MASK_BYTES = 4000
"""Bytes of a frame's masks message, with about five objects at 1080p."""


class Mcap(OutputFormat):
    """masks.mcap, a recording of masks alone."""

    file = "`masks.mcap`: masks messages, and annotations for Foxglove"
    frame_bytes = MASK_BYTES

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write the recording. With frames, each masks come after their frame. Raw colour becomes JPEG."""
        is_described = False
        frames = sources.frames if cls.has_frames else _no_frames
        with RecordingWriter(folder / "masks.mcap") as bag:
            for count, (masks, frame) in enumerate(join_frames(sources.masks, frames), start=1):
                image = compress_frame(frame)
                # say once that the pixels are not those of the camera
                if image is not frame and not is_described:
                    is_described = True
                    bag.write_metadata(COLOUR, describe_compression("jpeg"))
                if image is not None:
                    bag.write_frame(image, masks.age_origin_ns)
                _, body = pack_masks(masks, "rle")
                bag.write_masks(body, masks, masks.age_origin_ns)
                progress(count)


class McapWithImages(Mcap):
    """masks.mcap with the frames of the masks."""

    file = "`masks.mcap` with the frames, so that a viewer needs no other file"
    has_frames = True


def _no_frames() -> Iterator[Frame]:
    return iter(())
