"""Tests that packing and unpacking give the same value: frames, images, masks messages, requests and replies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sam3_node.errors import UnknownObjectError, WireError
from sam3_node.types import Depth, Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import (
    Failure,
    Reply,
    Request,
    decode_depth,
    decode_image,
    encode_depth,
    encode_image,
    pack,
    pack_frame,
    pack_masks,
    pack_reply,
    pack_request,
    unpack,
    unpack_frame,
    unpack_masks,
    unpack_reply,
    unpack_request,
)
from tests.support.refuses import refuses
from tests.support.wire_examples import plain

naturals = st.integers(0, 2**63 - 1)
capture_times = st.integers(0, 2**62)
epochs = st.integers(0, 2**53 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
cameras = st.from_regex(r"[A-Za-z0-9_.-]{1,64}", fullmatch=True).filter(lambda name: name.strip("."))
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | finite | words | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words, inner, max_size=4),
    max_leaves=20,
)
arguments = st.dictionaries(words, values.filter(lambda value: value is not None), max_size=4)

RAW = {"bgr8": 3, "rgb8": 3, "mono8": 1}


@st.composite
def frames(draw):
    width, height = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    encoding = draw(st.sampled_from([*RAW, "jpeg", "png"]))
    size = width * height * RAW.get(encoding, 0) or draw(st.integers(1, 30))
    intrinsics = st.builds(
        Intrinsics,
        *[st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), finite, finite],
        st.sampled_from(["none", "brown_conrady", "fisheye"]),
        st.lists(finite, max_size=14).map(tuple),
    )
    depth = st.builds(
        Depth,
        *map(st.just, (width, height)),
        st.sampled_from(["z16", "png16", "z16+zstd"]),
        st.floats(1e-6, 1.0),
        st.booleans(),
        st.just(bytes(width * height * 2)),
    )
    return Frame(
        draw(cameras),
        *(draw(naturals), draw(capture_times), width, height, encoding),
        draw(st.binary(min_size=size, max_size=size)),
        draw(st.sampled_from(["system", "monotonic", "device"])),
        draw(naturals),
        draw(st.none() | depth),
        draw(st.none() | intrinsics),
        draw(st.dictionaries(words, naturals | finite, max_size=4)),
    )


def instances(id, size):
    triple = st.tuples(*[st.floats(0, 100)] * 3)
    return st.builds(
        Instance,
        *(st.just(id), words, st.floats(0, 1), st.sampled_from(["tentative", "tracked", "occluded"])),
        *(naturals, naturals, npst.arrays(np.bool_, size).map(Mask.from_full)),
        *(st.none() | triple, st.none() | words, st.none() | triple),
    )


@st.composite
def mask_frames(draw):
    size = draw(npst.array_shapes(min_dims=2, max_dims=2, max_side=12))
    ids = draw(st.lists(naturals, unique=True, max_size=4))
    return MaskFrame(
        draw(cameras),
        *(draw(naturals), draw(naturals), size[1], size[0], draw(naturals), draw(naturals), draw(naturals)),
        draw(words),
        draw(st.dictionaries(words, naturals, max_size=4)),
        draw(st.lists(words, max_size=3).map(tuple)),
        tuple(draw(instances(id, size)) for id in ids),
        draw(st.sampled_from(["system", "monotonic", "device"])),
        draw(st.none() | words),
        draw(st.none() | epochs),
    )


@given(values)
def test_values(value):
    assert unpack(pack(value), what="value") == value


@given(frames())
def test_frames(frame):
    assert plain(unpack_frame(pack_frame(frame))) == plain(frame)


def test_frame_pixels_are_not_copied():
    colour = bytearray(12)
    frame = unpack_frame(pack_frame(Frame("cam0", 1, 2, 2, 2, "bgr8", colour)))
    assert frame.colour is colour


@given(mask_frames(), st.sampled_from(["bits+zstd", "rle"]))
def test_masks(masks, encoding):
    assert plain(unpack_masks(pack_masks(masks, encoding))) == plain(masks)


@given(naturals, words, arguments)
def test_requests(id, op, args):
    assert unpack_request(pack_request(Request(id, op, args))) == Request(id, op, args)


@given(naturals, values)
def test_replies(id, result):
    assert unpack_reply(pack_reply(Reply(id, result))) == Reply(id, result)


@given(naturals, words, words)
def test_error_replies(id, code, message):
    reply = Reply(id, error=Failure(code, message))
    assert unpack_reply(pack_reply(reply)) == reply
    assert not reply.ok


def test_an_error_of_this_package_becomes_a_reply():
    reply = Reply.failed(4, UnknownObjectError("no object 9"))
    assert reply == Reply(4, error=Failure("unknown_object", "no object 9"))


def test_unknown_fields_are_ignored():
    message = {"v": 1, "id": 1, "op": "status", "args": {}, "later": {"deep": [1, [2]]}}
    assert unpack_request(pack(message)) == Request(1, "status", {})


@pytest.fixture
def photo():
    row, column = np.mgrid[0:40, 0:60]
    return np.dstack([row * 6, column * 4, (row + column) * 2]).astype(np.uint8)


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "png"])
def test_lossless_colour(photo, encoding):
    frame = Frame("cam0", 0, 0, 60, 40, encoding, encode_image(photo, encoding))
    assert np.array_equal(decode_image(frame), photo)


def test_jpeg_colour(photo):
    frame = Frame("cam0", 0, 0, 60, 40, "jpeg", encode_image(photo, "jpeg", quality=95))
    assert np.abs(decode_image(frame).astype(int) - photo).mean() < 3


def test_mono_colour(photo):
    frame = Frame("cam0", 0, 0, 60, 40, "mono8", encode_image(photo, "mono8"))
    image = decode_image(frame)
    assert image.shape == photo.shape
    assert np.abs(image[..., 0] - photo @ [0.114, 0.587, 0.299]).max() <= 1


def test_raw_colour_is_a_read_only_view(photo):
    image = decode_image(Frame("cam0", 0, 0, 60, 40, "bgr8", encode_image(photo, "bgr8")))
    assert np.shares_memory(image, photo)
    assert not image.flags.writeable


def test_a_crop_of_an_image_can_be_encoded(photo):
    crop = photo[5:25, 10:30]
    assert np.array_equal(decode_image(Frame("cam0", 0, 0, 20, 20, "bgr8", encode_image(crop, "bgr8"))), crop)


@given(
    npst.arrays(np.uint16, npst.array_shapes(min_dims=2, max_dims=2, max_side=8)),
    st.sampled_from(["z16", "z16+zstd", "png16"]),
)
def test_depth(image, encoding):
    depth = encode_depth(image, encoding, scale_m=0.001, aligned=True)
    assert (depth.height, depth.width, depth.encoding, depth.scale_m) == (*image.shape, encoding, 0.001)
    assert np.array_equal(decode_depth(depth), image)


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_images_of_another_kind_are_not_encoded(image):
    with pytest.raises(WireError, match="expected"):
        encode_image(image, "bgr8")


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(3), 2**64, {"s": "\ud800"}])
def test_values_that_are_not_plain_are_not_packed(value):
    with refuses(WireError, field="pack"):
        pack(value)


def test_endless_nesting_is_not_packed():
    value: list = []
    value.append(value)
    with refuses(WireError, field="pack"):
        pack(value)
