"""Masks that are decoded when they are used: equal to those that are decoded at once, and no less checked."""

from __future__ import annotations

import pickle
from typing import Any

import msgpack
import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.types import Mask
from sam3_node.wire import unpack_masks
from sam3_node.wire.masks import EncodedMask
from tests.support.refuses import refuses
from tests.support.wire_examples import golden

NAMES = ("masks-bits", "masks-rle")


def changed(name: str, index: int = 0, mask: dict[str, Any] | None = None, **fields: Any) -> list[bytes]:
    """Return a golden message with one instance changed."""
    topic, body = golden(name)
    values = msgpack.unpackb(body)
    instance = values["instances"][index]
    instance["mask"] |= mask or {}
    instance |= fields
    return [topic, msgpack.packb(values)]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_equal_to_those_that_are_decoded_at_once(name: str) -> None:
    eager, lazy = unpack_masks(golden(name)), unpack_masks(golden(name), lazy=True)
    assert len(eager.instances) == len(lazy.instances) > 1
    for one, other in zip(eager.instances, lazy.instances, strict=True):
        assert isinstance(other.mask, EncodedMask)
        assert (one.mask.size, one.box, one.area) == (other.mask.size, other.box, other.area)
        copied = pickle.loads(pickle.dumps(other.mask))
        assert type(copied) is Mask
        for mask in (other.mask, copied):
            assert np.array_equal(one.mask.crop, mask.crop)
            assert np.array_equal(one.mask.full(), mask.full())
        with refuses(AttributeError, field="absent"):
            _ = other.mask.absent


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("masks-bits", {"area": 10**6}),
        ("masks-bits", {"area": -1}),
        ("masks-bits", {"box": [0, 0, 1, 1]}),
        ("masks-bits", {"mask": {"size": [3, 3]}}),
        ("masks-bits", {"mask": {"encoding": "png"}}),
        ("masks-bits", {"mask": {"data": b"no zstd frame"}}),
        ("masks-bits", {"mask": {"data": b""}}),
        ("masks-rle", {"mask": {"data": b"0" * (8 << 20)}}),
    ],
)
def test_headers_are_checked_at_once(name: str, change: dict[str, Any]) -> None:
    with refuses(WireError, field=("masks", "0")):
        unpack_masks(changed(name, **change), lazy=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("masks-bits", {"area": 1}),
        ("masks-rle", {"area": 1}),
        ("masks-rle", {"mask": {"data": b"~~~"}}),
    ],
)
def test_damaged_pixels_are_an_error_when_they_are_used(name: str, change: dict[str, Any]) -> None:
    mask = unpack_masks(changed(name, **change), lazy=True).instances[0].mask
    for _ in range(2):
        with refuses(WireError, field=("masks", "0")):
            mask.full()
