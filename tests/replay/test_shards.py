"""Shards are complete or absent after any failed write; the folder store."""

from __future__ import annotations

from pathlib import Path

import pytest

from sam3_node.errors import OutputError, ReplayError
from sam3_node.replay.shards import Cursor, Shards
from sam3_node.replay.store import FolderStore
from sam3_node.wire import pack_masks
from tests.support.recordings import frame_at, make_truth
from tests.support.refuses import refuses


def fill(store: FolderStore, count: int) -> Shards:
    """Add shards of two frames each until there are `count`."""
    parts = Shards(store)
    for number in range(len(parts), count):
        masks = [make_truth(frame_at(seq)) for seq in (2 * number, 2 * number + 1)]
        part = [(frame.camera, pack_masks(frame)[1]) for frame in masks]
        parts.add(part, Cursor(3 * (number + 1), {"frames": 2 * number}), b"state %d" % number)
    return parts


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "out")


def test_masks_come_back_in_order(store: FolderStore) -> None:
    fill(store, 3)
    parts = Shards(store)
    assert len(parts) == 3
    masks = list(parts.masks())
    assert [one.seq for one in masks] == list(range(6))
    assert [one.area for one in masks[4].instances] == [one.area for one in make_truth(frame_at(4)).instances]
    assert parts.cursor() == Cursor(9, {"frames": 4})
    assert parts.checkpoint() == b"state 2"


def test_shards_of_a_backward_pass_are_reversed(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    turning, names = fill(store, 3).masks_backward(), list[str]()
    monkeypatch.setattr(store, "read", lambda name: names.append(name) or FolderStore.read(store, name))
    assert next(turning).seq == 5
    assert names == ["parts/000002.masks"]
    assert [masks.seq for masks in turning] == [4, 3, 2, 1, 0]


def test_only_the_last_state_is_kept(store: FolderStore) -> None:
    parts = fill(store, 3)
    states = [name for name in store.names() if name.endswith(".state")]
    assert states == ["parts/000002.state"]
    parts.finish()
    assert [name for name in store.names() if name.endswith(".state")] == []
    assert len(list(Shards(store).masks())) == 6


def test_the_cursor_of_an_empty_folder_is_zero(store: FolderStore) -> None:
    assert Shards(store).cursor() == Cursor(0, {})
    assert list(Shards(store).masks()) == []


def test_an_unfinished_shard_is_absent(store: FolderStore) -> None:
    fill(store, 2)
    (store.folder / "parts/000002.state").write_bytes(b"newer")
    (store.folder / "parts/000002.masks.unfinished").write_bytes(b"half")
    parts = Shards(store)
    assert len(parts) == 2
    assert parts.checkpoint() == b"state 1"
    fill(store, 3)
    assert [one.seq for one in Shards(store).masks()] == list(range(6))


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:60] + b"X" + data[61:]])
def test_a_damaged_shard_is_an_error(store: FolderStore, damage: object) -> None:
    fill(store, 2)
    path = store.folder / "parts/000001.masks"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with refuses(ReplayError, field="parts/000001.masks"):
        Shards(store).cursor()


def test_a_missing_state_is_an_error(store: FolderStore) -> None:
    fill(store, 1).finish()
    with refuses(ReplayError, field="parts/000000.state"):
        Shards(store).checkpoint()


def test_cleared_shards_are_deleted(store: FolderStore) -> None:
    fill(store, 2).clear()
    assert store.names() == []
    assert len(Shards(store)) == 0


def test_a_store_keeps_values_by_name(store: FolderStore) -> None:
    store.write("a/b", b"1")
    store.write("a/b", b"2")
    store.write("c", b"3")
    assert store.read("a/b") == b"2"
    assert store.names() == ["a/b", "c"]
    assert store.names("a") == ["a/b"]
    assert store.exists("c")
    store.delete("c")
    store.delete("c")
    assert not store.exists("c")
    with pytest.raises(OutputError, match="absent"):
        store.read("absent")


def test_one_writer_at_a_time(store: FolderStore) -> None:
    with store.held():
        with refuses(OutputError, field=("replay", "writes")), FolderStore(store.folder).held():
            pass
        assert store.names() == []
    with FolderStore(store.folder).held():
        pass


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError, match="file"):
        FolderStore(tmp_path / "file" / "out")
