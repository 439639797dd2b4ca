"""The frames as image files."""

from pathlib import Path

from ...files import write_new
from .output import OutputFormat, Progress, Sources
from .pairs import IMAGES, compress_frame, name_images


class Images(OutputFormat):
    """images/<camera>/, the frames."""

    file = "`images/<camera>/00000.jpg` or `.png`: the frames; `masks.json` and `ytvis.json` name them"
    has_frames = True

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write the image of each frame that has masks, as `compress_frame` makes it."""
        (folder / IMAGES).mkdir()
        for count, (name, frame) in enumerate(name_images(sources.masks, sources.frames), start=1):
            image = compress_frame(frame)
            if name is not None and image is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                write_new(folder / name, image.colour)
            progress(count)
