"""Masks at frame size: equal to the definition bit for bit, on the host and on a device."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sam3_node.models import TrackerModel
from sam3_node.perception import output_masks
from sam3_node.perception.output_masks import (
    LIMIT,
    axis,
    blend,
    clamp,
    find_edges,
    pack_bits,
    rasterize,
    rasterize_on_device,
    read_boxes,
    unpack_bits,
)
from sam3_node.perception.pipeline import Pipeline
from sam3_node.resumable import run_to_end
from sam3_node.settings import TrackerSettings
from sam3_node.tracking.everything import EverythingOptions
from sam3_node.tracking.host_copy import HostCopy
from sam3_node.types import Frame, Mask, MaskFrame
from sam3_node.wire import decode_mask, encode_image, encode_mask, pack_masks
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.strict_cuda import HOST_READS
from tests.support.tables import each_row

SIZES = [(480, 640), (720, 1280), (1080, 1920), (479, 641), (97, 101), (61, 50), (64, 64), (1, 1), (36, 144)]


def smooth_logits(seed: int, size: int, blobs: int) -> np.ndarray:
    """Logits [size, size] of a few round objects, anywhere, also across the border."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    logits = np.full((size, size), -8.0, np.float32)
    for _ in range(blobs):
        centre = random.uniform(-2, size + 2, 2)
        radius = random.uniform(0.3, size / 3)
        logits = np.maximum(logits, radius - np.hypot(x - centre[0], y - centre[1]))
    return logits + random.normal(scale=0.3, size=logits.shape).astype(np.float32)


def upsampled(logits: np.ndarray, frame_size: tuple[int, int]) -> np.ndarray:
    whole = torch.from_numpy(logits)[None, None]
    return F.interpolate(whole, size=frame_size, mode="bilinear", align_corners=False)[0, 0].numpy()


@each_row("frame_size", SIZES)
@each_row("low", [72, 63])
@each_row("blobs", [1, 4])
def test_equals_the_upsampled_whole(frame_size: tuple[int, int], low: int, blobs: int) -> None:
    for seed in range(5):
        logits = smooth_logits(seed, low, blobs)
        expected = upsampled(logits, frame_size)
        mask = rasterize(logits, frame_size)
        assert mask.size == frame_size
        differs = mask.full() != (expected > 0)
        assert np.abs(expected[differs]).max(initial=0.0) < 1e-4


def test_the_box_is_tight_and_one_pixel_is_enough() -> None:
    logits = np.full((72, 72), -1.0, np.float32)
    logits[71, 0] = 5.0
    mask = rasterize(logits, (720, 720))
    assert mask.crop.any(axis=0).all()
    assert mask.crop.any(axis=1).all()
    assert mask.box[0] == 0
    assert mask.box[3] == 720


@pytest.mark.parametrize("value", [-1024.0, 0.0, float("nan")])
def test_nothing_positive_is_an_empty_mask(value: float) -> None:
    mask = rasterize(np.full((72, 72), value, np.float32), (480, 640))
    assert mask.area == 0
    assert mask.size == (480, 640)


LOW = 72
SIZE = (90, 120)


def hard_logits(side: int) -> np.ndarray:
    """Logits [N, side, side] of masks that are empty, full, ragged, of one pixel, and exactly zero between pixels."""
    random = np.random.default_rng(side)
    one = np.full((side, side), -1.0, np.float32)
    one[side - 1, 0] = 5.0
    chess = np.where(np.indices((side, side)).sum(axis=0) % 2, 1, -1).astype(np.float32)
    broken = random.normal(size=(side, side)).astype(np.float32)
    broken[random.random(broken.shape) < 0.02] = np.nan
    broken[random.random(broken.shape) < 0.02] = np.inf
    broken[random.random(broken.shape) < 0.02] = -np.inf
    noise = random.normal(size=(side, side)).astype(np.float32)
    whole = np.full((side, side), 0.5, np.float32)
    return np.stack(
        [whole, -whole, one, chess, noise, 1e-8 * noise, 1e6 * noise, broken, np.full_like(one, np.nan)]
    )


def define(logits: np.ndarray, frame_size: tuple[int, int]) -> Mask:
    """Make the mask of all pixels by the definition."""
    low = clamp(logits)
    (rows, columns) = map(axis, logits.shape, frame_size)
    lines = blend(low[rows.first], low[rows.second], rows.near[:, None], rows.far[:, None])
    values = blend(lines[:, columns.first], lines[:, columns.second], columns.near, columns.far)
    return Mask.from_full(values > 0)


def on_device(logits: Tensor, frame_size: tuple[int, int]) -> list[Mask]:
    boxes = read_boxes(find_edges(logits > 0).cpu().numpy(), logits.shape[1:])
    return rasterize_on_device(logits, boxes, frame_size).read()


def bits(mask: Mask) -> object:
    assert mask.crop.dtype == np.bool_
    return mask.size, mask.box, mask.crop.shape, mask.crop.tobytes()


def every_logits(side: int) -> np.ndarray:
    return np.concatenate([[smooth_logits(seed, side, 1 + seed % 4) for seed in range(6)], hard_logits(side)])


@each_row("frame_size", SIZES)
@each_row("side", [LOW, 63])
def test_masks_of_host_and_device_are_those_of_the_definition(frame_size: tuple[int, int], side: int) -> None:
    logits = every_logits(side)
    if frame_size[0] > 500:  # a few masks suffice there, and take a second
        logits = logits[[0, 2, 9, 13]]
    found = on_device(torch.from_numpy(logits), frame_size)
    for low, mask in zip(logits, found, strict=True):
        assert bits(mask) == bits(rasterize(low, frame_size)) == bits(define(low, frame_size))


def test_half_precision_logits_give_the_masks_of_their_float32_values() -> None:
    logits = torch.from_numpy(every_logits(LOW)).bfloat16()
    found = on_device(logits, (97, 101))
    assert [bits(m) for m in found] == [bits(rasterize(low.float().numpy(), (97, 101))) for low in logits]


def test_large_masks_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.from_numpy(every_logits(LOW))
    whole = [bits(mask) for mask in on_device(logits, (97, 101))]
    monkeypatch.setattr(output_masks, "MAX_BYTES", 200)
    assert [bits(mask) for mask in on_device(logits, (97, 101))] == whole


@pytest.mark.parametrize("encoding", ["bits+zstd", "rle"])
def test_they_are_the_same_on_the_wire(encoding: Any) -> None:
    logits = every_logits(LOW)
    for low, mask in zip(logits, on_device(torch.from_numpy(logits), (97, 101)), strict=True):
        sent = encode_mask(mask, encoding)
        assert sent == encode_mask(rasterize(low, (97, 101)), encoding)
        assert bits(decode_mask(sent)) == bits(mask)


def test_no_objects_are_no_masks() -> None:
    assert on_device(torch.zeros(0, LOW, LOW), SIZE) == []


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_bits_are_packed_as_numpy_does(count: int) -> None:
    inside = torch.from_numpy(np.random.default_rng(count).random((3, 5, count)) > 0.5)
    packed = pack_bits(inside).numpy()
    assert np.array_equal(packed, np.packbits(inside.numpy(), axis=-1))
    assert np.array_equal(unpack_bits(packed, count), inside.numpy())


def test_clamps_agree() -> None:
    values = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, LIMIT, 0.5, -0.0], np.float32)
    assert output_masks.clamp_tensor(torch.from_numpy(values)).tolist() == clamp(values).tolist()


class NoHostReads(TorchDispatchMode):
    """Refuses operations that make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in HOST_READS, f"{func}: the host waits for the device"
        return func(*args, **(kwargs or {}))


class Copies:
    """Counts of the copies to the host and their bytes; other reads are refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []

        def copy(values: Tensor) -> HostCopy:
            self.sizes.append(values.numel() * values.element_size())
            return HostCopy(values)

        monkeypatch.setattr(output_masks, "HostCopy", copy)
        monkeypatch.setattr(output_masks, "rasterizes", lambda device: True)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def frames() -> Iterator[Frame]:
    for seq in range(5):
        coarse = np.random.default_rng(seq).integers(0, 255, (6, 8, 3), np.uint8)
        image = np.kron(coarse, np.ones((15, 15, 1), np.uint8))
        yield Frame("cam0", seq, 1000 + seq, SIZE[1], SIZE[0], "bgr8", encode_image(image, "bgr8"))


def shown(mask_frame: MaskFrame) -> object:
    return pack_masks(replace(mask_frame, stages_us={}))


def play(model: TrackerModel) -> list[object]:
    """Run a pipeline with prompts of all kinds; return everything that it answers."""
    pipeline = Pipeline(model, TrackerSettings(max_objects=4), "cam0")
    found: list[object] = []
    for frame in frames():
        found.append(shown(pipeline.step(frame)))
        if frame.seq == 0:
            pipeline.add(FramePrompt(box=[20, 20, 80, 70]))
        if frame.seq == 1:
            pipeline.add(FramePrompt(points=[(60.0, 45.0)]), seq=1)
            pipeline.add(FramePrompt(points=[(30.0, 45.0)]), seq=0)
            while pipeline.catch_ups.behind:
                pipeline.catch_ups.advance()
        if frame.seq == 2:
            answers = [pipeline.refine(1, FramePrompt(points=[(10.0, 10.0)], labels=[0]))]
            answers.append(pipeline.prompting.segment(FramePrompt(box=[5, 5, 60, 60])))
            answers += run_to_end(pipeline.prompting.find_everything(EverythingOptions(grid=3), None))[1]
            found += [(answer.score, bits(answer.mask)) for answer in answers]
    return found


def test_a_pipeline_whose_device_makes_the_masks_gives_the_same(
    model: TrackerModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = play(model)
    monkeypatch.setattr(output_masks, "rasterizes", lambda device: True)
    assert play(model) == expected


def test_a_step_makes_three_copies_and_nothing_else_waits(
    model: TrackerModel, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Pipeline(model, TrackerSettings(max_objects=4), "cam0")
    first, second, *_ = frames()
    pipeline.step(first)
    for x in (30.0, 60.0, 90.0):
        pipeline.add(FramePrompt(points=[(x, 45.0)]), seq=0)
    copies.sizes.clear()
    refuse = pytest.fail
    with monkeypatch.context() as patch:
        for name in ("cpu", "item", "tolist"):
            patch.setattr(Tensor, name, lambda *_: refuse("the host waits for the device"))
        with NoHostReads():
            masks = pipeline.step(second)
    side = model.mask_size[0]
    row = 4 * (1 + 1 + model.hidden) + 1
    bits_of_levels = 3 * side * side // 8
    table, regions, *looks = copies.sizes
    assert looks == []
    assert table == 3 * (bits_of_levels + 4 * 2 + row)
    assert regions <= 3 * SIZE[0] * SIZE[1] // 8
    assert any(instance.mask.area for instance in masks.instances)


@pytest.mark.gpu
def test_a_gpu_makes_the_same_masks() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for side in (63, LOW):
        logits = every_logits(side)
        for size in SIZES:
            found = on_device(torch.from_numpy(logits).cuda(), size)
            assert [bits(mask) for mask in found] == [bits(rasterize(low, size)) for low in logits]
