"""Stores and recordings at URLs; shards are complete or absent after any failed write."""

import io
import logging
import logging.handlers
import queue
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem

from sam3_node.errors import BagError, MissingExtraError, OutputError, ReplayError
from sam3_node.replay import store as store_module
from sam3_node.replay.completion import StoppedError
from sam3_node.replay.job import Job
from sam3_node.replay.outputs.output import Sources
from sam3_node.replay.outputs.write import write_outputs
from sam3_node.replay.run import PerceptionCache, compare_job, read_finished_summary, run_job
from sam3_node.replay.shards import FIRST_PASS, Cursor, ShardLimits, Shards
from sam3_node.replay.store import LOCK, FolderStore, HeldError, UrlStore, local_bag, open_store
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import pack_masks
from tests.support.hostility import MEGABYTE, limited_memory
from tests.support.live import record_edits, stop_after, tiny_settings
from tests.support.recordings import frame_at, make_truth
from tests.support.refuses import mentions, refuses


@pytest.fixture
def url() -> Iterator[str]:
    name = f"/{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    memory = fsspec.filesystem("memory")
    if memory.exists(name):
        memory.rm(name, recursive=True)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def held_folders(temporary: Path) -> list[Path]:
    return [path for path in temporary.glob("sam3-node-*/*") if path.is_dir()]


@pytest.mark.parametrize("kind", ["folder", "URL"])
def test_values_are_kept_listed_and_deleted(url: str, tmp_path: Path, kind: str) -> None:
    place = str(tmp_path / "out/") if kind == "folder" else f"{url}/out/"
    store = open_store(place)
    assert store.names() == []
    assert not store.exists("a/1")
    for name in ("a/2", "a/1", "b"):
        store.write(name, name.encode())
    store.write("a/1", b"new")
    assert store.read("a/1") == b"new"
    assert store.exists("a/1")
    assert not store.exists("a")
    assert store.names() == ["a/1", "a/2", "b"]
    assert store.names("a") == ["a/1", "a/2"]
    store.delete("a/1")
    store.delete("a/1")
    assert open_store(place.rstrip("/")).names() == ["a/2", "b"]
    with refuses(OutputError, field="a/1"):
        store.read("a/1")


def test_kept_files_and_folders_replace_older_ones(url: str) -> None:
    store = UrlStore(url)
    for names in (["0.png", "1.png"], ["0.png"]):
        with store.held():
            folder = store.folder
            (folder / "png" / "left").mkdir(parents=True)
            for name in names:
                (folder / "png" / "left" / name).write_bytes(name.encode())
            (folder / "masks.mcap").write_bytes(b"masks")
            store.keep([folder / "png", folder / "masks.mcap"])
        assert store.names() == ["masks.mcap", *(f"png/left/{name}" for name in names)]
        assert not folder.exists()
    assert store.read("png/left/0.png") == b"0.png"


def test_the_last_holder_writes(url: str) -> None:
    first = UrlStore(url)
    second = UrlStore(url)
    with first.held():
        first.write("a", b"first")
        with second.held():
            second.write("a", b"second")
            with refuses(OutputError, field=("replay", "writes")):
                first.write("a", b"first")
        with refuses(OutputError, field=("replay", "writes")):
            first.write("a", b"first")
    with second.held():
        second.write("b", b"second")
    assert second.names() == ["a", "b"]
    assert second.read("a") == b"second"


def test_a_path_and_a_file_url_are_folders(tmp_path: Path) -> None:
    for place in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        store = open_store(place)
        assert isinstance(store, FolderStore)
        assert store.folder == tmp_path / "a b"
        with store.held(), pytest.raises(HeldError), open_store(place).held():
            pass


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [("nowhere://a/b", ReplayError, "nowhere"), ("abfs://a/b", MissingExtraError, "adlfs")],
)
def test_an_unknown_protocol_is_an_error(url: str, error: type[Exception], text: str) -> None:
    with refuses(error, field=text):
        open_store(url)


def test_a_recording_is_copied_and_the_copy_removed(url: str, tmp_path: Path, temporary: Path) -> None:
    store = UrlStore(url)
    store.write("bags/a.mcap", b"bytes")
    store.write("bags/folder/1.mcap", b"1")
    store.write("bags/folder/deep/2.mcap", b"2")
    with local_bag(f"{url}/bags/a.mcap") as path:
        assert path.name == "a.mcap"
        assert path.read_bytes() == b"bytes"
    assert not path.exists()
    with local_bag(f"{url}/bags/folder/") as path:
        files = sorted(file.relative_to(path).as_posix() for file in path.rglob("*.mcap"))
        assert files == ["1.mcap", "deep/2.mcap"]
    assert held_folders(temporary) == []
    with local_bag(f"file://{tmp_path}/a.mcap") as path:
        assert path == tmp_path / "a.mcap"
    with refuses(BagError, field="nothing"), local_bag(f"{url}/bags/none.mcap"):
        pass


@pytest.mark.parametrize("name", ["pick[1]", "what?", "a*", "x{y}"])
def test_a_key_is_literal(url: str, name: str) -> None:
    store = UrlStore(url)
    for recording in (name, "pick1", "whats", "abc", "xy"):
        store.write(f"bags/{recording}/1.mcap", recording.encode())
        store.write(f"bags/{recording}.mcap", recording.encode())
    with local_bag(f"{url}/bags/{name}") as path:
        assert {file.name: file.read_bytes() for file in path.iterdir()} == {"1.mcap": name.encode()}
    with local_bag(f"{url}/bags/{name}.mcap") as path:
        assert path.read_bytes() == name.encode()


@pytest.mark.parametrize("key", ["bags/a/../../../x", "bags/a/..", "other/x", "bags/a//x", "bags/a/x\0y"])
def test_a_key_that_leads_elsewhere_is_refused(tmp_path: Path, key: str) -> None:
    class Listing(AbstractFileSystem):
        def isdir(self, _: str) -> bool:
            return True

        def find(self, _: str) -> list[str]:
            return ["bags/a/1.mcap", key]

    with refuses(BagError, field="bags"):
        store_module._list_files(Listing(), "bags/a", tmp_path / "copy")
    assert not list(tmp_path.rglob("x*"))


def test_a_value_and_a_token_are_read_up_to_a_bound(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_FETCHED_BYTES", 4)
    store = UrlStore(url)
    store.write("fits", b"1234")
    store.write("large", b"12345")
    assert store.read("fits") == b"1234"
    with refuses(OutputError, field=("large", "at most 4 bytes")):
        store.read("large")
    with store.held():
        # another program's bytes in the place of the token
        UrlStore(url).write(LOCK, bytes(8 * MEGABYTE))
        with limited_memory(), refuses(OutputError, field="another replay writes here"):
            store.write("a", b"1")


def test_a_recording_leaves_space_on_the_disk(
    url: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UrlStore(url)
    for number in range(4):
        store.write(f"bags/folder/{number}.mcap", bytes(MEGABYTE))
    free = shutil.disk_usage(temporary)._replace(free=store_module.KEPT_FREE_BYTES + 3 * MEGABYTE)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with local_bag(f"{url}/bags/folder/2.mcap") as path:
        assert path.stat().st_size == MEGABYTE
    with refuses(BagError, field=("folder", "TMPDIR")), local_bag(f"{url}/bags/folder"):
        pass
    store.write("bags/large.mcap", bytes(4 * MEGABYTE))
    with refuses(BagError, field=("large.mcap", "TMPDIR")), local_bag(f"{url}/bags/large.mcap"):
        pass
    assert held_folders(temporary) == []


class EndlessFile(io.RawIOBase):
    """A file that its server never ends."""

    size = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return len(buffer)


class EndlessFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A server that tells no sizes."""

    protocol = "endless"

    def info(self, path: str, **options: object) -> dict[str, object]:
        return {"name": path, "size": None, "type": "file"}

    def _open(self, path: str, *args: object, **options: object) -> EndlessFile:
        return EndlessFile()


def test_a_silent_server_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: queue.Queue[str] = queue.Queue()
    told: list[str] = []

    def answer_late(*_: object) -> bool:
        if len(told) < 2:
            told.append(lines.get(timeout=60))
        return False

    store = open_store(url)
    handler = logging.handlers.QueueHandler(lines)
    handler.prepare = logging.LogRecord.getMessage
    monkeypatch.setattr(store_module, "ANSWER_S", 0.0)
    memory = fsspec.filesystem("memory")
    for name in ("isdir", "isfile"):
        monkeypatch.setattr(memory, name, answer_late)
    store_module._log.addHandler(handler)
    try:
        store.exists("a")
        with refuses(BagError, field="nothing"), local_bag(f"{url}/take.mcap"):
            pass
    finally:
        store_module._log.removeHandler(handler)
    assert mentions(told[0], f"{url}/a", "answer")
    assert mentions(told[1], f"{url}/take.mcap", "answer")


def test_a_server_that_never_answers_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(store_module, "FIRST_ANSWER_S", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(fsspec.filesystem("memory"), "exists", lambda path: ends.wait())
        with refuses(OutputError, field=(url, "0.01 s", "AWS_ENDPOINT_URL")):
            open_store(url)
        with refuses(BagError, field=(url, "0.01 s", "AWS_ENDPOINT_URL")), local_bag(f"{url}/take.mcap"):
            pass
        ends.set()
    # one that has answered, with whatever, gets all the time that its library gives it
    monkeypatch.setattr(store_module, "FIRST_ANSWER_S", 60.0)
    assert open_store(url).names() == []
    asked: list[str] = []
    monkeypatch.setattr(fsspec.filesystem("memory"), "exists", asked.append)
    open_store(f"{url}/other")
    assert not asked


def test_an_endless_recording_is_given_up(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("endless", EndlessFileSystem, clobber=True)
    free = shutil.disk_usage(temporary)._replace(free=store_module.KEPT_FREE_BYTES + 20 * MEGABYTE)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    with refuses(BagError, field=("endless.mcap", "TMPDIR")), local_bag("endless://host/endless.mcap"):
        pass
    assert held_folders(temporary) == []


def test_a_replay_between_urls_continues_from_its_last_shard(
    url: str, tmp_path: Path, temporary: Path
) -> None:
    bag = tmp_path / "live.mcap"
    load = PerceptionCache()
    record_edits(bag, load(tiny_settings(tmp_path)), last=10)
    remote = f"{url}/bags/live.mcap"
    UrlStore(f"{url}/bags").write("live.mcap", bag.read_bytes())
    job = Job((remote,), f"{url}/out", "as-recorded", outputs=("mcap", "png"))
    with pytest.raises(StoppedError):
        run_job(job, load, *stop_after(8), limits=ShardLimits(frames=5))
    store = UrlStore(job.out)
    kept = ("000000.masks", "000001.masks", "000001.state")
    assert store.names(FIRST_PASS) == [f"{FIRST_PASS}/{name}" for name in kept]
    summary = run_job(job, load)
    assert summary.resumed_from == 8
    assert read_finished_summary(job)
    assert compare_job(job).is_identical
    local = replace(job, bags=(str(bag),), out=str(tmp_path / "out"))
    run_job(local, load)
    kept = [name for name in FolderStore(Path(local.out)).names() if name.startswith(("png", "masks"))]
    assert [name for name in store.names() if name.startswith(("png", "masks"))] == kept
    assert all(store.read(name) == (Path(local.out) / name).read_bytes() for name in kept)
    assert held_folders(temporary) == []


def test_an_error_of_another_file_is_no_error_of_the_results(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"), FolderStore(tmp_path / "out").held():
        (tmp_path / "absent").read_bytes()
    (tmp_path / "out/.replay/lock").unlink()
    (tmp_path / "out/.replay/lock").mkdir()
    with refuses(OutputError, field="directory"), FolderStore(tmp_path / "out").held():
        pass


def test_an_output_that_meets_an_unreadable_recording_names_the_recording(tmp_path: Path) -> None:
    def frames() -> Iterator[Frame]:
        (tmp_path / "recording.mp4").read_bytes()
        yield from ()

    masks = MaskFrame("c", 0, 0, 8, 8, instances=())
    with refuses(BagError, field="recording.mp4"):
        write_outputs(tmp_path / "out", ["images"], Sources(lambda: iter([masks]), frames), lambda *_: None)


def fill(store: FolderStore, count: int) -> Shards:
    """Add shards of two frames each until there are `count`."""
    parts = Shards(store)
    for number in range(len(parts), count):
        masks = [make_truth(frame_at(seq)) for seq in (2 * number, 2 * number + 1)]
        part = [(frame.camera, pack_masks(frame)[1]) for frame in masks]
        parts.add(part, Cursor(3 * (number + 1), {"frames": {"c": 2 * number}}), b"state %d" % number)
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
    assert parts.cursor() == Cursor(9, {"frames": {"c": 4}})
    assert parts.checkpoint() == b"state 2"


def test_shards_of_a_backward_pass_are_reversed(store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    turning = fill(store, 3).masks_backward()
    names = list[str]()
    monkeypatch.setattr(store, "read", lambda name: names.append(name) or FolderStore.read(store, name))
    assert next(turning).seq == 5
    assert names == [f"{FIRST_PASS}/000002.masks"]
    assert [masks.seq for masks in turning] == [4, 3, 2, 1, 0]


def test_only_the_last_state_is_kept(store: FolderStore) -> None:
    parts = fill(store, 3)
    states = [name for name in store.names() if name.endswith(".state")]
    assert states == [f"{FIRST_PASS}/000002.state"]
    parts.finish()
    assert [name for name in store.names() if name.endswith(".state")] == []
    assert len(list(Shards(store).masks())) == 6


def test_the_cursor_of_an_empty_folder_is_zero(store: FolderStore) -> None:
    assert Shards(store).cursor() == Cursor(0, {})
    assert list(Shards(store).masks()) == []


def test_an_unfinished_shard_is_absent(store: FolderStore) -> None:
    fill(store, 2)
    (store.folder / f"{FIRST_PASS}/000002.state").write_bytes(b"newer")
    (store.folder / f"{FIRST_PASS}/000002.masks.unfinished").write_bytes(b"half")
    parts = Shards(store)
    assert len(parts) == 2
    assert parts.checkpoint() == b"state 1"
    fill(store, 3)
    assert [one.seq for one in Shards(store).masks()] == list(range(6))


@pytest.mark.parametrize("damage", [lambda data: data[:-3], lambda data: data[:60] + b"X" + data[61:]])
def test_a_damaged_shard_is_an_error(store: FolderStore, damage: object) -> None:
    fill(store, 2)
    path = store.folder / f"{FIRST_PASS}/000001.masks"
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    with refuses(ReplayError, field=f"{FIRST_PASS}/000001.masks"):
        Shards(store).cursor()


def test_a_missing_state_is_an_error(store: FolderStore) -> None:
    fill(store, 1).finish()
    with refuses(ReplayError, field=f"{FIRST_PASS}/000000.state"):
        Shards(store).checkpoint()


def test_cleared_shards_are_deleted(store: FolderStore) -> None:
    fill(store, 2).clear()
    assert store.names() == []
    assert len(Shards(store)) == 0


def test_one_writer_at_a_time(store: FolderStore) -> None:
    with store.held():
        with refuses(OutputError, field=("replay", "writes")), FolderStore(store.folder).held():
            pass
        assert store.names() == []
    with FolderStore(store.folder).held():
        pass


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with refuses(OutputError, field="file/out"):
        FolderStore(tmp_path / "file/out")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("linked", [".replay", ".replay/lock", "summary.json"])
def test_a_store_changes_nothing_behind_links(tmp_path: Path, linked: str) -> None:
    """A folder that somebody else has made may hold links to files of its reader."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    link = tmp_path / "store" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if linked == ".replay" else outside / "kept")
    store = FolderStore(tmp_path / "store")
    with pytest.raises(OutputError, match="symbolic link"), store.held():
        store.write("summary.json", b"new")
    assert [path.read_text() for path in outside.iterdir()] == ["kept"]
