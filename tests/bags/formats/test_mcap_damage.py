"""Damaged MCAP files: all complete chunks are read, and what was lost is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sam3_node.errors import BagError

pytest.importorskip("mcap")
pytest.importorskip("mcap_ros2")
pytest.importorskip("mcap_protobuf")
pytest.importorskip("foxglove_schemas_protobuf")
pytest.importorskip("rosbags")

from mcap.writer import CompressionType

from sam3_node.bags.formats.mcap import McapBag
from sam3_node.bags.samples import Sample
from tests.support.mcap_files import (
    COLOUR,
    DEPTH,
    INFO,
    T0,
    WRITERS,
    Moment,
    colour_pixels,
    raw,
    rgbd,
    uncompressed,
    write_json,
    write_mcap,
    write_protobuf,
    write_ros2,
)
from tests.support.refuses import refuses

FORMATS = sorted(WRITERS)
TOPICS = {COLOUR, DEPTH, INFO}


def read(path: Path, topics: set[str] | None = None) -> tuple[list[Sample], str | None]:
    reader = McapBag(path)
    samples = list(reader.samples({topic.name for topic in reader.topics} if topics is None else topics))
    return samples, reader.lost


@pytest.mark.parametrize(
    "options", [uncompressed(6000), {"compression": CompressionType.ZSTD, "chunk_size": 6000}]
)
def test_of_a_file_cut_anywhere_every_complete_chunk_is_read(tmp_path: Path, options: dict) -> None:
    path = write_protobuf(tmp_path / "whole.mcap", rgbd(12), **options)
    data, random = path.read_bytes(), np.random.default_rng(0)
    ends = chunk_ends(path)
    for length in sorted(int(at) for at in random.integers(200, len(data), 60)):
        cut = tmp_path / f"cut{length}.mcap"
        cut.write_bytes(data[:length])
        whole = [count for end, count in ends if end <= length]
        if not whole:
            with refuses(BagError, field="message"):
                McapBag(cut)
            continue
        samples, lost = read(cut)
        assert len(samples) >= whole[-1]
        assert [sample.topic for sample in samples[:3]] == [COLOUR, DEPTH, INFO]
        if len(samples) < 36:
            assert f"cut{length}.mcap" in str(lost)


def chunk_ends(path: Path) -> list[tuple[int, int]]:
    """Return the end of each chunk, and the number of messages up to it."""
    from mcap.reader import make_reader

    ends, count = [], 0
    with path.open("rb") as file:
        summary = make_reader(file).get_summary()
        assert summary is not None
        for index in summary.chunk_indexes:
            with path.open("rb") as again:
                again.seek(index.chunk_start_offset)
                count += messages_in(again.read(index.chunk_length))
            ends.append((index.chunk_start_offset + index.chunk_length, count))
    return ends


def messages_in(record: bytes) -> int:
    import io

    from mcap.data_stream import ReadDataStream
    from mcap.records import Chunk, Message
    from mcap.stream_reader import breakup_chunk

    chunk = Chunk.read(ReadDataStream(io.BytesIO(record[9:])))
    return sum(isinstance(found, Message) for found in breakup_chunk(chunk))


def test_without_chunks_no_half_message_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = write_json(tmp_path / "plain.mcap", rgbd(3), use_chunking=False)
    data = path.read_bytes()
    for length in range(len(data) // 3, len(data) * 2 // 3, 97):
        path.write_bytes(data[:length])
        samples, lost = read(path)
        assert lost is not None
        assert "skipped" not in lost
        assert len(samples) < 9


def test_what_was_lost_is_told_with_bytes_and_time(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "cut.mcap", rgbd(12), **uncompressed(6000))
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    _, lost = read(path)
    assert lost.startswith(f"{path} is cut off: what follows byte ")
    assert f" of {len(data) // 2} after 2023-11-14T22:13:20." in lost


def test_a_changed_byte_ends_the_reading_before_its_chunk(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "changed.mcap", rgbd(12), **uncompressed(6000))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    samples, lost = read(path, {COLOUR})
    assert 0 < len(samples) < 12
    assert "is damaged (crc validation failed in Chunk" in str(lost)


def test_an_index_that_is_cut_off_costs_nothing(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "cut.mcap", rgbd(4))
    path.write_bytes(path.read_bytes()[:-20])
    samples, lost = read(path)
    assert (len(samples), lost) == (12, None)


def test_a_chunk_that_declares_a_huge_size_is_damage(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "huge.mcap", rgbd(2))
    data = bytearray(path.read_bytes())
    at = data.index(b"\x04\x00\x00\x00zstd") - 12
    data[at : at + 8] = (1 << 50).to_bytes(8, "little")
    path.write_bytes(data)
    samples, lost = read(path)
    assert not samples
    assert f"a chunk of {1 << 50} bytes" in str(lost)


def test_a_chunk_in_an_unknown_compression_is_told(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "brotli.mcap", rgbd(2))
    path.write_bytes(path.read_bytes().replace(b"\x04\x00\x00\x00zstd", b"\x04\x00\x00\x00brot", 1))
    samples, lost = read(path)
    assert not samples
    assert "a chunk compressed by 'brot', expected lz4, zstd or nothing" in str(lost)


def test_a_damaged_message_is_passed_over(tmp_path: Path) -> None:
    good = raw(colour_pixels(0), "bgr8")
    short = replace(good, data=b"short", stamp_ns=T0 + 1)
    for write in WRITERS.values():
        samples, lost = read(write(tmp_path / "some.mcap", [good, short, good]))
        assert len(samples) == 2
        assert "skipped 1 of /cam/image_raw" in str(lost)


@pytest.mark.parametrize("encoding", ["json", "protobuf", "cdr", "ros1"])
@pytest.mark.parametrize("data", [b"", b"\xff" * 30, b"[1]", b'{"data": 3, "width": "x", "height": []}'])
def test_bytes_that_are_no_message_are_passed_over(tmp_path: Path, encoding: str, data: bytes) -> None:
    from foxglove_schemas_protobuf.RawImage_pb2 import RawImage
    from mcap_protobuf.schema import build_file_descriptor_set

    schema = build_file_descriptor_set(RawImage).SerializeToString() if encoding == "protobuf" else b""
    name = "foxglove.RawImage" if encoding in ("json", "protobuf") else "sensor_msgs/msg/Image"
    path = tmp_path / "bad.mcap"
    write_mcap(path, [Moment("/cam/image", "raw", T0)], encoding, encoding, lambda _: (name, schema, data))
    samples, lost = read(path)
    assert not samples
    assert "skipped 1 of /cam/image" in str(lost)


@pytest.mark.parametrize("format_", FORMATS)
def test_an_image_in_an_unknown_encoding_is_an_error(tmp_path: Path, format_: str) -> None:
    path = WRITERS[format_](tmp_path / "odd.mcap", [raw(colour_pixels(0), "hsv8")])
    with refuses(BagError, field=("/cam/image_raw", "hsv8")):
        read(path)


def test_messages_in_an_unknown_encoding_are_an_error(tmp_path: Path) -> None:
    path = write_mcap(
        tmp_path / "flat.mcap",
        [Moment("/cam/image", "raw", T0)],
        "flatbuffer",
        "flatbuffer",
        lambda _: ("foxglove.RawImage", b"", b"x"),
    )
    with refuses(BagError, field=("/cam/image", "flatbuffer")):
        read(path)


def test_a_damaged_schema_is_an_error(tmp_path: Path) -> None:
    path = write_mcap(
        tmp_path / "schema.mcap",
        [Moment("/cam/image", "raw", T0)],
        "protobuf",
        "protobuf",
        lambda _: ("foxglove.RawImage", b"\xff\xff", b""),
    )
    with refuses(BagError, field="foxglove.RawImage"):
        read(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("garbage", bytes(range(256))), ("bare", b"\x89MCAP0\r\n")):
        (tmp_path / name).write_bytes(content)
    for name, what in (
        ("empty", "an empty one"),
        ("garbage", "begins otherwise"),
        ("bare", "no message at all"),
    ):
        with pytest.raises(BagError, match=what):
            McapBag(tmp_path / name)
    with pytest.raises(BagError, match="cannot read"):
        McapBag(tmp_path / "absent")
    assert not McapBag.recognises(tmp_path / "garbage")
    assert McapBag.recognises(tmp_path / "bare")
