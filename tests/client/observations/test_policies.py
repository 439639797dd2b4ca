"""Observations and messages for GR00T, openpi, lerobot and GraspGen, held to their published layouts.

The peers here are written from the descriptions of these layouts. Where a peer's own package is installed, it is asked.
launch/lerobot/tests has what needs lerobot's own environment.
"""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq

from sam3_node.client import Grasps, PerceptionClient
from sam3_node.client.observations import (
    FIELDS,
    ObjectSlots,
    SlotObservation,
    as_gr00t,
    as_lerobot,
    as_openpi,
    lerobot_features,
    pack_gr00t,
    pack_openpi,
    unpack_gr00t,
    unpack_openpi,
)
from sam3_node.client.observations.policies import pack_graspgen, unpack_graspgen
from sam3_node.errors import NoAnswerError, PolicyError
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import Mask
from sam3_node.wire import Reply
from tests.support.observations import FRAME, T0, fresh, make_frame, make_instance
from tests.support.policy_servers import (
    gr00t_pack,
    gr00t_unpack,
    graspgen_pack,
    graspgen_unpack,
    openpi_pack,
    openpi_unpack,
    serve,
    serve_gr00t,
    serve_openpi,
)
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.transport_peer import TCP, wait_until

SIZE = (24, 32)
NAMES = ["red mug", "a", "b", "c"]
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
        assert (stream.dtype, stream.ndim) == (np.uint8, 5)
        assert (*stream.shape[:2], stream.shape[-1]) == (1, images, 3)
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


@each_row(
    ("form", "changes", "message"),
    [
        (as_gr00t, {"video": {"front": RGB.astype(np.float32)}}, "uint8"),
        (as_gr00t, {"video": {"front": RGB[..., :1]}}, "uint8"),
        (as_gr00t, {"state": {"arm": np.zeros((1, 1, 7))}}, ("arm", "vector")),
        (as_gr00t, {"state": {"arm": ["x"]}}, ("vector", "numbers")),
        (as_gr00t, {"video": {"objects_0": RGB}}, ("video", "objects_0")),
        (as_gr00t, {"state": {"objects": JOINTS}}, "state"),
        (as_lerobot, {"images": {"front": RGB / 255}}, "uint8"),
        (as_lerobot, {"images": {"objects_0": RGB}}, ("images", "objects_0")),
        (as_lerobot, {"state": np.zeros((1, 6))}, "state"),
    ],
)
def test_wrong_inputs_are_named(form: Any, changes: dict[str, Any], message: str | tuple[str, ...]) -> None:
    whole: dict[str, Any] = {"video": {"front": RGB}, "state": {"arm": JOINTS}, "language": "x"}
    inputs = whole if form is as_gr00t else {}
    with refuses(PolicyError, field=message):
        form(observe(1), **{**inputs, **changes})


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


def damaged_gr00t() -> Iterator[bytes]:
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


@each_row("reply", list(damaged_gr00t()), ids=lambda reply: reply[:24].hex())
def test_damaged_replies_of_gr00t_are_refused(reply: bytes) -> None:
    with refuses(PolicyError, field="GR00T"):
        unpack_gr00t(reply)


def test_objects_are_not_sent() -> None:
    with refuses(PolicyError, field=("dtype", "object")):
        pack_gr00t("get_action", {"observation": np.array([None])})
    with refuses(PolicyError, field="pack"):
        pack_gr00t("get_action", {"observation": object()})


def test_a_gr00t_server_answers() -> None:
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


PADDED_SIZE = (224, 224)
INPUTS = {
    "observation/image": np.zeros((*PADDED_SIZE, 3), np.uint8),
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


def observe_padded() -> SlotObservation:
    slots = ObjectSlots(["mug", "a", "b", "c"], PADDED_SIZE, fit="pad")
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
    objects = observe_padded()
    observation = as_openpi(objects, INPUTS, prompt="pick up the mug")
    added = {key: value.shape for key, value in observation.items() if key.startswith("observation/objects")}
    assert added == {
        "observation/objects_state": (4 * len(FIELDS),),
        "observation/objects_0": (*PADDED_SIZE, 3),
        "observation/objects_1": (*PADDED_SIZE, 3),
    }
    assert observation["prompt"] == "pick up the mug"
    assert observation["observation/state"] is INPUTS["observation/state"]
    np.testing.assert_array_equal(observation["observation/objects_0"][..., 0] > 0, objects.masks[0])
    np.testing.assert_array_equal(observation["observation/objects_state"], objects.vector())
    with refuses(PolicyError, field="inputs"):
        as_openpi(objects, {"prompt": ""}, prompt="x")


def test_messages_of_openpi_have_the_bytes_of_the_layout() -> None:
    observation = as_openpi(observe_padded(), INPUTS, prompt="pick up the mug")
    assert pack_openpi(observation) == openpi_pack(observation)
    assert_same(unpack_openpi(openpi_pack(observation)), observation)


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
        assert pack_openpi({"value": value}) == peer.packb({"value": value})
    assert_same(peer.unpackb(pack_openpi({"value": value})), {"value": value})
    assert_same(unpack_openpi(peer.packb({"value": value})), {"value": value})


def damaged_openpi() -> Iterator[bytes]:
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


@each_row("message", list(damaged_openpi()), ids=lambda message: message[:60].hex())
def test_damaged_messages_are_refused(message: bytes) -> None:
    with refuses(PolicyError, field=("openpi", "server")):
        unpack_openpi(message)


def test_an_openpi_server_answers() -> None:
    client = pytest.importorskip("websockets.sync.client")
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.full((10, 7), float(observation["observation/state"][0]))}

    observation = as_openpi(observe_padded(), INPUTS, prompt="x")
    with serve_openpi(act) as address, client.connect(address, compression=None, max_size=None) as server:
        assert unpack_openpi(server.recv()) == {"model": "test"}
        server.send(pack_openpi(observation))
        assert unpack_openpi(server.recv())["actions"].shape == (10, 7)
        assert_same(seen[0], observation)
        server.send(pack_openpi({}))
        with refuses(PolicyError, field="KeyError"):
            unpack_openpi(server.recv())


def test_the_client_of_openpi_sends_our_observation() -> None:
    policy = pytest.importorskip("openpi_client.websocket_client_policy")
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.zeros((10, 7))}

    observation = as_openpi(observe_padded(), INPUTS, prompt="x")
    with serve_openpi(act) as address:
        client = policy.WebsocketClientPolicy(address)
        assert client.infer(observation)["actions"].shape == (10, 7)
        client._ws.close()
    assert_same(seen[0], observation)
    assert_same(openpi_unpack(pack_openpi(observation)), observation)


def test_an_observation_has_the_keys_of_lerobot() -> None:
    slots = ObjectSlots(NAMES, SIZE)
    objects = slots.observe(make_frame(make_instance(1, "red mug")), T0)
    observation = as_lerobot(objects, images={"front": RGB}, state=JOINTS)
    assert {key: (value.dtype.name, value.shape) for key, value in observation.items()} == {
        "observation.images.front": ("uint8", (*SIZE, 3)),
        "observation.images.objects_0": ("uint8", (*SIZE, 3)),
        "observation.images.objects_1": ("uint8", (*SIZE, 3)),
        "observation.state": ("float32", (7,)),
        "observation.environment_state": ("float32", (4 * len(FIELDS),)),
    }
    np.testing.assert_array_equal(observation["observation.images.objects_0"][..., 0] > 0, objects.masks[0])


def test_features_describe_the_observation() -> None:
    slots = ObjectSlots(NAMES, SIZE)
    features = lerobot_features(slots)
    observation = as_lerobot(slots.observe())
    assert {key: feature["shape"] for key, feature in features.items()} == {
        key: value.shape for key, value in observation.items()
    }
    names = features["observation.environment_state"]["names"]
    assert len(set(names)) == len(names)
    assert names[0] == "0.red mug.usable"
    assert {feature["dtype"] for feature in lerobot_features(slots, dtype="video").values()} == {
        "video",
        "float32",
    }


POINTS = np.arange(30, dtype=np.float32).reshape(10, 3) / 100
SURE = make_instance(1, "mug")


def poses(count: int) -> np.ndarray:
    """Return poses that are turned about x, each 10 cm above the one before, float32 [count, 4, 4]."""
    found = np.tile(np.diag([1.0, -1.0, -1.0, 1.0]), (count, 1, 1))
    found[:, 2, 3] = np.arange(count) / 10
    return found.astype(np.float32)


def plan(server: str, frame: str = "base", masks: Any = None, seq: int = 5, **options: Any) -> Grasps:
    """Ask for the grasps of object 1 when the node measured points on frame `seq` and publishes `masks`."""
    masks = replace(masks or fresh(SURE), seq=5)
    points = {"id": 1, "camera": "cam0", "epoch": 7, "seq": seq, "frame": frame, "points_m": POINTS.tobytes()}
    with (
        ControlServer(TCP, lambda request: Reply(request.id, points)) as control,
        MaskPublisher(TCP) as publisher,
        PerceptionClient(publisher.endpoint, control.endpoint) as client,
    ):
        wait_until(lambda: publisher.send(masks) and client.newest())
        return client.grasps(1, server=server, **{"max_age_ms": 60_000, **options})


@pytest.mark.verifies(
    "policy", "GraspGen's server", "layout", "a server written from its protocol", "its server with weights"
)
def test_the_best_grasps_of_the_points_come_in_the_base() -> None:
    asked: list[dict[str, Any]] = []

    def answer(message: bytes) -> bytes:
        asked.append(graspgen_unpack(message))
        confidences = np.array([0.2, 0.9, 0.5], np.float32)
        return graspgen_pack({"grasps": poses(3), "confidences": confidences, "num_grasps": 3, "timing": {}})

    with serve(answer) as endpoint:
        found = plan(endpoint, count=2)
    assert (asked[0]["action"], asked[0]["topk_num_grasps"]) == ("infer", 2)
    assert asked[0]["point_cloud"].dtype == np.float32
    np.testing.assert_array_equal(asked[0]["point_cloud"], POINTS)
    np.testing.assert_array_equal(found.base_from_gripper, poses(3)[[1, 2]])
    np.testing.assert_allclose(found.confidences, [0.9, 0.5], rtol=1e-6)
    assert (found.masks.seq, found.masks.capture_ns > T0, found.masks.camera) == (5, True, "cam0")


@each_row(
    ("changes", "field"),
    [
        ({"frame": "camera"}, "spatial.calibration"),
        ({"masks": fresh(replace(SURE, doubtful=True))}, "doubtful"),
        ({"masks": fresh(replace(SURE, state="tentative"))}, "confirmed"),
        ({"masks": fresh(replace(SURE, mask=Mask.empty(FRAME)))}, "hidden"),
        ({"masks": fresh(make_instance(2, "mug"))}, "hidden"),
        ({"masks": replace(fresh(SURE), capture_ns=T0)}, "old"),
        ({"seq": 4}, "4"),
        ({"seq": 6}, "6"),
    ],
)
def test_what_no_gripper_should_act_on_is_refused(changes: dict[str, Any], field: str) -> None:
    with refuses(PolicyError, field=("object 1", field)):  # before the server is asked
        plan("tcp://127.0.0.1:9", timeout_ms=50, **changes)


def test_a_server_that_is_absent_or_fails_is_named() -> None:
    with refuses(NoAnswerError, field="tcp://127.0.0.1:9"):
        plan("tcp://127.0.0.1:9", timeout_ms=50)
    with (
        serve(lambda message: graspgen_pack({"error": "CUDA"})) as endpoint,
        refuses(PolicyError, field="CUDA"),
    ):
        plan(endpoint)


def test_messages_have_the_bytes_of_msgpack_numpy() -> None:
    packed = pack_graspgen(POINTS, 50)
    limits = {"num_grasps": 200, "topk_num_grasps": 50, "min_grasps": 40}
    request = {"action": "infer", "point_cloud": POINTS, **limits}
    assert packed == graspgen_pack(request)
    reply = graspgen_pack({"grasps": poses(0), "confidences": np.zeros(0, np.float32), "took": np.float32(1)})
    assert [len(array) for array in unpack_graspgen(reply, 9)] == [0, 0]
    peer = pytest.importorskip("msgpack_numpy")
    assert packed == msgpack.packb(request, default=peer.encode)
    assert reply == msgpack.packb(graspgen_unpack(reply), default=peer.encode)


GRASPS: dict[str, Any] = {"grasps": poses(2), "confidences": np.ones(2, np.float32)}
DAMAGED_GRASPS = {
    "no map": [1],
    "no grasps": {"confidences": GRASPS["confidences"]},
    "fewer confidences": GRASPS | {"confidences": np.ones(1, np.float32)},
    "integers": GRASPS | {"grasps": poses(2).astype(int)},
    "other sides": GRASPS | {"grasps": poses(2)[:, :3]},
    "not finite": GRASPS | {"grasps": poses(2) * np.nan},
    "a mirror": GRASPS | {"grasps": np.tile(np.diag([1.0, 1, -1, 1]), (2, 1, 1))},
    "a scale": GRASPS | {"grasps": np.tile(np.diag([2.0, 2, 2, 1]), (2, 1, 1))},
    "no last row": GRASPS | {"grasps": np.tile(np.diag([1.0, 1, 1, 0]), (2, 1, 1))},
    "a pickle": GRASPS | {"grasps": np.array([{}], object)},
    "another size": GRASPS | {"grasps": {b"nd": True, b"type": "<f4", b"shape": [1 << 40], b"data": b""}},
    "no shape": GRASPS | {"grasps": {b"nd": True, b"type": "<f4", b"data": b""}},
}


@each_row("reply", DAMAGED_GRASPS.values(), ids=DAMAGED_GRASPS)
def test_damaged_grasps_are_refused(reply: Any) -> None:
    with refuses(PolicyError, field="GraspGen"):
        unpack_graspgen(graspgen_pack(reply), 9)
