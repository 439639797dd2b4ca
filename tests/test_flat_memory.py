"""A tracker that has run for long holds no more memory than one that has just filled its bank."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses import FakeTensor

from sam3_node.models.sam.tracker_model import TrackerModel
from sam3_node.node.stats import rss_bytes
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.tiny import random_source

OBJECTS = 4
WARM_STEPS, STEPS = 200, 400
MAX_RSS_GROWTH = 4_000_000


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
@pytest.mark.parametrize("selection", ["recent", "confident"])
def test_neither_tensors_nor_resident_memory_grow(selection: str) -> None:
    source = random_source("sam3", presence=60.0, hidden=64, size=56)
    model = TrackerModel(source, name="tiny", mean=[0.5] * 3, std=[0.5] * 3, has_memory=True)
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

    run(WARM_STEPS)
    tensors, resident = tensor_bytes(), rss_bytes()
    run(STEPS)
    assert tensor_bytes() == tensors
    assert rss_bytes() - resident < MAX_RSS_GROWTH
