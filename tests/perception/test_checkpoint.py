"""States as bytes: back bit for bit, or refused."""

import hashlib
import math
import random
import struct
import tracemalloc
from contextlib import suppress

import msgpack
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from sam3_node.errors import ReplayError
from sam3_node.perception import checkpoint
from sam3_node.perception.checkpoint import FREE_BYTES, MAGIC, PLAIN, TENSOR, pack_state, unpack_state
from sam3_node.schema.state import State
from sam3_node.wire.codec import compress
from tests.support.hostility import damage, limited_memory
from tests.support.refuses import refuses
from tests.support.tables import each_row

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def same(found: Tensor, given: Tensor) -> bool:
    """Values, bit for bit."""
    if found.dtype != given.dtype or found.shape != given.shape:
        return False
    return torch.equal(*(tensor.flatten().contiguous().view(torch.uint8) for tensor in (found, given)))


def back(tensor: Tensor) -> Tensor:
    return unpack_state(pack_state({"tensor": tensor}))["tensor"]


def test_plain_values_come_back_as_they_were() -> None:
    state: State = {
        "whole": (0, -1, 2**63 - 1, -(2**63)),
        "real": (0.1, 1e-310, math.inf, -0.0, 5.0),
        "text": {"": "Süßkartoffel", "tensor": "0"},
        "flags": (True, False, None),
        "empty": ({}, ()),
        "keys": {1: "id", ("cam0", 1): "camera and id"},
    }
    found = unpack_state(pack_state(state))
    assert found == state
    assert [type(value) for value in found["real"]] == [float] * 5
    assert math.copysign(1, found["real"][3]) == -1


@each_row("dtype", DTYPES, ids=str)
def test_tensors_come_back_with_their_values(dtype: torch.dtype) -> None:
    given = (torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    assert same(back(given), given)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.0, 1e-42])
def test_odd_numbers_keep_their_bits(value: float) -> None:
    assert same(back(torch.tensor(value)), torch.tensor(value))


def test_tensors_lie_in_memory_as_they_did() -> None:
    image = torch.randn(2, 8, 4, 6)
    odd = torch.randn(64, 16).as_strided((1, 16, 8, 8), (16, 1, 128, 16))
    given = [image, image.to(memory_format=torch.channels_last), image.permute(3, 1, 0, 2), odd]
    found = unpack_state(pack_state({"all": given}))["all"]
    assert all(map(same, found, given))
    assert [tensor.stride() for tensor in found] == [tensor.stride() for tensor in given]


def test_views_bring_only_what_they_show() -> None:
    large = torch.zeros(1000, 1000).random_()
    given = [large[5], large[:, 7], large[::3, 1:4], torch.ones(1).expand(6, 2), large[0:0], large[:, 0:0]]
    data = pack_state({"all": given})
    assert len(data) < 50_000
    assert all(map(same, unpack_state(data)["all"], given))


def test_the_stride_of_a_single_value_may_be_any() -> None:
    assert back(torch.ones(1, dtype=torch.int64).as_strided((1,), (0,))).tolist() == [1]


def test_what_was_packed_may_change_afterwards() -> None:
    given = torch.zeros(4)
    data = pack_state({"tensor": given})
    given += 1
    found = unpack_state(data)["tensor"]
    assert found.sum() == 0
    found += 1
    assert unpack_state(data)["tensor"].sum() == 0


def test_one_state_has_one_packing() -> None:
    state = {"a": torch.arange(9.0), "b": [torch.ones(2), 5]}
    assert pack_state(state) == pack_state(unpack_state(pack_state(state)))


def test_what_is_no_state_is_not_packed() -> None:
    with refuses(TypeError, field="set"):
        pack_state({"ids": {1, 2}})


def test_every_flipped_bit_is_noticed() -> None:
    data = pack_state({"tensor": torch.ones(3), "text": "x"})
    for place in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises(ReplayError, match="expected a"):
            unpack_state(bytes(damaged))


def test_every_truncation_is_noticed() -> None:
    data = pack_state({"tensor": torch.ones(3), "text": "x"})
    for length in range(len(data)):
        with pytest.raises(ReplayError, match="expected a"):
            unpack_state(data[:length])
    with pytest.raises(ReplayError, match="damaged"):
        unpack_state(data + b"\0")


@pytest.mark.parametrize("data", [b"", b"not a checkpoint", MAGIC, MAGIC + bytes(200)])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ReplayError, match="expected a"):
        unpack_state(data)


def sign(plain: bytes, **tensors: Tensor) -> bytes:
    """Return a checkpoint with a right digest, whose plain values are these bytes."""
    body = save({PLAIN: torch.frombuffer(bytearray(plain), dtype=torch.uint8), **tensors})
    content = struct.pack("<Q", len(body)) + compress(body)
    return MAGIC + hashlib.sha256(content).digest() + content


def tensor(key_and_strides: bytes) -> bytes:
    """Return msgpack of a state that is one tensor."""
    return b"\x81\xa1t" + msgpack.packb(msgpack.ExtType(TENSOR, key_and_strides))


SIGNED = {
    "4e9 items in an array": b"\xdd\xee\x6b\x28\x00",
    "4e9 items in a map": b"\xdf\xee\x6b\x28\x00",
    "4 GB of text": b"\xdb\xff\xff\xff\xff",
    "4 GB of a tensor's place": b"\xc9\xff\xff\xff\xff\x01",
    "items declared at each of many levels": b"\xdd\x00\x10\x00\x00" * 1000 + bytes(1 << 20),
    "100,000 levels": b"\x91" * 100_000 + b"\xc0",
    "many maps in maps": b"\xdc\xff\xff" + b"\xdc\x00\x20" * 65535 + b"\x90" * (32 * 65535),
    "two values": b"\x01\x02",
    "no tensor of the name": tensor(msgpack.packb(["1", [1]])),
    "strides of another tensor": tensor(msgpack.packb(["0", [1 << 40, 1]])),
    "NaN as a stride": tensor(msgpack.packb(["0", [math.nan, 1]])),
    "a flag as a stride": tensor(msgpack.packb(["0", [True, "1"]])),
    "lists as strides": tensor(b"\x92\xa10" + b"\xdc\x04\x00" * 300),
    "another extension": b"\x81\xa1t\xc7\x00\x05",
}


@pytest.mark.parametrize("kind", SIGNED)
def test_a_state_that_was_made_up_is_refused_within_bounded_memory(kind: str) -> None:
    data = sign(SIGNED[kind], **{"0": torch.zeros(3, 4)})
    with limited_memory(128), pytest.raises(ReplayError, match="expected a checkpoint of this version"):
        unpack_state(data)


def test_the_items_of_a_state_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty map takes one byte in the file, and 64 in memory."""
    monkeypatch.setattr(checkpoint, "MAX_STATE_ITEMS", 4096)
    for inner in (b"\x80", b"\x90", b"\x81\x01\x90"):
        with pytest.raises(ReplayError, match="at most 4096 items"):
            unpack_state(sign(b"\xdc\x10\x00" + inner * 4096))


def test_any_plain_bytes_are_a_state_or_refused() -> None:
    good = pack_state({"a": torch.zeros(2, 3), "b": [1, 2.5, {"c": None}], ("d", 1): "text"})
    assert unpack_state(good)
    plain = b"\x82\xa1a\xc7\x05\x01\x92\xa10\x92\x03\xa1b\x93\x01\xcb\x40\x04\x00\x00\x00\x00\x00\x00\x81\xa1c\xc0"
    rng = random.Random(8)
    with limited_memory(16):
        for _ in range(400):
            data = sign(damage(plain, rng) or b"\xc0", **{"0": torch.zeros(2, 3)})
            with suppress(ReplayError):
                unpack_state(data)


def test_a_small_file_of_a_large_state_is_refused_before_it_is_unpacked() -> None:
    packed = compress(bytes(FREE_BYTES + 1))
    content = struct.pack("<Q", FREE_BYTES + 1) + packed
    data = MAGIC + hashlib.sha256(content).digest() + content
    tracemalloc.start()
    try:
        with refuses(ReplayError, field=str(FREE_BYTES + 1)):
            unpack_state(data)
        assert tracemalloc.get_traced_memory()[1] < FREE_BYTES // 8
    finally:
        tracemalloc.stop()
