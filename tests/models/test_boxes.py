"""Letterboxes there and back, and suppression against a plain greedy reference."""

import cv2
import numpy as np
import pytest
import torch

from sam3_node.models.pixels import GREY, box_iou, letterbox, mask_boxes, select, suppress
from tests.support.tables import each_row


def overlap(a: list[float], b: list[float]) -> float:
    width = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    height = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    common = width * height
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union else 0.0


def greedy(boxes: torch.Tensor, scores: torch.Tensor, thresholds: list[float], iou: float) -> list[int]:
    """Indices of the boxes that stay, the best first."""
    best: list[tuple[float, int, int]] = []
    for index, row in enumerate(scores.tolist()):
        passing = [(score, k) for k, score in enumerate(row) if score > thresholds[k]]
        if passing:
            score, k = max(passing)
            best.append((-score, index, k))
    kept: list[tuple[int, int]] = []
    for _, index, k in sorted(best):
        if all(k != c or overlap(boxes[index].tolist(), boxes[i].tolist()) <= iou for i, c in kept):
            kept.append((index, k))
    return [index for index, _ in kept]


def random_boxes(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * 100
    sides = torch.rand(count, 2, generator=generator) * 60
    return torch.cat([corners, corners + sides], dim=1), torch.rand(count, 3, generator=generator)


@each_row("seed", range(5))
@each_row("iou", [0.3, 0.7])
def test_selection_equals_greedy_suppression(seed: int, iou: float) -> None:
    boxes, scores = random_boxes(150, seed)
    thresholds = [0.2, 0.6, 0.9]
    wanted = greedy(boxes, scores, thresholds, iou)
    found = select(boxes, scores, torch.tensor(thresholds), iou=iou, limit=1000)
    assert found.boxes.tolist() == boxes[wanted].tolist()
    assert found.scores.tolist() == scores[wanted, found.classes].tolist()
    first = select(boxes, scores, torch.tensor(thresholds), iou=iou, limit=4).boxes
    assert first.tolist() == boxes[wanted[:4]].tolist()


def test_a_chain_of_overlaps_is_resolved_from_the_best_down() -> None:
    """Each box overlaps its neighbours alone: every other one stays, however long the chain."""
    left = torch.arange(40.0) * 4
    boxes = torch.stack([left, torch.zeros(40), left + 10, torch.ones(40)], dim=1)
    scores = torch.linspace(0.9, 0.5, 40)[:, None]
    assert select(boxes, scores, 0.1, iou=0.3).boxes[:, 0].tolist() == left[::2].tolist()


def test_classes_do_not_suppress_each_other() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10]] * 3)
    scores = torch.tensor([[0.9, 0.1], [0.1, 0.8], [0.1, 0.7]])
    found = select(boxes, scores, 0.5)
    assert found.classes.tolist() == [0, 1]
    assert found.scores.tolist() == pytest.approx([0.9, 0.8])


def test_a_box_takes_its_best_class_of_those_that_pass() -> None:
    found = select(torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([[0.7, 0.6]]), torch.tensor([0.8, 0.5]))
    assert found.classes.tolist() == [1]


def test_nothing_passes() -> None:
    boxes, scores = random_boxes(10, 0)
    found = select(boxes, scores, 2.0)
    assert (found.boxes.shape, found.scores.shape, found.classes.shape) == ((0, 4), (0,), (0,))
    assert len(select(boxes, scores.fill_(float("nan")), 0.1).scores) == 0


def test_empty_boxes_overlap_nothing() -> None:
    boxes = torch.tensor([[0.0, 0, 0, 0], [0, 0, 2, 2], [1, 0, 3, 2]])
    assert box_iou(boxes, boxes)[0].tolist() == [0, 0, 0]
    assert box_iou(boxes, boxes)[1].tolist() == pytest.approx([0, 1, 1 / 3])


@pytest.mark.parametrize(
    ("frame", "size"),
    [((48, 64), 64), ((64, 48), 64), ((100, 200), 64), ((20, 30), 96), ((720, 1280), (192, 320))],
)
def test_a_box_finds_its_way_back(frame: tuple[int, int], size: int | tuple[int, int]) -> None:
    height, width = frame
    image = np.zeros((height, width, 3), dtype=np.uint8)
    x0 = width // 4
    y0 = height // 5
    x1 = width // 2
    y1 = height // 5 * 4
    image[y0:y1, x0:x1] = (255, 255, 255)
    pixels, way = letterbox(image, size)
    assert pixels.shape[2:] == ((size, size) if isinstance(size, int) else size)
    left, top = way.offset
    inner = pixels[0, 0, top : pixels.shape[2] - top, left : pixels.shape[3] - left]
    rows, columns = (inner > 0.5).nonzero().unbind(1)
    low = (columns.min() + left, rows.min() + top)
    high = (columns.max() + left + 1, rows.max() + top + 1)
    back = way.to_frame(torch.tensor([*low, *high]).float())
    pixel = 1 / min(way.ratio)
    assert (back - torch.tensor([x0, y0, x1, y1])).abs().max() <= max(1.0, pixel)


def test_a_letterbox_is_grey_around_and_keeps_colours() -> None:
    image = np.zeros((32, 64, 3), dtype=np.uint8)
    image[..., 2] = 255
    image.flags.writeable = False
    pixels, _ = letterbox(image, 64)
    assert pixels[0, :, 0, 0].tolist() == pytest.approx([GREY] * 3)
    assert pixels[0, :, 63, 63].tolist() == pytest.approx([GREY] * 3)
    assert pixels[0, :, 32, 32].tolist() == [1, 0, 0]
    assert letterbox(image, 64, rgb=True)[0][0, :, 32, 32].tolist() == [0, 0, 1]


@pytest.mark.parametrize(("frame", "fitted"), [((720, 1280), (384, 640)), ((90, 70), (640, 512))])
def test_the_public_letterbox_is_bilinear_and_as_small_as_its_stride_allows(
    frame: tuple[int, int], fitted: tuple[int, int]
) -> None:
    image = np.random.default_rng(0).integers(0, 256, (*frame, 3), np.uint8)
    pixels, way = letterbox(image, 640, resize="bilinear", stride=32)
    assert pixels.shape[2:] == fitted
    scale = min(640 / frame[0], 640 / frame[1])
    assert way.ratio == (scale, scale)
    size = round(frame[1] * scale), round(frame[0] * scale)
    expected = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)[..., ::-1]
    (left, top) = way.offset
    (columns, rows) = size
    found = pixels[0, :, top : top + rows, left : left + columns].permute(1, 2, 0) * 255
    assert np.array_equal(found.round().numpy().astype(np.uint8), expected)
    assert pixels[0, :, -1, -1].tolist() == pytest.approx([GREY] * 3)


def test_boxes_are_clipped_to_the_frame() -> None:
    _, way = letterbox(np.zeros((32, 64, 3), dtype=np.uint8), 128)
    assert way.to_frame(torch.tensor([[-50.0, -50, 500, 500]])).tolist() == [[0, 0, 64, 32]]


def test_boxes_of_masks_are_those_of_their_cells() -> None:
    masks = torch.zeros(3, 6, 8, dtype=torch.bool)
    masks[0, 2:4, 1:7] = True
    masks[1, 5, 7] = True
    assert mask_boxes(masks).tolist() == [[1, 2, 7, 4], [7, 5, 8, 6], [0, 0, 8, 6]]


def test_boxes_that_a_better_one_overlaps_are_suppressed() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 30, 30], [0, 0, 10, 4]])
    assert suppress(boxes, torch.tensor([0.5, 0.9, 0.6, 0.1]), 0.7).tolist() == [1, 2, 3]
    assert suppress(boxes[:0], torch.zeros(0), 0.7).tolist() == []
