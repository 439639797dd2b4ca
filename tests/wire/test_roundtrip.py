"""Packing and unpacking give the same value, and golden files pin the bytes of wire version 1 for all peers."""

import contextlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sam3_node import wire
from sam3_node.errors import UnknownObjectError, WireError
from sam3_node.types import Depth, Frame, Instance, Intrinsics, Mask, MaskFrame
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.wire_examples import DATA, EXAMPLES, golden, gripper_pose, jpeg_frame, plain

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
    width = draw(st.integers(1, 6))
    height = draw(st.integers(1, 6))
    encoding = draw(st.sampled_from([*RAW, "jpeg", "png"]))
    size = width * height * RAW.get(encoding, 0) or draw(st.integers(1, 30))
    intrinsics = st.builds(
        Intrinsics,
        st.floats(1e-3, 1e6),
        st.floats(1e-3, 1e6),
        finite,
        finite,
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
        draw(naturals),
        draw(capture_times),
        width,
        height,
        encoding,
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
        st.just(id),
        words,
        st.floats(0, 1),
        st.sampled_from(["tentative", "tracked", "occluded"]),
        naturals,
        naturals,
        npst.arrays(np.bool_, size).map(Mask.from_full),
        st.none() | triple,
        st.none() | words,
        st.none() | triple,
    )


@st.composite
def mask_frames(draw):
    size = draw(npst.array_shapes(min_dims=2, max_dims=2, max_side=12))
    ids = draw(st.lists(naturals, unique=True, max_size=4))
    return MaskFrame(
        draw(cameras),
        draw(naturals),
        draw(naturals),
        size[1],
        size[0],
        draw(naturals),
        draw(naturals),
        draw(naturals),
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
    assert wire.unpack(wire.pack(value), what="value") == value


@given(frames())
def test_frames(frame):
    assert plain(wire.unpack_frame(wire.pack_frame(frame))) == plain(frame)


def test_frame_pixels_are_not_copied():
    colour = bytearray(12)
    frame = wire.unpack_frame(wire.pack_frame(Frame("cam0", 1, 2, 2, 2, "bgr8", colour)))
    assert frame.colour is colour


@given(mask_frames(), st.sampled_from(["bits+zstd", "rle"]))
def test_masks(masks, encoding):
    assert plain(wire.unpack_masks(wire.pack_masks(masks, encoding))) == plain(masks)


@given(naturals, words, arguments)
def test_requests(id, op, args):
    assert wire.unpack_request(wire.pack_request(wire.Request(id, op, args))) == wire.Request(id, op, args)


@given(naturals, values)
def test_replies(id, result):
    assert wire.unpack_reply(wire.pack_reply(wire.Reply(id, result))) == wire.Reply(id, result)


@given(naturals, words, words)
def test_error_replies(id, code, message):
    reply = wire.Reply(id, error=wire.Failure(code, message))
    assert wire.unpack_reply(wire.pack_reply(reply)) == reply
    assert not reply.ok


def test_an_error_of_this_package_becomes_a_reply():
    reply = wire.Reply.failed(4, UnknownObjectError("no object 9"))
    assert reply == wire.Reply(4, error=wire.Failure("unknown_object", "no object 9"))


def test_unknown_fields_are_ignored():
    message = {"v": 1, "id": 1, "op": "status", "args": {}, "later": {"deep": [1, [2]]}}
    assert wire.unpack_request(wire.pack(message)) == wire.Request(1, "status", {})


@pytest.fixture
def photo():
    row, column = np.mgrid[0:40, 0:60]
    return np.dstack([row * 6, column * 4, (row + column) * 2]).astype(np.uint8)


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "png"])
def test_lossless_colour(photo, encoding):
    frame = Frame("cam0", 0, 0, 60, 40, encoding, wire.encode_image(photo, encoding))
    assert np.array_equal(wire.decode_image(frame), photo)


def test_jpeg_colour(photo):
    frame = Frame("cam0", 0, 0, 60, 40, "jpeg", wire.encode_image(photo, "jpeg", quality=95))
    assert np.abs(wire.decode_image(frame).astype(int) - photo).mean() < 3


def test_mono_colour(photo):
    frame = Frame("cam0", 0, 0, 60, 40, "mono8", wire.encode_image(photo, "mono8"))
    image = wire.decode_image(frame)
    assert image.shape == photo.shape
    assert np.abs(image[..., 0] - photo @ [0.114, 0.587, 0.299]).max() <= 1


def test_raw_colour_is_a_read_only_view(photo):
    image = wire.decode_image(Frame("cam0", 0, 0, 60, 40, "bgr8", wire.encode_image(photo, "bgr8")))
    assert np.shares_memory(image, photo)
    assert not image.flags.writeable


def test_a_crop_of_an_image_can_be_encoded(photo):
    crop = photo[5:25, 10:30]
    assert np.array_equal(
        wire.decode_image(Frame("cam0", 0, 0, 20, 20, "bgr8", wire.encode_image(crop, "bgr8"))), crop
    )


@given(
    npst.arrays(np.uint16, npst.array_shapes(min_dims=2, max_dims=2, max_side=8)),
    st.sampled_from(["z16", "z16+zstd", "png16"]),
)
def test_depth(image, encoding):
    depth = wire.encode_depth(image, encoding, scale_m=0.001, aligned=True)
    assert (depth.height, depth.width, depth.encoding, depth.scale_m) == (*image.shape, encoding, 0.001)
    assert np.array_equal(wire.decode_depth(depth), image)


@pytest.mark.parametrize(
    "image", [np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)]
)
def test_images_of_another_kind_are_not_encoded(image):
    with pytest.raises(WireError, match="expected"):
        wire.encode_image(image, "bgr8")


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(3), 2**64, {"s": "\ud800"}])
def test_values_that_are_not_plain_are_not_packed(value):
    with refuses(WireError, field="pack"):
        wire.pack(value)


def test_endless_nesting_is_not_packed():
    value: list = []
    value.append(value)
    with refuses(WireError, field="pack"):
        wire.pack(value)


@each_row("name", EXAMPLES)
def test_golden_bytes_unpack_to_the_value(name):
    example = EXAMPLES[name]
    assert plain(example.unpack(golden(name))) == plain(example.value)


@each_row("name", [name for name, example in EXAMPLES.items() if example.exact])
def test_the_value_packs_to_golden_bytes(name):
    example = EXAMPLES[name]
    assert [bytes(part) for part in example.pack(example.value)] == golden(name)


def test_bits_masks_pack_to_golden_bytes_but_for_the_compressor():
    topic, body = EXAMPLES["masks-bits"].pack(EXAMPLES["masks-bits"].value)
    expected_topic, expected_body = golden("masks-bits")
    assert topic == expected_topic
    assert _without_mask_data(body) == _without_mask_data(expected_body)


def _without_mask_data(body: bytes) -> list[object]:
    message = msgpack.unpackb(body)
    for instance in message["instances"]:
        del instance["mask"]["data"]
    return list(message.items())


def test_every_golden_file_has_its_example():
    assert {path.stem for path in DATA.glob("*.json")} == set(EXAMPLES)


def test_golden_jpeg_decodes():
    image = wire.decode_image(jpeg_frame())
    assert image.shape == (8, 8, 3)
    assert np.all(np.abs(image.astype(int) - 128) <= 2)


def test_an_unknown_clock_is_refused():
    topic, body = golden("masks-device-clock")
    wrong = msgpack.packb(msgpack.unpackb(body) | {"clock": "sundial"})
    with refuses(WireError, field="clock"):
        wire.unpack_masks([topic, wrong])


@pytest.mark.parametrize(
    "shed", [[], {}, {"level": 0}, {"level": 1, "held": [-1]}, {"level": 1, "held": ["a"]}]
)
def test_a_wrong_shed_is_refused(shed):
    topic, body = golden("masks-shed")
    with pytest.raises(WireError, match="shed"):
        wire.unpack_masks([topic, msgpack.packb(msgpack.unpackb(body) | {"shed": shed})])


@pytest.mark.parametrize("windows", [-1, 1.5, "2", [2]])
def test_a_wrong_number_of_windows_is_refused(windows):
    topic, body = golden("masks-windows")
    with pytest.raises(WireError, match="windows"):
        wire.unpack_masks([topic, msgpack.packb(msgpack.unpackb(body) | {"windows": windows})])


BODY = {"v": 1, "kind": "event", "n": 3, "op": "reset", "args": {}}


def test_an_event_is_unpacked_as_it_was_packed() -> None:
    for event in (
        wire.Event(0, wire.SERVED, {"camera": "cam0"}),
        wire.Event(7, "add_object", {"box": [1, 2.5, 3, 4], "mask": {"data": b"\0"}}, "shelf-3"),
    ):
        assert wire.unpack_event(wire.pack_event(event)) == event


@each_row(
    "change",
    [
        {"v": 2},
        {"kind": "masks"},
        {"n": -1},
        {"n": 1.0},
        {"op": 4},
        {"op": None},
        {"args": []},
        {"request_id": ""},
    ],
)
def test_wrong_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(WireError):
        wire.unpack_event([wire.EVENTS_TOPIC, wire.pack(BODY | change)])


def test_another_topic_or_number_of_parts_is_refused() -> None:
    for parts in (
        [],
        [wire.EVENTS_TOPIC],
        [b"eventsx", wire.pack(BODY)],
        [wire.EVENTS_TOPIC, wire.pack(BODY), b""],
    ):
        with pytest.raises(WireError, match="event"):
            wire.unpack_event(parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_refused(data: bytes) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(wire.unpack_event([wire.EVENTS_TOPIC, data]), wire.Event)


def changed(**fields: object) -> list[bytes]:
    topic, body = wire.pack_pose(gripper_pose())
    return [topic, msgpack.packb(msgpack.unpackb(body) | fields)]


def test_the_topic_names_the_frame() -> None:
    assert wire.pack_pose(gripper_pose())[0] == wire.pose_topic("gripper") == b"pose/gripper"


@each_row(
    ("parts", "named"),
    [
        (changed(quaternion=[0, 0, 0, 2.0]), ("1", "2", "length")),
        (changed(quaternion=[0, 0, 1]), ("4", "numbers")),
        (changed(quaternion=[0, 0, float("nan"), 1]), "quaternion"),
        (changed(position=[0, 1]), "position"),
        (changed(position=[0, 1, float("inf")]), "position"),
        (changed(frame="tool"), "pose/tool"),
        (changed(frame="a/b"), ("frame", "name")),
        (changed(parent=""), ("frame", "name")),
        (changed(clock="sundial"), "clock"),
        (changed(stamp_ns=-1), "stamp_ns"),
        (changed(kind="frame"), "kind"),
        (changed(v=2), ("wire", "version")),
        (changed()[:1], ("2", "parts")),
        ([], ("2", "parts")),
    ],
)
def test_wrong_poses_are_refused(parts: list[bytes], named: str | tuple[str, ...]) -> None:
    with refuses(WireError, field=named):
        wire.unpack_pose(parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        wire.unpack_pose([b"pose/gripper", data])


def test_a_pose_without_a_unit_quaternion_is_not_sent() -> None:
    with pytest.raises(WireError, match="length 1"):
        wire.pack_pose(replace(gripper_pose(), quaternion_xyzw=(0, 0, 0, 0)))


def test_fields_of_later_versions_are_ignored() -> None:
    assert wire.unpack_pose(changed(covariance=[1, 2, 3])) == gripper_pose()
