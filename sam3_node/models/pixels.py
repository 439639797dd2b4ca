"""Convert frames to the input of networks, and a network's boxes (x0 y0 x1 y1) to detections in the frame."""

import math
import warnings
from collections.abc import Sequence
from typing import Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from ..types import Detection

Resize = Literal["bilinear", "antialias", "unrounded"]

GREY = 114 / 255  # padding colour that the public weights were trained with


def resize_frame(
    image: npt.NDArray[np.uint8],
    size: tuple[int, int],
    device: str | torch.device,
    *,
    rgb: bool = False,
    resize: Resize = "antialias",
) -> Tensor:
    """Resize a BGR (or RGB) uint8 frame [h, w, 3] to RGB pixels [1, 3, H, W], float32 in 0..1, on the device.

    size: (H, W). resize: "bilinear" takes the four nearest pixels of each point, as OpenCV's INTER_LINEAR does;
    "unrounded" takes them without rounding to whole values of a pixel.
    """
    is_resized = resize == "bilinear" and torch.device(device).type == "cpu"
    if is_resized:
        image = np.asarray(cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR), np.uint8)
    # uploaded as uint8, which has a quarter of the bytes of float32
    pixels = _upload(_as_tensor(image), torch.device(device)).permute(2, 0, 1)[None]
    if pixels.device.type != "cpu" or resize == "unrounded":
        pixels = pixels.float()
    if not is_resized:  # also where the size is right, so that the tensor's layout is always the same
        pixels = F.interpolate(
            pixels, size, mode="bilinear", align_corners=False, antialias=resize == "antialias"
        )
    return (pixels if rgb else pixels.flip(1)).float() / 255


def normalise_frame(
    image: npt.NDArray[np.uint8], size: tuple[int, int], mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """Resize a BGR frame as `resize_frame` does, subtract `mean`, and divide by `std`, both [1, 3, 1, 1]."""
    return ((resize_frame(image, size, mean.device) - mean) / std).to(dtype)


class Letterbox(NamedTuple):
    """The position of a frame in the network's input."""

    width: int
    """of the frame, pixels"""
    height: int
    """of the frame, pixels"""
    ratio: tuple[float, float]
    """(x, y) scale from the frame to the input"""
    offset: tuple[int, int]
    """(x, y) pixels by which the scaled frame is moved"""

    def to_frame(self, boxes: Tensor) -> Tensor:
        """Convert boxes [..., 4] from pixels of the network's input to pixels of the frame, clipped to the frame."""
        ratio = boxes.new_tensor(self.ratio * 2)
        offset = boxes.new_tensor(self.offset * 2)
        edge = boxes.new_tensor((self.width, self.height) * 2)
        return torch.minimum(((boxes - offset) / ratio).clamp(min=0), edge)


def letterbox(
    image: npt.NDArray[np.uint8],
    size: int | tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    rgb: bool = False,
    resize: Resize = "antialias",
    stride: int | None = None,
    centred: bool = True,
) -> tuple[Tensor, Letterbox]:
    """Fit a BGR (or RGB) uint8 frame [h, w, 3] into (H, W), or a square, with its proportions and grey padding.

    Return RGB pixels [1, 3, H, W], float32 in 0..1 on the device, and the frame's position in them. With `stride`, H
    and W are as small as multiples of it can be, as in the public implementation of YOLO-World. Unless `centred`, all
    padding is at the right and below, as for YOLOX.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    scale = min(high / height, wide / width)
    # a long, thin frame keeps at least one pixel
    rows = max(1, round(height * scale))
    columns = max(1, round(width * scale))
    ratio = (columns / width, rows / height)
    if stride is not None:
        high = -(-rows // stride) * stride
        wide = -(-columns // stride) * stride
        ratio = (scale, scale)  # the public implementation leaves the rounding out of the boxes
    top = (high - rows) // 2 if centred else 0
    left = (wide - columns) // 2 if centred else 0
    pixels = resize_frame(image, (rows, columns), device, rgb=rgb, resize=resize)
    pixels = F.pad(pixels, (left, wide - columns - left, top, high - rows - top), value=GREY)
    return pixels, Letterbox(width, height, ratio, (left, top))


def input_size(size: tuple[int, ...], shortest: int, longest: int) -> tuple[int, int]:
    """Return the (height, width) of the network's input: the largest within both limits, with the frame's proportions.

    A frame whose sides have a ratio above 4 * longest / shortest is stretched, because the network finds no box if it
    has fewer positions than queries.
    """
    scale = min(shortest / min(size), longest / max(size))
    height, width = (max(shortest // 4, round(side * scale)) for side in size)
    return height, width


def unit_letterbox(image: npt.NDArray[np.uint8]) -> Letterbox:
    """Return the position of a frame for a network whose boxes are fractions of its width and height."""
    height, width = image.shape[:2]
    return Letterbox(width, height, (1 / width, 1 / height), (0, 0))


def _upload(image: Tensor, device: torch.device) -> Tensor:
    """Copy an image to the device through pinned memory, so that the host does not wait for the device."""
    return image if device.type == "cpu" else image.pin_memory().to(device, non_blocking=True)


def _as_tensor(image: npt.NDArray[np.uint8]) -> Tensor:
    """Share the array's memory. Torch would warn that it is read-only, but nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.ascontiguousarray(image))


MAX_CANDIDATES = 1000  # best boxes that enter the suppression


class SelectedBoxes(NamedTuple):
    """The selected n boxes, the best first."""

    boxes: Tensor
    """[n, 4]"""
    scores: Tensor
    """[n]"""
    classes: Tensor
    """class indices [n]"""
    anchors: Tensor
    """their indices among all boxes [n]"""


def select(
    boxes: Tensor, scores: Tensor, thresholds: Tensor | float, *, iou: float = 0.7, limit: int = 100
) -> SelectedBoxes:
    """Suppress all but the best of overlapping boxes [A, 4] with scores [A, K] of one image, on their device.

    The class of a box is the one with its highest score, among those whose threshold it exceeds. `thresholds` is [K],
    or one number for all classes. A box is suppressed if a better box of its class that is kept overlaps it by more
    than `iou`. At most `limit` boxes are kept.
    """
    best, classes = torch.where(scores > thresholds, scores, 0).max(dim=1)
    # a best score of 0 means that no class exceeds its threshold
    index = best.nonzero()[:, 0]
    index = index[best[index].argsort(descending=True, stable=True)[:MAX_CANDIDATES]]
    index = index[_survivors(boxes[index], classes[index], iou)][:limit]
    return SelectedBoxes(boxes[index], best[index], classes[index], index)


def suppress(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Return the indices of boxes [n, 4] that no better box overlaps by more than `iou`, the best first."""
    order = scores.argsort(descending=True, stable=True)
    # one class for all, so that every box competes with every other
    return order[_survivors(boxes[order], torch.zeros_like(order), iou)]


def _survivors(boxes: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Return bool [n]: True for boxes, the best first, that greedy suppression keeps (arXiv 2005.03572).

    In each round, the boxes that are kept suppress the boxes after them. The fixed point is the greedy result. All
    boxes are processed at once, so a GPU needs only a few rounds.
    """
    rivals = (box_iou(boxes, boxes) > iou) & (classes[:, None] == classes)
    # the best come first, so only earlier boxes suppress later ones
    rivals = rivals.triu(diagonal=1)
    kept = torch.ones_like(classes, dtype=torch.bool)
    while True:
        next_kept = ~(rivals & kept[:, None]).any(dim=0)
        if torch.equal(next_kept, kept):
            return kept
        kept = next_kept


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU [..., n, m] of boxes [..., n, 4] and [..., m, 4]; 0 where both are empty."""
    first = first[..., None, :]
    second = second[..., None, :, :]
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    common = (high - low).clamp(min=0).prod(dim=-1)
    union = _area(first) + _area(second) - common
    # two empty boxes must not divide by 0
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def mask_boxes(masks: Tensor) -> Tensor:
    """Return the boxes, float32 [N, 4], around masks bool [N, h, w], in their cells; of an empty mask, all of it."""
    edges = []
    for line in (masks.any(dim=1), masks.any(dim=2)):  # columns, then rows
        line = line | ~line.any(dim=1, keepdim=True)
        marks = line.to(torch.uint8)
        # argmax finds the first mark, and in the flipped line the last
        edges.append((marks.argmax(dim=1), line.shape[1] - marks.flip(1).argmax(dim=1)))
    (x0, x1), (y0, y1) = edges
    return torch.stack([x0, y0, x1, y1], dim=1).float()


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def to_corners(boxes: Tensor) -> Tensor:
    """Convert boxes [..., 4] from centre x, centre y, width and height to x0 y0 x1 y1."""
    centre = boxes[..., :2]
    half = boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_detections(
    selection: SelectedBoxes, frame: Letterbox, phrases: Sequence[str], margins: Tensor | None = None
) -> list[Detection]:
    """Convert the selected boxes to detections in pixels of the frame, without empty boxes, in one copy to the host.

    margins: [n, 2], see `Detection`; NaN where there are none.
    """
    columns = [frame.to_frame(selection.boxes), selection.scores[:, None], selection.classes[:, None]]
    if margins is not None:
        columns.append(margins)
    rows = torch.cat(columns, dim=1).tolist()
    return [
        Detection(phrases[int(index)], score, (x0, y0, x1, y1), _finite(margin))
        for x0, y0, x1, y1, score, index, *margin in rows
        # a box outside the frame is empty once it is clipped
        if x0 < x1 and y0 < y1
    ]


def _finite(margins: Sequence[float]) -> tuple[float | None, float | None]:
    # a tensor cannot hold None, so NaN stands for it
    look, thing = (None if math.isnan(value) else value for value in margins or (math.nan, math.nan))
    return look, thing
