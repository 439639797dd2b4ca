"""Observations and messages for GR00T, held to its published layout.

The peer here is written from the description of that layout: `serve` reads requests as a policy server does, and
`check_observation` repeats what it asserts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from sam3_node.client.observations import (
    FIELDS,
    ObjectSlots,
    SlotObservation,
    as_gr00t,
    pack_gr00t,
    unpack_gr00t,
)
from sam3_node.errors import PolicyError
from tests.support.observations import T0, make_frame, make_instance
from tests.support.policy_servers import gr00t_pack, gr00t_unpack, serve_gr00t
from tests.support.refuses import refuses

SIZE = (24, 32)
RGB = np.arange(24 * 32 * 3, dtype=np.uint8).reshape(24, 32, 3)
JOINTS = np.linspace(-1, 1, 7)


def observe(count: int = 4) -> SlotObservation:
    slots = ObjectSlots(["mug", *"abc"][:count], SIZE)
    return slots.observe(make_frame(make_instance(1, "mug")), T0)


def check_observation(observation: dict[str, Any], images: int, vectors: int) -> None:
    """Assert what GR00T's server asserts of an observation."""
    assert set(observation) == {"video", "state", "language"}
    for stream in observation["video"].values():
        assert isinstance(stream, np.ndarray)
        assert (stream.dtype, stream.ndim, stream.shape[:2], stream.shape[-1]) == (
            np.uint8,
            5,
            (1, images),
            3,
        )
    for values in observation["state"].values():
        assert isinstance(values, np.ndarray)
        assert (values.dtype, values.ndim, values.shape[:2]) == (np.float32, 3, (1, vectors))
    for texts in observation["language"].values():
        assert isinstance(texts, list)
        assert [len(batch) for batch in texts] == [1]
        assert isinstance(texts[0][0], str)


def test_an_observation_has_masks_as_video_and_flags_as_state() -> None:
    objects = observe()
    observation = as_gr00t(objects, video={"front": RGB}, state={"arm": JOINTS}, language="pick up the mug")
    check_observation(observation, 1, 1)
    assert list(observation["video"]) == ["front", "objects_0", "objects_1"]
    np.testing.assert_array_equal(observation["video"]["front"][0, 0], RGB)
    np.testing.assert_array_equal(observation["video"]["objects_0"][0, 0, ..., 0] > 0, objects.masks[0])
    np.testing.assert_array_equal(observation["state"]["objects"][0, 0], objects.vector())
    assert observation["state"]["objects"].shape[-1] == 4 * len(FIELDS)
    assert observation["language"] == {"task": [["pick up the mug"]]}


def test_a_history_of_images_needs_that_of_objects() -> None:
    slots = ObjectSlots(["mug"], SIZE)
    history = [slots.observe(now_ns=T0), slots.observe(make_frame(make_instance(1, "mug")), T0)]
    two = {"front": np.stack([RGB, RGB])}
    observation = as_gr00t(history, video=two, state={"arm": JOINTS}, language={"annotation.human.task": "x"})
    assert observation["video"]["objects_0"].shape == (1, 2, *SIZE, 3)
    assert not observation["video"]["objects_0"][0, 0].any()
    assert observation["video"]["objects_0"][0, 1].any()
    np.testing.assert_array_equal(observation["state"]["objects"][0], [history[-1].vector()])
    observation = as_gr00t(history, video=two, state={"arm": np.stack([JOINTS] * 2)}, language="x")
    check_observation(observation, 2, 2)
    with refuses(PolicyError, field=("1", "2", "objects")):
        as_gr00t(history[:1], video=two, state={}, language="x")
    with refuses(PolicyError, field=("1", "vectors")):
        as_gr00t(observe(), video={}, state={"arm": np.stack([JOINTS] * 2)}, language="x")
    with refuses(PolicyError, field=("names", "sizes")):
        as_gr00t([history[0], observe(2)], video=two, state={}, language="x")
    with refuses(PolicyError, field="none"):
        as_gr00t([], video={}, state={}, language="x")


def test_flat_keys_for_earlier_servers() -> None:
    task = {"annotation.human.task_description": "pick up the mug"}
    flat = as_gr00t(observe(1), video={"front": RGB}, state={"arm": JOINTS}, language=task, flat=True)
    assert {key: getattr(value, "shape", value) for key, value in flat.items()} == {
        "video.front": (1, 1, *SIZE, 3),
        "video.objects_0": (1, 1, *SIZE, 3),
        "state.arm": (1, 1, 7),
        "state.objects": (1, 1, len(FIELDS)),
        "annotation.human.task_description": ["pick up the mug"],
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"video": {"front": RGB.astype(np.float32)}}, "uint8"),
        ({"video": {"front": RGB[..., :1]}}, "uint8"),
        ({"state": {"arm": np.zeros((1, 1, 7))}}, ("arm", "vector")),
        ({"state": {"arm": ["x"]}}, ("vector", "numbers")),
        ({"video": {"objects_0": RGB}}, ("video", "objects_0")),
        ({"state": {"objects": JOINTS}}, "state"),
    ],
)
def test_wrong_inputs_are_named(changes: dict[str, Any], message: str | tuple[str, ...]) -> None:
    inputs: dict[str, Any] = {"video": {"front": RGB}, "state": {"arm": JOINTS}, "language": "x"}
    with refuses(PolicyError, field=message):
        as_gr00t(observe(1), **{**inputs, **changes})


@pytest.mark.verifies(
    "policy",
    "GR00T's policy server",
    "layout",
    "messages as published, and a server written from them",
    "its package",
)
def test_requests_have_the_bytes_of_the_layout() -> None:
    observation = as_gr00t(observe(), video={"front": RGB}, state={"arm": JOINTS}, language="pick up the mug")
    data = {"observation": observation, "options": None}
    request = {"endpoint": "get_action", "data": data, "api_token": "secret"}
    packed = pack_gr00t("get_action", data, "secret")
    assert packed == gr00t_pack(request)
    np.testing.assert_equal(gr00t_unpack(packed), request)
    assert pack_gr00t("ping") == msgpack.packb({"endpoint": "ping"})


def test_replies_are_read() -> None:
    action = {"arm": np.ones((1, 16, 7), np.float32), "order": np.asfortranarray(np.arange(6).reshape(2, 3))}
    found, info = unpack_gr00t(gr00t_pack([action, {"n": 1}]))
    np.testing.assert_equal(found, action)
    assert info == {"n": 1}
    found["arm"] += 1  # not read-only
    config = {"delta_indices": [0], "modality_keys": ["front"]}
    for body in (config, '{"delta_indices": [0], "modality_keys": ["front"]}'):
        packed = msgpack.packb({"video": {"__ModalityConfig_class__": True, "as_json": body}})
        assert unpack_gr00t(packed) == {"video": config}
    with refuses(PolicyError, field="GR00T"):
        unpack_gr00t(msgpack.packb({"error": "Unauthorized: Invalid API token"}))
    with refuses(PolicyError, field="log"):
        unpack_gr00t(b"ERROR")


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode().ljust(118) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def damaged() -> Iterator[bytes]:
    file = io.BytesIO()
    np.save(file, np.array([{}], dtype=object), allow_pickle=True)
    arrays: list[Any] = [
        b"",
        "text",
        b"\x93NUMPY\x09\x00",
        file.getvalue(),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1 << 50,)}"),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000,)}", bytes(8)),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}", bytes(8)),
        npy("{'descr': '|V8', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", bytes(8)),
        npy("[" * 100),
        npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2,)}", bytes(8)),
    ]
    yield from (msgpack.packb({"__ndarray_class__": True, "as_npy": array}) for array in arrays)
    yield msgpack.packb({"__ModalityConfig_class__": True, "as_json": "{"})
    yield b"\xc1"
    yield b"\xdd\xff\xff\xff\xff"
    yield b"\x91" * 5000
    yield gr00t_pack({"a": np.zeros(9)})[:-3]


@pytest.mark.parametrize("reply", list(damaged()), ids=lambda reply: reply[:24].hex())
def test_damaged_replies_are_refused(reply: bytes) -> None:
    with refuses(PolicyError, field="GR00T"):
        unpack_gr00t(reply)


def test_objects_are_not_sent() -> None:
    with refuses(PolicyError, field=("dtype", "object")):
        pack_gr00t("get_action", {"observation": np.array([None])})
    with refuses(PolicyError, field="pack"):
        pack_gr00t("get_action", {"observation": object()})


def test_a_policy_server_answers() -> None:
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any], options: Any) -> Any:
        check_observation(observation, 1, 1)
        seen.append(observation)
        return [{"arm": np.zeros((1, 16, 7), np.float32)}, {}]

    with serve_gr00t(act) as endpoint, zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger = 0
        socket.connect(endpoint)
        socket.send(pack_gr00t("ping"))
        assert unpack_gr00t(socket.recv())["status"] == "ok"
        observation = as_gr00t(observe(), video={"front": RGB}, state={"arm": JOINTS}, language="x")
        socket.send(pack_gr00t("get_action", {"observation": observation, "options": None}))
        action, info = unpack_gr00t(socket.recv())
        assert (action["arm"].shape, info) == ((1, 16, 7), {})
        np.testing.assert_equal(seen[0], observation)
        socket.send(pack_gr00t("get_action", {"observation": {}, "options": None}))
        with refuses(PolicyError, field="GR00T"):
            unpack_gr00t(socket.recv())
