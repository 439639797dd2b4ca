"""Hand-overs that are disturbed at each step: no two nodes ever publish with the same epoch. Real processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import BusyError, RequestError
from sam3_node.types import MaskFrame
from tests.support.health_rig import ask
from tests.support.node_rig import READY_S, Process, Rig, ids, masks_where, until
from tests.support.relay import Relay

HAND_OVER, CONFIRM, CONFIRMED = b"\xa9hand_over", b"\xb1confirm_hand_over", b"\xa9confirmed"
SNAPSHOT = b"\xa8snapshot"
SOON, LATE = {"SNAPSHOT__CONFIRM_S": "1"}, {"SNAPSHOT__CONFIRM_S": "250"}


class Cell:
    """A camera, a node, the place of its taker, and the relay between the two."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.rig.environment |= {"SAM3_SNAPSHOT__EVERY_S": "0.2", "SAM3_CAMERA__FPS": "8"}
        self.rig.camera()
        self.relay = Relay(folder / "relay", folder / "control")
        self._masks, self._control = f"ipc://{folder}/masks2", f"ipc://{folder}/control2"

    def node(self, **settings: str) -> Process:
        """Start the old node."""
        path = self.rig.folder / "node.snapshot"
        path.unlink(missing_ok=True)
        return self.rig.node(SNAPSHOT__PATH=str(path), **settings)

    def taker(self, **settings: str) -> Process:
        """Begin to start the node that takes over through the relay."""
        where = {
            "TRANSPORT__MASKS": self._masks,
            "TRANSPORT__CONTROL": self._control,
            "SNAPSHOT__PATH": str(self.rig.folder / "taker.snapshot"),
        }
        return Process(
            self.rig, ("run", "--restore-from", self.relay.endpoint), {**where, **LATE, **settings}
        )

    def doomed_taker(self, request: bytes, reply: bytes = b"") -> None:
        """Start a taker, and kill it when this request, or the reply to it with this text, is on its way."""
        doomed: list[Process] = []
        self.relay.cut_at(request, reply, then=lambda: doomed[0].process.kill())
        doomed.append(self.taker())
        assert self.relay.was_cut.wait(READY_S), doomed[0].log.read_text()
        doomed[0].process.wait(READY_S)

    def of_taker(self) -> PerceptionClient:
        return PerceptionClient(
            self._masks, self._control, timeout_ms=10_000, on_restart=lambda restart: None
        )

    def of_node(self) -> PerceptionClient:
        return PerceptionClient(
            self.rig.masks, self.rig.control, timeout_ms=10_000, on_restart=lambda restart: None
        )


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    cell = Cell(tmp_path_factory.mktemp("cell"))
    yield cell
    cell.relay.close()
    cell.rig.close()


@pytest.fixture(autouse=True)
def no_earlier_taker(cell: Cell) -> None:
    (cell.rig.folder / "taker.snapshot").unlink(missing_ok=True)


def add_one(client: PerceptionClient) -> MaskFrame:
    masks_where(client, bool, "masks of the camera")
    client.add_object(points=[(100, 100)], label="thing")
    return masks_where(client, lambda masks: len(ids(masks)) == 1, "masks of the object")


def find_hand_over(client: PerceptionClient) -> str:
    return str((client.status()["snapshot"]["hand_over"] or {}).get("state"))


@pytest.mark.parametrize("cut", [(HAND_OVER, SNAPSHOT), (CONFIRM, b"")], ids=["reply", "confirmation"])
def test_a_node_works_on_with_its_ids_if_its_taker_is_killed(cell: Cell, cut: tuple[bytes, bytes]) -> None:
    """The taker is killed before the reply to `hand_over`, or its confirmation, arrives."""
    node = cell.node(**SOON)
    with cell.of_node() as client:
        before = add_one(client)
        cell.doomed_taker(*cut)
        until(lambda: find_hand_over(client) == "expired", "the end of the hand-over")
        paused = client.status()["cameras"]["cam0"]["last_seq"]
        after = masks_where(client, lambda masks: masks.seq > paused, "masks again")
        assert (after.epoch, ids(after)) == (before.epoch, ids(before))
        assert client.add_object(points=[(60, 60)]).id == ids(before)[-1] + 1
    assert "did not confirm in time" in node.log.read_text()
    node.kill()


def test_a_taker_that_is_started_again_continues_and_a_second_one_is_refused(cell: Cell) -> None:
    node = cell.node(HEALTH__BIND="127.0.0.1:0", **LATE)
    with cell.of_node() as client, cell.of_taker() as other:
        before = add_one(client)

        def check(process: Process, count: int) -> None:
            process.next_line()
            masks = masks_where(other, lambda masks: len(ids(masks)) == count, "masks of the taker")
            assert (masks.epoch, ids(masks)[0]) == (before.epoch, ids(before)[0])

        for cut in ((CONFIRM, b""), (CONFIRM, CONFIRMED)):  # killed before, and after the node has confirmed
            cell.doomed_taker(*cut)
            with pytest.raises(
                (BusyError, RequestError), match=r"found that this node (has handed|was handed)"
            ):
                client.add_object(points=[(60, 60)])
            cell.relay.heal()
            taker = cell.taker()
            check(taker, 1)
            if not cut[1]:
                taker.kill()
                (cell.rig.folder / "taker.snapshot").unlink()
                client.resume()
                before = masks_where(client, lambda masks, old=before: masks.epoch != old.epoch, "new epochs")  # type: ignore[misc]
        assert other.add_object(points=[(60, 60)]).id > 1
        saved = other.status()["snapshot"]["saved"]
        until(lambda: other.status()["snapshot"]["saved"] >= saved + 2, "snapshots of the taker")
        taker.kill()
        taker = cell.taker()
        check(taker, 2)
        second = cell.taker(
            **{
                f"{name}": f"ipc://{cell.rig.folder}/{name[-5:]}3"
                for name in ("TRANSPORT__MASKS", "TRANSPORT__CONTROL")
            },
            SNAPSHOT__PATH=str(cell.rig.folder / "second.snapshot"),
        )
        assert second.process.wait(READY_S) == 2
        assert "this node was handed over to " in second.log.read_text()
        assert find_hand_over(client) == "confirmed"
        address = re.search(r"health at (\S+)", node.log.read_text())
        assert address is not None
        status, text = ask(address[1], "/readyz")
        assert (status, "stop this process" in text) == (503, True)
        taker.kill()
    node.kill()


def test_nodes_that_cannot_reach_each_other_publish_with_different_epochs(cell: Cell) -> None:
    """The confirmation is lost on its way: the node works on, and so does the taker."""
    node = cell.node(**SOON)
    with cell.of_node() as client, cell.of_taker() as other:
        before = add_one(client)
        cell.relay.cut_at(CONFIRM)
        taker = cell.taker(**SOON)
        taken = masks_where(other, ids, "masks of the taker")
        until(lambda: find_hand_over(client) == "expired", "the end of the hand-over")
        paused = client.status()["cameras"]["cam0"]["last_seq"]
        after = masks_where(client, lambda masks: masks.seq > paused, "masks of the node")
        assert (after.epoch, ids(after)) == (before.epoch, ids(before))
        assert ids(taken) == ids(before)
        assert taken.epoch != before.epoch
        assert other.status()["snapshot"]["restored"]["ids_continue"] is False
        assert "did not answer the confirmation" in taker.log.read_text()
        taker.kill()
    node.kill()
