"""Recordings of at most 64 KB that want gigabytes of memory or disk, or minutes of work.

Each entry of CASES writes one into an empty folder and returns its path.
"""

import bz2
import contextlib
import json
import sqlite3
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import lz4.frame
import numpy as np
import zstandard
from google.protobuf.wrappers_pb2 import BytesValue

from tests.support.mcap_files import COLOUR, INFO, T0, Moment, raw, rgbd, ros_message
from tests.support.mcap_files import ROS2 as STORE

LIMIT = 64 << 10
MIB = 1 << 20
MCAP_MAGIC = b"\x89MCAP0\r\n"
ROS1_MAGIC = b"#ROSBAG V2.0\n"
IMAGE = "sensor_msgs/msg/Image"
CALIBRATION = "sensor_msgs/msg/CameraInfo"

Case = Callable[[Path], Path]
CASES: dict[str, Case] = {}


def case(name: str) -> Callable[[Case], Case]:
    def keep(write: Case) -> Case:
        CASES[name] = write
        return write

    return keep


def _write(write: Callable[..., Path], make: Callable[[], Sequence[bytes]], folder: Path) -> Path:
    return write(folder, *make())


def zstd_of(pieces: Iterable[bytes], level: int = 3) -> bytes:
    """Return zstd of pieces, whose size the data do not declare."""
    packer = zstandard.ZstdCompressor(level, write_content_size=False).compressobj()
    return b"".join([packer.compress(piece) for piece in pieces]) + packer.flush()


def repeated(piece: bytes, size: int) -> list[bytes]:
    """Return blocks of `piece` again and again, together `size` bytes or a little less."""
    block = piece * max(1, MIB // len(piece))
    return [block] * (size // len(block))


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


def cdr(moment: Moment) -> bytes:
    value = ros_message(moment, STORE)
    return bytes(STORE.serialize_cdr(value, value.__msgtype__))


def fill(head: bytes, part: bytes) -> tuple[bytes, ...]:
    """Return the head and as many parts as fit."""
    return (head, *[part] * ((LIMIT - len(head) - 100) // len(part)))


def packed(records: Sequence[bytes], level: int = 19) -> bytes:
    """Return a chunk of these records in zstd."""
    return chunk(zstd_of(records, level), sum(map(len, records)))


def picture(encoding: str, *shape: int) -> bytes:
    """Return a message with a black image."""
    return message(1, cdr(raw(np.zeros(shape, np.uint8), encoding)))


def deep(value: str, count: int) -> bytes:
    return (value * count).encode()


def json_image(**fields: object) -> bytes:
    """Return a message of foxglove.RawImage as JSON."""
    return message(1, json.dumps({"width": 1, "height": 1, "data": "AA=="} | fields).encode())


IMAGES = schema(1, IMAGE) + channel(1, 1, COLOUR)
JSON_IMAGES = schema(1, "foxglove.RawImage", "jsonschema", b"{}") + channel(1, 1, COLOUR, "json")
INFOS = schema(2, CALIBRATION) + channel(2, 2, INFO)
GOOD = cdr(next(iter(rgbd(1))))
LATE = {"sec": 10**300, "nsec": 10**300}
MCAPS: dict[str, Callable[[], Sequence[bytes]]] = {
    "a chunk of zeros in zstd": lambda: [IMAGES, packed(repeated(bytes(MIB), 1 << 30), 3)],
    "chunks of unknown records in zstd": lambda: fill(
        IMAGES, packed(repeated(record(0x70, b""), 30 * MIB), 3)
    ),
    "chunks of empty messages in zstd": lambda: fill(IMAGES, packed(repeated(message(1), 30 * MIB))),
    "chunks of large black images in zstd": lambda: fill(IMAGES, packed([picture("bgr8", 3000, 3400, 3)])),
    "chunks of large Bayer images in zstd": lambda: fill(
        IMAGES, packed([picture("bayer_rggb8", 5500, 5500)])
    ),
    "a lens of millions of coefficients": lambda: [
        IMAGES + INFOS,
        packed([message(2, cdr(Moment(INFO, "info", T0, coeffs=(0.1,) * (3 * MIB)))), message(1, GOOD)]),
    ],
    "a chunk in lz4 that declares more": lambda: [
        IMAGES,
        chunk(lz4.frame.compress(bytes(15 * MIB))[:LIMIT], 1 << 40, "lz4"),
    ],
    "records that declare more than the file has": lambda: [
        IMAGES,
        struct.pack("<BQ", 5, 1 << 62),
        bytes(1000),
    ],
    "JSON of a million lists": lambda: [
        JSON_IMAGES,
        packed([message(1, b'{"data": [' + deep("[],", 10 * MIB) + b"0]}")]),
    ],
    "deep JSON": lambda: [JSON_IMAGES, message(1, deep("[", 60_000))],
    "numbers of JSON without end": lambda: [JSON_IMAGES, json_image(width=10**4000, timestamp=LATE)],
    "a stamp beyond all times": lambda: [
        JSON_IMAGES,
        json_image(encoding="mono8", step=1, timestamp=LATE | {"nsec": 0}),
    ],
    "hundreds of topics behind thousands of messages": lambda: [many_topics("bgr8")],
    "hundreds of topics of unknown encodings": lambda: [many_topics("hsv8")],
}


@case("mcap: depth in RVL of a thousand large images")
def _(folder: Path) -> Path:
    topic = "/camera/depth/image_raw/compressedDepth"
    data = bytes(12) + struct.pack("<II", 8192, 8192) + pack_rvl([8192 * 8192, 0]) + bytes(4)
    one = message(1, cdr(Moment(topic, "compressed", T0, data, "16UC1; compressedDepth rvl")))
    head = schema(1, "sensor_msgs/msg/CompressedImage") + channel(1, 1, topic) + schema(2, IMAGE)
    return write_mcap_file(folder, *fill(head + channel(2, 2, COLOUR) + message(2, GOOD), one))


def pack_rvl(numbers: Iterable[int]) -> bytes:
    """Return numbers as RvlCodec packs them: three bits and whether more follow in each nibble."""
    nibbles = ""
    for number in numbers:
        while number > 7:
            nibbles = f"{nibbles}{number & 7 | 8:x}"
            number = number >> 3
        nibbles += f"{number:x}"
    nibbles += "0" * (-len(nibbles) % 8)
    return b"".join(bytes.fromhex(nibbles[at : at + 8])[::-1] for at in range(0, len(nibbles), 8))


def many_topics(encoding: str) -> bytes:
    """Return a thousand channels of images whose first messages lie behind thousands of others."""
    count = 600
    channels = b"".join(channel(number, 1, f"/c{number}/image") for number in range(1, count + 1))
    one = cdr(raw(np.zeros((1, 1, 3), np.uint8), encoding))
    data = [
        message(1, GOOD),
        message(60_000) * 7000,
        *(message(number, one) for number in range(1, count + 1)),
    ]
    return schema(1, IMAGE) + channels + channel(60_000, 1, "/other") + packed(data)


@case("mcap: a schema of protobuf that is deep")
def _(folder: Path) -> Path:
    data = b"\x1a\0"
    for _ in range(3000):
        data = b"\x1a" + BytesValue(value=data).SerializeToString()[1:]
    head = schema(1, "foxglove.RawImage", "protobuf", data) + channel(1, 1, COLOUR, "protobuf")
    return write_mcap_file(folder, head, message(1, b"\x0b" * 20_000))


# ROS

TOPIC_TABLE = "CREATE TABLE topics(id INTEGER PRIMARY KEY, name TEXT, type TEXT, serialization_format TEXT)"
MESSAGE_TABLE = (
    "CREATE TABLE messages(id INTEGER PRIMARY KEY, topic_id INTEGER, timestamp INTEGER, data BLOB)"
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
COMPUTED_MESSAGES = (
    f"CREATE VIEW messages AS {ENDLESS} SELECT i AS id, 1 AS topic_id, i AS timestamp, "
    "zeroblob(100000000) AS data FROM n"
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


def bz2_chunk(data: bytes, most: int | None = None) -> bytes:
    return ros1_chunk("bz2", bz2.compress(data)[:most], len(data))


def small_record() -> bytes:
    return part(op=b"\x02", conn=bytes(4), time=bytes(8)) + text(b"")


BAGS: dict[str, Callable[[], Sequence[bytes]]] = {
    # streams of bz2 that follow one another are one
    "chunks of zeros in bz2": lambda: fill(
        connection(), ros1_chunk("bz2", bz2.compress(bytes(3 * MIB)) * 10, 30 * MIB)
    ),
    "chunks of small records in bz2": lambda: fill(connection(), bz2_chunk(*repeated(small_record(), MIB))),
    "chunks of connections in bz2": lambda: [
        connection(),
        bz2_chunk(b"".join(connection(n, f"/c{n}/image".encode()) for n in range(10_000)), LIMIT - 1000),
    ],
    "an index that names the connections without end": lambda: [
        part(op=b"\x03", index_pos=struct.pack("<Q", 64), conn_count=b"\xff" * 4, chunk_count=bytes(4)),
        text(b""),
        connection() * 500,
    ],
}
CASES |= {f"mcap: {name}": partial(_write, write_mcap_file, make) for name, make in MCAPS.items()}
CASES |= {f"bag: {name}": partial(_write, write_bag, make) for name, make in BAGS.items()}


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


def execute(path: Path, *statements: str) -> Path:
    """Carry out statements of SQL on a database."""
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        for statement in statements:
            database.execute(statement)
    return path


def write_database(folder: Path, rows: list[tuple[int, bytes]], topics: Iterable[str] = (COLOUR,)) -> Path:
    path = execute(folder / "hostile.db3", "PRAGMA page_size=1024", TOPIC_TABLE, MESSAGE_TABLE)
    with contextlib.closing(sqlite3.connect(path)) as database, database:
        named = ((number, topic, IMAGE) for number, topic in enumerate(topics, 1))
        database.executemany("INSERT INTO topics VALUES (?, ?, ?, 'cdr')", named)
        database.executemany("INSERT INTO messages VALUES (?, 1, ?, ?)", ((n, T0 + n, d) for n, d in rows))
    return path


@case("ros 2: a blob that is computed")
def _(folder: Path) -> Path:
    return execute(write_database(folder, [(1, b"x")]), "DROP TABLE messages", COMPUTED_MESSAGES)
