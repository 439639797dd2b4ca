"""A page for people: pictures, tracks, scores, confidences, and IoU with what was recorded."""

import base64
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

import cv2

from ...errors import WireError
from ...files import write_new
from ...geometry import mask_iou, shrink
from ...types import NANOSECONDS, Frame, Instance, MaskFrame
from ...visualization import PALETTE, overlay
from ...wire import decode_image
from .output import OutputFormat, Progress, Sources
from .pairs import join_frames

REPORT_PICTURES = 12
"""Number of pictures in a report, evenly chosen."""
REPORT_PICTURE_PX = 480
"""Longer side of these pictures in pixels, at most."""
REPORT_POINTS = 4000
"""Number of frames in a report's graphs, at most. More would slow a browser down."""

# letters of states in the report; the others have their first letter, which this one shares with `tracked`
_STATE_LETTERS = {"tentative": "n"}

Point = tuple[int, str, float, float | None, int, float | None]
"""A point of a track: frame, state, score, confidence, doubt, and IoU with the recorded mask of its id."""


class _TrackGraph(TypedDict):
    """The graph of an object."""

    points: list[Point]
    label: str


class _CameraGraphs(TypedDict):
    """The graphs of a camera."""

    frames: list[tuple[int, float]]
    """seq, and seconds since the first frame"""
    objects: dict[int, _TrackGraph]


class ReportPage(OutputFormat):
    """report.html, one page that needs no other file."""

    file = "`report.html`: one page with pictures, tracks, confidences and, with `--as-recorded`, IoU"
    frame_bytes = 200

    @classmethod
    def write(cls, folder: Path, sources: Sources, progress: Progress) -> None:
        """Write the page. It has at most REPORT_POINTS frames, evenly chosen."""
        # evenly chosen frames for the graphs and the pictures, which needs the number of all
        count = sum(1 for _ in sources.masks())
        stride = max(1, math.ceil(count / REPORT_POINTS))
        shown = {index * count // REPORT_PICTURES for index in range(REPORT_PICTURES)}
        cameras: dict[str, _CameraGraphs] = {}
        pictures = []
        first_ns = dict[str, int]()
        model = ""
        pairs = join_frames(sources.masks, sources.frames)
        # both passes go through the same masks, so that they stay in step
        recorded = join_frames(sources.masks, sources.recorded or _no_masks)
        for number, ((masks, frame), (_, before)) in enumerate(zip(pairs, recorded, strict=True)):
            model = masks.model
            if number in shown and frame is not None:
                picture = _draw_picture(masks, frame)
                if picture is not None:
                    pictures.append((f"{masks.camera} #{masks.seq}", picture))

            # a point for each object, with the time since the camera's first frame
            if number % stride == 0:
                camera = cameras.setdefault(masks.camera, {"frames": [], "objects": {}})
                time_ns = masks.capture_ns - first_ns.setdefault(masks.camera, masks.capture_ns)
                camera["frames"].append((masks.seq, round(time_ns / NANOSECONDS, 3)))
                known: dict[int, Instance] = {}
                if before is not None:
                    known = {instance.id: instance for instance in before.instances}
                for instance in masks.instances:
                    track = camera["objects"].setdefault(instance.id, {"points": [], "label": ""})
                    track["label"] = instance.label
                    track["points"].append(_describe_point(len(camera["frames"]) - 1, instance, known))
            progress(number + 1)

        data = {
            "recording": sources.recording,
            "model": model,
            "frames": count,
            "stride": stride,
            "palette": PALETTE,
            "compared": sources.recorded is not None,
            "pictures": pictures,
            "cameras": cameras,
        }
        page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
        text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # a label may hold </script>
        write_new(folder / "report.html", page.replace("DATA", text, 1))


def _draw_picture(masks: MaskFrame, frame: Frame) -> str | None:
    """Return a frame with its masks as the base64 of a small JPEG; None if it cannot be decoded."""
    # the page holds its pictures itself: keep them small
    with suppress(WireError):
        image = overlay(decode_image(frame), masks)
        small = shrink(image, REPORT_PICTURE_PX)
        return base64.b64encode(cv2.imencode(".jpg", small)[1].tobytes()).decode()
    return None


def _describe_point(index: int, instance: Instance, recorded: Mapping[int, Instance]) -> Point:
    state = _STATE_LETTERS.get(instance.state, instance.state[0])
    confidence = round(instance.confidence, 3) if instance.confidence is not None else None
    iou = None
    before = recorded.get(instance.id)
    if before is not None:
        # an object that both results hide is the same in both: its masks agree
        iou = 1.0
        if instance.area or before.area:
            iou = round(mask_iou(instance.mask, before.mask), 3)
    return index, state, round(instance.score, 3), confidence, int(instance.doubtful), iou


def _no_masks() -> Iterator[MaskFrame]:
    return iter(())
