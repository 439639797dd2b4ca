"""Markdown tables, and the table of replay outputs."""

from collections.abc import Iterable, Sequence

from sam3_node.replay.job import OUTPUTS

_FILES = {
    "mcap": "`masks.mcap`: masks messages, and annotations for Foxglove",
    "mcap-images": "`masks.mcap` with the frames, so that a viewer needs no other file",
    "coco": "`masks.json`: COCO with RLE masks, with `videos` and `tracks` beside; each annotation has `confidence` "
    "and `doubtful`",
    "yolo": "`yolo/`: pictures and polygons in Ultralytics' layout (`images/`, `labels/`, `data.yaml`), split to train "
    "and to validate, and `contact.jpg`, which shows them; [your own classes](own-classes.md)",
    "ytvis": "`ytvis.json`: YouTube-VIS, with RLE masks of each object over its video",
    "png": "or `davis`: `png/<camera>/00000.png`: palette masks in DAVIS' layout; `objects.json` names each index",
    "overlay": "`overlay-<camera>.mp4`: H.264, which browsers play; without PyAV (extra `bags`) MPEG-4, and the "
    "log says so",
    "images": "`images/<camera>/00000.jpg` or `.png`: the frames; `masks.json` and `ytvis.json` name them",
    "report": "`report.html`: one page with pictures, tracks, confidences and, with `--as-recorded`, IoU",
    "lerobot": "`lerobot/`: the LeRobot dataset with masks as an added feature of each camera",
}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table; pipes in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(_cell(cell) for cell in line) + "|" for line in lines)


def code(text: str) -> str:
    """Return the text as inline code; empty text stays empty."""
    return f"`{text}`" if text else ""


def output_table() -> str:
    """Return the table of replay's `--outputs`. Raises KeyError for one that is not described here."""
    return table(["`--outputs`", "file"], [[code(output), _FILES[output]] for output in OUTPUTS])


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return text if text == "---" else f" {escaped} ".replace("  ", " ")
