"""Observations and messages for openpi, held to its published layout and, where it is installed, to its own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from sam3_node.client import observations
from sam3_node.errors import PolicyError
from tests.support.observations import T0, make_frame, make_instance
from tests.support.policy_servers import openpi_pack, openpi_unpack, serve_openpi
from tests.support.refuses import refuses

SIZE = (224, 224)
INPUTS = {
    "observation/image": np.zeros((*SIZE, 3), np.uint8),
    "observation/state": np.linspace(-1, 1, 8, dtype=np.float32),
}
VALUES: list[Any] = [
    1,
    1.5,
    "text",
    [1, "a", None, True],
    np.float32(0.5),
    np.array([1, 2, 3], np.int64),
    {"a": np.zeros((3, 4, 5), np.float32), "b": {"c": [np.array([True, False])]}},
    np.array([np.nan, np.inf]),
    np.array(["asdf", "q"]),
    np.array(1.0),
    np.asfortranarray(np.arange(6).reshape(2, 3)),
]


def observe() -> observations.SlotObservation:
    slots = observations.ObjectSlots(["mug", "a", "b", "c"], SIZE, fit="pad")
    return slots.observe(make_frame(make_instance(1, "mug")), T0)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_same(found[key], expected[key])
    else:
        np.testing.assert_equal(found, expected)


def test_an_observation_has_the_inputs_the_masks_and_the_flags() -> None:
    objects = observe()
    observation = observations.as_openpi(objects, INPUTS, prompt="pick up the mug")
    added = {key: value.shape for key, value in observation.items() if key.startswith("observation/objects")}
    assert added == {
        "observation/objects_state": (4 * len(observations.FIELDS),),
        "observation/objects_0": (*SIZE, 3),
        "observation/objects_1": (*SIZE, 3),
    }
    assert observation["prompt"] == "pick up the mug"
    assert observation["observation/state"] is INPUTS["observation/state"]
    np.testing.assert_array_equal(observation["observation/objects_0"][..., 0] > 0, objects.masks[0])
    np.testing.assert_array_equal(observation["observation/objects_state"], objects.vector())
    with refuses(PolicyError, field="inputs"):
        observations.as_openpi(objects, {"prompt": ""}, prompt="x")


def test_messages_have_the_bytes_of_the_layout() -> None:
    observation = observations.as_openpi(observe(), INPUTS, prompt="pick up the mug")
    assert observations.pack_openpi(observation) == openpi_pack(observation)
    assert_same(observations.unpack_openpi(openpi_pack(observation)), observation)


@pytest.mark.verifies(
    "policy",
    "openpi's policy server",
    "own package",
    "openpi-client 0.1.2: messages both ways, one exchange",
    "a server with weights",
)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value)[:30])
def test_the_client_of_openpi_reads_and_writes_the_same(value: Any) -> None:
    peer = pytest.importorskip("openpi_client.msgpack_numpy")
    if not isinstance(value, np.generic):  # sent as plain numbers
        assert observations.pack_openpi({"value": value}) == peer.packb({"value": value})
    assert_same(peer.unpackb(observations.pack_openpi({"value": value})), {"value": value})
    assert_same(observations.unpack_openpi(peer.packb({"value": value})), {"value": value})


def damaged() -> Iterator[bytes]:
    good: dict[bytes, Any] = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f8", b"shape": [1]}
    changes: list[dict[bytes, Any]] = [
        {b"dtype": "|O"},
        {b"dtype": "V8"},
        {b"dtype": "nonsense"},
        {b"dtype": ","},
        {b"dtype": "<f3"},
        {b"dtype": None, b"data": "text"},
        {b"dtype": [["a", "<f8"]]},
        {b"shape": [2]},
        {b"shape": [-1]},
        {b"data": b"", b"shape": [0, 1 << 62]},
        {b"data": b"", b"shape": [0, *[1 << 31] * 15]},
        {b"shape": [1 << 62, 4]},
        {b"shape": [1] * 40},
        {b"shape": "x"},
        {b"shape": [[1]]},
        {b"shape": None},
        {b"data": None},
        {b"dtype": "<U0", b"data": b"", b"shape": [1 << 40]},
    ]
    yield from (msgpack.packb(good | change) for change in changes)
    yield msgpack.packb({b"__ndarray__": True})
    yield msgpack.packb({b"__npgeneric__": True, b"data": 1 << 40, b"dtype": "V"})
    yield msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f8"})
    yield msgpack.packb({b"__npgeneric__": True, b"data": [1, [2]], b"dtype": "<f8"})
    yield msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<U900000000"})
    yield b"\xc1"
    yield openpi_pack({"a": np.zeros(9)})[:-3]


@pytest.mark.parametrize("message", list(damaged()), ids=lambda message: message[:60].hex())
def test_damaged_messages_are_refused(message: bytes) -> None:
    with refuses(PolicyError, field=("openpi", "server")):
        observations.unpack_openpi(message)


def test_a_policy_server_answers() -> None:
    client = pytest.importorskip("websockets.sync.client")
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.full((10, 7), float(observation["observation/state"][0]))}

    observation = observations.as_openpi(observe(), INPUTS, prompt="x")
    with serve_openpi(act) as address, client.connect(address, compression=None, max_size=None) as server:
        assert observations.unpack_openpi(server.recv()) == {"model": "test"}
        server.send(observations.pack_openpi(observation))
        assert observations.unpack_openpi(server.recv())["actions"].shape == (10, 7)
        assert_same(seen[0], observation)
        server.send(observations.pack_openpi({}))
        with refuses(PolicyError, field="KeyError"):
            observations.unpack_openpi(server.recv())


def test_the_client_of_openpi_sends_our_observation() -> None:
    policy = pytest.importorskip("openpi_client.websocket_client_policy")
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.zeros((10, 7))}

    observation = observations.as_openpi(observe(), INPUTS, prompt="x")
    with serve_openpi(act) as address:
        client = policy.WebsocketClientPolicy(address)
        assert client.infer(observation)["actions"].shape == (10, 7)
        client._ws.close()
    assert_same(seen[0], observation)
    assert_same(openpi_unpack(observations.pack_openpi(observation)), observation)
