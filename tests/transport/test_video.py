"""Tests of frames as a video: the pictures are those that ffmpeg decodes, and none is made of a missing packet."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from sam3_node import transport
from sam3_node.bags.native.reader import RecordingReader
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.bags.pairing import TimeSpan
from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import VideoStreams, frame_from
from sam3_node.cameras.video_encoder import VideoEncoder
from sam3_node.errors import CameraError, WireError
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher, FrameSubscriber, channels
from sam3_node.transport.mask_pairing import MaskPairing
from sam3_node.types import NANOSECONDS, Delivery, Frame
from sam3_node.wire import decode_image, pack_frame
from sam3_node.wire.video import VideoDecoders, is_key_packet
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import mentions
from tests.support.transport_peer import TCP, take_frame, wait_until

av = pytest.importorskip("av")
pytestmark = pytest.mark.verifies(
    "stream",
    "H.264 of `camera.encoding`",
    "other implementation",
    "ffmpeg's decoder gives the same pixels",
    "NVENC and V4L2",
)

WIDTH = 160
HEIGHT = 120
PERIOD_NS = NANOSECONDS // 30
VIDEO = CameraSettings(encoding="h264")


def draw(seq: int) -> npt.NDArray[np.uint8]:
    """Return a picture in which a bright square moves over a gradient: no two are equal."""
    image = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    image[:] = np.linspace(40, 160, WIDTH).astype(np.uint8)[None, :, None]
    x = 3 * seq % (WIDTH - 30)
    image[40:70, x : x + 30] = (30, 90 + seq % 100, 220)
    return image


def make_frames(count: int, first_ns: int = NANOSECONDS, key_at: tuple[int, ...] = ()) -> list[Frame]:
    """Return the frames of a camera at 30 Hz, the first one and those of `key_at` key frames."""
    encoder = VideoEncoder(WIDTH, HEIGHT, 2e6, 30)
    frames = []
    for seq in range(count):
        capture_ns = first_ns + seq * PERIOD_NS
        packet, is_key = encoder.encode(draw(seq), capture_ns, seq in key_at)
        assert is_key == is_key_packet(packet)
        frames.append(Frame("cam0", seq, capture_ns, WIDTH, HEIGHT, "h264", packet))
    return frames


def decode_all(frames: list[Frame]) -> dict[int, bytes]:
    """Return the pixels of each frame by its seq, as one decoder of ffmpeg gives them for all packets."""
    context: Any = av.CodecContext.create("h264", "r")
    context.options = {"flags": "low_delay"}
    pixels = {}
    for frame in frames:
        [picture] = context.decode(av.Packet(bytes(frame.colour)))
        pixels[frame.seq] = picture.to_ndarray(format="bgr24").tobytes()
    return pixels


def test_pictures_look_like_those_of_the_camera() -> None:
    videos = VideoDecoders()
    for frame in make_frames(40):
        picture = videos.decode(frame)
        assert picture is not None
        assert picture.encoding == "bgr8"
        difference = decode_image(picture).astype(int) - draw(frame.seq)
        assert np.abs(difference).mean() < 4


def test_key_frames_come_in_time_and_when_asked_for_but_not_too_often() -> None:
    frames = make_frames(130, key_at=(3, 20, 21, 22))
    # the request at 3 comes too soon after the first, those at 21 and 22 after the one at 20
    assert [frame.seq for frame in frames if is_key_packet(frame.colour)] == [0, 20, 80]


def test_after_a_gap_there_is_no_picture_until_the_next_key_frame() -> None:
    frames = make_frames(60, key_at=(30,))
    true = decode_all(frames)
    videos = VideoDecoders()
    assert videos.decode(frames[1]) is None
    got = {}
    for frame in frames[:10] + frames[11:]:
        picture = videos.decode(frame)
        if picture is not None:
            got[frame.seq] = bytes(picture.colour)
    assert list(got) == [*range(10), *range(30, 60)]
    assert all(pixels == true[seq] for seq, pixels in got.items())


@contextlib.contextmanager
def streaming(delivery: Delivery = "newest") -> Iterator[tuple[FramePublisher, Callable[[int], Frame]]]:
    """Yield a publisher, and a function that encodes its frame of a number."""
    with FramePublisher(TCP, delivery) as publisher:
        videos = VideoStreams(publisher, VIDEO)
        begin_ns = time.time_ns()

        def make(seq: int) -> Frame:
            captured = CapturedImage(draw(seq), begin_ns + seq * PERIOD_NS)
            return frame_from(captured, seq, VIDEO, videos=videos)

        yield publisher, make


def test_each_reader_gets_a_key_frame_when_it_comes() -> None:
    with streaming() as (publisher, make):
        frames = []

        def send() -> None:
            frames.append(make(len(frames)))
            publisher.send(frames[-1])

        def receives(subscriber: FrameSubscriber) -> bool:
            send()
            return subscriber.take(20) is not None

        with FrameSubscriber([publisher.endpoint]) as first:
            wait_until(lambda: receives(first))
            for _ in range(20):
                send()
            before = len(frames)
            with FrameSubscriber([publisher.endpoint], cameras=["cam0"]) as second:
                wait_until(lambda: receives(second))
                keys = [frame.seq for frame in frames[before:] if is_key_packet(frame.colour)]
                # long before the next one would have come by itself
                assert keys
                assert keys[0] - before < 30


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_a_reader_has_what_ffmpeg_decodes_and_nothing_of_lost_packets(delivery: Delivery) -> None:
    loses = delivery == "newest"
    with streaming(delivery) as (publisher, make), FrameSubscriber([publisher.endpoint], delivery) as reader:
        publisher.wait_for_peer(PATIENCE_MS)
        frames = []
        got = {}

        def step() -> bool:
            frames.append(make(len(frames)))
            # one of twenty is lost on the way
            if not loses or len(frames) % 20 != 7:
                publisher.send(frames[-1], PATIENCE_MS)
            while (received := reader.take(0 if loses else PATIENCE_MS)) is not None:
                got[received.frame.seq] = received.frame
                if not loses:
                    break
            time.sleep(0.001)
            return len(got) > 150

        wait_until(step)
        true = decode_all(frames)
        assert all(bytes(frame.colour) == true[seq] for seq, frame in got.items())
        assert not reader.rejected
        if not loses:
            assert list(got) == list(range(len(got)))


def test_damaged_packets_cost_their_pictures_alone() -> None:
    frames = make_frames(20, key_at=(18,))
    true = decode_all(frames)
    videos = VideoDecoders()
    for seq, frame in enumerate(frames):
        if seq == 5:
            with pytest.raises(WireError, match="damaged"):
                videos.decode(replace(frame, colour=bytes(frame.colour)[:40]))
        elif seq < 5 or seq >= 18:
            picture = videos.decode(frame)
            assert picture is not None
            assert bytes(picture.colour) == true[seq]
        else:
            assert videos.decode(frame) is None


@pytest.mark.parametrize(
    "change",
    [
        {"width": WIDTH + 16},
        {"height": HEIGHT // 2},
        {"width": 16, "height": 16},
        {"width": 16384, "height": 16384},
        {"colour": b"\0\0\1\x67\0\0\1\x65" + bytes(200)},
        {"colour": b"\0\0\1\x67\xff\xff\xff\0\0\1\x65"},
    ],
)
def test_a_packet_that_is_not_what_its_header_says_is_refused(change: dict[str, Any]) -> None:
    frame = replace(make_frames(1)[0], **change)
    with pytest.raises(WireError) as error:
        VideoDecoders().decode(frame)
    assert mentions(str(error.value), "h264", "expected", "found")


def test_a_reader_without_pyav_goes_on_without_the_camera(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = make_frames(1)[0]
    monkeypatch.setitem(sys.modules, "av", None)
    parts = [memoryview(bytes(part)) for part in pack_frame(frame)]
    with pytest.raises(WireError, match="bags"):
        MaskPairing().accept(parts)


def test_odd_sides_are_refused_with_what_to_set() -> None:
    with pytest.raises(CameraError) as error:
        VideoEncoder(161, 120, 1e6, 30)
    assert mentions(str(error.value), "161 x 120", "camera.width")


def test_a_flood_of_packets_is_decoded_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "MAX_VIDEO_FPS", 5.0)
    with streaming() as (publisher, make), FrameSubscriber([publisher.endpoint]) as reader:
        publisher.wait_for_peer(PATIENCE_MS)
        seqs = iter(range(1 << 20))

        def send() -> int:
            publisher.send(make(next(seqs)))
            reader.take(0)
            return reader.rejected

        wait_until(send)
        assert mentions(str(reader.last_error), "packets", "a second")


def test_masks_are_paired_with_pictures() -> None:
    pairing = MaskPairing()
    frame = make_frames(2)[1]
    parts = [memoryview(bytes(part)) for part in pack_frame(frame)]
    # it needs the first one
    assert pairing.accept(parts) is None


@pytest.fixture
def recording(tmp_path: Path) -> tuple[Path, list[Frame]]:
    """A recording of a video of 150 frames, one of which the recorder has missed."""
    frames = make_frames(150, first_ns=1_700_000_000 * NANOSECONDS)
    path = tmp_path / "video.mcap"
    with RecordingWriter(path) as writer:
        for frame in frames:
            if frame.seq != 70:
                writer.write_frame(frame, frame.capture_ns + 1_000_000)
    return path, frames


def test_a_recording_of_a_video_has_the_pixels_of_the_live_frames(
    recording: tuple[Path, list[Frame]],
) -> None:
    path, frames = recording
    true = decode_all(frames)
    reader = RecordingReader([path])
    read = {frame.seq: bytes(frame.colour) for frame in reader.frames()}
    next_key = min(frame.seq for frame in frames if frame.seq > 70 and is_key_packet(frame.colour))
    assert list(read) == [*range(70), *range(next_key, 150)]
    assert all(pixels == true[seq] for seq, pixels in read.items())
    assert "skipped" in str(reader.lost)


def test_a_part_of_a_recorded_video_has_the_same_pixels(recording: tuple[Path, list[Frame]]) -> None:
    path, frames = recording
    true = decode_all(frames)
    span = TimeSpan(frames[50].capture_ns, frames[60].capture_ns)
    reader = RecordingReader([path])
    read = {frame.seq: bytes(frame.colour) for frame in reader.frames(span)}
    assert list(read) == list(range(50, 60))
    assert all(pixels == true[seq] for seq, pixels in read.items())
    assert reader.lost is None


def test_a_recorded_video_is_foxgloves(recording: tuple[Path, list[Frame]]) -> None:
    mcap = pytest.importorskip("mcap.reader")
    decoder = pytest.importorskip("mcap_protobuf.decoder")
    path, frames = recording
    with path.open("rb") as file:
        reader = mcap.make_reader(file, decoder_factories=[decoder.DecoderFactory()])
        messages = [
            message
            for *_, message in reader.iter_decoded_messages(topics=["/cam0/image"], log_time_order=True)
        ]
    assert {message.format for message in messages} == {"h264"}
    assert [message.data for message in messages] == [frame.colour for frame in frames if frame.seq != 70]


def test_a_slow_reader_of_a_video_never_blocks_a_camera() -> None:
    with streaming() as (publisher, make), transport.FrameSubscriber([publisher.endpoint]) as reader:
        publisher.wait_for_peer(PATIENCE_MS)
        seqs = iter(range(1 << 20))
        wait_until(lambda: publisher.send(make(next(seqs))) and reader.waits)
        first = reader.peek((), PATIENCE_MS)
        assert first is not None

        def holds_a_later_one() -> bool:
            assert publisher.send(make(next(seqs)))
            held = reader.peek((), PATIENCE_MS)
            return held is not None and held.seq > first.seq + 20

        # nobody takes one: the newest picture is in the place of those before
        wait_until(holds_a_later_one)
        assert take_frame(reader).frame.seq > first.seq + 20
        assert not reader.rejected
