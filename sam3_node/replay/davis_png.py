"""Reads and writes masks as palette PNGs in the layout of DAVIS: <camera>/<seq>.png, with object indices as pixels.

Pixels are 0 for the background. <camera>/objects.json lists the objects as {index, id, label, first_seq, doubtful}.
`doubtful`, if it is there, has the first and last seq of each run of frames on which the object was doubtful.
"""

import json
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, NotRequired, TypedDict, TypeVar

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import ReplayError, WireError
from ..files import child_path, read_regular, write_new
from ..palette_png import PALETTE_TYPE, encode_labels, palette_index
from ..recording.lerobot.masks import add_to_runs
from ..types import Buffer, Mask, MaskFrame
from ..wire.images import MAX_FRAME_PIXELS, check_png_pixels, read_png_header

Labels = npt.NDArray[np.uint8]
AnyLabels = npt.NDArray[np.unsignedinteger[Any]]
"""Labels of 8 or 16 bits."""
MaskSource = Callable[[], Iterator[MaskFrame]]
"""Each call yields all masks from the beginning, each camera's in the order of its frames."""
K = TypeVar("K", bound=Hashable)

MAX_IMAGE_FILE = 64 << 20
"""Bytes of an image file that a job names: a mask, or the photo of an exemplar. A larger one is refused."""
VOID = 255
"""Palette index of pixels that belong to nothing known, as in DAVIS and Pascal VOC."""
MAX_LABELS = 256
"""Number of labels that a 16-bit image may have, as `segment-everything` writes at most. Depth has more."""
TABLE = "objects.json"
"""Name of the file that lists a camera's objects."""

# offset in a PNG file of the byte with the colour type
_TYPE_OFFSET = 25


class _ObjectRow(TypedDict):
    """An object of a camera in TABLE."""

    index: int
    id: int
    label: str
    first_seq: int
    doubtful: NotRequired[list[list[int]]]


def decode_labels(data: Buffer) -> AnyLabels:
    """Decode a palette PNG to its indices, or an 8-bit or 16-bit grey PNG to its values, as [h, w].

    In a grey PNG with no values but 0 and the largest one, that becomes 1. In a PNG with a transparent part, as image
    editors save a cut-out, the opaque part is 1. Raises WireError for anything else.
    """
    pixels: Any = _decode_png(data)
    if pixels is None or pixels.dtype not in (np.uint8, np.uint16):
        raise WireError(f"expected a palette, 8-bit or 16-bit grey PNG, found {_describe(pixels)}")
    # grey: a mask of one object has the values 0 and the largest one, other images have the indices themselves
    if pixels.ndim == 2:
        largest = np.iinfo(pixels.dtype).max
        if np.isin(pixels, (0, largest)).all():
            whole: AnyLabels = np.equal(pixels, largest).astype(np.uint8)
            return whole
        found = len(np.unique(pixels))
        if pixels.dtype == np.uint16 and found > MAX_LABELS + 1:
            raise WireError(
                f"expected at most {MAX_LABELS} labels in a 16-bit PNG, found {found} values: is it a depth image?"
            )
        labels: AnyLabels = pixels
        return labels

    # a palette's indices count, whatever their colours
    opaque = None if is_palette(data) else find_opaque(pixels)
    if opaque is not None:
        return opaque.astype(np.uint8)
    # OpenCV has turned the palette's indices into colours: look these up
    table = _pack_rgb(_read_palette(bytes(data)))
    order = np.argsort(table, kind="stable")
    position = np.searchsorted(table[order], _pack_rgb(pixels[..., 2::-1]))
    return order[np.minimum(position, len(order) - 1)].astype(np.uint8)


def is_palette(data: Buffer) -> bool:
    """Return True if a PNG has a palette."""
    return len(data) > _TYPE_OFFSET and data[_TYPE_OFFSET] == PALETTE_TYPE


def find_opaque(pixels: npt.NDArray[Any]) -> npt.NDArray[np.bool_] | None:
    """Return the opaque part [h, w] of an image [h, w, 4]; None for an image without a transparent part."""
    if pixels.ndim != 3 or pixels.shape[2] != 4:
        return None
    # an editor makes the edge of a cut-out half transparent
    alpha = pixels[..., 3]
    opaque: npt.NDArray[np.bool_] = alpha > np.iinfo(alpha.dtype).max // 2
    if opaque.all():
        return None
    return opaque


def find_objects(labels: AnyLabels) -> list[int]:
    """Return the values of the objects in a label image. VOID is none, unless it is the only value."""
    values: list[int] = np.unique(labels[labels > 0]).tolist()
    if labels.dtype == np.uint8 and len(values) > 1:
        values = [value for value in values if value != VOID]
    return values


def read_mask(path: Path, value: int | None = None) -> Mask:
    """Read the pixels of a label image that equal `value`; without a value, all nonzero pixels.

    In a palette PNG without a value, VOID is no object. Raises ReplayError if there are no pixels.
    """
    data, labels = _read_labels(path)
    if value is None:
        pixels = np.isin(labels, find_objects(labels)) if is_palette(data) else labels != 0
        wanted = "an object"
    else:
        pixels = labels == value
        wanted = str(value)
    mask = Mask.from_full(pixels)
    if not mask.area:
        raise ReplayError(f"mask {path}: expected a pixel of {wanted}, found none")
    return mask


def read_labels(path: Path) -> AnyLabels:
    """Decode a file with `decode_labels`. Raises ReplayError with the file's name."""
    return _read_labels(path)[1]


def _read_labels(path: Path) -> tuple[bytes, AnyLabels]:
    """Return the content of a file, and its labels."""
    try:
        data = bytes(read_regular(path, MAX_IMAGE_FILE))
        return data, decode_labels(data)
    except OSError as error:
        raise ReplayError(f"mask {path}: expected a PNG, found none to read ({error.strerror})") from error
    except WireError as error:
        raise ReplayError(f"mask {path}: {error}") from error


class NumberTable(Generic[K]):
    """Assigns numbers from 1 to keys, in the order in which they are first looked up."""

    def __init__(self) -> None:
        self._numbers: dict[K, int] = {}

    def __getitem__(self, key: K) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def __iter__(self) -> Iterator[tuple[K, int]]:
        return iter(self._numbers.items())


class FrameNames:
    """Names the frames of each camera by their seq. After a restart, numbers that come again get -1, -2 and so on."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, int]] = {}

    def next(self, camera: str, seq: int) -> str:
        """Return the name of a camera's next frame."""
        last_seq, restarts = self._last.get(camera, (-1, 0))
        if seq <= last_seq:
            restarts += 1
        self._last[camera] = seq, restarts
        restart = f"-{restarts}" if restarts else ""
        return f"{seq:05d}{restart}"


def write_palette_pngs(
    folder: Path, masks: Iterable[MaskFrame], progress: Callable[[int], None], with_doubtful: bool = False
) -> None:
    """Write the PNGs and object tables of all cameras into `folder`.

    Doubtful objects are drawn only `with_doubtful`, because a pixel cannot say that it is doubtful. PNGs have the names
    of `FrameNames`.
    """
    names = FrameNames()
    tables: dict[str, dict[int, _ObjectRow]] = {}
    for count, frame in enumerate(masks, start=1):
        camera_folder = child_path(folder, frame.camera)
        camera_folder.mkdir(parents=True, exist_ok=True)
        # the object's row keeps its first frame, and the label that it had there
        table = tables.setdefault(frame.camera, {})
        for instance in frame.instances:
            row: _ObjectRow = {
                "index": palette_index(instance.id),
                "id": instance.id,
                "label": instance.label,
                "first_seq": frame.seq,
            }
            known = table.setdefault(instance.id, row)
            if instance.doubtful:
                add_to_runs(known.setdefault("doubtful", []), frame.seq)
        if not with_doubtful:
            frame = frame.without_doubtful()
        name = names.next(frame.camera, frame.seq)
        write_new(camera_folder / f"{name}.png", encode_labels(frame.paint_indices()))
        progress(count)
    for camera, table in tables.items():
        write_new(child_path(folder, camera) / TABLE, json.dumps(list(table.values()), indent=1) + "\n")


def _decode_png(data: Buffer) -> npt.NDArray[Any] | None:
    try:
        header = read_png_header(data)
    except WireError:
        return None
    # before anything is expanded to what the header declares
    if header.width * header.height > MAX_FRAME_PIXELS:
        raise WireError(f"expected at most {MAX_FRAME_PIXELS} pixels, found {header.width} x {header.height}")
    try:
        check_png_pixels(data)
    except WireError:
        return None
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error:
        return None


def _describe(pixels: npt.NDArray[Any] | None) -> str:
    if pixels is None:
        return "no PNG, or a broken one"
    return f"one of {pixels.dtype} values"


def _read_palette(data: bytes) -> Labels:
    # OpenCV gives no palette: take it from its chunk, which stands before the pixels
    start = data.find(b"PLTE")
    if start < 0 or data[_TYPE_OFFSET] != PALETTE_TYPE:
        raise WireError(
            "expected a palette, 8-bit or 16-bit grey PNG, or one with a transparent part, found one of full colour"
        )
    (length,) = struct.unpack(">I", data[start - 4 : start])
    return np.frombuffer(data[start + 4 : start + 4 + length], np.uint8).reshape(-1, 3)


def _pack_rgb(rgb: Labels) -> npt.NDArray[np.int32]:
    return rgb.astype(np.int32) @ np.array([65536, 256, 1], np.int32)
