"""Recordings of some kilobytes that would unpack to gigabytes, or compute without end, are refused within limits."""

import bz2
import contextlib
import resource
import shutil
import sqlite3
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import lz4.frame
import pytest
import zstandard

from sam3_node.bags.decompression import DecompressionError, decompress, decompress_file, max_content
from sam3_node.bags.formats import rosbag
from sam3_node.bags.formats.mcap import McapStream
from sam3_node.bags.formats.rosbag import RosBag
from sam3_node.bags.messages import ros_images
from sam3_node.bags.messages.ros import deserialise
from sam3_node.errors import BagError
from tests.support import hostile_media  # it adds its cases
from tests.support import ros_recordings as ros
from tests.support.confined import read_confined
from tests.support.damaged_recordings import GOOD, write_damaged
from tests.support.hostile_recordings import (
    CASES,
    COMPUTED_MESSAGES,
    ENDLESS,
    LIMIT,
    MESSAGE_TABLE,
    MIB,
    TOPIC_TABLE,
    chunk,
    connection,
    execute,
    repeated,
    ros1_chunk,
    write_bag,
    write_mcap_file,
    zstd_of,
)
from tests.support.refuses import mentions, refuses
from tests.support.repeats import repetitions
from tests.support.tables import each_row

GIGABYTE = 1 << 30
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
    "lz4": lz4.frame.compress,
    "bz2": bz2.compress,
}
TOPIC_ROW = "INSERT INTO topics VALUES (1, '/camera/image', 'sensor_msgs/msg/Image', 'cdr')"


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return zstd_of(repeated(bytes(MIB), 2 * GIGABYTE))


@contextlib.contextmanager
def bounded_memory(megabytes: int = 600) -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < megabytes


@pytest.mark.parametrize("compression", COMPRESS)
def test_what_is_declared_comes_back(compression: str) -> None:
    data = bytes(range(256)) * 8000
    packed = COMPRESS[compression](data)
    assert decompress(packed, compression, len(data)) == data
    assert decompress(memoryview(packed), compression) == data
    assert data.startswith(decompress(packed[: len(packed) // 2], compression))


@pytest.mark.parametrize("compression", COMPRESS)
def test_more_than_is_declared_is_refused(compression: str) -> None:
    packed = COMPRESS[compression](bytes(10 << 20))
    with bounded_memory(64), refuses(DecompressionError, field="1000"):
        decompress(packed, compression, 1000)


@pytest.mark.parametrize("compression", [*COMPRESS, "brotli"])
def test_other_bytes_are_refused(compression: str) -> None:
    with pytest.raises(DecompressionError, match=r"cannot be decompressed|expected zstd, lz4 or bz2"):
        decompress(b"no compressed data at all", compression)


def test_a_bomb_is_refused_whatever_it_declares(bomb: bytes) -> None:
    assert len(bomb) < 100_000
    with refuses(DecompressionError, field=("33554432", "2147483648")):
        decompress(bomb, "zstd", 2 * GIGABYTE)
    with bounded_memory(), refuses(DecompressionError, field="33554432"):
        decompress(bomb, "zstd")


def test_honest_chunks_may_be_larger_than_bombs() -> None:
    assert max_content(10) == 32 << 20
    assert max_content(40 << 20) == 640 << 20
    assert max_content(GIGABYTE) == GIGABYTE


@each_row("compression", ["zstd", "lz4"])
@each_row("declared", [100, 200 << 20, GIGABYTE, 2**63])
def test_mcap_chunks_expand_within_limits(tmp_path: Path, compression: str, declared: int) -> None:
    data = COMPRESS[compression](bytes(300 << 20))
    stream = McapStream(write_mcap_file(tmp_path, chunk(data, declared, compression)))
    with bounded_memory():
        assert list(stream.rows()) == []
    assert mentions(str(stream.damage), "chunk")
    assert mentions(str(stream.damage), "at most")


def test_mcap_records_end_within_their_chunk(tmp_path: Path) -> None:
    data = struct.pack("<BQ", 5, 2**40) + bytes(100)
    stream = McapStream(write_mcap_file(tmp_path, chunk(data, len(data), "")))
    assert list(stream.rows()) == []
    assert mentions(str(stream.damage), "record", "chunk")


@pytest.mark.parametrize("compression", ["bz2", "lz4"])
@pytest.mark.parametrize("declared", [100, GIGABYTE])
def test_ros_1_chunks_expand_within_limits(tmp_path: Path, compression: str, declared: int) -> None:
    data = COMPRESS[compression](bytes(10 << 20))
    path = write_bag(tmp_path, connection(), ros1_chunk(compression, data, declared))
    with bounded_memory(), contextlib.closing(RosBag(path)) as bag:
        assert list(bag.samples({"/camera/image"})) == []
        assert mentions(str(bag.lost), "at most")


def test_ros_1_chunks_are_not_nested(tmp_path: Path) -> None:
    inner = connection()
    for _ in range(2000):
        inner = ros1_chunk("none", inner, len(inner))
    with contextlib.closing(RosBag(write_bag(tmp_path, connection(), inner))) as bag:
        assert list(bag.samples({"/camera/image"})) == []
        assert mentions(str(bag.lost), "a chunk within")


def test_messages_of_ros_2_expand_within_limits(bomb: bytes) -> None:
    header = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 200 << 20)
    for data in (bomb, header, zstandard.ZstdCompressor().compress(bytes(300 << 20))):
        with bounded_memory(), pytest.raises(ros_images.MessageError):
            deserialise(data, "sensor_msgs/msg/Image", is_cdr=True)


def test_a_compressed_file_expands_within_limits(tmp_path: Path, bomb: bytes) -> None:
    (tmp_path / "a.db3.zstd").write_bytes(bomb)
    with refuses(BagError, field="a.db3.zstd"):
        RosBag(tmp_path)


def test_a_compressed_file_leaves_space_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.zstd").write_bytes(zstd_of(repeated(bytes(MIB), 10 * MIB)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=GIGABYTE + 1000))
    with refuses(DecompressionError, field=("1000", "TMPDIR")):
        decompress_file(tmp_path / "a.zstd", tmp_path / "a")


FAKE = "PRAGMA writable_schema=ON"
DATABASES = {
    "messages are a view": [TOPIC_TABLE, TOPIC_ROW, COMPUTED_MESSAGES],
    "topics are a view": [
        MESSAGE_TABLE, f"CREATE VIEW topics AS {ENDLESS} SELECT i AS id, '/a' || i AS name, "
        "'sensor_msgs/msg/Image' AS type, 'cdr' AS serialization_format FROM n",
    ],
    "a view that is entered as a table": [
        TOPIC_TABLE, TOPIC_ROW, MESSAGE_TABLE, FAKE,
        f"UPDATE sqlite_master SET sql = 'CREATE VIEW messages AS {ENDLESS} SELECT i AS id, 1 AS topic_id, "
        "i AS timestamp, zeroblob(9) AS data FROM n' WHERE name = 'messages'",
    ],
    "data that is computed": [
        TOPIC_TABLE, TOPIC_ROW, "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id, timestamp, "
        "data AS (zeroblob(100000000)))", "INSERT INTO messages VALUES (1, 1, 1)",
    ],
    "no messages": [TOPIC_TABLE, TOPIC_ROW],
}  # fmt: skip


@pytest.mark.parametrize("statements", DATABASES.values(), ids=DATABASES.keys())
def test_databases_that_compute_are_not_read(tmp_path: Path, statements: list[str]) -> None:
    path = execute(tmp_path / "a.db3", *statements)
    with (
        bounded_memory(),
        pytest.raises(BagError, match=r"no plain table|lacks the stored columns|no such column"),
    ):
        RosBag(path)


def test_a_search_without_end_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pages(tmp_path)
    monkeypatch.setattr(rosbag, "_MAX_STEPS", 20_000)
    monkeypatch.setattr(rosbag, "_STEPS_PER_BYTE", 0)
    with contextlib.closing(RosBag(path)) as bag:
        assert list(bag.samples({"/camera/image"})) == []
        assert "interrupted" in str(bag.lost)


def test_pages_that_refer_to_one_page_many_times_end(tmp_path: Path) -> None:
    path = write_pages(tmp_path)
    repeat_children(path)
    with bounded_memory(), contextlib.closing(RosBag(path)) as bag:
        assert list(bag.samples({"/camera/image"})) == []
        assert mentions(str(bag.lost), "rows", "bytes")


def write_pages(folder: Path) -> Path:
    """Write a database whose messages fill several levels of pages."""
    some = ENDLESS.replace("FROM n)", "FROM n WHERE i < 20000)")
    rows = f"INSERT INTO messages {some} SELECT i, 1, i, zeroblob(200) FROM n"
    return execute(folder / "a.db3", "PRAGMA page_size=512", TOPIC_TABLE, TOPIC_ROW, MESSAGE_TABLE, rows)


def repeat_children(path: Path) -> None:
    """Keep one page of each level of the messages, to whose child all its cells then refer."""
    data = path.read_bytes()
    size = 512
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((number,),) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'messages'")
    first = data[: number * size - size]
    pages = []
    while data[(number - 1) * size] == 5:
        page = bytearray(data[(number - 1) * size : number * size])
        (count,) = struct.unpack_from(">H", page, 3)
        cells = struct.unpack_from(f">{count}H", page, 12)
        number = int.from_bytes(page[cells[0] : cells[0] + 4], "big")
        for place in (8, *cells):
            page[place : place + 4] = (len(first) // size + len(pages) + 2).to_bytes(4, "big")
        pages.append(bytes(page))
    pages.append(data[(number - 1) * size : number * size])
    whole = bytearray(first + b"".join(pages))
    whole[28:32] = (len(whole) // size).to_bytes(4, "big")
    path.write_bytes(whole)


def test_recordings_are_read_as_before(tmp_path: Path) -> None:
    for compression in (None, "FILE", "MESSAGE"):
        folder = ros.write_ros2(tmp_path / str(compression), 3, compression=compression)
        with contextlib.closing(RosBag(folder)) as bag:
            assert ros.same(
                ros.decode_samples(bag.samples({topic.name for topic in bag.topics})), list(ros.shots(3))
            )
            assert bag.lost is None


SHORT = (
    "mcap: chunks of empty messages in zstd",
    "mcap: hundreds of topics behind thousands of messages",
    "bag: chunks of small records in bz2",
    "ros 2: a database in zstd that grows",
    "images: webp that declares 16000 x 16000",
    "images: progressive JPEG of 8000 x 8000",
    "video: mp4 with a hundred million samples of one byte",
)
assert hostile_media.KINDS


def test_hostile_recordings_stay_within_limits(tmp_path: Path) -> None:
    names = {}
    for index, name in enumerate(dict.fromkeys([*SHORT, *list(CASES)[:: repetitions(len(CASES), 4)]])):
        (tmp_path / str(index)).mkdir()
        path = CASES[name](tmp_path / str(index))
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= LIMIT, name
        names[path] = name
    broken = {names[out.path]: out.problem for out in read_confined(list(names)) if out.problem is not None}
    assert not broken


def test_damaged_recordings_are_read_or_refused(tmp_path: Path) -> None:
    damaged = {path: name for name, path in write_damaged(tmp_path, repetitions(3, 15) * len(GOOD))}
    outcomes = list(read_confined(list(damaged), together=110))
    assert {damaged[out.path]: out.problem for out in outcomes if out.problem is not None} == {}
    assert sum(not out.result.startswith("refused") for out in outcomes) > len(outcomes) / 3
