import itertools
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import av
import cv2
import numpy as np
import pytest

from sam3_node.bags.formats import video
from sam3_node.bags.formats.video import VideoBag
from sam3_node.errors import BagError
from tests.support.paths import ROOT, SHARED
from tests.support.recordings import write_film
from tests.support.refuses import mentions, refuses

VIDEOS = SHARED / "data" / "video"
SIZE = (48, 64)
FPS = 25
FRAMES = 30
CODECS = {"mp4": "mp4v", "mov": "mp4v", "avi": "MJPG", "mkv": "mp4v", "webm": "VP80", "ts": "mpg2"}


DATASET = ROOT / "tests" / "data" / "lerobot" / "v3.0"


def frame(index: int) -> np.ndarray:
    """Draw four coloured squares that become brighter from frame to frame."""
    corners = np.array([[[40, 90, 140], [140, 40, 90]], [[90, 140, 40], [60, 60, 60]]], np.uint8)
    return cv2.resize(corners, SIZE[::-1], interpolation=cv2.INTER_NEAREST) + np.uint8(3 * index)


def write(path: Path) -> Path:
    return write_film(path, map(frame, range(FRAMES)), FPS, CODECS[path.suffix[1:]])


def write_by_ffmpeg(path: Path, begins_s: int = 0, interlaced: bool = False) -> Path:
    """Write MPEG-2 whose first frame has the time `begins_s`."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg2video", rate=FPS)
        stream.height, stream.width = SIZE
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 2_000_000
        if interlaced:
            stream.codec_context.options = {"flags": "+ildct+ilme"}
        for index in range(FRAMES):
            image = av.VideoFrame.from_ndarray(frame(index), format="bgr24")
            image.pts = begins_s * FPS + index
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))
    return path


def read(path: Path) -> tuple[list[int], list[np.ndarray], str | None]:
    stamps = []
    images = []
    with VideoBag(path) as bag:
        for item in bag.samples({topic.name for topic in bag.topics}):
            assert item.payload.encoding == "bgr8"
            assert item.stamp_ns == item.logged_ns
            shape = (item.payload.height, item.payload.width, 3)
            stamps.append(item.stamp_ns)
            images.append(np.frombuffer(item.payload.data, np.uint8).reshape(shape))
        return stamps, images, bag.lost


@pytest.mark.verifies("recording", "video: avi, mkv, mp4, webm", "other implementation", "OpenCV writes it")
@pytest.mark.parametrize("suffix", CODECS)
def test_every_frame_comes_at_its_time(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"take.{suffix}")
    assert VideoBag.recognises(path)
    stamps, images, lost = read(path)
    assert np.abs(np.array(stamps) - np.arange(FRAMES) * 1e9 / FPS).max() < 1e6
    check(images)
    assert lost is None


def check(images: list[np.ndarray]) -> None:
    """Check the middle of each square, because codecs are lossy."""
    assert len(images) == FRAMES
    for index, image in enumerate(images):
        found = image[12::24, 16::32].astype(int)
        expected = frame(index)[12::24, 16::32].astype(int)
        assert np.abs(found - expected).max() < 25


@pytest.mark.parametrize("suffix", ["mkv", "mp4", "ts"])
def test_a_video_that_begins_later_is_whole_and_counts_from_its_first_frame(
    tmp_path: Path, suffix: str
) -> None:
    stamps, images, lost = read(write_by_ffmpeg(tmp_path / f"take.{suffix}", begins_s=5))
    assert np.abs(np.array(stamps) - np.arange(FRAMES) * 1e9 / FPS).max() < 1e6
    assert lost is None
    check(images)


@pytest.mark.verifies(
    "recording", "video: avi, mkv, mp4, webm", "other implementation", "ffmpeg writes it interlaced"
)
def test_interlaced_frames_are_those_of_the_video(tmp_path: Path) -> None:
    path = write_by_ffmpeg(tmp_path / "take.mkv", interlaced=True)
    with av.open(str(path)) as container:
        assert next(container.decode(video=0)).interlaced_frame
    _, images, lost = read(path)
    assert lost is None
    check(images)


@pytest.mark.parametrize("suffix", ["avi", "mkv"])
def test_a_cut_video_gives_what_can_be_decoded(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"take.{suffix}")
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    stamps, images, lost = read(path)
    assert FRAMES // 4 < len(images) < FRAMES
    assert stamps == sorted(stamps)
    assert mentions(str(lost), "1.2")


def write_tracks(path: Path, sizes: Sequence[tuple[int, int]], **options: str) -> Path:
    """Write H.264 in a track of each size (width, height), with a key frame every second picture."""
    with av.open(str(path), "w", options=options) as container:
        tracks = []
        for width, height in sizes:
            tracks.append(container.add_stream("libx264", rate=FPS, options={"g": "2"}))
            tracks[-1].width = width
            tracks[-1].height = height
            tracks[-1].pix_fmt = "yuv420p"
        for index, track in itertools.product(range(FRAMES), tracks):
            image = av.VideoFrame.from_ndarray(
                cv2.resize(frame(index), (track.width, track.height)), format="bgr24"
            )
            image.pts = index
            container.mux(track.encode(image))
        for track in tracks:
            container.mux(track.encode(None))
    return path


def test_a_cut_mp4_of_fragments_says_so(tmp_path: Path) -> None:
    path = write_tracks(tmp_path / "take.mp4", [(64, 48)], movflags="frag_keyframe+empty_moov")
    data = path.read_bytes()
    _, images, lost = read(path)
    assert (len(images), lost) == (FRAMES, None)
    for kind in (b"moof", b"mdat"):
        # in a fragment of the middle
        places = [match.start() for match in re.finditer(kind, data)]
        path.write_bytes(data[: places[len(places) // 2] + 20])
        _, images, lost = read(path)
        assert FRAMES // 4 < len(images) < FRAMES
        assert mentions(str(lost), "cut off")


def test_the_first_of_two_tracks_is_read_and_told(tmp_path: Path) -> None:
    path = write_tracks(tmp_path / "take.mkv", [(64, 48), (32, 24)])
    _, images, lost = read(path)
    assert [image.shape for image in images] == [(48, 64, 3)] * FRAMES
    assert mentions(str(lost), "64x48, 32x24", "-map 0:v:1")


def test_more_pictures_than_a_file_can_hold_are_lost_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "take.avi")
    monkeypatch.setattr(video, "max_video_pixels", lambda _: 10 * frame(0).shape[0] * frame(0).shape[1])
    _, images, lost = read(path)
    assert len(images) == 10
    assert mentions(str(lost), "pictures")


def test_files_without_a_frame_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "take.mp4").read_bytes()
    cut = tmp_path / "cut.mp4"
    cut.write_bytes(whole[: len(whole) // 2])  # its index was at the end
    assert VideoBag.recognises(cut)
    with refuses(BagError, field=("video", "frame")):
        VideoBag(cut)


def test_a_stream_of_an_unknown_codec_is_refused(tmp_path: Path) -> None:
    whole = next(DATASET.rglob("*.mp4")).read_bytes()
    path = tmp_path / "a.mp4"
    path.write_bytes(whole.replace(b"av01\0", b"zz01\0"))
    with refuses(BagError, field=("frame", "decoded")):
        VideoBag(path)


def test_a_title_in_another_encoding_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        container.metadata["title"] = "Gluehwein"
        stream = container.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width = SIZE
        for packet in (*stream.encode(av.VideoFrame.from_ndarray(frame(0), "bgr24")), *stream.encode()):
            container.mux(packet)
    path.write_bytes(path.read_bytes().replace(b"Gluehwein", b"Gl\xfcehwein"[:9]))
    _, images, lost = read(path)
    assert (len(images), lost) == (1, None)


@pytest.mark.verifies("recording", "video: avi, mkv, mp4, webm", "real data", "H.264 of a camera")
def test_a_real_video_is_read_to_its_end() -> None:
    path = VIDEOS / "16_robotarm.mp4"
    if not path.is_file():
        pytest.skip("the shared videos are not here")
    with VideoBag(path) as bag:
        stamps = [item.stamp_ns for item in bag.samples({"/16_robotarm/image"})]
        assert len(stamps) == 250
        assert stamps[-1] == 9_960_000_000
        assert bag.lost is None


TURNS = {  # the display matrix (a, b, c, d) in x' = a x + c y, y' = b x + d y, and the picture that it asks for
    (1, 0, 0, 1): lambda image: image,
    (0, 1, -1, 0): lambda image: np.rot90(image, -1),
    (-1, 0, 0, -1): lambda image: np.rot90(image, 2),
    (0, -1, 1, 0): lambda image: np.rot90(image, 1),
    (-1, 0, 0, 1): lambda image: image[:, ::-1],
    (1, 0, 0, -1): lambda image: image[::-1],
    (0, 1, 1, 0): lambda image: image.swapaxes(0, 1),
    (0, -1, -1, 0): lambda image: np.rot90(image, 2).swapaxes(0, 1),
}


@pytest.mark.verifies(
    "recording",
    "video that is turned or mirrored by its display matrix",
    "other implementation",
    "ffmpeg writes the video, all eight matrices of MP4",
)
@pytest.mark.parametrize("matrix", TURNS)
def test_a_video_is_turned_and_mirrored_by_its_display_matrix(
    tmp_path: Path, matrix: tuple[int, int, int, int]
) -> None:
    path = write(tmp_path / "take.mp4")
    _, before, _ = read(path)
    data = bytearray(path.read_bytes())
    a, b, c, d = (value << 16 for value in matrix)
    struct.pack_into(">9i", data, data.index(b"tkhd") + 44, a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    _, after, lost = read(path)
    assert lost is None
    for turned, image in zip(after, before, strict=True):
        assert np.array_equal(turned, TURNS[matrix](image))
