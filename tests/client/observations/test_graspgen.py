"""Grasps of a GraspGen server: who is asked, what is refused, and its messages, held to msgpack_numpy's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest

from sam3_node.client import Grasps, PerceptionClient
from sam3_node.client.observations.policies import pack_graspgen, unpack_graspgen
from sam3_node.errors import NoAnswerError, PolicyError
from sam3_node.transport import ControlServer, MaskPublisher
from sam3_node.types import Mask
from sam3_node.wire import Reply
from tests.support.observations import FRAME, T0, fresh, make_instance
from tests.support.policy_servers import graspgen_pack, graspgen_unpack, serve
from tests.support.refuses import refuses
from tests.support.transport_peer import wait_until

TCP = "tcp://127.0.0.1:*"
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


@pytest.mark.parametrize(
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


GOOD: dict[str, Any] = {"grasps": poses(2), "confidences": np.ones(2, np.float32)}
DAMAGED = {
    "no map": [1],
    "no grasps": {"confidences": GOOD["confidences"]},
    "fewer confidences": GOOD | {"confidences": np.ones(1, np.float32)},
    "integers": GOOD | {"grasps": poses(2).astype(int)},
    "other sides": GOOD | {"grasps": poses(2)[:, :3]},
    "not finite": GOOD | {"grasps": poses(2) * np.nan},
    "a mirror": GOOD | {"grasps": np.tile(np.diag([1.0, 1, -1, 1]), (2, 1, 1))},
    "a scale": GOOD | {"grasps": np.tile(np.diag([2.0, 2, 2, 1]), (2, 1, 1))},
    "no last row": GOOD | {"grasps": np.tile(np.diag([1.0, 1, 1, 0]), (2, 1, 1))},
    "a pickle": GOOD | {"grasps": np.array([{}], object)},
    "another size": GOOD | {"grasps": {b"nd": True, b"type": "<f4", b"shape": [1 << 40], b"data": b""}},
    "no shape": GOOD | {"grasps": {b"nd": True, b"type": "<f4", b"data": b""}},
}


@pytest.mark.parametrize("reply", DAMAGED.values(), ids=DAMAGED)
def test_damaged_replies_are_refused(reply: Any) -> None:
    with refuses(PolicyError, field="GraspGen"):
        unpack_graspgen(graspgen_pack(reply), 9)
