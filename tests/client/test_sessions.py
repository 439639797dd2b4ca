"""A policy never takes an object of a restarted node for one that it knows: with sockets, then with a real node."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.client.mask_reader import MAX_CAMERAS, KnownEpochs
from sam3_node.errors import NodeRestarted, RequestError
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import MaskFrame
from sam3_node.wire import Reply, Request
from tests.support.node_rig import Process, Rig, masks_where, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.transport_peer import NOBODY, TCP, make_masks, wait_until


@pytest.fixture
def publisher() -> Iterator[MaskPublisher]:
    with MaskPublisher(TCP) as publisher:
        yield publisher


def send(publisher: MaskPublisher, seq: int, epoch: int | None, camera: str = "cam0") -> None:
    publisher.send(make_masks(seq, camera, epoch=epoch, node=f"node{epoch}"))


def connect(publisher: MaskPublisher, client: PerceptionClient) -> None:
    """Wait until the client gets masks of epoch 1."""
    wait_until(lambda: send(publisher, 0, 1) or client.latest(20))
    while client.latest(100) is not None:
        pass


def latest(client: PerceptionClient) -> MaskFrame:
    masks = client.latest(PATIENCE_MS)
    assert masks is not None
    return masks


def test_another_epoch_is_raised_once_before_its_masks(publisher: MaskPublisher) -> None:
    with PerceptionClient(publisher.endpoint, NOBODY) as client:
        connect(publisher, client)
        send(publisher, 1, 1)
        assert latest(client).epoch == 1
        send(publisher, 2, 2)
        with refuses(NodeRestarted, field=("add", "objects")) as caught:
            latest(client)
        error = caught.value
        assert (error.camera, error.old_epoch, error.new_epoch, error.node) == ("cam0", 1, 2, "node2")
        assert (latest(client).seq, client.latest(50)) == (2, None)
        send(publisher, 3, 2)
        assert latest(client).seq == 3


def test_after_the_error_the_newest_masks_come_and_cameras_are_apart(publisher: MaskPublisher) -> None:
    with PerceptionClient(publisher.endpoint, NOBODY) as client:
        connect(publisher, client)
        send(publisher, 0, 1, "left")
        assert latest(client).camera == "left"
        send(publisher, 2, 2)
        with pytest.raises(NodeRestarted):
            latest(client)
        send(publisher, 3, 2)
        send(publisher, 9, 1, "left")
        seen: dict[str, list[int]] = {"cam0": [], "left": []}
        while not (seen["left"] and 3 in seen["cam0"]):
            masks = latest(client)
            seen[masks.camera].append(masks.seq)
        assert seen in ({"cam0": [3], "left": [9]}, {"cam0": [2, 3], "left": [9]})  # 2, if 3 was on its way
        send(publisher, 10, 3, "left")
        with refuses(NodeRestarted, field=("camera", "left")):
            latest(client)


def test_lossless_delivery_loses_no_masks_by_the_error() -> None:
    with (
        MaskPublisher("tcp://127.0.0.1:*", "every") as publisher,
        PerceptionClient(publisher.endpoint, NOBODY, delivery="every") as client,
    ):
        for seq, epoch in enumerate((1, 2, 2, None)):
            publisher.send(make_masks(seq, epoch=epoch))
        seen: list[int | str] = []
        while len(seen) < 6:
            try:
                seen.append(latest(client).seq)
            except NodeRestarted as error:
                seen.append(f"{error.old_epoch} {error.new_epoch}")
        assert seen == [0, "1 2", 1, 2, "2 None", 3]


def test_a_callback_is_called_instead_and_an_iterator_goes_on(publisher: MaskPublisher) -> None:
    errors: list[NodeRestarted] = []
    with PerceptionClient(publisher.endpoint, NOBODY, on_restart=errors.append) as client:
        connect(publisher, client)
        send(publisher, 1, 2)
        assert latest(client).seq == 1
        assert [error.new_epoch for error in errors] == [2]
    with PerceptionClient(publisher.endpoint, NOBODY) as client:
        connect(publisher, client)
        send(publisher, 1, 2)
        masks = iter(client)
        with pytest.raises(NodeRestarted):
            next(masks)
        assert next(masks).seq == 1
        client.close()
        assert list(masks) == []


def test_the_known_cameras_are_bounded() -> None:
    known = KnownEpochs()
    for number in range(MAX_CAMERAS + 5):
        assert known.meet(f"camera{number}", 1) is None
    known_now = [number for number in range(MAX_CAMERAS + 5) if known.find(f"camera{number}")]
    assert known_now == list(range(5, MAX_CAMERAS + 5))
    assert known.find("camera4") is None
    assert known.find("camera5") == ("camera5", 1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("sessions")) as rig:
        rig.camera()
        yield rig


class Policy:
    """A client that holds the red mug by its id, and a node that is killed and started again."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.node = rig.node()
        self.client = rig.client()
        assert self.client.wait_for_camera(PATIENCE_MS) == "cam0"
        added = self.client.add_object(points=[(160, 120)], label="red mug")
        self.mug = added.id
        self.epoch = added.epoch
        masks_where(self.client, lambda masks: masks.instances, "the mug")

    def restart_with_a_knife(self) -> None:
        """Kill the node. Another client adds an object to the new one, which gets the mug's id."""
        self.node.kill()
        self.node: Process = self.rig.node()
        with self.rig.client() as other:
            other.wait_for_camera(PATIENCE_MS)
            added = other.add_object(points=[(40, 40)], label="knife")
            assert added.id == self.mug
            assert added.epoch != self.epoch
            masks_where(other, lambda masks: masks.instances, "the knife")

    def close(self) -> None:
        self.client.close()
        self.node.kill()


@pytest.fixture
def policy(rig: Rig) -> Iterator[Policy]:
    policy = Policy(rig)
    yield policy
    policy.close()


def test_a_policy_learns_of_the_restart_before_it_sees_the_new_object(policy: Policy) -> None:
    policy.restart_with_a_knife()
    seen: list[MaskFrame] = []
    with pytest.raises(NodeRestarted) as caught:
        until(lambda: seen.append(latest(policy.client)), "the restart")
    assert all(masks.epoch == policy.epoch for masks in seen)
    assert {instance.label for masks in seen for instance in masks.instances} <= {"red mug"}
    masks = masks_where(policy.client, lambda masks: masks.instances, "the knife")
    assert masks.instances[0].label == "knife"
    assert (masks.epoch, masks.node) == (caught.value.new_epoch, caught.value.node)
    status = policy.client.status()
    assert (status["node"], status["cameras"]["cam0"]["epoch"]) == (masks.node, masks.epoch)
    (listed,) = policy.client.list_objects()
    assert (listed.label, listed.epoch) == ("knife", masks.epoch)


def test_an_id_of_the_earlier_session_is_refused(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with refuses(NodeRestarted, field=str(policy.epoch)) as caught:
        policy.client.refine_object(policy.mug, points=[(10, 10)])
    assert (caught.value.camera, caught.value.old_epoch) == ("cam0", policy.epoch)
    # the error has told the policy: from here on, ids are those of the new session
    (knife,) = policy.client.list_objects()
    assert knife.label == "knife"
    assert policy.client.add_object(points=[(80, 80)], label="red mug").id != knife.id


def test_no_request_takes_an_old_id_for_a_new_one(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.remove_object(policy.mug)
    with policy.rig.client() as other:
        assert [known.label for known in other.list_objects()] == ["knife"]


def test_objects_are_added_to_the_session_that_the_policy_knows(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.add_object(points=[(160, 120)])
    assert [known.label for known in policy.client.list_objects()] == ["knife"]
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.list_objects()
    assert [known.label for known in policy.client.list_objects()] == ["knife"]


def test_masks_of_an_ended_epoch_are_not_returned(publisher: MaskPublisher) -> None:
    """They waited in the client when the node refused the id of that epoch."""
    refused: list[dict[str, Any]] = []

    def refuse(request: Request) -> Reply:
        refused.append(request.args)
        return Reply.failed(request.id, NodeRestarted("ids of epoch 1 are void"))

    with (
        ControlServer("tcp://127.0.0.1:*", refuse) as control,
        PerceptionClient(publisher.endpoint, control.endpoint) as client,
    ):
        connect(publisher, client)
        send(publisher, 5, 1)
        with refuses(NodeRestarted, field=("1", "void")):
            client.remove_object(1)
        assert refused == [{"id": 1, "camera": "cam0", "epoch": 1}]
        send(publisher, 6, 1)
        assert client.latest(200) is None
        send(publisher, 7, 2)
        assert latest(client).seq == 7


def test_an_object_of_several_cameras_needs_the_name_of_one(publisher: MaskPublisher) -> None:
    with PerceptionClient(publisher.endpoint, NOBODY) as client:
        connect(publisher, client)
        send(publisher, 0, 1, "left")
        assert latest(client).camera == "left"
        with refuses(RequestError, field="cam0"):
            client.refine_object(1, points=[(1, 1)])


def test_with_a_callback_objects_are_added_to_the_new_session(rig: Rig, tmp_path: Path) -> None:
    errors: list[NodeRestarted] = []
    node = rig.node()
    with PerceptionClient(rig.masks, rig.control, timeout_ms=PATIENCE_MS, on_restart=errors.append) as client:
        client.wait_for_camera(PATIENCE_MS)
        before = client.add_object(points=[(160, 120)])
        node.kill()
        node = rig.node()
        with rig.client() as other:
            other.wait_for_camera(PATIENCE_MS)
        after = client.add_object(points=[(160, 120)])
        assert after.id == before.id == 1
        assert after.epoch != before.epoch
        assert [error.old_epoch for error in errors] == [before.epoch]
        masks_where(client, lambda masks: masks.epoch == after.epoch, "masks")
        assert len(errors) == 1
    node.kill()
