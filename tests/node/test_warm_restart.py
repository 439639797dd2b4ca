"""Nodes that are killed and started again, and nodes that take over from others: real processes and sockets."""

import functools
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from sam3_node.client import PerceptionClient
from sam3_node.errors import NodeRestarted, RequestError, SettingsError, SnapshotError
from sam3_node.node import saved_state
from sam3_node.node.saved_state import Snapshots
from sam3_node.node.status import CameraStats
from sam3_node.node.take_over import restore_at_start
from sam3_node.perception.identity import LiveIdentity
from sam3_node.perception.perception import Perception
from sam3_node.perception.snapshot import ID_BLOCK, Snapshot
from sam3_node.settings import ModelSettings, Settings, SnapshotSettings, TrackerSettings
from sam3_node.types import MaskFrame
from sam3_node.wire import RESTORED
from sam3_node.wire.frame_prompt import FramePrompt
from tests.support.hostility import link_to_device, make_pipe
from tests.support.node_rig import Rig, ids, masks_where, picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

OFTEN = {"SNAPSHOT__EVERY_S": "0.1"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig")) as rig:
        rig.environment["SAM3_SNAPSHOT__PATH"] = str(rig.folder / "node.snapshot")
        rig.camera()
        yield rig


@pytest.fixture
def path(rig: Rig) -> Path:
    path = rig.folder / "node.snapshot"
    path.unlink(missing_ok=True)
    return path


def add_two(client: PerceptionClient) -> MaskFrame:
    masks_where(client, bool, "masks of the camera")
    for points in ([(100, 100)], [(200, 120)]):
        client.add_object(points=points, label="thing")
    return masks_where(client, lambda masks: len(ids(masks)) == 2, "masks of both")


def wait_for_snapshot(client: PerceptionClient) -> None:
    """Wait for a snapshot that was begun after everything before this call."""
    count = client.status()["snapshot"]["saved"]
    until(lambda: client.status()["snapshot"]["saved"] >= count + 2, "two more snapshots")


def masks_after(client: PerceptionClient, before: MaskFrame) -> MaskFrame:
    return masks_where(client, lambda masks: masks.node != before.node, "masks of the new process")


def test_a_node_that_is_killed_or_stopped_continues_its_ids_and_epochs(rig: Rig, path: Path) -> None:
    node = rig.node(**OFTEN)
    with rig.client() as client:
        before = add_two(client)
        wait_for_snapshot(client)
        last = client.add_object(points=[(50, 50)], label="given after the snapshot, maybe").id
        node.kill()
        node = rig.node(SNAPSHOT__EVERY_S="1000")
        after = masks_after(client, before)
        assert after.epoch == before.epoch
        assert ids(after)[:2] == ids(before)
        assert all(new.age > old.age for new, old in zip(after.instances, before.instances, strict=False))
        client.remove_object(ids(before)[0])
        new = client.add_object(points=[(60, 60)]).id
        assert new > ID_BLOCK > last
        status = client.status()
        assert status["snapshot"]["restored"]["ids_continue"] is True
        assert status["cameras"]["cam0"]["stepped"] > 2
        shown = masks_where(client, lambda masks: new in ids(masks), "masks of the new object")
        assert node.terminate() == 0
        node = rig.node()
        stopped = masks_after(client, shown)
        assert (stopped.epoch, ids(stopped)) == (shown.epoch, ids(shown))
        node.kill()


def test_snapshots_by_name_and_another_node_that_takes_over(rig: Rig, path: Path) -> None:
    node = rig.node(**OFTEN)
    places = {f"TRANSPORT__{name}": f"ipc://{rig.folder}/{name}2" for name in ("MASKS", "CONTROL")}
    taken = {**places, "SNAPSHOT__PATH": str(rig.folder / "second.snapshot"), **OFTEN}
    with (
        rig.client() as client,
        PerceptionClient(
            taken["TRANSPORT__MASKS"], taken["TRANSPORT__CONTROL"], timeout_ms=PATIENCE_MS
        ) as other,
    ):
        named = restore_by_name(rig.folder, client, add_two(client))
        with refuses(SnapshotError, field=("tracker.bank_size", "7")):
            restore_at_start(keeper(rig.folder / "unused.snapshot", bank_size=9), rig.control)
        assert client.status()["snapshot"]["handed_over"] is False
        before = masks_where(client, lambda masks: masks.seq > named.seq, "masks of the first node")
        assert (before.epoch, ids(before)) == (named.epoch, ids(named))
        second = rig.start("run", "--restore-from", rig.control, **taken)
        after = masks_where(other, bool, "masks of the second node")
        assert (after.epoch, ids(after)) == (before.epoch, ids(before))
        status = client.status()
        assert status["snapshot"]["handed_over"] is True
        assert status["paused"] is True
        assert other.add_object(points=[(60, 60)]).id == 3
        wait_for_snapshot(other)
        second.kill()
        third = rig.start("run", "--restore-from", rig.control, **taken)
        again = masks_after(other, after)
        assert (again.epoch, ids(again)) == (before.epoch, [1, 2, 3])
        third.kill()
        client.resume()
        with refuses(NodeRestarted, field="begun"):
            masks_where(client, lambda masks: masks.epoch != before.epoch, "masks of new epochs")
    node.kill()


def restore_by_name(folder: Path, client: PerceptionClient, before: MaskFrame) -> MaskFrame:
    """Save, restore and refuse by name; return the masks afterwards."""
    saved = client.snapshot("two-things")
    assert (folder / "two-things.snapshot").stat().st_size == saved.size
    assert len(client.fetch_snapshot()) > 1000
    client.reset()
    masks_where(client, lambda masks: not ids(masks), "no objects")
    client.restore("two-things")
    with refuses(NodeRestarted, field="begun"):
        masks_where(client, lambda masks: masks.epoch != before.epoch, "masks of the restored objects")
    named = masks_where(client, ids, "masks of both")
    assert ids(named) == ids(before)
    with refuses(RequestError, field="other"):
        client.restore("other")
    for name in ("", "../x", "a.b", "node", "x" * 65):
        with refuses(RequestError, field=("1", "64", "letters")):
            client.snapshot(name)
    (folder / "two-things.snapshot").write_bytes(b"other")
    with refuses(SnapshotError, field=("snapshot", "begins")):
        client.restore("two-things")
    return named


def keeper(
    path: Path,
    perception: Perception | None = None,
    max_age_s: float = 60.0,
    publish_event: Callable[[str, dict[str, Any]], None] = lambda op, args: None,
    **tracker: Any,
) -> Snapshots:
    """The snapshots of a node in this process."""
    perception = perception or served(**tracker)
    stats = {camera: CameraStats() for camera in perception.pipelines}
    output: Any = SimpleNamespace(stats=stats, publish_event=publish_event)
    return Snapshots(SnapshotSettings(path=path, every_s=1000, max_age_s=max_age_s), perception, output)


tiny_tracker = functools.cache(tiny_model)


def served(**tracker: Any) -> Perception:
    settings = Settings(model=ModelSettings(device="cpu"), tracker=TrackerSettings(**tracker))
    perception = Perception(settings, tiny_tracker(), None)
    perception.session = LiveIdentity(lambda _: 0.0, 0.0, live=True)
    return perception


def with_object() -> Perception:
    perception = served()
    pipeline = perception.serve("cam1")
    pipeline.step(picture(0))
    pipeline.add(FramePrompt(points=[(30, 30)]), "thing", 0)
    return perception


def until_told(node: Snapshots, what: str) -> None:
    """Let a node tick until it describes an error, or a saved snapshot."""
    until(lambda: (node.tick(), node.describe()[what])[1], what)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The file of a node that was killed."""
    keeper(tmp_path / "a.snapshot", with_object()).close()
    return tmp_path / "a.snapshot"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bank_size": 9}, "tracker.bank_size 9; found one with tracker.bank_size 7"),
        ({"max_age_s": 1e-6}, "expected a snapshot of the last 1e-06 s"),
        ({}, "damaged or truncated"),
    ],
    ids=["settings", "age", "damage"],
)
def test_a_snapshot_that_cannot_be_used_is_put_aside_and_told(
    saved: Path, settings: dict[str, Any], reason: str
) -> None:
    if not settings:
        saved.write_bytes(saved.read_bytes()[:-1])
    content = saved.read_bytes()
    node = keeper(saved, **settings)
    restore_at_start(node, None)
    assert reason in node.describe()["refused"]
    assert not saved.exists()
    assert saved.with_name("a.snapshot.refused").read_bytes() == content
    with pytest.raises(SnapshotError):
        restore_at_start(keeper(saved, **settings), str(saved))


def write_wrong_value(path: Path) -> None:
    """Write a snapshot with a right digest whose value every status would stumble over."""
    snapshot = Snapshot.unpack(path.read_bytes(), "saved")
    prompts = snapshot.state["prompts"] | {"priorities": {"mug": math.nan}}
    path.write_bytes(replace(snapshot, state=snapshot.state | {"prompts": prompts}).pack())


@pytest.mark.parametrize("harm", [write_wrong_value, link_to_device, make_pipe])
def test_the_start_after_a_refused_snapshot_is_a_good_one(saved: Path, harm: Callable[[Path], None]) -> None:
    """A supervisor starts a node again and again: what is refused once must not be met at each start."""
    if harm is not write_wrong_value:
        saved.unlink()
    harm(saved)
    first = keeper(saved)
    restore_at_start(first, None)
    assert "expected" in first.describe()["refused"]
    assert first.figures().is_refused
    assert not os.path.lexists(saved)
    first.close()
    second = keeper(saved)
    restore_at_start(second, None)
    assert second.describe()["refused"] is None
    assert second.restored is not None


@pytest.mark.parametrize("same_boot", [True, False])
@pytest.mark.parametrize("hours", [5, -5])
def test_a_clock_that_was_set_does_not_change_the_age_since_the_same_boot(
    saved: Path, monkeypatch: pytest.MonkeyPatch, hours: int, same_boot: bool
) -> None:
    now_ns = time.time_ns() + hours * 3600 * 10**9
    monkeypatch.setattr("sam3_node.perception.snapshot.time.time_ns", lambda: now_ns)
    if not same_boot:
        other = saved.parent / "boot_id"
        other.write_text("another")
        monkeypatch.setattr("sam3_node.perception.snapshot.BOOT_ID", other)
    node = keeper(saved)
    restore_at_start(node, None)
    if same_boot:
        assert node.describe()["refused"] is None
        return
    assert ("s ago" if hours > 0 else "s ahead of this clock") in node.describe()["refused"]


@contextmanager
def as_nobody() -> Iterator[None]:
    """Be a user without rights, where this one may become another."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("closed", ["file", "folder"])
def test_a_snapshot_that_may_not_be_read_keeps_no_node_from_starting(saved: Path, closed: str) -> None:
    (saved if closed == "file" else saved.parent).chmod(0)
    with as_nobody():
        node = keeper(saved, with_object())
        restore_at_start(node, None)
        node.tick()
        until_told(node, "error")
        age_s = node.age_s
        node.close()
    saved.parent.chmod(0o755)
    assert node.failed["not_permitted"] >= 1
    assert node.describe()["saved"] == 0
    assert age_s > 0


def test_a_full_disk_leaves_the_last_snapshot_and_is_counted(saved: Path) -> None:
    """A limit of the size of files is what this process can have of a full disk."""
    node = keeper(saved, with_object())
    content = saved.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        node.tick()
        until_told(node, "error")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in node.describe()["error"]
    assert node.failed["no_space"] == 1
    assert saved.read_bytes() == content
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    node.save()
    assert node.describe()["error"] is None
    assert node.describe()["saved"] == 1
    node.close()


def test_a_snapshot_that_cannot_be_put_aside_keeps_no_node_from_starting(saved: Path) -> None:
    saved.write_bytes(b"other")
    (saved.parent / "a.snapshot.refused" / "something").mkdir(parents=True)
    node = keeper(saved)
    restore_at_start(node, None)
    assert "begins with" in node.describe()["refused"]
    node.close()
    assert saved.read_bytes().startswith(b"SAM3SNAP")


def test_a_folder_is_no_snapshot_and_stays_where_it_is(tmp_path: Path) -> None:
    with refuses(SettingsError, field="snapshot.path"):
        keeper(tmp_path)
    assert tmp_path.is_dir()


def test_a_file_of_a_killed_node_is_restored_by_name(saved: Path, tmp_path: Path) -> None:
    perception = served()
    restore_at_start(keeper(tmp_path / "own.snapshot", perception), str(saved))
    assert [status.id for status in perception.pipelines["cam1"].objects] == [1]
    with refuses(SnapshotError, field=("snapshot", "file")):
        restore_at_start(keeper(tmp_path / "own.snapshot"), str(tmp_path / "absent"))


def test_a_snapshot_of_void_ids_is_never_restored(saved: Path) -> None:
    """A camera that is dropped, or a node that has handed over, leaves no file from which its epochs would go on."""
    node = keeper(saved, with_object())
    node.withdraw()
    assert not saved.exists()
    node.tick()
    until_told(node, "saved")
    assert saved.exists()
    node.hand_over(None, "")
    assert not saved.exists()
    node.tick()
    node.close()
    assert not saved.exists()
    with refuses(RequestError, field=("node", "process")):
        node.hand_over(None, "")


def test_a_folder_that_cannot_be_written_is_told_and_ids_stay_safe(saved: Path) -> None:
    perception = with_object()
    node = keeper(saved, perception)
    registry = perception.pipelines["cam1"].registry
    node.tick()
    until_told(node, "saved")
    limit = registry.id_limit
    (saved.parent / f"{saved.name}.unfinished").mkdir()  # so that no file can be written there
    registry.last_id = limit - 10
    until_told(node, "error")
    assert "could not be written" in node.describe()["error"]
    assert not saved.exists()
    assert registry.id_limit is None
    node.close()


def test_the_event_of_a_restore_names_the_snapshot(saved: Path) -> None:
    events = list[tuple[str, dict[str, Any]]]()
    node = keeper(saved, publish_event=lambda op, args: events.append((op, args)))
    restore_at_start(node, None)
    ((op, args),) = events
    assert op == RESTORED
    assert len(args["sha256"]) == 64
    assert (args["ids_continue"], list(args["cameras"])) == (True, ["cam1"])


def test_a_request_reads_only_its_own_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = keeper(tmp_path / "a.snapshot", with_object())
    number = node.begin()
    until(lambda: node.read(number, 0).ready, "a packed snapshot")
    part = node.read(number, 10)
    assert (part.size, part.ready) == (len(part.data or b"") + 10, True)
    assert node.read(number, 1 << 60).data == b""
    with refuses(RequestError, field="kept"):
        node.read(number + 1, 0)
    node.tick()
    assert node.read(number, 10) == part, "it is kept for a while"
    monkeypatch.setattr(saved_state, "KEEP_S", -1.0)  # nobody has read it for longer
    node.tick()
    with refuses(RequestError, field="kept"):
        node.read(number, 0)
    node.close()
