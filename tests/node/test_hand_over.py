"""Hand-overs that are disturbed at each step: no two nodes ever publish with the same epoch. Real processes."""

import contextlib
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import BusyError, RequestError, SnapshotError
from sam3_node.node import take_over
from sam3_node.node.operations import handle_request
from sam3_node.node.saved_state import Snapshots
from sam3_node.node.take_over import restore_at_start
from sam3_node.perception.perception import Perception
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import MaskFrame
from sam3_node.wire.frame_prompt import FramePrompt
from sam3_node.wire.requests import read_operation
from tests.node.test_warm_restart import keeper, served, with_object
from tests.support.near_node import ask
from tests.support.node_rig import Process, Rig, ids, masks_where, picture, until, unworried_client
from tests.support.patience import PATIENCE_S
from tests.support.refuses import refuses
from tests.support.threads import repeating

HAND_OVER = b"\xa9hand_over"
CONFIRM = b"\xb1confirm_hand_over"
CONFIRMED = b"\xa9confirmed"
SNAPSHOT = b"\xa8snapshot"
SOON = {"SNAPSHOT__CONFIRM_S": "1"}
LATE = {"SNAPSHOT__CONFIRM_S": "250"}


class Relay:
    """A relay of ipc:// connections that is cut at a chosen message, as a network may be.

    It listens at `path`, and forwards each connection to `target`, both directions, until it is cut. Close ends it.

    While it is cut, nothing passes and no peer can connect. `cut_at` waits for a text in what clients send, or, with
    `reply`, for the request to pass and then for the text in what they receive. The message with the last text is not
    delivered, and `then` is called.
    """

    def __init__(self, path: Path, target: Path) -> None:
        self.endpoint = f"ipc://{path}"
        self._target = str(target)
        self._lock = threading.Lock()
        self._request = b""
        self._reply = b""
        self._then: Callable[[], object] = lambda: None
        self._has_passed = False
        self._open: list[socket.socket] = []
        self._is_cut = False
        self.was_cut = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_at(self, request: bytes, reply: bytes = b"", then: Callable[[], object] = lambda: None) -> None:
        """Connect again, and cut at the next message with this text."""
        with self._lock:
            self._is_cut = False
            self.was_cut.clear()
            self._request = request
            self._reply = reply
            self._then = then
            self._has_passed = False

    def heal(self) -> None:
        """Forward everything again."""
        self.cut_at(b"")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                node = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                with self._lock:
                    self._open += [client, node]
                    is_cut = self._is_cut
                try:
                    node.connect(self._target)
                except OSError:
                    is_cut = True
                if is_cut:
                    client.close()
                    node.close()
                    continue
                for ends in ((client, node, False), (node, client, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_reply: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self._lock:
                    if self._is_cut:
                        break
                    if self._is_last(data, is_reply):
                        self._is_cut = True
                        self._then()
                        self.was_cut.set()
                        break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if self._is_cut:
            self._drop_all()

    def _is_last(self, data: bytes, is_reply: bool) -> bool:
        if not is_reply and self._request and self._request in data:
            self._has_passed = True
            return not self._reply
        return is_reply and self._has_passed and self._reply in data

    def _drop_all(self) -> None:
        with self._lock:
            ends = self._open
            self._open = []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Cell:
    """A camera, a node, the place of its taker, and the relay between the two."""

    def __init__(self, folder: Path) -> None:
        self.rig = Rig(folder)
        self.rig.environment |= {"SAM3_SNAPSHOT__EVERY_S": "0.2", "SAM3_CAMERA__FPS": "8"}
        self.rig.camera()
        self.relay = Relay(folder / "relay", folder / "control")
        self._masks = f"ipc://{folder}/masks2"
        self._control = f"ipc://{folder}/control2"

    def node(self, **settings: str) -> Process:
        """Start the old node."""
        path = self.rig.folder / "node.snapshot"
        path.unlink(missing_ok=True)
        return self.rig.node(SNAPSHOT__PATH=str(path), **settings)

    def taker(self, **settings: str) -> Process:
        """Begin to start the node that takes over through the relay."""
        where = {"TRANSPORT__MASKS": self._masks, "TRANSPORT__CONTROL": self._control}
        where["SNAPSHOT__PATH"] = str(self.rig.folder / "taker.snapshot")
        return self.rig.launch("run", "--restore-from", self.relay.endpoint, **(where | LATE | settings))

    def doomed_taker(self, request: bytes, reply: bytes = b"") -> None:
        """Start a taker, and kill it when this request, or the reply to it with this text, is on its way."""
        doomed: list[Process] = []
        self.relay.cut_at(request, reply, then=lambda: doomed[0].process.kill())
        doomed.append(self.taker())
        assert self.relay.was_cut.wait(PATIENCE_S), doomed[0].log.read_text()
        doomed[0].process.wait(PATIENCE_S)

    def of_taker(self) -> PerceptionClient:
        return unworried_client(self._masks, self._control)

    def of_node(self) -> PerceptionClient:
        return unworried_client(self.rig.masks, self.rig.control)


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    cell = Cell(tmp_path_factory.mktemp("cell"))
    yield cell
    cell.relay.close()
    cell.rig.close()


@pytest.fixture(autouse=True)
def no_earlier_taker(cell: Cell) -> None:
    (cell.rig.folder / "taker.snapshot").unlink(missing_ok=True)


class OldNode:
    """The control socket of a node of one object in this process."""

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.endpoint = f"ipc://{folder}/old"
        self.perception = with_object()
        self.snapshots = keeper(folder / "old.snapshot", self.perception)
        self._server = opened.enter_context(ControlServer(self.endpoint))
        opened.callback(self.snapshots.close)
        opened.enter_context(repeating(self._serve))

    def _serve(self) -> None:
        received = self._server.receive(20)
        if received is None:
            self.snapshots.tick()
            return
        peer, request = received
        self._server.reply(peer, handle_request(self, request))  # snapshot operations use `snapshots` only

    def find_state(self) -> str:
        return str((self.snapshots.describe()["hand_over"] or {}).get("state"))


@pytest.fixture
def old(tmp_path: Path) -> Iterator[OldNode]:
    with ExitStack() as opened:
        yield OldNode(tmp_path, opened)


def start(path: Path, source: str, max_age_s: float = 60.0) -> tuple[Snapshots, Perception]:
    """Start a node that keeps its snapshot at a path."""
    perception = served()
    node = keeper(path, perception, max_age_s)
    restore_at_start(node, source)
    return node, perception


def list_ids(perception: Perception) -> list[int]:
    return [status.id for pipeline in perception.pipelines.values() for status in pipeline.objects]


def find_epoch(perception: Perception) -> int | None:
    return perception.pipelines["cam1"].epoch


def test_a_taker_that_was_away_for_too_long_starts_without_objects(old: OldNode, tmp_path: Path) -> None:
    """It would never start otherwise, as the old node does not hand over twice."""
    node, taken = start(tmp_path / "new.snapshot", old.endpoint)
    node.close()
    assert (list_ids(taken), find_epoch(taken)) == ([1], find_epoch(old.perception))
    node, late = start(tmp_path / "new.snapshot", old.endpoint, max_age_s=1e-6)
    assert list_ids(late) == []
    assert "expected a snapshot of the last" in node.describe()["refused"]
    late.serve("cam1")
    node.close()
    node, again = start(tmp_path / "new.snapshot", old.endpoint)
    node.close()
    assert find_epoch(again) == find_epoch(late) != find_epoch(taken)
    assert old.find_state() == "confirmed"
    with refuses(RequestError, field="handed"):
        start(tmp_path / "third.snapshot", old.endpoint)


def test_a_taker_that_cannot_keep_the_state_lets_the_old_node_work_on_at_once(
    old: OldNode, tmp_path: Path
) -> None:
    (tmp_path / "new.snapshot.unfinished").mkdir()  # no file can be written there
    with refuses(SnapshotError, field="written"):
        start(tmp_path / "new.snapshot", old.endpoint)
    assert old.find_state() == "cancelled"
    assert not old.perception.paused


def test_a_taker_of_a_hand_over_that_is_past_takes_over_again(
    old: OldNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was killed before it confirmed. Meanwhile the old node has been taken over by another one, and resumed."""
    with monkeypatch.context() as patch:
        patch.setattr(take_over, "ConfirmHandOver", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            start(tmp_path / "new.snapshot", old.endpoint)
    old.snapshots.take_back()
    start(tmp_path / "other.snapshot", old.endpoint)[0].close()
    old.snapshots.take_back()
    epoch = find_epoch(old.perception)
    node, taken = start(tmp_path / "new.snapshot", old.endpoint)
    node.close()
    assert (list_ids(taken), find_epoch(taken)) == ([1], epoch)
    assert old.find_state() == "confirmed"


def test_a_file_is_continued_once(old: OldNode, tmp_path: Path) -> None:
    """A supervisor repeats the command. The second start must not give the ids of the first again."""
    file = tmp_path / "copy"
    old.snapshots.save()
    file.write_bytes((tmp_path / "old.snapshot").read_bytes())
    node, first = start(tmp_path / "new.snapshot", str(file))
    first.pipelines["cam1"].step(picture(1))
    first.pipelines["cam1"].add(FramePrompt(points=[(20, 20)]), "another", 1)
    node.close()
    file.unlink()
    node, second = start(tmp_path / "new.snapshot", str(file))
    node.close()
    assert list_ids(second) == list_ids(first)
    assert find_epoch(second) == find_epoch(first)
    with refuses(SnapshotError, field="snapshot"):
        start(tmp_path / "third.snapshot", str(file))


def test_a_taker_may_not_name_itself_over_several_lines() -> None:
    for taker in ("", "a\nb", "\x1b[2J", "x" * 201):
        with refuses(RequestError, field=("taker", "1", "200")):
            read_operation("hand_over", {"taker": taker, "token": "t"})


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
            handed = r"found that this node (has handed|was handed)"
            with pytest.raises((BusyError, RequestError), match=handed):
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
        others = {
            name: f"ipc://{cell.rig.folder}/{name}3" for name in ("TRANSPORT__MASKS", "TRANSPORT__CONTROL")
        }
        second = cell.taker(**others, SNAPSHOT__PATH=str(cell.rig.folder / "second.snapshot"))
        assert second.process.wait(PATIENCE_S) == 2
        assert "this node was handed over to " in second.log.read_text()
        assert find_hand_over(client) == "confirmed"
        (address,) = re.findall(r"health at (\S+)", node.log.read_text())
        status, text = ask(address, "/readyz")
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
