"""Encode and decode colour and depth images, and read the structure of compressed ones without decoding.

A decoder allocates the size that the file declares, and a file of some kilobytes can keep it busy for seconds. So the
whole structure is walked first, as libjpeg and libpng walk it. Everything that these two read in another way than this
module, and every kind of file that cameras do not make, is refused. OpenCV is imported only where an encoding needs it.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Any, Literal, NamedTuple, cast

from ..errors import WireError, require
from ..schema.fields import MAX_SIDE
from ..types import Buffer, ColourEncoding, Depth, DepthEncoding, DepthImage, Frame, Image
from ..types import lazy_numpy as np
from . import codec
from .jpeg_holes import Scan, has_hole
from .orientation import find_orientation, turn_upright

MAX_SCANS = 32
"""Maximum number of scans of a JPEG. libjpeg's own progressive script has 10, and optimising encoders stay below 20."""
MAX_SEGMENTS = 1024
"""Maximum number of segments of a JPEG. A colour profile and metadata of full length have some 300."""
MAX_ANCILLARY = 64
"""Maximum number of chunks of a PNG besides its pixels: text, profile, palette."""
MAX_PACKED = 8
"""Maximum number of compressed texts and profiles of a PNG; libpng expands each to as much as 8 MB."""
MAX_FRAME_PIXELS = 8192 * 8192
"""Default for the maximum number of pixels of an image that is decoded."""
MAX_DEPTH_PIXELS = 1 << 25
"""Maximum number of pixels of a compressed depth image that is decoded for viewers."""
MAX_PHOTO_MEMORY = 50_000_000
"""Bytes that decoding a photo of a request may take: 8 million pixels, 3840 x 2160. A larger photo is refused before it
is decoded. Detectors look at 1 million. With the photo's file and its resizing, a request takes 64 MB."""
MAX_PHOTO_FILE = 8 << 20
"""Bytes of the file of a photo in a request. A larger one is refused. The event of the request repeats them, and eight
messages may wait for each reader that is slow."""
CHANNELS = {"bgr8": 3, "rgb8": 3, "mono8": 1}
"""Bytes per pixel of each raw colour encoding."""
SENSOR_BITS = (8, 10, 12, 14, 16)
"""Bits that the values of an image of 16 bits a channel may need."""

_MAX_SAMPLES = 3
"""Work of decoding, for each allowed pixel: as much as a plain image of 8 bits has."""
_MAX_JPEG_RATIO = 256
"""Pixels for each byte of a JPEG. An even grey has 171 with the best tables, a bit for each block and table of 16 x 16
pixels; the decoder of a progressive JPEG holds all its coefficients in memory."""
_COEFFICIENT_BYTES = 2
"""Memory of a coefficient in libjpeg. A sample has one."""
_MAX_DEFLATE = 1032
"""Largest ratio of deflate."""
_INTERLACED_WORK = 4
"""Work of an interlaced PNG. Measured: seven passes take two to three times as long as one."""
_PIECE = 1024
"""Bytes of compressed pixels that are expanded at once. Little more than the limit is then ever in memory."""

_JPEG_START = b"\xff\xd8"
# zero: a stuffed byte of pixels; FF: fill before a marker; D0 to D7: restarts
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_PROGRESSIVE = 0xC2
_FRAMES = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended, progressive
_DHT = 0xC4  # tables of Huffman codes
_EOI = 0xD9  # end of the image
_SOS = 0xDA  # start of a scan
_DQT = 0xDB  # tables of quantisation
_DRI = 0xDD  # interval of restarts
_TABLES_AND_TEXT = {_DHT, _DQT, _DRI, 0xFE, *range(0xE0, 0xF0)}
_COMPONENTS = (1, 3, 4)

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PNG_START = _PNG_SIGNATURE + b"\x00\x00\x00\rIHDR"
_PNG_GREY16 = b"\x10\x00"  # bits and type of colour, in the header
_PNG_HEADER = struct.Struct(">IIBBBBB")
_PNG_CHUNK = struct.Struct(">I4s")
_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # by type of colour
_PNG_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_PNG_PACKED = (b"zTXt", b"iTXt", b"iCCP")
_PNG_ANIMATION = (b"acTL", b"fcTL", b"fdAT")


class ImageHeader(NamedTuple):
    """Size of a compressed image, and the work of decoding it."""

    width: int
    """pixels"""
    height: int
    """pixels"""
    samples: int
    """Samples of 8 bits that the decoder passes over: a plain 8-bit image has 3 for each pixel, and a progressive JPEG
    has as many for each scan."""
    memory_bytes: int
    """Most memory of decoding to BGR"""
    scan: Scan | None = None
    """Compressed pixels of a JPEG, if they are in one scan of all components, row by row"""


def read_jpeg_header(data: Buffer, what: str = "jpeg") -> ImageHeader:
    """Walk all markers of a JPEG up to its end; what follows the end is ignored, as decoders do.

    Raises WireError for bytes that are no complete JPEG of 8 bits, baseline or progressive, in Huffman coding, and
    beyond MAX_SCANS and MAX_SEGMENTS.
    """
    if bytes(data[:2]) != _JPEG_START:
        raise WireError(f"{what}: expected a JPEG, found {bytes(data[:4])!r}")
    view = memoryview(data)
    position = len(_JPEG_START)
    frame = None
    scans = 0
    samples = 0
    restart = 0
    pixels = (0, 0)  # where those of the last scan begin and end
    for _ in range(MAX_SEGMENTS):
        begin = position
        marker, position = _next_marker(view, begin, what)
        if begin == pixels[0]:
            pixels = (begin, position - 2)
        if marker == _EOI:
            if frame is None or not scans:
                raise WireError(f"{what}: expected a JPEG with pixels, found none")
            # a baseline JPEG in one scan of all its components needs a few rows alone
            area = sum(frame.areas.values())
            is_one_pass = not frame.is_progressive and scans == 1 and samples == area
            coefficients = 0 if is_one_pass else area
            memory_bytes = _count_memory(frame.width, frame.height, coefficients)
            scan = Scan(*pixels, frame.block, restart) if is_one_pass else None
            return ImageHeader(frame.width, frame.height, samples, memory_bytes, scan)
        body, position = _read_segment(view, position, what)
        # the frame tells size and components, each scan is a pass over some of these, and all else is tables and text
        if marker in _FRAMES and frame is None:
            frame = _read_frame(body, what, marker == _PROGRESSIVE)
        elif marker == _SOS and frame is not None:
            scans += 1
            samples += frame.scan_samples(body, what)
            pixels = (position, position)
            if scans > MAX_SCANS:
                raise WireError(f"{what}: expected a JPEG of at most {MAX_SCANS} scans, found more")
        elif marker == _DRI and len(body) == 2:
            restart = int.from_bytes(body, "big")
        elif marker not in _TABLES_AND_TEXT:
            raise WireError(
                f"{what}: expected a baseline or progressive JPEG in Huffman coding, found the marker {marker:02X}"
            )
    raise WireError(f"{what}: expected a JPEG of at most {MAX_SEGMENTS} segments, found more")


class _JpegFrame(NamedTuple):
    width: int
    height: int
    areas: dict[int, int]
    """samples of each component, padded to whole blocks, by its number"""
    is_progressive: bool
    block: tuple[int, int]
    """height and width in pixels of what a scan of all components codes together"""

    def scan_samples(self, body: bytes, what: str) -> int:
        """Return the samples of one scan. Raises WireError unless its header names components of this frame."""
        count = body[0] if body else 0
        # the header names the components of this scan, each once, among those of the frame
        numbers = body[1 : 1 + 2 * count : 2]
        if len(body) != 4 + 2 * count or not count or not set(numbers) <= self.areas.keys():
            raise WireError(f"{what}: expected a scan of the JPEG's components, found another header")
        if len(set(numbers)) != count:
            raise WireError(f"{what}: expected each component once in a scan, found {list(numbers)}")
        return sum(self.areas[number] for number in numbers)


def _next_marker(view: memoryview, position: int, what: str) -> tuple[int, int]:
    """Return the next marker that is no restart, and the position behind it."""
    # the pixels of a scan are no segment: they are searched for the next marker
    match = _JPEG_MARKER.search(view, position)
    if match is None:
        raise WireError(f"{what}: expected a complete JPEG, found no end of it")
    return view[match.end() - 1], match.end()


def _read_segment(view: memoryview, position: int, what: str) -> tuple[bytes, int]:
    length = int.from_bytes(view[position : position + 2], "big")
    if length < 2 or position + length > len(view):
        raise WireError(f"{what}: expected a complete JPEG, found a segment of {length} bytes at {position}")
    return bytes(view[position + 2 : position + length]), position + length


def _read_frame(body: bytes, what: str, is_progressive: bool) -> _JpegFrame:
    # 8 bits in Huffman coding; other kinds are decoded in ways that this module does not know
    if len(body) < 6 or body[5] not in _COMPONENTS or len(body) != 6 + 3 * body[5] or body[0] != 8:
        raise WireError(f"{what}: expected a JPEG of 8 bits in 1, 3 or 4 components, found another kind")
    height, width = struct.unpack_from(">HH", body, 1)
    factors = {body[place]: divmod(body[place + 1], 16) for place in range(6, len(body), 3)}
    is_usual = all(1 <= across <= 4 and 1 <= down <= 4 for across, down in factors.values())
    if len(factors) != body[5] or not is_usual:
        raise WireError(f"{what}: expected components with sampling factors of 1 to 4, found others")
    if not (width and height):
        raise WireError(f"{what}: expected a JPEG that declares its size, found {width} x {height} pixels")
    # each component is padded to whole blocks of the largest sampling factors
    most_across = max(across for across, _ in factors.values())
    most_down = max(down for _, down in factors.values())
    blocks = -(-width // (8 * most_across)) * -(-height // (8 * most_down)) * 64
    areas = {number: blocks * across * down for number, (across, down) in factors.items()}
    # alone, a component has blocks of its own size
    block = (8, 8) if len(factors) == 1 else (8 * most_down, 8 * most_across)
    return _JpegFrame(width, height, areas, is_progressive, block)


def read_png_header(data: Buffer, what: str = "png") -> ImageHeader:
    """Walk all chunks of a PNG up to its end; what follows the end is ignored, as decoders do.

    Raises WireError for bytes that are no complete PNG, for an animation, for more chunks than MAX_ANCILLARY and
    MAX_PACKED allow, and where the compressed pixels are too few for the declared size.
    """
    return _read_png(data, what)[0]


def check_png_pixels(data: Buffer, what: str = "png") -> None:
    """Raise WireError if the compressed pixels of a PNG expand to more than its size, as libpng expands all of them.

    Raises WireError as `read_png_header` does.
    """
    header, row_bytes, parts = _read_png(data, what)
    left = row_bytes
    stream = zlib.decompressobj()
    try:
        for part in parts:
            # piece by piece, and never more than what is left: a bomb ends in an error, not in memory
            for start in range(0, len(part), _PIECE):
                left -= len(stream.decompress(part[start : start + _PIECE], max(left, 0) + 1))
                if left < 0:
                    raise WireError(f"{what}: expected {header.width} x {header.height} pixels, found more")
    except zlib.error as error:
        raise WireError(f"{what}: expected the pixels of a PNG, found damaged ones: {error}") from error


def _read_png(data: Buffer, what: str) -> tuple[ImageHeader, int, list[memoryview]]:
    """Return the header, the largest size of all rows before compression, and the parts of the compressed rows."""
    if bytes(data[: len(_PNG_SIGNATURE)]) != _PNG_SIGNATURE:
        raise WireError(f"{what}: expected a PNG, found {bytes(data[:4])!r}")
    view = memoryview(data)
    position = len(_PNG_SIGNATURE)
    header: ImageHeader | None = None
    row_bytes = 0  # of all rows before compression
    ancillary = 0  # chunks besides the pixels
    packed = 0  # of these, the compressed ones
    parts: list[memoryview] = []
    # chunks may be small, but not so many that the walk itself is the work
    for _ in range(MAX_SEGMENTS + len(view) // 1024):
        name, body, position = _read_chunk(view, position, what)
        if header is None:
            header, row_bytes = _read_png_frame(name, body, what)
        elif name == b"IEND":
            # deflate cannot make so many pixels of so few bytes: libpng would fill the rest
            if sum(map(len, parts)) * _MAX_DEFLATE < row_bytes:
                raise WireError(
                    f"{what}: expected the bytes of {header.width} x {header.height} pixels, found fewer"
                )
            return header, row_bytes, parts
        elif name == b"IDAT":
            parts.append(body)
        elif name == b"IHDR" or name in _PNG_ANIMATION:
            raise WireError(f"{what}: expected a PNG of one image, found an animation or two headers")
        else:
            ancillary += 1
            packed += name in _PNG_PACKED
        if ancillary > MAX_ANCILLARY or packed > MAX_PACKED:
            raise WireError(
                f"{what}: expected at most {MAX_ANCILLARY} chunks besides pixels, {MAX_PACKED} of them compressed; "
                "found more"
            )
    raise WireError(f"{what}: expected a PNG in chunks of 1 KB on average, found smaller ones")


def _read_chunk(view: memoryview, position: int, what: str) -> tuple[bytes, memoryview, int]:
    if position + 12 > len(view):
        raise WireError(f"{what}: expected a complete PNG, found no end of it")
    length, name = _PNG_CHUNK.unpack_from(view, position)
    # length and name, the body, and a checksum of four bytes, which libpng checks
    end = position + 12 + length
    if end > len(view) or not name.isalpha():
        raise WireError(f"{what}: expected a complete PNG, found a chunk {name!r} of {length} bytes")
    return name, view[position + 8 : end - 4], end


def _read_png_frame(name: bytes, body: memoryview, what: str) -> tuple[ImageHeader, int]:
    """Return the header, and the size of all rows before compression; of an interlaced PNG, an upper bound."""
    if name != b"IHDR" or len(body) != _PNG_HEADER.size:
        raise WireError(f"{what}: expected a PNG that begins with its header, found {name!r}")
    width, height, bits, colour, compression, filters, interlace = _PNG_HEADER.unpack(body)
    if bits not in _PNG_DEPTHS.get(colour, ()) or compression or filters or interlace > 1:
        raise WireError(f"{what}: expected a PNG of a standard kind, found {bytes(body[8:]).hex()}")
    if not (width and height):
        raise WireError(f"{what}: expected a PNG that declares its size, found {width} x {height} pixels")
    channels = _PNG_CHANNELS[colour]
    work = width * height * channels
    if bits == 16:
        work *= 2
    row_bytes = height * (1 + (width * bits * channels + 7) // 8)
    if interlace:
        work *= _INTERLACED_WORK
        # the seven passes have fewer than twice the rows, each of them padded to whole bytes
        row_bytes += 4 * height + 64
    memory_bytes = _count_memory(width, height, sample_bytes=2 if bits == 16 else 1)
    return ImageHeader(width, height, work, memory_bytes), row_bytes


def _count_memory(width: int, height: int, coefficients: int = 0, sample_bytes: int = 1) -> int:
    """Return the most bytes of decoding to BGR. `coefficients` are what libjpeg holds until the last scan."""
    image_bytes = 3 * width * height * sample_bytes
    # OpenCV copies the decoded image once, when the coefficients are gone
    return image_bytes + max(image_bytes, _COEFFICIENT_BYTES * coefficients)


def encode_image(image: Image, encoding: ColourEncoding, quality: int = 90) -> Buffer:
    """Encode a BGR image uint8 [height, width, 3]. `bgr8` gives a view, not a copy. `quality` applies to jpeg."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise WireError(f"image: expected uint8 [height, width, 3], found {image.dtype} {list(image.shape)}")
    # raw encodings need no library, and the default copies nothing
    _check_sides(image.shape[1], image.shape[0], "image")
    if encoding == "bgr8":
        return _flatten(image)
    if encoding == "rgb8":
        return _flatten(image[:, :, ::-1])
    cv2 = require("cv2", "cli")

    if encoding == "mono8":
        return _flatten(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if encoding == "jpeg" else []
    return _compress(image, encoding, options)


def decode_image(frame: Frame, max_pixels: int = MAX_FRAME_PIXELS) -> Image:
    """Decode the BGR image uint8 [height, width, 3] of a frame. For `bgr8` it is a read-only view.

    A PNG of 16 bits a channel is scaled as `narrow` does. Raises WireError for invalid bytes, for more than
    `max_pixels`, and for a compressed image that takes more work than a plain one of `max_pixels`.
    """
    what = f"{frame.encoding} image"
    encoding = frame.encoding
    shape = (frame.height, frame.width)
    # sizes first: nothing is decoded that is larger than what is permitted
    check_colour(frame.colour, encoding, frame.width, frame.height)
    _check_pixels(frame.width, frame.height, max_pixels, what)
    if encoding == "bgr8":
        return _view_read_only(frame.colour, np.uint8, (*shape, 3))
    if encoding == "rgb8":
        return np.ascontiguousarray(_view_read_only(frame.colour, np.uint8, (*shape, 3))[:, :, ::-1])
    cv2 = require("cv2", "cli")

    if encoding == "mono8":
        return cast(Image, cv2.cvtColor(_view_read_only(frame.colour, np.uint8, shape), cv2.COLOR_GRAY2BGR))
    if encoding == "h264":
        raise WireError(
            f"{what}: expected a whole image, found a packet of a video; use wire.video.VideoDecoders"
        )
    header = _check_compressed(frame.colour, encoding, frame.width, frame.height, max_pixels, what)
    # without the orientation of a camera's own file: the frame has the size that it says
    return _decompress_colour(frame.colour, header, what)


def check_colour(colour: Buffer, encoding: ColourEncoding, width: int, height: int) -> None:
    """Raise WireError unless `colour` has the size of the raw `encoding`, or is not empty if compressed."""
    _check_sides(width, height, "colour")
    # the size of raw pixels is known; that of compressed ones is checked when they are decoded
    size = memoryview(colour).nbytes
    channels = CHANNELS.get(encoding)
    if channels is None and size == 0:
        raise WireError(f"colour: expected a {encoding} image, found no bytes")
    if channels is not None and size != width * height * channels:
        raise WireError(
            f"colour: expected {width * height * channels} bytes ({width} x {height} {encoding}), "
            f"found {size}"
        )


def encode_depth(image: DepthImage, encoding: DepthEncoding, scale_m: float, aligned: bool) -> Depth:
    """Encode depth uint16 [height, width] in units of `scale_m` metres. `z16` gives a view, not a copy."""
    if image.dtype != np.uint16 or image.ndim != 2:
        raise WireError(f"depth: expected uint16 [height, width], found {image.dtype} {list(image.shape)}")
    height, width = image.shape
    _check_sides(width, height, "depth")
    if encoding == "png16":
        data: Buffer = _compress(image, "png", [])
    else:
        # little-endian on the wire, whatever the machine is
        raw = _flatten(image.astype("<u2", copy=False))
        data = codec.compress(raw) if encoding == "z16+zstd" else raw
    return Depth(width, height, encoding, scale_m, aligned, data)


def decode_depth(depth: Depth, max_pixels: int = MAX_FRAME_PIXELS) -> DepthImage:
    """Decode a depth image to uint16 [height, width]. For `z16` it is a read-only view.

    Raises WireError as `decode_image` does.
    """
    what = f"{depth.encoding} depth"
    shape = (depth.height, depth.width)
    check_depth(depth)
    _check_pixels(depth.width, depth.height, max_pixels, what)
    if depth.encoding == "png16":
        cv2 = require("cv2", "cli")

        # a PNG of 8 bits or of colours would be scaled by the decoder, and not be depth
        _check_compressed(depth.data, "png", depth.width, depth.height, max_pixels, what)
        if not is_depth_png(depth.data):
            raise WireError(f"{what}: expected a PNG of 16-bit grey, found another kind")
        return _decompress(depth.data, cv2.IMREAD_UNCHANGED, shape, "uint16", what)
    size = depth.width * depth.height * 2
    raw = codec.decompress(depth.data, size, what) if depth.encoding == "z16+zstd" else depth.data
    return _view_read_only(raw, np.dtype("<u2"), shape)


def check_depth(depth: Depth) -> None:
    """Raise WireError unless `data` has the size of `z16`, or is not empty if compressed."""
    _check_sides(depth.width, depth.height, "depth")
    size = memoryview(depth.data).nbytes
    expected = depth.width * depth.height * 2
    if size == 0 or (depth.encoding == "z16" and size != expected):
        raise WireError(
            f"depth: expected {depth.width} x {depth.height} {depth.encoding} ({expected} bytes raw), "
            f"found {size} bytes"
        )


def compressed_size(data: Buffer, encoding: str) -> tuple[int, int]:
    """Return the width and height that a complete `jpeg` or `png` declares. Raises WireError for other bytes."""
    header = _read_header(data, encoding, encoding)
    _check_sides(header.width, header.height, encoding)
    return header.width, header.height


def find_compression(data: Buffer) -> Literal["jpeg", "png"] | None:
    """Return what the bytes start like; None for neither."""
    head = bytes(data[:4])
    if head == _PNG_START[:4]:
        return "png"
    if head[:2] == _JPEG_START:
        return "jpeg"
    return None


def identify_compressed(data: Buffer) -> tuple[Literal["jpeg", "png"], int, int]:
    """Return encoding, width and height of a complete JPEG or PNG. Raises WireError for other bytes."""
    encoding = find_compression(data)
    if encoding is None:
        raise WireError(f"expected a JPEG or PNG, found {bytes(data[:4])!r}")
    return encoding, *compressed_size(data, encoding)


def check_photo(
    data: Buffer, max_pixels: int = MAX_FRAME_PIXELS, max_memory: int | None = None
) -> ImageHeader:
    """Return the header of a JPEG or PNG file that may be decoded.

    max_memory: bytes that decoding may take; None for no limit but `max_pixels`. Raises WireError as `decode_image`
    does, and beyond `max_memory`.
    """
    what = "photo"
    encoding = find_compression(data)
    if encoding is None:
        raise WireError(f"{what}: expected a JPEG or PNG, found {bytes(data[:4])!r}")
    header = _read_header(data, encoding, what)
    if max_memory is not None and header.memory_bytes > max_memory:
        raise WireError(
            f"{what}: expected one that is decoded in at most {max_memory} bytes, found {header.width} x "
            f"{header.height} pixels that take {header.memory_bytes}; scale the photo and its boxes down, for example "
            "to 2000 pixels on a side: detectors see no more"
        )
    _check_sides(header.width, header.height, what)
    _check_pixels(header.width, header.height, max_pixels, what)
    return _check_compressed(data, encoding, header.width, header.height, max_pixels, what)


def decode_photo(data: Buffer, max_pixels: int = MAX_FRAME_PIXELS, max_memory: int | None = None) -> Image:
    """Decode the bytes of a JPEG or PNG file to BGR uint8 [height, width, 3], turned as viewers show it.

    A PNG of 16 bits a channel is scaled as `narrow` does. Raises WireError as `check_photo`.
    """
    header = check_photo(data, max_pixels, max_memory)
    # turned here: a decoder would turn some formats and not others
    image = _decompress_colour(data, header, "photo")
    return turn_upright(image, find_orientation(bytes(data)))


def decode_wide(data: Buffer, max_pixels: int = MAX_FRAME_PIXELS) -> np.typing.NDArray[np.uint16]:
    """Decode a PNG of 16 bits a channel to BGR uint16 [height, width, 3]. Raises WireError as `decode_image` does."""
    width, height = compressed_size(data, "png")
    _check_pixels(width, height, max_pixels, "png")
    header = _check_compressed(data, "png", width, height, max_pixels, "png")
    return _decompress_wide(data, header, "png")


def count_bits(values: np.typing.NDArray[np.uint16]) -> int:
    """Return the fewest of SENSOR_BITS that hold all values of an image."""
    largest = int(values.max())
    return next(bits for bits in SENSOR_BITS if largest < 1 << bits)


def narrow(values: np.typing.NDArray[np.uint16], bits: int | None = None) -> np.typing.NDArray[np.uint8]:
    """Scale an image of 16 bits a channel to 8, by the `bits` of its sensor; default: the fewest that hold it.

    No encoding of 16 bits says how many of them the sensor fills: a camera of 12 bits gives values up to 4095, whose
    high byte is black.
    """
    out = np.empty(values.shape, np.uint8)
    # into 8 bits at once: another image of 16 bits is memory that no limit counts
    np.right_shift(values, (bits or count_bits(values)) - 8, out=out, casting="unsafe")
    return out


def is_wide_png(data: Buffer) -> bool:
    """Return True if the bytes start like a PNG of 16 bits a channel."""
    return bytes(data[: len(_PNG_START)]) == _PNG_START and bytes(data[24:25]) == _PNG_GREY16[:1]


def is_depth_png(data: Buffer) -> bool:
    """Return True if the bytes start like a PNG of 16-bit grey."""
    return bytes(data[: len(_PNG_START)]) == _PNG_START and bytes(data[24:26]) == _PNG_GREY16


def _check_sides(width: int, height: int, what: str) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise WireError(f"{what}: expected sides of 1 to {MAX_SIDE} pixels, found {width} x {height}")


def _flatten(image: np.typing.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(image).data.cast("B")


def _view_read_only(data: Buffer, dtype: Any, shape: tuple[int, ...]) -> np.typing.NDArray[Any]:
    return np.frombuffer(memoryview(data).toreadonly(), dtype=dtype).reshape(shape)


def _compress(image: np.typing.NDArray[Any], extension: str, options: list[int]) -> memoryview:
    cv2 = require("cv2", "cli")

    done, data = cv2.imencode(f".{extension}", image, options)
    if not done:
        raise WireError(f"cannot encode {image.dtype} {list(image.shape)} as {extension}")
    return _flatten(data)


def _decompress_colour(data: Buffer, header: ImageHeader, what: str) -> Image:
    """Decode a JPEG or PNG to BGR uint8 [height, width, 3], as it is stored. Raises WireError for one with a hole."""
    cv2 = require("cv2", "cli")

    if is_wide_png(data):
        return narrow(_decompress_wide(data, header, what))
    # without the orientation of a camera's own file: a frame has the size that it says
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
    image = _decompress(data, flags, (header.height, header.width, 3), "uint8", what)

    def decode_small(data: Buffer) -> Image:
        flags = cv2.IMREAD_REDUCED_COLOR_8 | cv2.IMREAD_IGNORE_ORIENTATION
        return _decompress(data, flags, (-(-header.height // 8), -(-header.width // 8), 3), "uint8", what)

    if header.scan is not None and has_hole(data, header.scan, image, decode_small):
        raise WireError(
            f"{what}: expected a complete JPEG, found one that lacks pixels, as after a lost packet; check the cable "
            "and the network between camera and reader"
        )
    return image


def _decompress_wide(data: Buffer, header: ImageHeader, what: str) -> np.typing.NDArray[np.uint16]:
    """Decode a PNG of 16 bits a channel to BGR uint16 [height, width, 3], as it is stored."""
    cv2 = require("cv2", "cli")

    flags = cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    return _decompress(data, flags, (header.height, header.width, 3), "uint16", what)


def _decompress(
    data: Buffer, flags: int, shape: tuple[int, ...], dtype: str, what: str
) -> np.typing.NDArray[Any]:
    cv2 = require("cv2", "cli")

    try:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    except cv2.error as error:
        raise WireError(f"{what}: cannot be decoded: {error.err}") from error
    # a decoder may succeed, and give another image than the header promised
    if image is None or image.shape != shape or image.dtype != dtype:
        actual = "bytes that cannot be decoded"
        if image is not None:
            actual = f"{image.dtype} {list(image.shape)}"
        raise WireError(f"{what}: expected {dtype} {list(shape)}, found {actual}")
    return cast("np.typing.NDArray[Any]", image)


def _check_pixels(width: int, height: int, max_pixels: int, what: str) -> None:
    if width * height > max_pixels:
        raise WireError(
            f"{what}: expected at most {max_pixels} pixels, found {width} x {height}; send smaller images, or raise "
            "tracker.max_frame_pixels"
        )


def _check_compressed(
    data: Buffer, kind: str, width: int, height: int, max_pixels: int, what: str
) -> ImageHeader:
    # check before decoding: the decoder allocates the declared size, and fills missing pixels with grey
    header = _read_header(data, kind, what)
    if header[:2] != (width, height):
        raise WireError(f"{what}: expected {width} x {height} pixels, found {header.width} x {header.height}")
    if header.samples > max_pixels * _MAX_SAMPLES:
        raise WireError(
            f"{what}: expected one that decodes like {max_pixels} plain pixels, found more work: {width} x {height} "
            "pixels with many scans, interlaced or of 16 bits; send a plain jpeg or png, or raise "
            "tracker.max_frame_pixels"
        )
    if kind == "png":
        check_png_pixels(data, what)
    return header


def _read_header(data: Buffer, kind: str, what: str) -> ImageHeader:
    if kind == "png":
        return read_png_header(data, what)
    header = read_jpeg_header(data, what)
    # a header can promise more pixels than its bytes can hold: the decoder would invent them
    size = memoryview(data).nbytes
    if size * _MAX_JPEG_RATIO < header.width * header.height:
        raise WireError(
            f"{what}: expected the bytes of {header.width} x {header.height} pixels, found {size}"
        )
    return header
