"""MCAP files of ROS 2, ROS 1 and Foxglove: all comes back as written; of damaged files every complete chunk."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from mcap.data_stream import ReadDataStream, RecordBuilder
from mcap.reader import make_reader
from mcap.records import Channel, Chunk, Message, Schema
from mcap.stream_reader import breakup_chunk
from mcap.writer import CompressionType

from sam3_node.bags.formats.mcap import McapBag
from sam3_node.bags.samples import Colour, Sample
from sam3_node.errors import BagError
from sam3_node.types import Intrinsics
from sam3_node.wire import decode_depth
from tests.support.mcap_files import (
    COLOUR,
    DEPTH,
    HEIGHT,
    INFO,
    LOG_DELAY_NS,
    PERIOD_NS,
    T0,
    WIDTH,
    WRITERS,
    D,
    Moment,
    colour_pixels,
    depth_pixels,
    jpeg,
    raw,
    rgbd,
    uncompressed,
    write_json,
    write_mcap,
    write_protobuf,
    write_ros2,
)
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

FORMATS = sorted(WRITERS)
TOPICS = {COLOUR, DEPTH, INFO}


def read(path: Path, topics: set[str] | None = None) -> tuple[list[Sample], str | None]:
    reader = McapBag(path)
    samples = list(reader.samples({topic.name for topic in reader.topics} if topics is None else topics))
    return samples, reader.lost


def one(path: Path) -> Sample:
    (sample,), lost = read(path)
    assert lost is None
    return sample


def pixels(colour: object) -> np.ndarray:
    """Return the pixels of a raw bgr8 or grey image."""
    assert colour.encoding in ("bgr8", "mono8")
    return np.frombuffer(colour.data, np.uint8).reshape(colour.height, colour.width, -1)


@pytest.mark.verifies(
    "recording",
    "MCAP of ROS 2, ROS 1 and Foxglove (protobuf, JSON)",
    "own package",
    "mcap, mcap-ros2-support, mcap-protobuf-support and foxglove-schemas-protobuf write it",
    "a file of Foxglove's bridge",
)
@pytest.mark.parametrize("format_", FORMATS)
def test_every_format_gives_the_pixels_stamps_and_intrinsics_that_were_written(
    tmp_path: Path, format_: str
) -> None:
    samples, lost = read(WRITERS[format_](tmp_path / "rgbd.mcap", rgbd(4)))
    assert lost is None
    assert [(sample.topic, sample.stamp_ns, sample.logged_ns) for sample in samples] == [
        (topic, T0 + index * PERIOD_NS, T0 + index * PERIOD_NS + LOG_DELAY_NS)
        for index in range(4)
        for topic in (COLOUR, DEPTH, INFO)
    ]
    colour, depth, info = (sample.payload for sample in samples[9:])
    assert np.array_equal(pixels(colour), colour_pixels(3))
    assert (depth.scale_m, depth.aligned) == (0.001, True)
    assert np.array_equal(decode_depth(depth), depth_pixels(3))
    assert info.lens == Intrinsics(60.0, 61.0, 15.5, 11.5, "brown_conrady", tuple(D))
    assert info.size == (WIDTH, HEIGHT)


@pytest.mark.parametrize("format_", FORMATS)
def test_compressed_images_keep_their_bytes(tmp_path: Path, format_: str) -> None:
    samples, _ = read(WRITERS[format_](tmp_path / "jpeg.mcap", rgbd(2, compressed=True)))
    assert bytes(samples[3].payload.data) == jpeg(1)  # type: ignore[union-attr]
    assert samples[3].payload == Colour(WIDTH, HEIGHT, "jpeg", samples[3].payload.data)  # type: ignore[union-attr]


@each_row("format_", FORMATS)
@each_row(
    ("encoding", "code"),
    [("rgba8", cv2.COLOR_BGR2RGBA), ("bgra8", cv2.COLOR_BGR2BGRA), ("mono8", cv2.COLOR_BGR2GRAY)],
)
def test_other_encodings_become_bgr_or_stay_grey(
    tmp_path: Path, format_: str, encoding: str, code: int
) -> None:
    written = cv2.cvtColor(colour_pixels(1), code)
    sample = one(WRITERS[format_](tmp_path / "image.mcap", [raw(written, encoding)]))
    grey = cv2.cvtColor(colour_pixels(1), cv2.COLOR_BGR2GRAY)[:, :, None]
    assert np.array_equal(pixels(sample.payload), grey if encoding == "mono8" else colour_pixels(1))


@pytest.mark.parametrize("format_", FORMATS)
def test_padding_behind_rows_is_left_out(tmp_path: Path, format_: str) -> None:
    padded = np.pad(colour_pixels(2), ((0, 0), (0, 5), (0, 0)), constant_values=255)
    sample = one(WRITERS[format_](tmp_path / "image.mcap", [raw(padded, "bgr8")]))
    assert np.array_equal(pixels(sample.payload), colour_pixels(2))


@pytest.mark.parametrize("format_", FORMATS)
def test_depth_in_metres_becomes_millimetres(tmp_path: Path, format_: str) -> None:
    metres = (depth_pixels(0) / 1000).astype("<f4")
    metres[0, :3] = np.nan, np.inf, -1
    payload = one(WRITERS[format_](tmp_path / "d.mcap", [raw(metres, "32FC1", topic=DEPTH)])).payload
    expected = depth_pixels(0).copy()
    expected[0, :3] = 0
    assert np.array_equal(decode_depth(payload), expected)


@each_row("format_", FORMATS)
@each_row(
    ("model", "coeffs", "expected"),
    [
        ("rational_polynomial", (0.1,) * 8, "brown_conrady"),
        ("plumb_bob", (0.0,) * 5, "none"),
        ("equidistant", (0.1,) * 4, "fisheye"),
    ],
)
def test_distortion_models(
    tmp_path: Path, format_: str, model: str, coeffs: tuple[float, ...], expected: str
) -> None:
    moment = Moment(INFO, "info", T0, model=model, coeffs=coeffs)
    payload = one(WRITERS[format_](tmp_path / "info.mcap", [moment])).payload
    assert (payload.lens.model, payload.lens.coeffs) == (expected, coeffs if expected != "none" else ())


def test_kannala_brandt_of_foxglove_is_fisheye(tmp_path: Path) -> None:
    moment = Moment(INFO, "info", T0, model="kannala_brandt", coeffs=(0.1, 0.2, 0.3, 0.4))
    for write in (write_json, write_protobuf):
        payload = one(write(tmp_path / "info.mcap", [moment])).payload
        assert payload.lens == Intrinsics(60.0, 61.0, 15.5, 11.5, "fisheye", moment.coeffs)


@pytest.mark.parametrize("format_", FORMATS)
def test_without_a_stamp_the_log_time_counts(tmp_path: Path, format_: str) -> None:
    sample = one(WRITERS[format_](tmp_path / "image.mcap", [raw(colour_pixels(0), "bgr8", stamp_ns=0)]))
    assert sample.stamp_ns == sample.logged_ns == T0 + LOG_DELAY_NS


@pytest.mark.parametrize("compression", list(CompressionType))
def test_chunks_of_every_compression_and_none(tmp_path: Path, compression: CompressionType) -> None:
    path = write_ros2(tmp_path / "chunks.mcap", rgbd(6), compression=compression, chunk_size=4000)
    assert len(read(path, {COLOUR})[0]) == 6


def test_files_without_chunks_or_without_an_index(tmp_path: Path) -> None:
    for options in ({"use_chunking": False}, {"use_statistics": False}, {"repeat_channels": False}):
        path = write_json(tmp_path / "plain.mcap", rgbd(3), **options)
        assert {topic.name for topic in McapBag(path).topics} == TOPICS
        assert len(read(path)[0]) == 9


def test_topics_have_type_and_kind_and_silent_ones_are_left_out(tmp_path: Path) -> None:
    moments = [*rgbd(1), Moment("/tf", "info", T0)]

    def encode(moment: Moment) -> tuple[str, bytes, bytes]:
        return ("tf2_msgs/msg/TFMessage" if moment.topic == "/tf" else "foxglove.RawImage"), b"", b"{}"

    path = write_mcap(tmp_path / "topics.mcap", moments, "json", "jsonschema", encode)
    assert [(topic.type, topic.kind) for topic in McapBag(path).topics] == [
        ("foxglove.RawImage", "colour"),
        ("foxglove.RawImage", "depth"),
        ("foxglove.RawImage", "colour"),
        ("tf2_msgs/msg/TFMessage", "other"),
    ]


@pytest.mark.parametrize("format_", FORMATS)
def test_chunks_stored_out_of_order_come_by_their_times(tmp_path: Path, format_: str) -> None:
    moments = list(rgbd(12))
    shuffled = [moment for begin in (0, 24, 12, 30, 6, 18) for moment in moments[begin : begin + 6]]
    path = WRITERS[format_](tmp_path / "rgbd.mcap", shuffled, chunk_size=1)
    samples, lost = read(path)
    assert lost is None
    assert [(sample.topic, sample.stamp_ns) for sample in samples] == [
        (moment.topic, moment.stamp_ns) for moment in sorted(moments, key=lambda moment: moment.stamp_ns)
    ]


def test_bytes_behind_the_fields_of_records_in_chunks_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later versions of the format may have more fields of schemas and channels."""
    expected, _ = read(write_ros2(tmp_path / "rgbd.mcap", rgbd(4)))
    plain = len((tmp_path / "rgbd.mcap").read_bytes())

    def pad(write: Any) -> Any:
        return lambda record, stream: write(record, Padded(stream))

    for kind in (Schema, Channel):
        monkeypatch.setattr(kind, "write", pad(kind.write))
    padded = write_ros2(tmp_path / "padded.mcap", rgbd(4))
    assert padded.stat().st_size > plain
    assert read(padded) == (expected, None)


class Padded:
    """A builder of records that appends bytes to each."""

    def __init__(self, builder: RecordBuilder) -> None:
        self._builder = builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def finish_record(self) -> None:
        self._builder.write(b"later")
        self._builder.finish_record()


@pytest.mark.parametrize(
    "options", [uncompressed(6000), {"compression": CompressionType.ZSTD, "chunk_size": 6000}]
)
def test_of_a_file_cut_anywhere_every_complete_chunk_is_read(tmp_path: Path, options: dict) -> None:
    path = write_protobuf(tmp_path / "whole.mcap", rgbd(12), **options)
    data = path.read_bytes()
    random = np.random.default_rng(0)
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
    data = path.read_bytes()
    ends = []
    count = 0
    for index in make_reader(io.BytesIO(data)).get_summary().chunk_indexes:
        end = index.chunk_start_offset + index.chunk_length
        record = ReadDataStream(io.BytesIO(data[index.chunk_start_offset + 9 : end]))
        count += sum(isinstance(found, Message) for found in breakup_chunk(Chunk.read(record)))
        ends.append((end, count))
    return ends


def test_without_chunks_no_half_message_is_taken_for_a_whole_one(tmp_path: Path) -> None:
    path = write_json(tmp_path / "plain.mcap", rgbd(3), use_chunking=False)
    data = path.read_bytes()
    for length in range(len(data) // 3, len(data) * 2 // 3, 97):
        path.write_bytes(data[:length])
        samples, lost = read(path)
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
    assert mentions(str(lost), "crc", "Chunk")


def test_an_index_that_is_cut_off_costs_nothing(tmp_path: Path) -> None:
    path = write_ros2(tmp_path / "cut.mcap", rgbd(4))
    path.write_bytes(path.read_bytes()[:-20])
    samples, lost = read(path)
    assert (len(samples), lost) == (12, None)


@pytest.mark.parametrize(
    ("before", "new", "told"),
    [
        (12, (1 << 50).to_bytes(8, "little"), f"a chunk of {1 << 50} bytes"),
        (0, b"\x04\0\0\0brot", "a chunk compressed by 'brot', expected lz4, zstd or nothing"),
    ],
)
def test_a_chunk_of_huge_size_or_unknown_compression_is_told(
    tmp_path: Path, before: int, new: bytes, told: str
) -> None:
    path = write_ros2(tmp_path / "odd.mcap", rgbd(2))
    data = bytearray(path.read_bytes())
    at = data.index(b"\x04\0\0\0zstd") - before
    data[at : at + 8] = new
    path.write_bytes(data)
    samples, lost = read(path)
    assert not samples
    assert told in str(lost)


def test_a_damaged_message_is_passed_over(tmp_path: Path) -> None:
    good = raw(colour_pixels(0), "bgr8")
    short = replace(good, data=b"short", stamp_ns=T0 + 1)
    for write in WRITERS.values():
        samples, lost = read(write(tmp_path / "some.mcap", [good, short, good]))
        assert len(samples) == 2
        assert mentions(str(lost), "1", "/cam/image_raw")


@each_row("encoding", ["json", "protobuf", "cdr", "ros1"])
@each_row("data", [b"", b"\xff" * 30, b"[1]", b'{"data": 3, "width": "x", "height": []}'])
def test_bytes_that_are_no_message_are_passed_over(tmp_path: Path, encoding: str, data: bytes) -> None:
    from foxglove_schemas_protobuf.RawImage_pb2 import RawImage
    from mcap_protobuf.schema import build_file_descriptor_set

    schema = build_file_descriptor_set(RawImage).SerializeToString() if encoding == "protobuf" else b""
    name = "foxglove.RawImage" if encoding in ("json", "protobuf") else "sensor_msgs/msg/Image"
    path = tmp_path / "bad.mcap"
    write_mcap(path, [Moment("/cam/image", "raw", T0)], encoding, encoding, lambda _: (name, schema, data))
    samples, lost = read(path)
    assert not samples
    assert mentions(str(lost), "1", "/cam/image")


@pytest.mark.parametrize("format_", FORMATS)
def test_an_image_in_an_unknown_encoding_is_an_error(tmp_path: Path, format_: str) -> None:
    path = WRITERS[format_](tmp_path / "odd.mcap", [raw(colour_pixels(0), "hsv8")])
    with refuses(BagError, field=("/cam/image_raw", "hsv8")):
        read(path)


@pytest.mark.parametrize(
    ("encoding", "schema", "field"),
    [("flatbuffer", b"", ("/cam/image", "flatbuffer")), ("protobuf", b"\xff\xff", "foxglove.RawImage")],
)
def test_an_unknown_encoding_of_messages_and_a_damaged_schema_are_errors(
    tmp_path: Path, encoding: str, schema: bytes, field: Any
) -> None:
    path = tmp_path / "odd.mcap"
    moment = Moment("/cam/image", "raw", T0)
    write_mcap(path, [moment], encoding, encoding, lambda _: ("foxglove.RawImage", schema, b"x"))
    with refuses(BagError, field=field):
        read(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    for name, content, what in (
        ("empty", b"", "an empty one"),
        ("garbage", bytes(range(256)), "begins otherwise"),
        ("bare", b"\x89MCAP0\r\n", "no message at all"),
        ("absent", None, "cannot read"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(BagError, match=what):
            McapBag(tmp_path / name)
    assert not McapBag.recognises(tmp_path / "garbage")
    assert McapBag.recognises(tmp_path / "bare")
