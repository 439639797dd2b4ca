"""Drawing of masks on camera images, and writing of contact sheets, images and video files.

Videos are H.264, which every browser plays, where PyAV has an encoder for it. Else OpenCV writes MPEG-4 Part 2.
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import cv2
import numpy as np

from .errors import OutputError
from .files import make_folder, write_output
from .resources import Closeable
from .types import NANOSECONDS, Box, Image, Instance, Mask, MaskFrame

_log = logging.getLogger(__name__)

Colour = tuple[int, int, int]
"""Blue, green and red, 0..255."""

# fmt: off
PALETTE = (
    "e69f00", "56b4e9", "009e73", "f0e442", "0072b2", "d55e00", "cc79a7",
    "ffd17a", "b5e0fa", "7fd6b9", "a89b00", "8fa8ff", "ffa66b", "8c4a6b", "b07aff",
)
# fmt: on
"""Colours of objects, RGB: the palette of Okabe and Ito without black, then tints and shades of it."""
HATCH_OPACITY = 0.6
"""Opacity of the lines across a mask, 0..1. Between them, an object keeps its colours, by which people and agents know
it."""
HATCH_SPACING = 14
"""Distance of these lines, in widths of a line."""
DENSE_SPACING = 5
"""The same for the robot."""
FRAMES_FOR_RATE = 10
"""Number of frames whose times give a video its rate."""
DARK = (24, 24, 24)
GREY = (150, 150, 150)
LIGHT = (255, 255, 255)
FONT = cv2.FONT_HERSHEY_SIMPLEX
DASH = 5
"""Length of the dashes and gaps around a doubtful mask, in widths of the line."""
STATE_MARK = {"tracked": "", "tentative": "?", "occluded": " occluded"}
"""What follows the score of an object in each state."""

H264_ENCODERS = ("libx264", "libopenh264")
"""Encoders of H.264 that PyAV may have, the best first."""
H264_OPTIONS = {"preset": "veryfast", "crf": "20", "x264-params": "mbtree=0"}
"""Options of libx264: quick to write, and thin outlines stay sharp. A lower `crf` gives larger files. With `mbtree`,
the same frames would give other bytes each time."""
H264_THREADS = 2
"""Threads of the encoder. A fixed number gives the same bytes on each machine."""
MAX_RATE_DENOMINATOR = 1001
"""Largest denominator of a video's rate: that of 30000/1001."""

# rates of videos, in frames per second: of one without a gap between two frames, and the limits
_FALLBACK_FPS = 30.0
_MIN_FPS = 1.0
_MAX_FPS = 240.0
# brightness, 0..255, above which text on a colour is dark
_BRIGHT = 110


def pick_colour(object_id: int) -> Colour:
    """Return the BGR colour of an object id. The 15 colours suit colour-blind viewers. They repeat after 15 ids."""
    red, green, blue = bytes.fromhex(PALETTE[object_id % len(PALETTE)])
    return blue, green, red


def tag_text(instance: Instance) -> str:
    """Return the text beside an object: id, label and score, and whether its mask is tentative, hidden or doubtful."""
    mark = STATE_MARK[instance.state]
    if instance.doubtful:
        mark += " doubtful"
    return " ".join(filter(None, (str(instance.id), instance.label, f"{instance.score:.2f}{mark}")))


def overlay(image: Image, masks: MaskFrame) -> Image:
    """Return a copy of `image` (BGR uint8 [h, w, 3]) with each instance outlined, lightly hatched and tagged.

    A doubtful instance has a dashed outline. The robot's hatch is grey and dense. A status line at the top shows the
    camera and the times. Masks are scaled to the size of the image.
    """
    canvas = image.copy()
    height, width = image.shape[:2]
    shown = [(instance, _fit(instance.mask, (height, width))) for instance in masks.instances]
    shown = [(instance, mask) for instance, mask in shown if mask.crop.size]

    # all hatches, then all outlines, so that no hatch covers an outline
    if masks.robot_mask is not None and masks.robot_mask.area:
        _hatch(canvas, _fit(masks.robot_mask, (height, width)), GREY, DENSE_SPACING)
    for instance, mask in shown:
        _hatch(canvas, mask, pick_colour(instance.id), HATCH_SPACING)
    for instance, mask in shown:
        _outline(canvas, mask, pick_colour(instance.id), dashed=instance.doubtful)

    # tags avoid each other and the status line
    occupied = [_write(canvas, (0, 0), status_text(masks), LIGHT, DARK)]
    for instance, mask in shown:
        occupied.append(_tag(canvas, tag_text(instance), pick_colour(instance.id), mask.box, occupied))
    return canvas


def draw_labels(image: Image, labels: Sequence[tuple[str, int, Mask]]) -> Image:
    """Return a copy of `image` (BGR uint8 [h, w, 3]) with masks of its size, each with its name.

    `labels` are (name, number, mask). The number, from 0, chooses the colour.
    """
    canvas = image.copy()
    shown = [(name, pick_colour(number), mask) for name, number, mask in labels if mask.crop.size]
    for _, colour, mask in shown:
        _hatch(canvas, mask, colour, HATCH_SPACING)
    occupied: list[Box] = []
    for name, colour, mask in shown:
        _outline(canvas, mask, colour)
        occupied.append(_tag(canvas, name, colour, mask.box, occupied))
    return canvas


def status_text(masks: MaskFrame) -> str:
    """Return one line of text: camera, frame, age at publishing, the longest stages and objects without a mask."""
    parts = [f"{masks.camera} #{masks.seq}"]
    if masks.published_ns:
        latency_ms = (masks.published_ns - masks.age_origin_ns) / 1e6
        parts.append(f"{latency_ms:.0f} ms")
    slowest = sorted(masks.stages_us.items(), key=lambda stage: -stage[1])[:3]
    if slowest:
        stages = " ".join(f"{name} {us / 1000:.0f}" for name, us in slowest)
        parts.append(f"({stages})")
    hidden = [str(instance.id) for instance in masks.instances if not instance.mask.crop.size]
    if hidden:
        parts.append(f"unseen {','.join(hidden)}")
    return "  ".join(parts)


def _fit(mask: Mask, size: tuple[int, int]) -> Mask:
    # the image may be a smaller one than the masks are of
    if mask.size == size:
        return mask
    scaled = cv2.resize(mask.full().view(np.uint8), size[::-1], interpolation=cv2.INTER_NEAREST)
    return Mask.from_full(scaled.astype(np.bool_))


def _hatch(canvas: Image, mask: Mask, colour: Colour, spacing: int) -> None:
    """Draw slanted lines across a mask, which leave most of its pixels as they are."""
    x0, y0, x1, y1 = mask.box
    width = max(1, round(canvas.shape[0] / 500))
    # by the frame's pixels, so that the lines stand still in a video
    slant = np.add.outer(np.arange(y0, y1), np.arange(x0, x1)) % (spacing * width)
    region = canvas[y0:y1, x0:x1]
    lines = mask.crop & (slant < width)
    mixed = region[lines] * (1.0 - HATCH_OPACITY) + np.multiply(colour, HATCH_OPACITY)
    region[lines] = mixed.round().astype(np.uint8)


def _outline(canvas: Image, mask: Mask, colour: Colour, dashed: bool = False) -> None:
    x0, y0, _, _ = mask.box
    contours, _ = cv2.findContours(
        mask.crop.view(np.uint8), cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE, offset=(x0, y0)
    )
    # a dark rim shows the line on any background
    width = max(2, round(canvas.shape[0] / 400))
    cv2.drawContours(canvas, contours, -1, DARK, width + 2, cv2.LINE_AA)
    if not dashed:
        cv2.drawContours(canvas, contours, -1, colour, width, cv2.LINE_AA)
        return
    dash = DASH * width
    for contour in contours:
        parts = [contour[start : start + dash] for start in range(0, len(contour), 2 * dash)]
        cv2.polylines(canvas, parts, False, colour, width, cv2.LINE_AA)


def _tag(canvas: Image, text: str, colour: Colour, box: Box, occupied: Sequence[Box]) -> Box:
    """Write text at the first free position: above the box, in it, below it, or lower."""
    # OpenCV's fonts have no other characters
    text = text.encode("ascii", "replace").decode()
    width, height = _text_size(canvas, text)
    x0, y0, _, y1 = box
    x = min(x0, canvas.shape[1] - width)
    lowest = canvas.shape[0] - height

    # without a free position, the tag covers another one
    top = max(y0 - height, 0)
    for y in (y0 - height, y0, y1 - height, y1, *range(y1, lowest, height)):
        strip = (x, y, x + width, y + height)
        if 0 <= y <= lowest and not any(_overlap(strip, other) for other in occupied):
            top = y
            break
    return _write(canvas, (x, top), text, _readable_on(colour), colour)


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _readable_on(colour: Colour) -> Colour:
    """Return the colour of text that can be read on a colour."""
    # brightness by Rec. 601
    blue, green, red = colour
    if 0.114 * blue + 0.587 * green + 0.299 * red > _BRIGHT:
        return DARK
    return LIGHT


def _font(canvas: Image) -> tuple[float, int, int]:
    """Return scale, thickness and padding in pixels for an image of this height."""
    scale = max(0.4, canvas.shape[0] / 1080)
    return scale, max(1, round(1.6 * scale)), max(3, round(8 * scale))


def _text_size(canvas: Image, text: str) -> tuple[int, int]:
    scale, thickness, padding = _font(canvas)
    (width, height), baseline = cv2.getTextSize(text, FONT, scale, thickness)
    return width + 2 * padding, height + baseline + padding


def _write(canvas: Image, corner: tuple[int, int], text: str, colour: Colour, background: Colour) -> Box:
    """Write text on a filled strip with the given top-left corner. Return the box of the strip."""
    scale, thickness, padding = _font(canvas)
    width, height = _text_size(canvas, text)
    _, baseline = cv2.getTextSize(text, FONT, scale, thickness)
    x = max(corner[0], 0)
    y = max(corner[1], 0)
    box = (x, y, x + width, y + height)
    cv2.rectangle(canvas, (x, y), (x + width - 1, y + height - 1), background, cv2.FILLED)
    origin = (x + padding, y + height - baseline - padding // 2 + 1)
    cv2.putText(canvas, text, origin, FONT, scale, colour, thickness, cv2.LINE_AA)
    return box


def contact_sheet(images: Sequence[Image], captions: Sequence[str], columns: int) -> Image:
    """Return images (BGR uint8) on a grid, each under its caption, all resized to the size of the first.

    Raises ValueError when there is no image or column, or when the number of captions differs.
    """
    if not images or len(images) != len(captions) or columns < 1:
        raise ValueError(
            f"expected images, one caption for each, and at least one column; found {len(images)} images, "
            f"{len(captions)} captions, {columns} columns"
        )
    # dark cells fill the last row
    height, width = images[0].shape[:2]
    cells = [_cell(image, caption, (width, height)) for image, caption in zip(images, captions, strict=True)]
    columns = min(columns, len(cells))
    cells += [np.full_like(cells[0], DARK)] * (-len(cells) % columns)
    rows = [np.hstack(cells[start : start + columns]) for start in range(0, len(cells), columns)]
    return np.vstack(rows)


def _cell(image: Image, caption: str, size: tuple[int, int]) -> Image:
    picture = image
    if image.shape[1::-1] != size:
        picture = np.asarray(cv2.resize(image, size, interpolation=cv2.INTER_AREA), np.uint8)
    _, strip = _text_size(picture, caption)
    cell = cv2.copyMakeBorder(picture, strip + 4, 2, 2, 2, cv2.BORDER_CONSTANT, value=DARK)
    _write(cell, (2, 2), caption, LIGHT, DARK)
    return np.asarray(cell, dtype=np.uint8)


class VideoWriter(Closeable):
    """An mp4 file of BGR frames, uint8 [h, w, 3]. The first frame sets the size. Later frames are scaled to it.

    Without `fps`, the rate is measured from the capture times of the first FRAMES_FOR_RATE frames, which are buffered
    until then. With `keyframe_every`, a keyframe comes after so many frames, so that single frames are read fast.
    """

    def __init__(self, path: Path, fps: float | None = None, keyframe_every: int | None = None) -> None:
        self.path = path
        self.frames = 0
        self._fps = fps
        self._keyframe_every = keyframe_every
        self._buffered: list[tuple[Image, int]] = []
        self._file: _VideoFile | None = None
        self._size = (0, 0)

    def write(self, image: Image, capture_ns: int = 0) -> None:
        """Add one frame, captured at this time. Raises OutputError when the file cannot be written."""
        # without a rate, wait for frames whose times show one
        self.frames += 1
        self._buffered.append((image, capture_ns))
        if self._file is not None or self._fps is not None or len(self._buffered) == FRAMES_FOR_RATE:
            self._flush()

    def close(self) -> None:
        """Finish the file. Without a frame there is no file. Raises OutputError if the disk was full."""
        self._flush()
        if self._file is not None:
            file = self._file
            self._file = None
            file.close()
            self._check_whole()

    def _flush(self) -> None:
        """Write the buffered frames."""
        buffered = self._buffered
        self._buffered = []
        if not buffered:
            return
        # the first frames set size and rate
        if self._file is None:
            self._size = buffered[0][0].shape[1::-1]
            self._file = self._open(self._fps or _measure_rate([capture_ns for _, capture_ns in buffered]))
        for image, _ in buffered:
            if image.shape[1::-1] != self._size:
                image = np.asarray(cv2.resize(image, self._size), dtype=np.uint8)
            self._file.write(image)

    def _open(self, fps: float) -> _VideoFile:
        make_folder(self.path.parent)
        encoder = _find_h264()
        if encoder is not None:
            return _H264File(self.path, fps, self._size, encoder, self._keyframe_every)
        _log.warning(
            "%s: written as MPEG-4 Part 2, which browsers do not play: expected PyAV with an encoder of H.264, found "
            "none; pip install 'sam3-node[bags]', or convert the file with ffmpeg -i IN.mp4 -c:v libx264 OUT.mp4",
            self.path,
        )
        return _OpenCvFile(self.path, fps, self._size)

    def _check_whole(self) -> None:
        """Raise OutputError if the file lacks frames."""
        # OpenCV does not tell about failed writes
        video = cv2.VideoCapture(str(self.path), cv2.CAP_FFMPEG)
        count = int(video.get(cv2.CAP_PROP_FRAME_COUNT)) if video.isOpened() else 0
        video.release()
        if count < self.frames:
            raise OutputError(
                f"cannot write {self.path}: expected a video of {self.frames} frames, found {count}; is the disk full?"
            )


class _VideoFile(Protocol):
    """A video file that is being written, from images of one size."""

    def write(self, image: Image) -> None:
        """Add a frame."""

    def close(self) -> None:
        """Finish the file. Idempotent."""


class _OpenCvFile:
    """A video that OpenCV writes. It has no encoder of H.264, and does not tell about failed writes."""

    def __init__(self, path: Path, fps: float, size: tuple[int, int]) -> None:
        self._writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, size)
        if not self._writer.isOpened():
            raise OutputError(f"cannot write a video to {path}: expected a writable .mp4 file")

    def write(self, image: Image) -> None:
        """Add a frame."""
        self._writer.write(image)

    def close(self) -> None:
        """Finish the file. Idempotent."""
        self._writer.release()


class _H264File:
    """A video that PyAV writes with an encoder of H.264. Its index comes first, so that browsers play it at once."""

    def __init__(
        self, path: Path, fps: float, size: tuple[int, int], encoder: str, keyframe_every: int | None
    ) -> None:
        import av

        self._av = av
        self._path = path
        with self._explaining():
            self._container = av.open(str(path), "w", format="mp4", options={"movflags": "faststart"})
            rate = Fraction(fps).limit_denominator(MAX_RATE_DENOMINATOR)
            self._stream: Any = self._container.add_stream(encoder, rate=rate)
        # browsers play halved colour alone, which needs even sides
        self._padding = [side % 2 for side in size]
        self._stream.width, self._stream.height = (side + side % 2 for side in size)
        self._stream.pix_fmt = "yuv420p"
        self._stream.options = H264_OPTIONS if encoder == "libx264" else {}
        self._stream.thread_count = H264_THREADS
        if keyframe_every is not None:
            self._stream.codec_context.gop_size = keyframe_every

    def write(self, image: Image) -> None:
        """Add a frame."""
        right, below = self._padding
        if right or below:
            padded = cv2.copyMakeBorder(image, 0, below, 0, right, cv2.BORDER_REPLICATE)
            image = np.asarray(padded, dtype=np.uint8)
        with self._explaining():
            frame = self._av.VideoFrame.from_ndarray(image, format="bgr24")
            self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        """Finish the file. Idempotent."""
        with self._explaining():
            try:
                self._container.mux(self._stream.encode(None))
            finally:
                self._container.close()

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an error of ffmpeg into OutputError."""
        try:
            yield
        except (self._av.FFmpegError, OSError) as error:
            raise OutputError(
                f"cannot write a video to {self._path}: expected a writable .mp4 file: {error.strerror}"
            ) from error


@cache
def _find_h264() -> str | None:
    """Return the name of the encoder of H.264 that PyAV has, None without one or without PyAV."""
    try:
        import av
    except ImportError:
        return None
    return next((name for name in H264_ENCODERS if name in av.codecs_available), None)


def _measure_rate(times_ns: Sequence[int]) -> float:
    """Return the frames per second by the median gap between capture times, 1 to 240; 30 without a gap."""
    # a camera that was started again may count its time from the beginning
    gaps = [later - earlier for earlier, later in itertools.pairwise(times_ns) if later > earlier]
    if not gaps:
        return _FALLBACK_FPS
    return min(max(NANOSECONDS / statistics.median(gaps), _MIN_FPS), _MAX_FPS)


def write_image(path: Path, image: Image) -> None:
    """Write a PNG or JPEG file, chosen by its suffix. Raises OutputError that names the file."""
    try:
        _, data = cv2.imencode(path.suffix, image)
    except cv2.error as error:
        raise OutputError(f"cannot write {path}: {error.err}; name a .png or .jpg file") from error
    write_output(path, data.tobytes())
