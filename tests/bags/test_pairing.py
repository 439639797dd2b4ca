"""Pairing of colour with depth: nearest by stamp, in order, in bounded memory, without endless waiting."""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags import RecordingWriter
from sam3_node.bags.discovery import Camera
from sam3_node.bags.formats import mcap, video
from sam3_node.bags.pairing import MAX_WAITING, PATIENCE_NS, TOLERANCE_NS, Pairing, TimeSpan, parse_time
from sam3_node.bags.samples import CameraInfo, Colour, MillimetreDepth, Sample
from sam3_node.errors import BagError
from sam3_node.types import NANOSECONDS, Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth
from tests.support import mcap_files
from tests.support.recordings import frame_at, read_bag, write_film
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tests.support.wire_examples import plain

MS = 1_000_000
T0 = 1_700_000_000_000 * MS
LENS = Intrinsics(60.0, 60.0, 3.5, 2.5, "brown_conrady", (0.1, 0.2, 0.0, 0.0, 0.0))
TABLE = Camera("table", "/table/image", "/table/depth", "/table/info", aligned=True)
TABLE_ALONE = replace(TABLE, intrinsics=None)
BARE = Camera("wrist", "/wrist/image")


def colour(at_ms: int, camera: Camera = TABLE, logged_ms: int | None = None) -> Sample:
    logged_ns = T0 + (at_ms if logged_ms is None else logged_ms) * MS
    return Sample(camera.colour, T0 + at_ms * MS, logged_ns, Colour(8, 6, "mono8", bytes([at_ms % 256] * 48)))


def depth(at_ms: int, logged_ms: int | None = None, size: tuple[int, int] = (8, 6)) -> Sample:
    logged_ns = T0 + (at_ms if logged_ms is None else logged_ms) * MS
    data = np.full(size[0] * size[1], at_ms % 50_000, "<u2").tobytes()
    return Sample("/table/depth", T0 + at_ms * MS, logged_ns, Depth(*size, "z16", 0.001, False, data))


def info(at_ms: int, lens: Intrinsics = LENS) -> Sample:
    return Sample("/table/info", T0 + at_ms * MS, T0 + at_ms * MS, CameraInfo(lens))


def pair_frames(samples: Iterable[Sample], *cameras: Camera) -> list[Frame]:
    pairing = Pairing(cameras or (TABLE_ALONE,))
    return [frame for sample in samples for frame in pairing.add(sample)] + list(pairing.flush())


def by_log(*samples: Iterable[Sample]) -> list[Sample]:
    return sorted(chain(*samples), key=lambda sample: sample.logged_ns)


def both(times_ms: Iterable[int], shift_ms: int = 0, late_ms: int = 0) -> list[Sample]:
    """Return colour at these times and depth beside it, which is logged late."""
    shifted = ((at, at + shift_ms) for at in times_ms)
    return [item for at, other in shifted for item in (colour(at), depth(other, other + late_ms))]


def depth_times(frames: Iterable[Frame]) -> list[int | None]:
    """Return the capture time in ms of each frame's depth."""
    return [None if frame.depth is None else int(decode_depth(frame.depth)[0, 0]) for frame in frames]


def test_depth_comes_before_or_after_its_colour() -> None:
    samples = [colour(0), depth(0), depth(33), colour(33), colour(66), colour(99), depth(66), depth(99)]
    frames = pair_frames(samples)
    assert depth_times(frames) == [0, 33, 66, 99]
    assert [frame.seq for frame in frames] == list(range(4))
    assert [frame.capture_ns for frame in frames] == [T0 + 33 * index * MS for index in range(4)]
    assert {frame.clock for frame in frames} == {"system"}


def test_the_nearest_depth_is_taken_and_none_that_is_too_far() -> None:
    tolerance = TOLERANCE_NS // MS
    assert depth_times(pair_frames([colour(100), depth(92), depth(105), depth(120)])) == [105]
    assert depth_times(pair_frames([depth(92), colour(100), depth(111)])) == [92]
    assert depth_times(pair_frames([colour(100), depth(100 + tolerance)])) == [100 + tolerance]
    assert depth_times(pair_frames([colour(100), depth(101 + tolerance)])) == [None]
    assert depth_times(pair_frames([depth(99 - tolerance), colour(100)])) == [None]


def test_depth_at_half_the_rate_belongs_to_every_other_frame() -> None:
    samples = by_log(map(colour, range(0, 400, 50)), map(depth, range(0, 400, 100)))
    assert depth_times(pair_frames(samples)) == [0, None, 100, None, 200, None, 300, None]


def test_a_frame_comes_as_soon_as_it_is_complete() -> None:
    pairing = Pairing([TABLE_ALONE])
    assert not pairing.add(colour(0))
    assert not pairing.add(colour(33))
    assert len(pairing.add(depth(0))) == 1
    assert len(pairing.add(depth(66))) == 1  # later than 33: nothing nearer will come
    assert not pairing.flush()


def test_without_depth_or_intrinsics_nothing_waits() -> None:
    (frame,) = Pairing([BARE]).add(colour(0, BARE))
    assert (frame.camera, frame.depth, frame.intrinsics) == ("wrist", None, None)


def test_depth_that_never_comes_is_waited_for_by_a_bounded_number_of_frames() -> None:
    pairing = Pairing([TABLE_ALONE])
    waiting = 0
    seqs = []
    for index in range(200):
        seqs += [frame.seq for frame in pairing.add(colour(index))]
        waiting = max(waiting, index + 1 - len(seqs))
    assert waiting <= MAX_WAITING
    seqs += [frame.seq for frame in pairing.flush()]
    assert seqs == list(range(200))


def test_no_frame_waits_longer_than_the_patience() -> None:
    pairing = Pairing([TABLE_ALONE])
    assert not pairing.add(colour(0))
    late_ms = PATIENCE_NS // MS + 1
    assert [frame.seq for frame in pairing.add(colour(late_ms))] == [0]


def test_stamps_that_jump_back_stop_nothing() -> None:
    frames = pair_frames(both([90_000, *range(0, 990, 33)]))
    assert len(frames) == 31
    assert [frame.seq for frame in frames] == list(range(31))
    assert depth_times(frames)[-1] == 957


def test_the_first_frame_waits_for_intrinsics_and_the_latest_count() -> None:
    other = replace(LENS, fx=70.0)
    samples = [colour(0), depth(0), info(0), colour(33), depth(33), info(50, other), colour(66), depth(66)]
    assert [frame.intrinsics for frame in pair_frames(samples, TABLE)] == [LENS, LENS, other]


def test_intrinsics_that_never_come_hold_nothing_back_for_good() -> None:
    frames = pair_frames(both(range(0, 3300, 33)), TABLE)
    assert len(frames) == 100
    assert all(frame.intrinsics is None and frame.depth is not None for frame in frames[:50])


def test_rectified_images_have_intrinsics_without_distortion() -> None:
    (frame,) = pair_frames([info(0), colour(0), depth(0)], replace(TABLE, rectified=True))
    assert frame.intrinsics == Intrinsics(60.0, 60.0, 3.5, 2.5)


def test_depth_is_aligned_where_its_topic_says_so_and_the_sizes_agree() -> None:
    for size, aligned in (((8, 6), True), ((4, 3), False)):
        (frame,) = pair_frames([colour(0), depth(0, size=size)])
        assert frame.depth.aligned == aligned
    (frame,) = pair_frames([colour(0), depth(0)], replace(TABLE, intrinsics=None, aligned=False))
    assert not frame.depth.aligned


def test_frames_of_several_cameras_come_in_the_order_of_the_recording() -> None:
    first = [colour(0), colour(1, BARE), colour(20, BARE), depth(0)]
    then = [*both([33]), colour(40, BARE)]
    frames = pair_frames([*first, *then], TABLE_ALONE, BARE)
    assert [frame.camera for frame in frames] == ["table", "wrist", "wrist", "table", "wrist"]
    assert [frame.seq for frame in frames] == [0, 0, 1, 1, 2]
    assert depth_times(frames) == [0, None, None, 33, None]


def test_stamps_that_are_not_of_unix_time_are_of_the_device() -> None:
    (frame,) = Pairing([BARE]).add(Sample(BARE.colour, 5 * MS, 5 * MS, Colour(8, 6, "mono8", bytes(48))))
    assert (frame.capture_ns, frame.clock) == (5 * MS, "device")


def test_samples_of_no_camera_are_left_out() -> None:
    assert not pair_frames([Sample("/other", T0, T0, CameraInfo(LENS)), info(0), depth(0)])


def test_the_tolerance_follows_the_shorter_period() -> None:
    for period, distance in ((100, 33), (100, 58), (200, 110), (66, 30)):
        times = depth_times(pair_frames(by_log(both(range(0, 2000, period), distance))))
        shift = distance if distance <= period // 2 else distance - period
        assert times[1:] == [at + shift for at in range(0, 2000, period)][1:]
        assert times[0] is not None


def test_sparse_depth_serves_one_image_each() -> None:
    samples = by_log(map(colour, range(0, 1980, 33)), map(depth, range(5, 1985, 198)))
    times = depth_times(pair_frames(samples))
    assert [time for time in times if time is not None] == [198 * index + 5 for index in range(10)]


def test_a_missing_depth_image_is_not_replaced_by_its_neighbour() -> None:
    for distance in (0, 30):
        samples = both([at for at in range(0, 1000, 100) if at != 500], distance)
        times = depth_times(pair_frames(by_log(samples, [colour(500)])))
        assert times == [None if at == 500 else at + distance for at in range(0, 1000, 100)]


def test_depth_that_is_recorded_late_is_waited_for_in_bounded_memory() -> None:
    pairing = Pairing([TABLE_ALONE])
    samples = by_log(both(range(0, 3300, 33), late_ms=900))
    frames = [frame for sample in samples for frame in pairing.add(sample)]
    frames += pairing.flush()
    assert depth_times(frames) == [33 * index for index in range(100)]
    assert pairing.describe_losses() is None
    assert mentions(" ".join(pairing.notes()), "depth", "900 ms")


def test_large_images_wait_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.bags.pairing.MAX_BYTES", 10 * 48)
    pairing = Pairing([TABLE_ALONE])
    seqs = [frame.seq for index in range(30) for frame in pairing.add(colour(index))]
    assert seqs == list(range(20))


def add_all(*samples: Iterable[Sample]) -> Pairing:
    pairing = Pairing([TABLE_ALONE])
    for sample in by_log(*samples):
        pairing.add(sample)
    pairing.flush()
    return pairing


def losses(*samples: Iterable[Sample]) -> str | None:
    return add_all(*samples).describe_losses()


def test_depth_of_another_clock_is_told_with_the_offset() -> None:
    for offset_ms in (-3_600_000, 7_200_000):
        text = losses(both(range(0, 1000, 100), offset_ms, -offset_ms))
        assert mentions(str(text), "/table/depth", "10", "0")
        side = "behind" if offset_ms < 0 else "ahead of"
        assert f"its clock is about {abs(offset_ms) / 1000:.3f} s {side} the clock of colour" in text


def test_depth_that_is_too_far_is_told_with_the_nearest_distance() -> None:
    text = losses([colour(0), colour(100), depth(4000), depth(4100)])
    assert mentions(str(text), "60 ms", "3.900 s")
    assert "clock" not in str(text)


def test_depth_that_comes_later_than_the_patience_is_told() -> None:
    text = losses(both(range(0, 9000, 300), late_ms=4000))
    assert mentions(str(text), "depth", "2.000 s")


def test_depth_that_starts_later_is_noted() -> None:
    pairing = add_all(map(colour, range(0, 6000, 100)), map(depth, range(4000, 6000, 100)))
    assert pairing.describe_losses() is None
    assert pairing.notes() == ["table: 30 of 60 frames have no depth, because it began later"]


def test_depth_that_starts_later_or_is_sparse_is_no_loss() -> None:
    assert losses(map(colour, range(0, 3000, 100)), map(depth, range(2000, 3000, 100))) is None
    assert losses(map(colour, range(0, 990, 33)), map(depth, range(0, 990, 198))) is None
    assert losses(map(colour, range(0, 990, 198)), map(depth, range(0, 990, 33))) is None
    assert losses([colour(0), colour(100)]) is None


@pytest.mark.parametrize(
    "depths_ms", [range(0, 1000, 100), [0], [*range(0, 1000, 100), *range(5000, 6000, 100)]]
)
def test_depth_that_stops_is_told(depths_ms: Iterable[int]) -> None:
    text = losses(map(colour, range(0, 6000, 100)), map(depth, depths_ms)) or ""
    count = sum(all(abs(at - other) > 1000 for other in depths_ms) for at in range(0, 6000, 100))
    assert f"/table/depth: {count} of 60 frames have no depth, because it stopped" in text


def test_a_short_gap_of_depth_and_slow_depth_are_no_loss() -> None:
    times = range(0, 30_000, 100)
    assert losses(map(colour, times), (depth(at) for at in times if not 5000 < at < 5900)) is None
    assert losses(map(colour, times), map(depth, range(0, 30_000, 1500))) is None
    assert losses(map(colour, range(0, 1900, 100)), map(depth, range(0, 900, 100))) is None


def test_a_colour_image_on_the_topic_of_depth_is_told() -> None:
    other = Sample("/table/depth", T0, T0, Colour(8, 6, "mono8", bytes(48)))
    text = losses([colour(0), depth(0), other])
    assert "/table/depth" in str(text)
    assert "expected depth" in str(text)


def millimetre_depth(at_ms: int) -> Sample:
    plain = depth(at_ms).payload
    fields = (plain.width, plain.height, plain.encoding, plain.scale_m, plain.aligned, plain.data)
    return depth(at_ms)._replace(payload=MillimetreDepth(*fields))


def test_depth_read_as_millimetres_is_told_and_a_plain_depth_of_the_frame() -> None:
    pairing = Pairing([TABLE_ALONE])
    frames = [frame for sample in (colour(100), millimetre_depth(100)) for frame in pairing.add(sample)]
    assert [type(frame.depth) for frame in frames] == [Depth]
    assert "millimetres" in str(pairing.describe_losses())


def test_the_unit_of_a_topic_does_not_change() -> None:
    samples = [*both([100]), colour(200), millimetre_depth(200), *both([300])]
    assert depth_times(pair_frames(samples)) == [100, None, 300]
    assert "in metres" in str(losses(samples))


def test_intrinsics_of_another_size_are_left_out_and_told() -> None:
    lens = Intrinsics(60.0, 60.0, 8.0, 6.0)
    for size, expected in (((16, 12), Intrinsics(30.0, 30.0, 4.0, 3.0)), ((16, 10), None)):
        pairing = Pairing([TABLE])
        told = Sample("/table/info", T0, T0, CameraInfo(lens, size=size))
        frames = [frame for sample in (told, *both([0, 100])) for frame in pairing.add(sample)]
        assert [frame.intrinsics for frame in frames] == [expected] * 2
        text = pairing.describe_losses()
        assert (text is None) == (expected is not None)
        assert text is None or (mentions(text, "2", "intrinsics", "table") and mentions(text, "8 x 6"))


def test_one_calibration_serves_raw_and_rectified_images() -> None:
    raw = Intrinsics(60.0, 60.0, 4.0, 3.0)
    rectified = Intrinsics(50.0, 50.0, 3.5, 2.5)
    cameras = [
        Camera("raw", "/c/image_raw", intrinsics="/c/info"),
        Camera("rect", "/c/image_rect", intrinsics="/c/info", rectified=True),
    ]
    pairing = Pairing(cameras)
    info_sample = Sample("/c/info", T0, T0, CameraInfo(raw, rectified, (8, 6)))
    frames = pairing.add(info_sample)
    for camera in cameras:
        frames += pairing.add(colour(0, camera))
    assert [(frame.camera, frame.intrinsics) for frame in frames] == [("raw", raw), ("rect", rectified)]


SECOND = NANOSECONDS
EPOCH_NS = 1_700_000_000 * SECOND
PERIOD_NS = SECOND // 20
FRAMES = 100
WHOLE = TimeSpan()
SPANS = [
    TimeSpan(2 * SECOND),
    TimeSpan(None, 2 * SECOND),
    TimeSpan(SECOND + 1, 3 * SECOND),
    TimeSpan(10**6 * SECOND),
]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a recording in which a 150 KB frame comes every 50 ms: a chunk holds seven."""
    path = tmp_path_factory.mktemp("native") / "r.mcap"
    with RecordingWriter(path) as writer:
        for seq in range(FRAMES):
            frame = dataclasses.replace(frame_at(seq), encoding="jpeg", colour=bytes(150_000), depth=None)
            writer.write_frame(frame, EPOCH_NS + seq * PERIOD_NS)
    return path


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = np.zeros((FRAMES, 48, 64, 3), np.uint8)
    for seq, image in enumerate(images):
        image[:] = 2 * seq
        image[:, : seq % 64] = 255
    return write_film(tmp_path_factory.mktemp("film") / "film.mp4", images, 20.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    for camera in ("left", "right"):
        (folder / camera).mkdir()
        for seq in range(FRAMES):
            cv2.imwrite(str(folder / camera / f"{seq:05}.jpg"), np.full((8, 8, 3), seq, np.uint8))
    return folder


def read(path: Path, span: TimeSpan = WHOLE) -> list[Frame]:
    return read_bag(path, span=span)[0]


def expect(frames: list[Frame], span: TimeSpan, kind: str) -> list[Frame]:
    begin = span.begin_ns or 0
    end = span.end_ns or 10**18
    times = [frame.capture_ns if kind == "folder" else frame.seq * PERIOD_NS for frame in frames]
    return [frame for frame, time_ns in zip(frames, times, strict=True) if begin <= time_ns < end]


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("kind", ["native", "film", "folder"])
def test_a_part_has_the_frames_of_the_whole(
    kind: str, span: TimeSpan, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(kind)
    whole = read(path)
    expected = expect(whole, span, kind)
    found = read(path, span)
    assert [frame.key for frame in found] == [frame.key for frame in expected]
    assert [bytes(frame.colour) for frame in found] == [bytes(frame.colour) for frame in expected]


def test_chunks_outside_are_not_read(native: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    class Watched(mcap._McapFile):
        def read(self, length: int) -> bytes:
            lengths.append(length)
            return super().read(length)

    monkeypatch.setattr(mcap, "_McapFile", Watched)
    whole = len(read(native)), sum(lengths)
    lengths.clear()
    assert len(read(native, TimeSpan(2 * SECOND, 3 * SECOND))) == 20
    assert whole[0] == FRAMES
    assert sum(lengths) < whole[1] / 2


def test_a_recording_without_a_summary_has_the_same_part(native: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(native.read_bytes()[:-200_000])
    assert [frame.seq for frame in read(cut, TimeSpan(2 * SECOND, 3 * SECOND))] == list(range(40, 60))


def test_frames_of_a_film_before_the_part_are_not_decoded(
    film: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[int] = []
    decode = video.Playback._whole_frames

    def watch(playback: video.Playback, *source: object) -> Iterator[object]:
        for image in decode(playback, *source):
            decoded.append(1)
            yield image

    monkeypatch.setattr(video.Playback, "_whole_frames", watch)
    assert [frame.seq for frame in read(film, TimeSpan(4 * SECOND, 4 * SECOND + SECOND // 2))] == list(
        range(80, 90)
    )
    assert len(decoded) < 40


def test_a_date_is_one_of_the_recording(native: Path, film: Path) -> None:
    found = read(native, TimeSpan(parse_time("2023-11-14T22:13:21Z"), EPOCH_NS + 2 * SECOND))
    assert [frame.seq for frame in found] == list(range(20, 40))
    with refuses(BagError, field=("recording", "date")):
        read(film, TimeSpan(EPOCH_NS))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12.5", 12_500_000_000),
        ("0", 0),
        (str(EPOCH_NS), EPOCH_NS),
        ("2023-11-14T23:13:20.250001+01:00", EPOCH_NS + 250_001_000),
    ],
)
def test_times_are_seconds_dates_or_nanoseconds(text: str, expected: int) -> None:
    assert parse_time(text) == expected


@each_row("text", ["", "-1", "nan", "inf", "soon", "2023-11-14T22:13:20", "1e300"])
def test_other_times_are_refused(text: str) -> None:
    with refuses(ValueError, field=("seconds", "start")):
        parse_time(text)


def test_depth_and_intrinsics_of_a_part_are_those_of_the_whole(tmp_path: Path) -> None:
    path = mcap_files.write_ros2(tmp_path / "r.mcap", mcap_files.rgbd(30))
    whole = read(path)
    period_ns = mcap_files.PERIOD_NS
    found = read(path, TimeSpan(10 * period_ns, 20 * period_ns))
    assert [frame.seq for frame in found] == list(range(10, 20))
    assert [plain(frame) for frame in found] == [plain(frame) for frame in whole[10:20]]
