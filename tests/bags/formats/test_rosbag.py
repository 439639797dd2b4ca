import contextlib
import random
import re
import shutil
import sqlite3
import struct
import tempfile
from pathlib import Path

import lz4.frame
import pytest
import zstandard

from sam3_node.bags.formats.rosbag import ROSBAG1_MAGIC, RosBag
from sam3_node.errors import BagError
from tests.support import ros_recordings as ros
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

FRAMES = 20


def read(path: Path, topics: frozenset[str] = ros.TOPICS) -> tuple[list[ros.Shot], str | None]:
    with RosBag(path) as bag:
        return ros.decode_samples(bag.samples(topics)), bag.lost


@pytest.fixture(scope="module")
def bag_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ros.write_ros1(tmp_path_factory.mktemp("ros1") / "drive.bag", FRAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ros.write_ros2(tmp_path_factory.mktemp("ros2") / "drive", FRAMES)


def change_rows(path: Path, statement: str, *values: object) -> Path:
    """Run a statement of SQL on a database."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)
    return path


def unindexed(path: Path, target: Path) -> Path:
    """Write a bag as a killed recorder leaves it: it has no index, and its header points at none."""
    content = bytearray(path.read_bytes())
    place = content.index(b"index_pos=") + len(b"index_pos=")
    (index,) = struct.unpack_from("<Q", content, place)
    content[place : place + 8] = bytes(8)
    target.write_bytes(content[:index])
    return target


def check_whole(path: Path) -> None:
    assert RosBag.recognises(path)
    found, lost = read(path)
    assert ros.same(found, list(ros.shots(FRAMES)))
    assert lost is None


@pytest.mark.verifies(
    "recording",
    "ROS 1 `.bag`",
    "other implementation",
    "rosbags writes it, chunks plain, bz2 and lz4",
    "a bag of ROS 1's own recorder",
)
@pytest.mark.parametrize("compression", [None, "BZ2", "LZ4"])
def test_a_bag_of_ros_1_is_read_to_the_last_pixel(tmp_path: Path, compression: str | None) -> None:
    check_whole(ros.write_ros1(tmp_path / "drive.bag", FRAMES, compression))


@pytest.mark.verifies(
    "recording",
    "ROS 2 folder, `.db3` and `.mcap`",
    "other implementation",
    "rosbags writes it, plain and with zstd of messages, chunks and files",
    "a folder of ROS 2's own recorder",
)
@pytest.mark.parametrize(
    ("storage", "compression"),
    [
        *(("SQLITE3", compression) for compression in (None, "MESSAGE", "FILE")),
        *(("MCAP", compression) for compression in (None, "STORAGE", "MESSAGE", "FILE")),
    ],
)
def test_a_folder_of_ros_2_is_read_to_the_last_pixel(
    tmp_path: Path, storage: str, compression: str | None
) -> None:
    check_whole(ros.write_ros2(tmp_path / "drive", FRAMES, storage, compression))


def test_topics_tell_what_they_hold(bag_file: Path, folder: Path) -> None:
    for path, prefix in ((bag_file, "sensor_msgs/"), (folder, "sensor_msgs/msg/")):
        with RosBag(path) as bag:
            assert {topic.name: topic.kind for topic in bag.topics} == {
                ros.COLOUR: "colour",
                ros.DEPTH: "depth",
                ros.INFO: "intrinsics",
            }
            assert {topic.type for topic in bag.topics} == {f"{prefix}Image", f"{prefix}CameraInfo"}


@pytest.mark.parametrize("compression", [None, "BZ2", "LZ4"])
def test_an_unindexed_bag_gives_all_its_chunks(tmp_path: Path, compression: str | None) -> None:
    whole = ros.write_ros1(tmp_path / "drive.bag", FRAMES, compression)
    found, lost = read(unindexed(whole, tmp_path / "killed.bag"))
    assert ros.same(found, list(ros.shots(FRAMES)))
    assert "no index" in str(lost)


def test_the_open_chunk_of_a_killed_recorder_counts(tmp_path: Path, bag_file: Path) -> None:
    # a recorder writes a chunk's length when it closes it: until then it is 0, and messages follow
    content = bytearray(unindexed(bag_file, tmp_path / "killed.bag").read_bytes())
    length_at = content.index(b"size=", content.rindex(b"compression=none")) + len(b"size=") + 4
    end = length_at + 4 + struct.unpack_from("<I", content, length_at)[0]
    content[length_at : length_at + 4] = bytes(4)
    (tmp_path / "killed.bag").write_bytes(content[:end])
    assert ros.same(read(tmp_path / "killed.bag")[0], list(ros.shots(FRAMES)))


@pytest.mark.parametrize("compression", [None, "BZ2", "LZ4"])
def test_a_cut_bag_gives_what_lies_before_the_cut(tmp_path: Path, compression: str | None) -> None:
    content = ros.write_ros1(tmp_path / "drive.bag", FRAMES, compression).read_bytes()
    expected = list(ros.shots(FRAMES))
    cut = tmp_path / "cut.bag"
    rng = random.Random(1)
    for size in sorted(rng.randrange(30_000, len(content)) for _ in range(15)):
        cut.write_bytes(content[:size])
        found, lost = read(cut)
        assert ros.same(found, expected[: len(found)])
        # all but the chunk that is cut, which holds three frames
        assert len(found) >= len(expected) * size / len(content) - 12
        assert lost is not None


def test_a_damaged_bag_gives_what_lies_before_the_damage(tmp_path: Path, bag_file: Path) -> None:
    content = bag_file.read_bytes()
    expected = list(ros.shots(FRAMES))
    damaged = tmp_path / "damaged.bag"
    rng = random.Random(2)
    for _ in range(15):
        place = rng.randrange(30_000, len(content) - 5000)
        damaged.write_bytes(content[:place] + rng.randbytes(40) + content[place + 40 :])
        found, _ = read(damaged)
        before = int(len(expected) * place / len(content)) - 12
        assert ros.same(found[:before], expected[:before])


def test_a_cut_database_gives_what_lies_before_the_cut(tmp_path: Path, folder: Path) -> None:
    content = next(folder.glob("*.db3")).read_bytes()
    expected = list(ros.shots(FRAMES))
    half = tmp_path / "drive"
    half.mkdir()
    rng = random.Random(3)
    for size in sorted(rng.randrange(40_000, len(content) - 5000) for _ in range(15)):
        (half / "drive_0.db3").write_bytes(content[:size])
        found, lost = read(half)
        assert ros.same(found, expected[: len(found)])
        # its tables take the first 40 kB
        assert len(found) >= len(expected) * (size - 40_000) / len(content) - 12
        assert "no metadata.yaml" in str(lost)


def test_a_cut_mcap_in_a_folder_gives_its_whole_chunks(tmp_path: Path) -> None:
    frames = 400
    path = ros.write_ros2(tmp_path / "drive", frames, "MCAP")
    file = next(path.glob("*.mcap"))
    expected = list(ros.shots(frames))
    content = file.read_bytes()
    (path / "metadata.yaml").unlink()
    file.write_bytes(content[: len(content) * 9 // 10])
    found, lost = read(path)
    assert ros.same(found, expected[: len(found)])
    assert len(found) >= len(expected) // 3
    assert lost is not None


def test_a_recorder_that_was_killed_leaves_what_it_had_committed(tmp_path: Path, folder: Path) -> None:
    # its journal still holds the newest messages
    killed = tmp_path / "drive"
    killed.mkdir()
    content = next(folder.glob("*.db3")).read_bytes()
    (tmp_path / "first.db3").write_bytes(content)
    writer = sqlite3.connect(tmp_path / "first.db3")
    writer.execute("PRAGMA journal_mode=WAL")
    writer.execute("PRAGMA wal_autocheckpoint=0")
    writer.execute("INSERT INTO messages SELECT id + 1000, topic_id, timestamp, data FROM messages")
    writer.commit()
    for suffix in ("", "-wal"):
        (killed / f"drive_0.db3{suffix}").write_bytes((tmp_path / f"first.db3{suffix}").read_bytes())
    writer.close()
    assert ros.same(read(killed)[0], [*ros.shots(FRAMES), *ros.shots(FRAMES)])


def test_files_come_in_the_order_of_their_numbers_and_absent_ones_are_told(tmp_path: Path) -> None:
    path = ros.write_ros2(tmp_path / "drive", 2)
    file = path / "drive.db3"
    for number in (10, 2, 1):
        part = Path(shutil.copy(file, path / f"drive_{number}.db3"))
        change_rows(part, "UPDATE messages SET timestamp = timestamp + ?", number)
    file.unlink()
    found, lost = read(path)
    assert offsets(found) == [1] * 6 + [2] * 6 + [10] * 6
    assert "drive.db3" in str(lost)


def test_one_damaged_file_costs_only_itself(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "drive"
    path.mkdir()
    for number in (1, 2, 3):
        (path / f"drive_{number}.db3").write_bytes(next(folder.glob("*.db3")).read_bytes())
    (path / "drive_2.db3").write_bytes(b"nothing")
    found, lost = read(path)
    assert ros.same(found, [*ros.shots(FRAMES), *ros.shots(FRAMES)])
    assert "drive_2.db3" in str(lost)


def test_a_message_that_is_none_is_passed_over_and_told(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "one.db3").write_bytes(next(folder.glob("*.db3")).read_bytes())
    change_rows(tmp_path / "one.db3", "UPDATE messages SET data = ? WHERE id IN (1, 5)", bytes(30))
    found, lost = read(tmp_path / "one.db3")
    expected = list(ros.shots(FRAMES))
    assert ros.same(found, [*expected[1:4], *expected[5:]])
    assert f"skipped 1 of {ros.COLOUR}" in str(lost)
    assert f"skipped 1 of {ros.DEPTH}" in str(lost)


@pytest.mark.parametrize(
    "content", [b"", b"#ROSBAG V1.2\n", ROSBAG1_MAGIC, ROSBAG1_MAGIC + bytes(5000), b"SQLite format 3\x00"]
)
def test_what_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    for name in ("drive.bag", "drive.db3"):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(BagError, match=r"expected .*, found "):
            RosBag(path)


def test_folders_without_a_recording_are_refused(tmp_path: Path) -> None:
    assert not RosBag.recognises(tmp_path)
    with refuses(BagError, field=("ROS", "2")):
        RosBag(tmp_path)
    (tmp_path / "metadata.yaml").write_text("rosbag2_bagfile_information: {}")
    with refuses(BagError, field=("ROS", "2")):
        RosBag(tmp_path)


def test_a_damaged_chunk_costs_only_itself(tmp_path: Path) -> None:
    path = ros.write_ros1(tmp_path / "drive.bag", FRAMES, "LZ4")
    content = bytearray(path.read_bytes())
    starts = [match.end() for match in re.finditer(rb"compression=lz4", bytes(content))]
    content[starts[2] + 20 : starts[2] + 60] = bytes(40)
    path.write_bytes(content)
    found, lost = read(path)
    expected = list(ros.shots(FRAMES))
    assert len(expected) - 12 <= len(found) < len(expected)
    assert {shot[:3] for shot in found} < {shot[:3] for shot in expected}
    assert found[-1].payload == expected[-1].payload
    assert mentions(str(lost), "1", "chunks", "drive.bag")


def recoded(folder: Path, target: Path, number: int) -> Path:
    """Return the database of a folder with another encoding in one of its messages."""
    target.write_bytes(next(folder.glob("*.db3")).read_bytes())
    with contextlib.closing(sqlite3.connect(target)) as database:
        (data,) = database.execute("SELECT data FROM messages WHERE id = ?", (number,)).fetchone()
    assert b"bgr8" in data
    data = data.replace(b"bgr8", b"nv24")
    return change_rows(target, "UPDATE messages SET data = ? WHERE id = ?", data, number)


def test_unknown_encodings_end_the_reading_unless_they_come_amid_known_ones(
    tmp_path: Path, folder: Path
) -> None:
    with refuses(BagError, field="nv24"):
        read(recoded(folder, tmp_path / "first.db3", 1))
    found, lost = read(recoded(folder, tmp_path / "amid.db3", 4))
    expected = list(ros.shots(FRAMES))
    assert ros.same(found, [*expected[:3], *expected[4:]])
    assert "found 'nv24'" in str(lost)


def split(tmp_path: Path, storage: str, count: int) -> tuple[Path, list[Path]]:
    """Write a folder of `count` parts, without metadata; the messages of each part are a nanosecond later."""
    folder = tmp_path / "drive"
    suffix = ".mcap" if storage == "MCAP" else ".db3"
    folder.mkdir()
    parts = []
    for number in range(count):
        written = ros.write_ros2(tmp_path / str(number), 2, storage, delay_ns=number)
        parts.append(next(written.glob(f"*{suffix}")).rename(folder / f"drive_{number}{suffix}"))
    return folder, parts


def pack(path: Path, suffix: str = ".zstd", keep: bool = False) -> Path:
    """Compress a file as ROS 2 does."""
    compress = lz4.frame.compress if suffix == ".lz4" else zstandard.compress
    packed = path.with_name(path.name + suffix)
    packed.write_bytes(compress(path.read_bytes()))
    if not keep:
        path.unlink()
    return packed


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: -path.stat().st_size // 3])


def offsets(found: list[ros.Shot]) -> list[int]:
    """Return the numbers of the parts of `split` that the messages are from."""
    return [shot.logged_ns - shot.stamp_ns - ros.LOG_DELAY_NS for shot in found]


def list_files(folder: Path, *names: str) -> None:
    lines = "".join(f"    - {name}\n" for name in names)
    (folder / "metadata.yaml").write_text(
        f"rosbag2_bagfile_information:\n  relative_file_paths:\n{lines}  duration:\n    nanoseconds: 5\n"
    )


@pytest.mark.verifies(
    "recording",
    "ROS 2 files packed as a whole, `.zstd` and `.lz4`, also alone",
    "other implementation",
    "rosbags writes the files, zstandard and lz4 pack them",
    "a folder of ROS 2's own recorder",
)
@pytest.mark.parametrize("storage", ["SQLITE3", "MCAP"])
@pytest.mark.parametrize("suffix", [".zstd", ".zst", ".lz4"])
def test_a_part_that_is_packed_and_unpacked_comes_once_in_its_place(
    tmp_path: Path, storage: str, suffix: str
) -> None:
    folder, parts = split(tmp_path, storage, 12)
    for number, part in enumerate(parts[:11]):
        pack(part, suffix, keep=number % 2 == 0)
    for listed in (
        [part.name for part in parts],
        [f"{part.name}{suffix}" for part in parts],
        [f'"{part.name}"' for part in parts],
    ):
        list_files(folder, *listed)
        found, lost = read(folder)
        assert offsets(found) == sorted([*range(12)] * 6)
        assert lost is None
    for text in ("", "rosbag2_bagfile_information: {}\n"):
        (folder / "metadata.yaml").write_text(text)
        found, lost = read(folder)
        assert offsets(found) == sorted([*range(12)] * 6)
        assert mentions(str(lost), "files")
    list_files(folder, *(part.name for part in parts), f"drive_12.db3{suffix}")
    assert mentions(str(read(folder)[1]), "drive", "drive_12.db3")


@each_row("storage", ["SQLITE3", "MCAP"])
@each_row("damaged", ["packed", "unpacked", "empty", "pointer"])
def test_the_whole_one_of_two_copies_is_read(tmp_path: Path, storage: str, damaged: str) -> None:
    folder, parts = split(tmp_path, storage, 2)
    copies = {"unpacked": parts[0], "packed": pack(parts[0], keep=True)}
    if damaged in copies:
        cut(copies[damaged])
    else:
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
        parts[0].write_text("" if damaged == "empty" else text)
    list_files(folder, *(part.name for part in parts))
    found, lost = read(folder)
    assert (offsets(found), lost) == ([0] * 6 + [1] * 6, None)
    for copy in copies.values():
        copy.write_bytes(b"")
    found, lost = read(folder)
    assert offsets(found) == [1] * 6
    assert "drive_0" in str(lost)
    assert mentions(str(lost), "empty")


@pytest.mark.parametrize("storage", ["SQLITE3", "MCAP"])
def test_a_damaged_packed_part_gives_its_beginning_and_its_own_path(tmp_path: Path, storage: str) -> None:
    folder, parts = split(tmp_path, storage, 2)
    content = b"".join(zstandard.compress(piece) for piece in pieces(parts[0].read_bytes()))
    packed = pack(parts[0])
    packed.write_bytes(content[:-20])
    found, lost = read(folder)
    assert offsets(found)[-6:] == [1] * 6
    assert storage == "SQLITE3" or len(found) > 6
    assert f"{packed} is damaged: what follows the first" in str(lost)
    packed.write_bytes(b"other bytes")
    found, lost = read(folder)
    assert offsets(found) == [1] * 6
    assert f"{packed} is damaged" in str(lost)
    assert tempfile.gettempdir() + "/sam3-node-" not in str(lost)
    with pytest.raises(BagError, match=re.escape(f"{packed} is damaged")):
        RosBag(packed)


def pieces(data: bytes) -> list[bytes]:
    return [data[at : at + 1000] for at in range(0, len(data), 1000)]


@pytest.mark.parametrize("suffix", [".zstd", ".lz4"])
def test_a_lone_packed_file_is_read(tmp_path: Path, suffix: str, bag_file: Path) -> None:
    for storage in ("SQLITE3", "MCAP"):
        (tmp_path / storage).mkdir()
        _, parts = split(tmp_path / storage, storage, 1)
        packed = pack(parts[0], suffix)
        assert RosBag.recognises(packed)
        found, lost = read(packed)
        assert ros.same(found, list(ros.shots(2)))
        assert lost is None
    copy = tmp_path / "drive.bag"
    copy.write_bytes(bag_file.read_bytes())
    assert ros.same(read(pack(copy, suffix))[0], list(ros.shots(FRAMES)))
