"""Recordings come back as they were written, also as Foxglove's messages; damage costs only what follows it."""

import dataclasses
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from mcap_protobuf.decoder import DecoderFactory

from sam3_node.bags.native import NODE, RECORDING
from sam3_node.bags.native.reader import RecordedMasks, RecordingReader, is_recorded
from sam3_node.bags.native.writer import CHUNK_BYTES, RecordingWriter, SplitRecordingWriter
from sam3_node.errors import BagError, OutputError, WireError
from sam3_node.types import Depth, Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import Event, decode_depth, encode_depth, encode_image, pack_event, pack_masks
from tests.support.mcap_files import rgbd, write_json
from tests.support.refuses import refuses
from tests.support.wire_examples import masks, plain

RESET = Event(0, "reset", {"camera": "cam0"})


def image(seed: int, width: int = 64, height: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)


def depth(encoding: Any) -> Depth:
    values = np.arange(12, dtype=np.uint16).reshape(3, 4) * 700
    return encode_depth(values, encoding, 0.001, aligned=False)


def frame(seq: int, encoding: Any = "bgr8", **changes: Any) -> Frame:
    colour = bytes(encode_image(image(seq), encoding))
    return dataclasses.replace(Frame("cam0", seq, 1000 + seq, 64, 48, encoding, colour), **changes)


def read_frames(path: Path) -> Iterator[Frame]:
    return RecordingReader([path]).frames()


def record(path: Path, frames: list[Frame]) -> Path:
    with RecordingWriter(path) as writer:
        for item in frames:
            writer.write_frame(item, 5)
    return path


def decoded(path: Path, topic: str) -> list[tuple[Any, Any]]:
    """Return type and content of the messages of a topic, by mcap's own reader."""
    with path.open("rb") as file:
        reader = make_reader(file, decoder_factories=[DecoderFactory()])
        return [
            (schema.name, message) for schema, _, _, message in reader.iter_decoded_messages(topics=[topic])
        ]


@pytest.mark.parametrize("encoding", ["bgr8", "rgb8", "mono8", "jpeg", "png"])
def test_frames_come_back_as_they_were(tmp_path: Path, encoding: str) -> None:
    frames = [frame(seq, encoding, sent_ns=9, clock="device", times={"a": 1.5, "b": 2}) for seq in (3, 4, 9)]
    path = record(tmp_path / "r.mcap", frames)
    assert plain(list(read_frames(path))) == plain(frames)
    assert is_recorded(path)


@pytest.mark.parametrize("encoding", ["z16", "z16+zstd", "png16"])
def test_depth_comes_back_with_equal_values(tmp_path: Path, encoding: str) -> None:
    sent = frame(0, depth=depth(encoding))
    (found,) = read_frames(record(tmp_path / "r.mcap", [sent]))
    assert np.array_equal(decode_depth(found.depth), decode_depth(sent.depth))
    kept = "z16" if encoding == "z16+zstd" else encoding
    assert found.depth.encoding == kept
    assert plain(dataclasses.replace(found, depth=None)) == plain(dataclasses.replace(sent, depth=None))


def test_a_depth_that_does_not_decompress_is_left_out_and_counted(tmp_path: Path) -> None:
    broken = Depth(4, 3, "z16+zstd", 0.001, False, b"no zstd")
    vast = Depth(16384, 16384, "z16+zstd", 0.001, False, b"no zstd")
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        for number, item in enumerate((broken, vast)):
            writer.write_frame(frame(number, depth=item), 5)
        assert writer.depths_left_out == 2
    assert plain(list(read_frames(writer.path))) == plain([frame(0), frame(1)])


def test_a_frame_that_contradicts_itself_is_refused_and_the_file_goes_on(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        with pytest.raises(WireError):
            writer.write_frame(frame(0, colour=b"short"), 5)
        writer.write_frame(frame(1), 5)
    assert [found.seq for found in read_frames(writer.path)] == [1]


def test_a_camera_may_change_its_encoding(tmp_path: Path) -> None:
    frames = [frame(0, "bgr8"), frame(1, "jpeg"), frame(2, "mono8"), frame(3, "png")]
    assert plain(list(read_frames(record(tmp_path / "r.mcap", frames)))) == plain(frames)


def test_masks_and_events_come_back_in_their_order(tmp_path: Path) -> None:
    _, body = pack_masks(masks())
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        writer.write_event(pack_event(RESET)[1], 0, 5)
        writer.write_frame(frame(0), 6)
        writer.write_masks(body, masks(), 7)
        writer.write_event(pack_event(Event(1, "pause"))[1], 1, 8)
    first, second, third = RecordingReader([writer.path]).actions()
    assert (first, third) == (RESET, Event(1, "pause"))
    assert isinstance(second, RecordedMasks)
    assert second.body == body
    assert plain(second.masks) == plain(masks())


@pytest.mark.verifies(
    "results",
    "MCAP of this package in Foxglove",
    "own package",
    "mcap and foxglove-schemas-protobuf read images, calibration and annotations",
    "Foxglove's application",
)
def test_images_are_foxgloves(tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", [frame(0), frame(1, "jpeg"), frame(2, depth=depth("z16"))])
    (raw_kind, raw), (jpeg_kind, jpeg), _ = decoded(path, "/cam0/image")
    assert (raw_kind, raw.width, raw.height, raw.step, raw.encoding) == (
        "foxglove.RawImage", 64, 48, 192, "bgr8",
    )  # fmt: skip
    assert raw.data == frame(0).colour
    assert (raw.timestamp.nanos, raw.frame_id) == (1000, "cam0")
    assert (jpeg_kind, jpeg.format, jpeg.data) == (
        "foxglove.CompressedImage", "jpeg", frame(1, "jpeg").colour,
    )  # fmt: skip
    ((_, found),) = decoded(path, "/cam0/depth")
    assert (found.width, found.height, found.step, found.encoding) == (4, 3, 8, "16UC1")
    assert found.data == depth("z16").data


@pytest.mark.parametrize(
    ("model", "coeffs", "name", "count"),
    [
        ("none", (), "", 0),
        ("brown_conrady", (0.1, 0.2, 0.3, 0.4), "plumb_bob", 5),
        ("brown_conrady", tuple(range(8)), "rational_polynomial", 8),
        ("brown_conrady", tuple(range(12)), "thin_prism", 12),
        ("fisheye", (0.1,), "kannala_brandt", 4),
    ],
)
def test_calibrations_are_foxgloves(
    tmp_path: Path, model: Any, coeffs: tuple[float, ...], name: str, count: int
) -> None:
    known = Intrinsics(600.0, 601.0, 31.5, 23.5, model, coeffs)
    other = dataclasses.replace(known, fx=500.0)
    frames = [frame(seq, intrinsics=item) for seq, item in enumerate((known, known, other, None, other))]
    path = record(tmp_path / "r.mcap", frames)
    (_, first), (_, second) = decoded(path, "/cam0/calibration")
    assert list(first.K) == [600, 0, 31.5, 0, 601, 23.5, 0, 0, 1]
    assert (first.width, first.height, first.distortion_model, len(first.D)) == (64, 48, name, count)
    assert list(first.D)[: len(coeffs)] == list(coeffs)
    assert second.P[0] == 500.0
    assert [found.intrinsics for found in read_frames(path)] == [known, known, other, None, other]


def test_annotations_are_foxgloves(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        writer.write_masks(pack_masks(masks())[1], masks(), 5)
    ((kind, found),) = decoded(writer.path, "/wrist-1/annotations")
    assert kind == "foxglove.ImageAnnotations"
    assert [text.text for text in found.texts] == ["3 red mug 0.88", "4 1.00?"]
    for loop in found.points:
        corners = {(point.x, point.y) for point in loop.points}
        assert loop.type == loop.LINE_LOOP
        assert all(0.5 <= x <= 7.5 and 0.5 <= y <= 4.5 for x, y in corners)
    stamps = [part.timestamp for part in (found, *found.points, *found.texts)]  # of old viewers, too
    assert {stamp.seconds * 10**9 + stamp.nanos for stamp in stamps} == {masks().capture_ns}


def test_a_mask_of_noise_has_no_outline(tmp_path: Path) -> None:
    noise = Mask.from_full(np.random.default_rng(0).integers(0, 2, (400, 400)).astype(bool))
    found = MaskFrame("cam0", 0, 0, 400, 400, instances=(Instance(1, "", 0.5, "tracked", 1, 0, noise),))
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        writer.write_masks(pack_masks(found)[1], found, 5)
    ((_, annotations),) = decoded(writer.path, "/cam0/annotations")
    assert not annotations.points
    assert len(annotations.texts) == 1


def test_metadata_comes_back(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        writer.write_metadata(NODE, {"model": "nano", "settings": {"a": [1, 2.5, None]}, "odd": b"\0"})
        writer.write_frame(frame(0), 5)
        writer.write_metadata(NODE, {"model": "other"})
    found = RecordingReader([writer.path]).metadata()[NODE]
    assert found == [
        {"model": "nano", "settings": {"a": [1, 2.5, None]}, "odd": "b'\\x00'"},
        {"model": "other"},
    ]


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("hello")
    foreign = write_json(tmp_path / "foreign.mcap", rgbd(1))
    for path in (foreign, tmp_path / "empty", tmp_path / "text", tmp_path, tmp_path / "none"):
        assert not is_recorded(path)
        with pytest.raises(BagError, match=str(path)):
            RecordingReader([path])
    with pytest.raises(BagError, match="none"):
        RecordingReader([])


def test_a_newer_layout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.bags.native.LAYOUT_VERSION", 2)
    path = record(tmp_path / "r.mcap", [])
    with refuses(BagError, field=("1", "2", "recordings")):
        RecordingReader([path])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a recording of 60 frames in several chunks, with masks among them."""
    with RecordingWriter(tmp_path_factory.mktemp("whole") / "r.mcap") as writer:
        for seq in range(60):
            writer.write_frame(frame(seq), seq)
            writer.write_masks(pack_masks(masks())[1], masks(), seq)
            if seq % 10 == 9:
                writer.flush()
        writer.write_metadata(RECORDING, {"frames": 60})
    return writer.path


@pytest.mark.parametrize("part", range(1, 20))
def test_of_a_file_that_is_cut_all_complete_chunks_come(whole: Path, tmp_path: Path, part: int) -> None:
    content = whole.read_bytes()
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(content[: len(content) * part // 20])
    recorded = RecordingReader([cut])
    seqs = [found.seq for found in recorded.frames()]
    assert seqs == list(range(len(seqs)))
    assert len(seqs) % 10 == 0
    assert len(seqs) >= 60 * (part - 4) // 20
    assert str(cut) in recorded.lost
    assert len(list(recorded.actions())) == len(seqs)


def test_damage_in_the_middle_ends_the_reading(whole: Path, tmp_path: Path) -> None:
    content = bytearray(whole.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path = tmp_path / "damaged.mcap"
    path.write_bytes(content)
    recorded = RecordingReader([path])
    assert [found.seq for found in recorded.frames()] in [list(range(count)) for count in (20, 30)]
    assert "damaged" in str(recorded.lost)


def test_random_damage_never_raises(whole: Path, tmp_path: Path) -> None:
    content = whole.read_bytes()[:200_000]
    rng = np.random.default_rng(7)
    path = tmp_path / "damaged.mcap"
    for _ in range(60):
        damaged = bytearray(content)
        for position in rng.integers(120, len(damaged), 3):
            damaged[position] = rng.integers(256)
        path.write_bytes(damaged)
        recorded = RecordingReader([path])
        seqs = [found.seq for found in recorded.frames()]
        assert seqs == list(range(len(seqs)))
        list(recorded.actions())
        recorded.metadata()


def test_a_length_that_lies_takes_no_memory(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "lies.mcap"
    path.write_bytes(whole.read_bytes()[:150] + struct.pack("<BQ", 6, 1 << 60) + bytes(100))
    recorded = RecordingReader([path])
    assert not list(recorded.frames())
    assert recorded.lost is not None


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    frames = [frame(seq) for seq in range(6)]
    paths = [record(tmp_path / f"{part}.mcap", frames[part * 3 : part * 3 + 3]) for part in range(2)]
    recorded = RecordingReader(paths)
    assert [found.seq for found in recorded.frames()] == list(range(6))
    assert [found.seq for found in recorded.frames()] == list(range(6))
    assert recorded.lost is None


def test_complete_chunks_are_on_the_disk_at_once(tmp_path: Path) -> None:
    writer = RecordingWriter(tmp_path / "r.mcap")
    large = dataclasses.replace(frame(0), width=640, height=480, colour=bytes(640 * 480 * 3))
    for seq in range(5):
        writer.write_frame(dataclasses.replace(large, seq=seq), 5)
        assert writer.bytes - writer.path.stat().st_size < CHUNK_BYTES
    writer.flush()
    assert [found.seq for found in read_frames(writer.path)] == list(range(5))
    writer.close()


def test_a_recording_is_never_overwritten(tmp_path: Path) -> None:
    path = record(tmp_path / "r.mcap", [frame(0)])
    with refuses(OutputError, field="r.mcap"):
        RecordingWriter(path)
    assert len(list(read_frames(path))) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field=("create", "folder")):
        RecordingWriter(tmp_path / "file" / "r.mcap")


def splits(path: Path, split_bytes: float = 0, split_s: float = 0) -> SplitRecordingWriter:
    return SplitRecordingWriter(path, split_bytes, split_s, lambda: {"frames": 7})


def test_every_split_opens_alone(tmp_path: Path) -> None:
    sent = [frame(seq, intrinsics=Intrinsics(1.0, 1.0, 0.0, 0.0)) for seq in range(7)]
    with splits(tmp_path / "r.mcap", split_bytes=3 * len(sent[0].colour)) as files:
        files.add_metadata(NODE, {"model": "nano"})
        for item in sent:
            files.current().write_frame(item, 5)
    assert [path.name for path in files.paths] == ["r.mcap", "r_0001.mcap", "r_0002.mcap"]
    assert plain(list(RecordingReader(files.paths).frames())) == plain(sent)
    for path in files.paths:
        recorded = RecordingReader([path])
        assert recorded.metadata()[NODE] == [{"model": "nano"}]
        assert recorded.metadata()[RECORDING] == [{"frames": 7}]
        assert len(decoded(path, "/cam0/calibration")) == 1
        assert recorded.lost is None


def test_time_splits_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = iter(range(0, 1000, 10))
    monkeypatch.setattr("sam3_node.bags.native.writer.time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with splits(tmp_path / "r.mcap", split_s=25) as files:
        for seq in range(6):
            files.current().write_frame(frame(seq), 5)
    assert len(files.paths) > 1
    assert [found.seq for found in RecordingReader(files.paths).frames()] == list(range(6))


def test_splits_of_an_earlier_recording_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    (tmp_path / "r_0001.mcap").write_bytes(b"")
    with pytest.raises(OutputError, match=r"r_0001\.mcap"):
        splits(tmp_path / "r.mcap")


@pytest.fixture
def small_files(tmp_path: Path) -> Iterator[int]:
    """Limit every file to 400 kB."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    yield 400_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_where_the_disk_is_full_the_file_ends_whole(tmp_path: Path, small_files: int) -> None:
    writer = RecordingWriter(tmp_path / "r.mcap")

    def fill() -> None:
        for seq in range(1000):
            writer.write_frame(frame(seq), 5)
            if seq % 5 == 4:
                writer.flush()

    with refuses(OutputError, field="r.mcap"):
        fill()
    assert writer.closed
    writer.close()
    recorded = RecordingReader([writer.path])
    seqs = [found.seq for found in recorded.frames()]
    assert seqs == list(range(len(seqs)))
    assert len(seqs) * len(frame(0).colour) > small_files * 0.8
    assert recorded.lost is None  # it has an end
    assert len(decoded(writer.path, "/cam0/image")) == len(seqs)  # mcap's own reader takes it
    assert os.path.getsize(writer.path) <= small_files


def test_metadata_is_json(tmp_path: Path) -> None:
    with RecordingWriter(tmp_path / "r.mcap") as writer:
        writer.write_metadata(NODE, {"model": "nano"})
    with writer.path.open("rb") as file:
        found = {record.name: record.metadata for record in make_reader(file).iter_metadata()}
    assert json.loads(found[NODE]["model"]) == "nano"
