"""Masks as the palette images of DAVIS."""

from pathlib import Path

from ..davis_png import write_palette_pngs
from .output import OutputFormat, Progress, Sources


class Png(OutputFormat):
    """png/<camera>/ in DAVIS format."""

    file = "or `davis`: `png/<camera>/00000.png`: palette masks in DAVIS' layout; `objects.json` names each index"
    hides_doubt = True
    is_label = True
    frame_bytes = 8000

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write a palette image for each masks."""
        (folder / "png").mkdir()
        write_palette_pngs(folder / "png", sources.masks(), progress, sources.with_doubtful)
