"""A long run holds no more memory than one that has just filled its bank and its cache of frames."""

import gc

import pytest
import torch
from torch._subclasses import FakeTensor

from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import TrackerSettings
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.transport.limits import rss_bytes
from sam3_node.types import Frame
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.tiny import tiny_model

OBJECTS = 4
WARM_STEPS = 60  # the bank of 15 frames is full, and an object was replaced
STEPS = 100
MAX_RSS_GROWTH = 1_000_000
"""10 kB a step: less than the memory of one frame."""


def tensor_bytes() -> int:
    """Memory of all live tensors, storages counted once; those that an export left behind have none."""
    gc.collect()
    tensors = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), torch.Tensor) and not issubclass(type(found), FakeTensor)
    ]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("selection", ["recent", "confident", "distractor"])
def test_neither_tensors_nor_resident_memory_grow(selection: str) -> None:
    model = tiny_model(presence=60.0, hidden=64, size=56)
    tracker = Tracker(model, max_objects=OBJECTS, bank_size=15, selection=selection)
    size = model.image_size
    clip = torch.randn(8, 1, 3, size, size, generator=torch.Generator().manual_seed(0))

    def run(steps: int) -> None:
        for step in range(steps):
            # now and then an object leaves and another comes
            if step % 50 == 0 and tracker.ids:
                tracker.remove(tracker.ids[0])
            new = [
                ObjectPrompt(tracker.frame_number * OBJECTS + i, points=[[size * (i + 1) / 5, size / 2]])
                for i in range(OBJECTS - len(tracker.ids))
            ]
            assert len(tracker.step(clip[step % len(clip)], new).ids) == OBJECTS

    def growth() -> int:
        resident = rss_bytes()
        run(STEPS)
        return rss_bytes() - resident

    run(WARM_STEPS)
    tensors = tensor_bytes()
    # what else the process holds may move its pages once; what a step leaks, it leaks again
    assert any(growth() < MAX_RSS_GROWTH for _ in range(3))
    assert tensor_bytes() == tensors


@pytest.mark.usefixtures("one_thread")
def test_frames_that_are_kept_for_prompts_take_the_memory_of_their_limit() -> None:
    """Prompts on the oldest of them are made all the time, and catch up beside the steps."""
    limit_mb = 0.4
    settings = TrackerSettings(max_objects=3, feature_cache_s=60, feature_cache_mb=limit_mb)
    pipeline = Pipeline(tiny_model(presence=60.0, hidden=64, size=56), settings, "cam0")
    colour = torch.randint(0, 255, (48, 64, 3), dtype=torch.uint8).numpy().tobytes()
    caught_up = 0

    def run(first: int, last: int) -> None:
        nonlocal caught_up
        for seq in range(first, last):
            pipeline.step(Frame("cam0", seq, seq * 10**8, 64, 48, "bgr8", colour))
            usage = pipeline.prompting.cache_usage
            assert usage["cached_bytes"] <= limit_mb * 1e6
            if seq % 10 == 9:
                pipeline.reset()
                oldest = seq - usage["cached_frames"] + 1
                pipeline.add(FramePrompt(points=[(32, 24)]), seq=oldest)
                pipeline.add(FramePrompt(box=(8, 8, 50, 40)), seq=oldest + 2)
            caught_up += sum(pipeline.catch_ups.advance() is not None for _ in range(8))

    run(0, 60)
    assert pipeline.prompting.cache_usage["cached_frames"] > 5
    one_frame = limit_mb * 1e6 / pipeline.prompting.cache_usage["cached_frames"]
    tensors = tensor_bytes()

    def growth(first: int) -> int:
        resident = rss_bytes()
        run(first, first + 60)
        return rss_bytes() - resident

    # as above: what a frame leaks, it leaks again
    assert any(growth(first) < MAX_RSS_GROWTH for first in (60, 120, 180))
    assert caught_up > 15
    assert abs(tensor_bytes() - tensors) < 2 * one_frame
