"""Mask encodings: round trips, equality with pycocotools, and masks that are decoded when they are used."""

import pickle
from typing import Any

import msgpack
import numpy as np
import pycocotools.mask as coco
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sam3_node.errors import WireError
from sam3_node.types import Mask
from sam3_node.wire import Fields, decode_mask, encode_mask, unpack_masks
from sam3_node.wire.masks import EncodedMask, read_mask
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.wire_examples import golden

ENCODINGS = ("bits+zstd", "rle")
images = npst.arrays(np.bool_, npst.array_shapes(min_dims=2, max_dims=2, max_side=24))


def coco_counts(full):
    return coco.encode(np.asfortranarray(full.astype(np.uint8)))["counts"]


def pixels(size, *points):
    full = np.zeros(size, dtype=bool)
    for row, column in points:
        full[row, column] = True
    return full


def random_image(seed, size=(97, 131)):
    rng = np.random.default_rng(seed)
    return rng.random(size) < rng.choice([0.001, 0.1, 0.5, 0.9, 0.999])


EDGES = {
    "empty": np.zeros((5, 7), dtype=bool),
    "full": np.ones((5, 7), dtype=bool),
    "one pixel image": np.ones((1, 1), dtype=bool),
    "first pixel": pixels((5, 7), (0, 0)),
    "last pixel": pixels((5, 7), (4, 6)),
    "column": np.eye(7, dtype=bool)[2:3].repeat(5, axis=0),
    "row": np.eye(7, dtype=bool)[:, 2:3].repeat(5, axis=1),
    "bottom then top of the next column": pixels((5, 7), (4, 2), (0, 3)),
    "two full columns": np.arange(35).reshape(5, 7) % 7 // 2 == 1,
    "bottom rows": np.arange(35).reshape(5, 7) >= 21,
    "checkers": np.indices((5, 7)).sum(axis=0) % 2 == 0,
    "large": np.pad(np.ones((300, 5), dtype=bool), ((400, 380), (1000, 915))),
    "large and full": np.ones((1080, 1920), dtype=bool),
    **{f"random {seed}": random_image(seed) for seed in range(10)},
}


each_edge = each_row("edge", EDGES.values(), ids=EDGES)


@each_edge
def test_rle_equals_pycocotools(edge):
    assert encode_mask(Mask.from_full(edge), "rle")["data"] == coco_counts(edge)


@each_edge
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_pycocotools_decodes_rle(edge):
    encoded = encode_mask(Mask.from_full(edge), "rle")
    assert np.array_equal(coco.decode({"size": encoded["size"], "counts": encoded["data"]}), edge)


@each_edge
def test_rle_of_pycocotools_decodes(edge):
    mask = Mask.from_full(edge)
    encoded = {"encoding": "rle", "size": list(edge.shape), "box": list(mask.box), "data": coco_counts(edge)}
    assert np.array_equal(decode_mask(encoded).full(), edge)


@each_row("encoding", ENCODINGS)
@each_edge
def test_edges_round_trip(edge, encoding):
    mask = Mask.from_full(edge)
    back = decode_mask(encode_mask(mask, encoding))
    assert (back.size, back.box, back.crop.shape) == (mask.size, mask.box, mask.crop.shape)
    assert np.array_equal(back.full(), edge)


@given(images, st.sampled_from(ENCODINGS))
def test_round_trip(full, encoding):
    back = decode_mask(encode_mask(Mask.from_full(full), encoding))
    assert back.box == Mask.from_full(full).box
    assert np.array_equal(back.full(), full)


@pytest.mark.verifies(
    "reader", "masks as RLE of COCO", "own package", "pycocotools encodes and decodes the same"
)
@given(images)
def test_rle_equals_pycocotools_on_any_image(full):
    assert encode_mask(Mask.from_full(full), "rle")["data"] == coco_counts(full)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_box_wider_than_the_mask_is_kept(encoding):
    full = pixels((9, 9), (4, 4))
    mask = Mask((9, 9), (2, 0, 7, 9), full[0:9, 2:7])
    back = decode_mask(encode_mask(mask, encoding))
    assert back.box == mask.box
    assert np.array_equal(back.crop, mask.crop)


def test_an_empty_mask_has_a_box_of_zeros_and_no_bits():
    encoded = encode_mask(Mask.empty((5, 7)))
    assert encoded == {"encoding": "bits+zstd", "size": [5, 7], "box": [0, 0, 0, 0], "data": b""}


@pytest.mark.parametrize(
    "mask",
    [
        Mask((5, 7), (0, 0, 3, 3), np.ones((2, 3), dtype=bool)),
        Mask((5, 7), (0, 0, 3, 3), np.ones((3, 3), dtype=np.uint8)),
        Mask((5, 7), (5, 0, 8, 3), np.ones((3, 3), dtype=bool)),
        Mask((5, 20000), (0, 0, 3, 3), np.ones((3, 3), dtype=bool)),
    ],
    ids=["shape", "dtype", "outside", "too wide"],
)
def test_a_mask_that_is_wrong_is_not_encoded(mask):
    with pytest.raises(WireError):
        encode_mask(mask)


def test_runs_that_do_not_fill_the_image_are_refused() -> None:
    encoded = encode_mask(Mask.from_full(np.ones((5, 8), np.bool_)), "rle")
    with refuses(WireError, field=("48", "pixels")):
        decode_mask({**encoded, "size": [6, 8]})


def test_a_mask_of_another_size_than_the_frame_is_refused() -> None:
    encoded = encode_mask(Mask.from_full(np.ones((5, 8), np.bool_)))
    assert read_mask(Fields(encoded, "mask"), frame_size=(5, 8)).area == 40
    with refuses(WireError, field=("mask", "6", "8", "5")):
        read_mask(Fields({**encoded, "data": b"not decoded"}, "mask"), frame_size=(6, 8))


NAMES = ("masks-bits", "masks-rle")


def changed_instance(
    name: str, index: int = 0, mask: dict[str, Any] | None = None, **fields: Any
) -> list[bytes]:
    """Return a golden message with one instance changed_instance."""
    topic, body = golden(name)
    values = msgpack.unpackb(body)
    instance = values["instances"][index]
    instance["mask"] |= mask or {}
    instance |= fields
    return [topic, msgpack.packb(values)]


@pytest.mark.parametrize("name", NAMES)
def test_they_are_equal_to_those_that_are_decoded_at_once(name: str) -> None:
    eager = unpack_masks(golden(name))
    lazy = unpack_masks(golden(name), lazy=True)
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


@each_row(
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
        unpack_masks(changed_instance(name, **change), lazy=True)


@pytest.mark.parametrize(
    ("name", "change"),
    [("masks-bits", {"area": 1}), ("masks-rle", {"area": 1}), ("masks-rle", {"mask": {"data": b"~~~"}})],
)
def test_damaged_pixels_are_an_error_when_they_are_used(name: str, change: dict[str, Any]) -> None:
    mask = unpack_masks(changed_instance(name, **change), lazy=True).instances[0].mask
    for _ in range(2):
        with refuses(WireError, field=("masks", "0")):
            mask.full()
