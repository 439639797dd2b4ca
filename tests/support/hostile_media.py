"""Images and videos of at most 64 KB that want gigabytes of memory, or minutes of work: more of CASES."""

import io
import struct
import zlib
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import product
from pathlib import Path

import av
import cv2
import numpy as np

from tests.support.hostile_recordings import CASES, LIMIT, MIB, case, deep, repeated
from tests.support.hostility import declare_jpeg, join_png, png_chunk, png_header
from tests.support.mcap_files import jpeg

KINDS = ("webp", "tiff", "bmp", "avif")


def write_images(folder: Path, data: bytes, suffix: str, count: int = 1) -> Path:
    (folder / "desk").mkdir()
    for index in range(count):
        (folder / "desk" / f"{index}.{suffix}").write_bytes(data[:LIMIT])
    return folder / "desk"


def png(width: int, height: int, depth: int = 8, colour: int = 0, interlace: int = 0) -> bytes:
    """Return a PNG whose pixels are zeros, as many as fit."""
    packer = zlib.compressobj(9)
    bits = {0: 1, 2: 3, 6: 4}[colour] * depth
    rows = min((1 + (width * bits + 7) // 8) * height, 60 * MIB)
    pixels = b"".join(packer.compress(piece) for piece in repeated(bytes(MIB), rows)) + packer.flush()
    header = png_header(width, height, depth, colour, interlace=interlace)
    return join_png(header, png_chunk(b"IDAT", pixels[: LIMIT - 100]), png_chunk(b"IEND"))


def blank(name: str, height: int, width: int) -> bytes:
    return cv2.imencode(f".{name}", np.zeros((height, width, 3), np.uint8))[1].tobytes()


@case("images: progressive JPEG of 8000 x 8000")
def _(folder: Path) -> Path:
    progressive = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]
    small = cv2.imencode(".jpg", np.zeros((64, 64, 3), np.uint8), progressive)[1].tobytes()
    data = declare_jpeg(small, 8000, 8000)
    scan = data.index(b"\xff\xda")
    end = data.index(b"\xff\xda", scan + 2)
    while data[end - 2] == 0xFF or b"\xff\xc4" in data[scan + 2 : end]:
        end = data.index(b"\xff\xc4", scan + 2)
    return write_images(folder, data[:end] + bytes(LIMIT - end - 100) + b"\xff\xd9", "jpg")


@case("images: the same image in a list a thousand times")
def _(folder: Path) -> Path:
    (folder / "rgb").mkdir()
    best = [cv2.IMWRITE_PNG_COMPRESSION, 9]
    data = cv2.imencode(".png", np.zeros((4000, 4000, 3), np.uint8), best)[1].tobytes()
    (folder / "rgb" / "a.png").write_bytes(data)
    rows = (LIMIT - len(data)) // 15
    (folder / "rgb.txt").write_text("\n".join(f"{index} rgb/a.png" for index in range(rows)))
    return folder


@case("images: BOP's table without end")
def _(folder: Path) -> Path:
    (folder / "rgb").mkdir()
    (folder / "rgb" / "000000.png").write_bytes(png(10, 10))
    (folder / "scene_camera.json").write_bytes(deep('{"0":', 12_000))
    return folder


def declare(name: str, image: bytes, width: int, height: int) -> bytes:
    """Return an image that declares another size than it has."""
    data = bytearray(image)
    if name == "bmp":
        struct.pack_into("<ii", data, 18, width, height)
    elif b"\x9d\x01\x2a" in data[:40]:  # a lossy WebP
        struct.pack_into("<HH", data, data.index(b"\x9d\x01\x2a") + 3, width, height)
    elif name == "webp":  # lossless: 14 bits each
        place = data.index(b"VP8L") + 9
        rest = int.from_bytes(data[place : place + 4], "little") >> 28
        struct.pack_into("<I", data, place, (width - 1) | (height - 1) << 14 | rest << 28)
    elif name == "tiff":
        (first,) = struct.unpack_from("<I", data, 4)
        for place in range(first + 2, len(data) - 12, 12):
            (tag,) = struct.unpack_from("<H", data, place)
            if tag in (256, 257):
                struct.pack_into("<HII", data, place + 2, 4, 1, width if tag == 256 else height)
    else:
        place = data.index(b"ispe") + 8
        struct.pack_into(">II", data, place, width, height)
    return bytes(data)


def _still(name: str, suffix: str, make: Callable[[], bytes]) -> None:
    CASES[f"images: {name}"] = lambda folder: write_images(folder, make(), suffix)


_still("PNG of 16384 x 4096", "png", lambda: png(16384, 3800))
_still("PNG of one bit, 8192 x 8192", "png", lambda: png(8192, 8192, depth=1))
_still("interlaced PNG of 16 bits", "png", lambda: png(2800, 2800, 16, 6, 1))
_still("JPEG that declares 16000 x 16000", "jpg", lambda: declare_jpeg(jpeg(0), 16000, 16000))
for kind in KINDS:
    large = partial(declare, kind, blank(kind, 48, 64), 16000, 16000)
    _still(f"{kind} that declares 16000 x 16000", kind, large)
for kind, side in product(("webp", "avif"), (1500, 3000)):
    _still(f"blank {kind} of {side} x {side}", kind, partial(blank, kind, side, side))


@case("images: a hundred blank AVIF")
def _(folder: Path) -> Path:
    data = blank("avif", 1200, 1900)
    return write_images(folder, data, "avif", LIMIT // len(data))


def video(
    suffix: str, codec: str, size: tuple[int, int], frames: int, again: int = 0, **options: str
) -> bytes:
    """Return a video of `size` (height, width) without movement, the packet of its last picture `again` times."""
    file = io.BytesIO()
    with av.open(file, "w", format=suffix) as container:
        stream = container.add_stream(codec, 25)
        stream.height, stream.width = size
        stream.pix_fmt = "yuv420p"
        stream.options = options
        stream.gop_size = 100_000
        image = av.VideoFrame.from_ndarray(np.zeros((*size, 3), np.uint8), format="bgr24")
        packets = []
        for index in range(frames):
            image.pts = index
            packets += stream.encode(image)
        packets += stream.encode(None)
        data = bytes(packets[-1])
        for packet in packets:
            container.mux(packet)
        for index in range(again):
            packet = av.Packet(data)
            packet.stream = stream
            packet.time_base = Fraction(1, 25)
            packet.pts = packet.dts = frames + index
            container.mux(packet)
    return file.getvalue()


def write_video(folder: Path, data: bytes, suffix: str) -> Path:
    path = folder / f"hostile.{suffix}"
    path.write_bytes(data[:LIMIT])
    return path


@case("video: thousands of large pictures that do not change")
def _(folder: Path) -> Path:
    data = video("matroska", "libvpx", (2160, 3840), 2, 3000, deadline="realtime", speed="16")
    return write_video(folder, data, "mkv")


@case("video: pictures of 4096 x 4096")
def _(folder: Path) -> Path:
    return write_video(folder, video("avi", "mpeg4", (4096, 4096), 1), "avi")


def _mp4_case(name: str, box: bytes, *values: tuple[int, int]) -> None:
    """Add a case in which numbers of 32 bits, each at a distance behind the box's name, are others."""

    @case(f"video: mp4 with {name}")
    def write(folder: Path) -> Path:
        data = bytearray(video("mp4", "mpeg4", (48, 64), 6))
        place = data.index(box) + 4
        for offset, value in values:
            struct.pack_into(">I", data, place + offset, value)
        return write_video(folder, bytes(data), "mp4")


_mp4_case("a hundred million samples of one byte", b"stsz", (4, 1), (8, 100_000_000))
_mp4_case("four billion sizes of samples", b"stsz", (8, 0xFFFFFFFF))
_mp4_case("four billion times", b"stts", (4, 0xFFFFFFFF))
_mp4_case("one time for a billion samples", b"stts", (8, 1_000_000_000))
_mp4_case("samples that last for years", b"stts", (12, 0x7FFFFFFF))
_mp4_case("a clock of a nanosecond", b"mdhd", (12, 1_000_000_000), (16, 0xFFFFFFFF))
_mp4_case("no clock", b"mdhd", (12, 0))
_mp4_case("a billion chunks", b"stco", (4, 1_000_000_000))


@case("video: mp4 whose chunk has a hundred million samples")
def _(folder: Path) -> Path:
    data = bytearray(video("mp4", "mpeg4", (48, 64), 6))
    size, chunks, stts = (data.index(name) + 4 for name in (b"stsz", b"stsc", b"stts"))
    struct.pack_into(">II", data, size + 4, 1, 100_000_000)
    struct.pack_into(">I", data, chunks + 12, 100_000_000)
    struct.pack_into(">I", data, stts + 8, 100_000_000)
    return write_video(folder, bytes(data), "mp4")
