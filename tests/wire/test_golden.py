"""Tests of the golden files, which pin the bytes of wire version 1 for peers in any language."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from sam3_node.errors import WireError
from sam3_node.wire import decode_image, unpack_masks
from tests.support.refuses import refuses
from tests.support.wire_examples import DATA, EXAMPLES, golden, jpeg_frame, plain


@pytest.mark.parametrize("name", EXAMPLES)
def test_golden_bytes_unpack_to_the_value(name):
    example = EXAMPLES[name]
    assert plain(example.unpack(golden(name))) == plain(example.value)


@pytest.mark.parametrize("name", [name for name, example in EXAMPLES.items() if example.exact])
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
    image = decode_image(jpeg_frame())
    assert image.shape == (8, 8, 3)
    assert np.all(np.abs(image.astype(int) - 128) <= 2)


def test_an_unknown_clock_is_refused():
    topic, body = golden("masks-device-clock")
    wrong = msgpack.packb(msgpack.unpackb(body) | {"clock": "sundial"})
    with refuses(WireError, field="clock"):
        unpack_masks([topic, wrong])


@pytest.mark.parametrize(
    "shed", [[], {}, {"level": 0}, {"level": 1, "held": [-1]}, {"level": 1, "held": ["a"]}]
)
def test_a_wrong_shed_is_refused(shed):
    topic, body = golden("masks-shed")
    with pytest.raises(WireError, match="shed"):
        unpack_masks([topic, msgpack.packb(msgpack.unpackb(body) | {"shed": shed})])
