"""Recordings of at most 64 KB that want gigabytes of memory or disk, or minutes of work.

Each entry of CASES writes one into an empty folder and returns its path.
"""

import bz2
import contextlib
import json
import sqlite3
import struct
from collections.abc import Callable, Iterable
from pathlib import Path

import lz4.frame
import numpy as np
import zstandard

from tests.support.mcap_files import COLOUR, INFO, T0, Moment, raw, rgbd, ros_message
from tests.support.mcap_files import ROS2 as STORE

LIMIT = 64 << 10
MIB = 1 << 20
MCAP_MAGIC = b"\x89MCAP0\r\n"
ROS1_MAGIC = b"#ROSBAG V2.0\n"
IMAGE, CALIBRATION = "sensor_msgs/msg/Image", "sensor_msgs/msg/CameraInfo"

Case = Callable[[Path], Path]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(write: Case) -> Case:
        CASES[name] = write
        return write

    return keep


def zstd_of(pieces: Iterable[bytes], level: int = 3) -> bytes:
    """Return zstd of pieces, whose size the data do not declare."""
    packer = zstandard.ZstdCompressor(level, write_content_size=False).compressobj()
    return b"".join([packer.compress(piece) for piece in pieces]) + packer.flush()


def repeated(piece: bytes, size: int) -> Iterable[bytes]:
    """Yield `piece` again and again, to `size` bytes or a little less, some MiB at a time."""
    block = piece * max(1, MIB // len(piece))
    for _ in range(size // len(block)):
        yield block


# MCAP


def record(opcode: int, content: bytes) -> bytes:
    return struct.pack("<BQ", opcode, len(content)) + content


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<I", len(data)) + data


def schema(number: int, name: str, encoding: str = "ros2msg", data: bytes = b"x") -> bytes:
    return record(3, struct.pack("<H", number) + text(name) + text(encoding) + text(data))


def channel(number: int, schema_number: int, topic: str, encoding: str = "cdr") -> bytes:
    return record(4, struct.pack("<HH", number, schema_number) + text(topic) + text(encoding) + text(b""))


def message(number: int, data: bytes = b"", time: int = T0) -> bytes:
    return record(5, struct.pack("<HIQQ", number, 0, time, time) + data)


def chunk(data: bytes, size: int, compression: str = "zstd") -> bytes:
    head = struct.pack("<QQQI", T0, T0 + 1, size, 0)
    return record(6, head + text(compression) + struct.pack("<Q", len(data)) + data)


def write_mcap_file(folder: Path, *records: bytes) -> Path:
    path = folder / "hostile.mcap"
    path.write_bytes(MCAP_MAGIC + b"".join(records))
    return path


def image_channel() -> bytes:
    return schema(1, IMAGE) + channel(1, 1, COLOUR)


def cdr(moment: Moment) -> bytes:
    value = ros_message(moment, STORE)
    return bytes(STORE.serialize_cdr(value, value.__msgtype__))


def fill(head: bytes, part: bytes) -> tuple[bytes, ...]:
    """Return the head and as many parts as fit."""
    return (head, *[part] * ((LIMIT - len(head) - 100) // len(part)))


@case("mcap: a chunk of zeros in zstd")
def _(folder: Path) -> Path:
    return write_mcap_file(folder, image_channel(), chunk(zstd_of(repeated(bytes(MIB), 1 << 30)), 1 << 30))


@case("mcap: chunks of unknown records in zstd")
def _(folder: Path) -> Path:
    part = chunk(zstd_of(repeated(record(0x70, b""), 30 * MIB)), 9 * (MIB // 9) * 30)
    return write_mcap_file(folder, *fill(image_channel(), part))


@case("mcap: chunks of empty messages in zstd")
def _(folder: Path) -> Path:
    one = message(1)
    part = chunk(zstd_of(repeated(one, 30 * MIB), 19), len(one) * (MIB // len(one)) * 30)
    return write_mcap_file(folder, *fill(image_channel(), part))


@case("mcap: chunks of large black images in zstd")
def _(folder: Path) -> Path:
    one = message(1, cdr(raw(np.zeros((3000, 3400, 3), np.uint8), "bgr8")))
    return write_mcap_file(folder, *fill(image_channel(), chunk(zstd_of([one], 19), len(one))))


@case("mcap: chunks of large Bayer images in zstd")
def _(folder: Path) -> Path:
    one = message(1, cdr(raw(np.zeros((5500, 5500), np.uint8), "bayer_rggb8")))
    return write_mcap_file(folder, *fill(image_channel(), chunk(zstd_of([one], 19), len(one))))


@case("mcap: a lens of millions of coefficients")
def _(folder: Path) -> Path:
    one = message(2, cdr(Moment(INFO, "info", T0, coeffs=(0.1,) * (3 * MIB))))
    picture = message(1, cdr(next(iter(rgbd(1)))))
    head = image_channel() + schema(2, CALIBRATION) + channel(2, 2, INFO)
    return write_mcap_file(folder, head, chunk(zstd_of([one, picture], 19), len(one) + len(picture)))


@case("mcap: a chunk in lz4 that declares more")
def _(folder: Path) -> Path:
    data = lz4.frame.compress(bytes(15 * MIB))
    return write_mcap_file(folder, image_channel(), chunk(data[:LIMIT], 1 << 40, "lz4"))


@case("mcap: records that declare more than the file has")
def _(folder: Path) -> Path:
    return write_mcap_file(folder, image_channel(), struct.pack("<BQ", 5, 1 << 62), bytes(1000))


def deep(value: str, count: int) -> bytes:
    return (value * count).encode()


def json_mcap(folder: Path, data: bytes, size: int | None = None) -> Path:
    """Write a file with one message of foxglove.RawImage as JSON, in zstd if its size is not given."""
    head = schema(1, "foxglove.RawImage", "jsonschema", b"{}") + channel(1, 1, COLOUR, "json")
    one = message(1, data)
    return write_mcap_file(folder, head, chunk(zstd_of([one], 19), len(one)) if size is None else one)


@case("mcap: JSON of a million lists")
def _(folder: Path) -> Path:
    return json_mcap(folder, b'{"data": [' + deep("[],", 10 * MIB) + b"0]}")


@case("mcap: deep JSON")
def _(folder: Path) -> Path:
    return json_mcap(folder, deep("[", 60_000), 1)


@case("mcap: numbers of JSON without end")
def _(folder: Path) -> Path:
    fields = {"width": 10**4000, "timestamp": {"sec": 10**300, "nsec": 10**300}, "data": "AA=="}
    return json_mcap(folder, json.dumps(fields).encode(), 1)


@case("mcap: a stamp beyond all times")
def _(folder: Path) -> Path:
    fields = {"width": 1, "height": 1, "encoding": "mono8", "step": 1, "data": "AA=="}
    return json_mcap(folder, json.dumps({**fields, "timestamp": {"sec": 10**300, "nsec": 0}}).encode(), 1)


@case("mcap: depth in RVL of a thousand large images")
def _(folder: Path) -> Path:
    topic = "/camera/depth/image_raw/compressedDepth"
    data = bytes(12) + struct.pack("<II", 8192, 8192) + _nibbles(8192 * 8192) + bytes(4)
    one = message(1, cdr(Moment(topic, "compressed", T0, data, "16UC1; compressedDepth rvl")))
    head = schema(1, "sensor_msgs/msg/CompressedImage") + channel(1, 1, topic) + schema(2, IMAGE)
    return write_mcap_file(
        folder, *fill(head + channel(2, 2, COLOUR) + message(2, cdr(next(iter(rgbd(1))))), one)
    )


def _nibbles(number: int) -> bytes:
    """Return a number as RVL packs it, and a zero behind it."""
    nibbles = [number >> shift & 7 | 8 for shift in range(0, 27, 3)] + [0] * 7
    nibbles[8] &= 7
    words = [nibbles[:8], nibbles[8:]]
    return b"".join(
        struct.pack("<I", sum(nibble << 28 - 4 * at for at, nibble in enumerate(word))) for word in words
    )


def many_topics(encoding: str) -> bytes:
    """Return a thousand channels of images whose first messages lie behind thousands of others."""
    count = 600
    channels = b"".join(channel(number, 1, f"/c{number}/image") for number in range(1, count + 1))
    noise = message(1, cdr(next(iter(rgbd(1))))) + message(60_000) * 7000
    one = cdr(raw(np.zeros((1, 1, 3), np.uint8), encoding))
    data = noise + b"".join(message(number, one) for number in range(1, count + 1))
    return schema(1, IMAGE) + channels + channel(60_000, 1, "/other") + chunk(zstd_of([data], 19), len(data))


@case("mcap: hundreds of topics behind thousands of messages")
def _(folder: Path) -> Path:
    return write_mcap_file(folder, many_topics("bgr8"))


@case("mcap: hundreds of topics of unknown encodings")
def _(folder: Path) -> Path:
    return write_mcap_file(folder, many_topics("hsv8"))


@case("mcap: a schema of protobuf that is deep")
def _(folder: Path) -> Path:
    data = b""
    for _ in range(3000):
        data = b"\x1a" + _varint(len(data)) + data
    head = schema(1, "foxglove.RawImage", "protobuf", data) + channel(1, 1, COLOUR, "protobuf")
    return write_mcap_file(folder, head, message(1, b"\x0b" * 20_000))


def _varint(number: int) -> bytes:
    groups = [number >> shift & 0x7F for shift in range(0, max(number.bit_length(), 1), 7)]
    return bytes(group | 0x80 for group in groups[:-1]) + bytes(groups[-1:])


# ROS

TOPIC_TABLE = "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT, type TEXT, serialization_format TEXT)"
MESSAGE_TABLE = (
    "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER, timestamp INTEGER, data BLOB)"
)


def part(**fields: bytes) -> bytes:
    records = (name.encode() + b"=" + value for name, value in fields.items())
    header = b"".join(map(text, records))
    return text(header)


def ros1_chunk(compression: str, data: bytes, size: int) -> bytes:
    return part(op=b"\x05", compression=compression.encode(), size=struct.pack("<I", size)) + text(data)


def connection(number: int = 0, topic: bytes = b"/camera/image") -> bytes:
    data = part(topic=topic, type=b"sensor_msgs/Image")[4:]
    return part(op=b"\x07", conn=struct.pack("<I", number), topic=topic) + text(data)


def write_bag(folder: Path, *records: bytes) -> Path:
    path = folder / "hostile.bag"
    path.write_bytes(ROS1_MAGIC + b"".join(records))
    return path


@case("bag: chunks of zeros in bz2")
def _(folder: Path) -> Path:
    size = 30 * MIB
    packed = bz2.compress(bytes(3 * MIB)) * 10  # streams that follow one another are one
    return write_bag(folder, *fill(connection(), ros1_chunk("bz2", packed, size)))


@case("bag: chunks of small records in bz2")
def _(folder: Path) -> Path:
    one = part(op=b"\x02", conn=bytes(4), time=bytes(8)) + text(b"")
    data = one * (MIB // len(one))
    return write_bag(folder, *fill(connection(), ros1_chunk("bz2", bz2.compress(data), len(data))))


@case("bag: chunks of connections in bz2")
def _(folder: Path) -> Path:
    data = b"".join(connection(number, f"/c{number}/image".encode()) for number in range(10_000))
    packed = bz2.compress(data)[: LIMIT - 1000]
    return write_bag(folder, connection(), ros1_chunk("bz2", packed, len(data)))


@case("bag: an index that names the connections without end")
def _(folder: Path) -> Path:
    head = part(op=b"\x03", index_pos=struct.pack("<Q", 64), conn_count=b"\xff" * 4, chunk_count=bytes(4))
    return write_bag(folder, head + text(b""), connection() * 500)


@case("ros 2: a database in zstd that grows")
def _(folder: Path) -> Path:
    (folder / "bag").mkdir()
    (folder / "bag" / "a.db3.zstd").write_bytes(zstd_of(repeated(bytes(MIB), 1 << 30)))
    return folder / "bag"


@case("ros 2: many messages in zstd")
def _(folder: Path) -> Path:
    whole = cdr(raw(np.zeros((3000, 3400, 3), np.uint8), "bgr8"))
    data = zstandard.ZstdCompressor(19).compress(whole)
    count = (LIMIT - 16_000) // (len(data) + 60)
    return write_database(folder, [(number, data) for number in range(count)])


@case("ros 2: hundreds of topics")
def _(folder: Path) -> Path:
    return write_database(
        folder, [], topics=[f"/{n}/depth/image" if n % 2 else f"/{n}/image" for n in range(800)]
    )


def write_database(folder: Path, rows: list[tuple[int, bytes]], topics: Iterable[str] = (COLOUR,)) -> Path:
    path = folder / "hostile.db3"
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA page_size=1024")
        database.execute(TOPIC_TABLE)
        database.execute(MESSAGE_TABLE)
        for number, topic in enumerate(topics, 1):
            database.execute("INSERT INTO topics VALUES (?, ?, ?, 'cdr')", (number, topic, IMAGE))
        database.executemany("INSERT INTO messages VALUES (?, 1, ?, ?)", ((n, T0 + n, d) for n, d in rows))
        database.commit()
    return path


@case("ros 2: a blob that is computed")
def _(folder: Path) -> Path:
    path = write_database(folder, [(1, b"x")])
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("DROP TABLE messages")
        database.execute(
            "CREATE VIEW messages AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
            "SELECT i AS id, 1 AS topic_id, i AS timestamp, zeroblob(100000000) AS data FROM n"
        )
        database.commit()
    return path
