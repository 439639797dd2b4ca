"""Images in ROS messages, and WebP, AVIF, TIFF and BMP in messages and folders, are what OpenCV decodes."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from sam3_node.bags.bag import open_bag
from sam3_node.bags.decompression import MIN_STILL_PIXELS, decode_still
from sam3_node.bags.messages.ros_images import MessageError, find_kind, read_payload, read_stamp
from sam3_node.bags.samples import CameraInfo, MillimetreDepth
from sam3_node.errors import BagError
from sam3_node.types import Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth, decode_image
from tests.support.hostile_media import declare
from tests.support.hostile_recordings import pack_rvl
from tests.support.mcap_files import T0, WRITERS, Moment
from tests.support.refuses import mentions, refuses
from tests.support.ros_recordings import decoded
from tests.support.tables import each_row

SIZE = (12, 16)
IMAGE, COMPRESSED, INFO = (f"sensor_msgs/msg/{name}" for name in ("Image", "CompressedImage", "CameraInfo"))
COLOUR_TOPIC = "/camera/color/image_raw"
DEPTH_TOPIC = "/camera/depth/image_rect_raw"
BGR = np.random.default_rng(3).integers(0, 256, (*SIZE, 3), dtype=np.uint8)
MILLIMETRES = np.random.default_rng(4).integers(0, 5000, SIZE, dtype=np.uint16)


def image(pixels: np.ndarray, encoding: str, padding: int = 0, big_endian: bool = False) -> SimpleNamespace:
    """Return a sensor_msgs/Image of these pixels, each row followed by `padding` bytes."""
    if big_endian:
        pixels = pixels.astype(pixels.dtype.newbyteorder(">"))
    rows = pixels.reshape(pixels.shape[0], -1).view(np.uint8)
    data = np.pad(rows, ((0, 0), (0, padding)), constant_values=77)
    return SimpleNamespace(
        height=pixels.shape[0],
        width=pixels.shape[1],
        encoding=encoding,
        is_bigendian=int(big_endian),
        step=data.shape[1],
        data=data.ravel(),
    )


def info(**changes: Any) -> SimpleNamespace:
    k = [60.0, 0.0, 7.5, 0.0, 61.0, 5.5, 0.0, 0.0, 1.0]
    message = SimpleNamespace(k=np.array(k), d=np.zeros(5), distortion_model="plumb_bob")
    vars(message).update(changes)
    return message


def read_info(**changes: Any) -> CameraInfo:
    return read_payload(info(**changes), INFO, "/c/camera_info")


def read_colour(message: object, topic: str = COLOUR_TOPIC, type_name: str = IMAGE) -> np.ndarray:
    return decoded(read_payload(message, type_name, topic))


def read_depth(message: object, topic: str = DEPTH_TOPIC, type_name: str = IMAGE) -> np.ndarray:
    payload = read_payload(message, type_name, topic)
    assert payload.scale_m == 0.001
    return decode_depth(payload)


@each_row("padding", [0, 5])
@each_row(
    ("pixels", "encoding"),
    [
        (BGR, "bgr8"),
        (BGR, "8UC3"),
        (BGR[:, :, ::-1], "rgb8"),
        (cv2.cvtColor(BGR, cv2.COLOR_BGR2BGRA), "bgra8"),
        (cv2.cvtColor(BGR, cv2.COLOR_BGR2RGBA), "rgba8"),
        (BGR.astype(np.uint16) << 8 | 7, "bgr16"),
        (BGR[:, :, ::-1].astype(np.uint16) << 8, "rgb16"),
        (cv2.cvtColor(BGR, cv2.COLOR_BGR2RGBA).astype(np.uint16) << 8, "rgba16"),
    ],
)
def test_colour_is_what_was_taken(pixels: np.ndarray, encoding: str, padding: int) -> None:
    assert np.array_equal(read_colour(image(np.ascontiguousarray(pixels), encoding, padding)), BGR)


@pytest.mark.parametrize("padding", [0, 6])
def test_grey_of_8_and_16_bits(padding: int) -> None:
    grey = BGR[:, :, 0]
    expected = cv2.cvtColor(grey, cv2.COLOR_GRAY2BGR)
    wide = grey.astype(np.uint16) * 257
    assert np.array_equal(read_colour(image(grey.copy(), "mono8", padding)), expected)
    assert np.array_equal(read_colour(image(wide, "mono16", padding)), expected)
    assert np.array_equal(read_colour(image(wide, "mono16", padding, big_endian=True)), expected)


@each_row("pattern", ["rggb", "bggr", "gbrg", "grbg"])
@each_row("bits", [8, 16])
def test_bayer_patterns_keep_their_colours(pattern: str, bits: int) -> None:
    colour = {"b": 200, "g": 120, "r": 40}
    mosaic = np.tile(np.array([colour[place] for place in pattern], np.uint8).reshape(2, 2), (6, 8))
    pixels = mosaic if bits == 8 else mosaic.astype(np.uint16) << 8
    found = read_colour(image(np.ascontiguousarray(pixels), f"bayer_{pattern}{bits}"))
    assert np.array_equal(found[4, 4], [200, 120, 40])


@pytest.mark.parametrize(
    ("encoding", "order"), [("yuv422", "uyvy"), ("uyvy", "uyvy"), ("yuyv", "yuyv"), ("yuv422_yuy2", "yuyv")]
)
def test_packed_yuv_keeps_its_colours(encoding: str, order: str) -> None:
    y, u, v = cv2.cvtColor(np.full((1, 1, 3), (200, 120, 40), np.uint8), cv2.COLOR_BGR2YUV)[0, 0]
    first, second = ([u, y], [v, y]) if order == "uyvy" else ([y, u], [y, v])
    pixels = np.tile(np.array([first, second], np.uint8), (SIZE[0], SIZE[1] // 2, 1))
    found = read_colour(image(pixels, encoding))
    assert np.abs(found.astype(int) - (200, 120, 40)).max() <= 30  # video range against full range


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("padding", [0, 4])
def test_depth_in_millimetres_and_metres(big_endian: bool, padding: int) -> None:
    assert np.array_equal(read_depth(image(MILLIMETRES, "16UC1", padding, big_endian)), MILLIMETRES)
    metres = (MILLIMETRES / 1000).astype(np.float32)
    assert np.array_equal(read_depth(image(metres, "32FC1", padding, big_endian)), MILLIMETRES)
    assert np.array_equal(read_depth(image(MILLIMETRES, "mono16", padding, big_endian)), MILLIMETRES)


def test_metres_that_are_none_are_unknown() -> None:
    metres = np.full(SIZE, 1.5, np.float32)
    metres[0, :5] = [np.nan, np.inf, -np.inf, -1.0, 70.0]
    found = read_depth(image(metres, "32FC1"))
    assert np.array_equal(found[0, :6], [0, 0, 0, 0, 0, 1500])


def test_depth_is_aligned_where_its_topic_says_so() -> None:
    for topic, aligned in (("/camera/aligned_depth_to_color/image_raw", True), (DEPTH_TOPIC, False)):
        assert read_payload(image(MILLIMETRES, "16UC1"), IMAGE, topic).aligned == aligned


@pytest.mark.parametrize("extension", ["jpeg", "png"])
def test_compressed_colour_passes_through(extension: str) -> None:
    data = cv2.imencode(f".{extension}", BGR)[1]
    payload = read_payload(SimpleNamespace(format="whatever", data=data), COMPRESSED, COLOUR_TOPIC)
    assert (payload.encoding, payload.width, payload.height) == (extension, SIZE[1], SIZE[0])
    assert bytes(payload.data) == data.tobytes()


def test_compressed_depth_passes_through() -> None:
    png = cv2.imencode(".png", MILLIMETRES)[1].tobytes()
    for header, format_, topic in (
        (bytes(12), "16UC1; compressedDepth png", f"{DEPTH_TOPIC}/compressedDepth"),
        (b"", "16UC1; png compressed", f"{DEPTH_TOPIC}/compressed"),
    ):
        message = SimpleNamespace(format=format_, data=header + png)
        payload = read_payload(message, COMPRESSED, topic)
        assert (payload.encoding, bytes(payload.data)) == ("png16", png)
        assert np.array_equal(read_depth(message, topic, COMPRESSED), MILLIMETRES)


def test_inverse_depth_becomes_millimetres() -> None:
    # depth = a / (value - b), as compressed_depth_image_transport quantises it
    a = 25_600.0
    b = -2500.0
    values = np.random.default_rng(5).integers(1, 60_000, SIZE, dtype=np.uint16)
    values[0, 0] = 0
    data = struct.pack("<iff", 0, a, b) + cv2.imencode(".png", values)[1].tobytes()
    message = SimpleNamespace(format="32FC1; compressedDepth png", data=data)
    found = read_depth(message, f"{DEPTH_TOPIC}/compressedDepth", COMPRESSED)
    expected = np.rint(1000 * a / (values.astype(np.float64) - b))
    expected[0, 0] = 0
    assert np.abs(found - expected).max() <= 1


@pytest.mark.parametrize(
    ("model", "coeffs", "expected"),
    [
        ("plumb_bob", (0.1, 0.2, 0.003, 0.004, 0.05), "brown_conrady"),
        ("rational_polynomial", (0.1, 0.2, 0.003, 0.004, 0.05, 0.6, 0.07, 0.008), "brown_conrady"),
        ("equidistant", (0.1, 0.2, 0.003, 0.004), "fisheye"),
        ("plumb_bob", (0.0,) * 5, "none"),
        ("", (), "none"),
    ],
)
def test_intrinsics_of_every_distortion(model: str, coeffs: tuple[float, ...], expected: str) -> None:
    found = read_info(distortion_model=model, d=np.array(coeffs))
    lens = Intrinsics(60.0, 61.0, 7.5, 5.5, expected, () if expected == "none" else coeffs)  # type: ignore[arg-type]
    assert found.lens == lens


def test_intrinsics_by_the_names_of_ros_1() -> None:
    matrix = [60.0, 0.0, 7.5, 0.0, 61.0, 5.5, 0.0, 0.0, 1.0]
    projection = [50.0, 0.0, 8.0, -4.0, 0.0, 51.0, 6.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    message = SimpleNamespace(K=matrix, D=[], P=projection, distortion_model="plumb_bob", width=16, height=12)
    assert read_payload(message, "sensor_msgs/CameraInfo", "/c/camera_info") == CameraInfo(
        Intrinsics(60.0, 61.0, 7.5, 5.5), Intrinsics(50.0, 51.0, 8.0, 6.0), (16, 12)
    )


def test_a_camera_that_was_never_calibrated_says_nothing() -> None:
    assert read_payload(info(k=np.zeros(9)), INFO, "/c/camera_info") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"k": np.full(9, np.nan)},
        {"k": -np.ones(9)},
        {"d": np.ones(3)},
        {"d": np.ones(5), "distortion_model": "pincushion"},
    ],
)
def test_impossible_intrinsics_are_refused_by_topic(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match=r"^/c/camera_info: expected .* found "):
        read_payload(info(**changes), INFO, "/c/camera_info")


@pytest.mark.parametrize(
    "changes",
    [
        {"width": 0},
        {"height": 100_000},
        {"step": 3},
        {"data": np.zeros(10, np.uint8)},
        {"data": np.zeros(0, np.uint8)},
    ],
)
def test_impossible_sizes_are_refused_by_topic(changes: dict[str, Any]) -> None:
    message = image(BGR, "bgr8")
    vars(message).update(changes)
    with refuses(MessageError, field=str(COLOUR_TOPIC)):
        read_payload(message, IMAGE, COLOUR_TOPIC)


@each_row("data", [b"", b"\xff\xd8\xff", b"GIF89a" * 10, cv2.imencode(".png", BGR)[1].tobytes()[:-20]])
@each_row("format_", ["jpeg", "16UC1; compressedDepth png"])
def test_damaged_compressed_images_are_refused(data: bytes, format_: str) -> None:
    with pytest.raises(MessageError, match=COLOUR_TOPIC):
        read_payload(SimpleNamespace(format=format_, data=data), COMPRESSED, COLOUR_TOPIC)


def test_unknown_encodings_name_those_that_are_known() -> None:
    with refuses(BagError, field=("rgb8", "nv24")) as raised:
        read_payload(image(BGR, "nv24"), IMAGE, COLOUR_TOPIC)
    assert not isinstance(raised.value, MessageError)
    with pytest.raises(BagError, match="PointCloud2"):
        read_payload(image(BGR, "rgb8"), "sensor_msgs/msg/PointCloud2", "/points")


@pytest.mark.parametrize("encoding", ["nv12", "nv21"])
def test_planes_of_yuv_keep_their_colours(encoding: str) -> None:
    y, u, v = cv2.cvtColor(np.full((1, 1, 3), (200, 120, 40), np.uint8), cv2.COLOR_BGR2YUV)[0, 0]
    chroma = [u, v] if encoding == "nv12" else [v, u]
    rows = np.full((SIZE[0] * 3 // 2, SIZE[1]), y, np.uint8)
    rows[SIZE[0] :] = np.tile(np.array(chroma, np.uint8), SIZE[1] // 2)
    message = image(rows, encoding, padding=4)
    message.height = SIZE[0]
    assert np.abs(read_colour(message).astype(int) - (200, 120, 40)).max() <= 30
    message.height = SIZE[0] + 2
    with pytest.raises(MessageError, match="expected"):
        read_colour(message)


def encode_rvl(pixels: np.ndarray) -> bytes:
    """Encode as RvlCodec does, number by number."""
    numbers: list[int] = []
    values = pixels.ravel().astype(int).tolist()
    place = 0
    previous = 0
    while place < len(values):
        for is_zero in (True, False):
            begin = place
            while place < len(values) and (values[place] == 0) == is_zero:
                place += 1
            numbers.append(place - begin)
        for value in values[begin:place]:
            difference = value - previous
            previous = value
            numbers.append(difference * 2 if difference >= 0 else -difference * 2 - 1)
    return np.array(pixels.shape[::-1], "<u4").tobytes() + pack_rvl(numbers)


def rvl_message(data: bytes) -> SimpleNamespace:
    return SimpleNamespace(format="16UC1; compressedDepth rvl", data=bytes(12) + data)


def depth_images() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    holes = random.integers(0, 65536, SIZE).astype(np.uint16) * (random.random(SIZE) < 0.6)
    return [holes.astype(np.uint16), np.zeros(SIZE, np.uint16), np.full(SIZE, 65535, np.uint16)]


@pytest.mark.verifies(
    "recording",
    "`compressedDepth`: PNG, inverse depth, RVL",
    "layout",
    "an encoder of RVL from its paper",
    "a message of ROS's own transport",
)
@pytest.mark.parametrize("pixels", depth_images())
def test_rvl_depth_is_what_was_encoded(pixels: np.ndarray) -> None:
    found = read_depth(rvl_message(encode_rvl(pixels)), f"{DEPTH_TOPIC}/compressedDepth", COMPRESSED)
    assert np.array_equal(found, pixels)


def test_damaged_rvl_depth_costs_its_message() -> None:
    data = encode_rvl(depth_images()[0])
    random = np.random.default_rng(1)
    cut = [data[:length] for length in (0, 7, 8, 12, len(data) // 2)]
    sizes = [np.array([side, side], "<u4").tobytes() + data[8:] for side in (0, 8191, 1 << 31)]
    noise = [data[:8] + random.bytes(64) for _ in range(200)]
    refused = 0
    for damaged in [*cut, *sizes, *noise, data[:8] + b"\xff" * 64]:
        try:
            read_payload(rvl_message(damaged), COMPRESSED, DEPTH_TOPIC)
        except MessageError:
            refused += 1
    assert refused > 200


@each_row(
    ("type_name", "topic", "kind"),
    [
        (IMAGE, "/camera/color/image_raw", "colour"),
        ("sensor_msgs/Image", "/camera/depth/image_rect_raw", "depth"),
        (IMAGE, "/camera/aligned_depth_to_color/image_raw", "depth"),
        (IMAGE, "/depth_camera/rgb/image_raw", "colour"),
        (IMAGE, "/depth_camera/left/image_raw", "colour"),
        (COMPRESSED, "/camera/color/image_raw/compressedDepth", "depth"),
        (INFO, "/camera/depth/camera_info", "intrinsics"),
        ("sensor_msgs/msg/Imu", "/imu", "other"),
        ("my_msgs/msg/Image", "/camera/image", "other"),
    ],
)
def test_what_topics_hold(type_name: str, topic: str, kind: str) -> None:
    assert find_kind(type_name, topic) == kind


def test_stamps_of_both_ros() -> None:
    def stamped(**stamp: int) -> SimpleNamespace:
        return SimpleNamespace(header=SimpleNamespace(stamp=SimpleNamespace(**stamp)))

    assert read_stamp(stamped(sec=3, nanosec=5)) == 3_000_000_005
    assert read_stamp(stamped(secs=3, nsecs=5)) == 3_000_000_005
    assert read_stamp(stamped(sec=0, nanosec=0)) == 0
    assert read_stamp(SimpleNamespace()) == 0


def test_projection_region_and_binning_are_read() -> None:
    region = SimpleNamespace(x_offset=2, y_offset=4, width=8, height=6, do_rectify=False)
    message = info(
        p=[50.0, 0.0, 8.0, -4.0, 0.0, 51.0, 6.0, 0.0, 0.0, 0.0, 1.0, 0.0],
        width=16,
        height=12,
        binning_x=2,
        binning_y=0,
        roi=region,
    )
    found = read_payload(message, INFO, "/c/camera_info")
    lens = Intrinsics(60.0, 61.0, 7.5, 5.5)
    projection = Intrinsics(50.0, 51.0, 8.0, 6.0)
    assert found == CameraInfo(lens, projection, (16, 12), (2, 1), (2, 4, 8, 6))


@pytest.mark.parametrize(
    "p", [[0.0] * 12, [], [0.0] * 10 + [1.0, 0.0], [1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0]]
)
def test_a_projection_that_is_not_set_is_none(p: list[float]) -> None:
    found = read_info(p=p)
    assert found.projection is None


@pytest.mark.parametrize("p", [[-50.0, *[1.0] * 11], [float("nan")] * 12, [50.0] * 9])
def test_a_projection_that_is_none_leaves_the_raw_lens(p: list[float]) -> None:
    found = read_info(p=p)
    assert isinstance(found.lens, Intrinsics)
    assert mentions(str(found.projection), "P", "12")


def test_an_unknown_lens_leaves_the_projection() -> None:
    p = [50.0, 0.0, 8.0, 0.0, 0.0, 51.0, 6.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    found = read_info(p=p, distortion_model="ds", d=[0.1] * 6)
    assert isinstance(found.projection, Intrinsics)
    assert mentions(str(found.lens), "distortion")


@pytest.mark.parametrize("values", [np.full(SIZE, 1000.0), MILLIMETRES.astype(np.float64) + 150])
def test_floats_that_cannot_be_metres_are_millimetres(values: np.ndarray) -> None:
    pixels = values.astype(np.float32)
    pixels[0, 0] = np.nan
    pixels[0, 1] = 0
    payload = read_payload(image(pixels, "32FC1"), IMAGE, DEPTH_TOPIC)
    assert isinstance(payload, MillimetreDepth)
    expected = np.rint(np.nan_to_num(pixels)).astype(np.uint16)
    assert np.array_equal(decode_depth(payload), expected)


def test_floats_in_metres_stay_metres_though_some_are_far_away() -> None:
    pixels = np.full(SIZE, 1000.0, np.float32)
    pixels[6:] = 2.5
    payload = read_payload(image(pixels, "32FC1"), IMAGE, DEPTH_TOPIC)
    assert type(payload) is Depth
    assert set(np.unique(decode_depth(payload))) == {0, 2500}


STILL_SIZE = (48, 64)
ROWS, COLUMNS = np.mgrid[: STILL_SIZE[0], : STILL_SIZE[1]]
STILL = np.stack([ROWS * 5, COLUMNS * 3, 128 + 60 * np.sin(COLUMNS / 9)], -1).astype(np.uint8)
STILL_DEPTH = (ROWS * 64 + COLUMNS + 500).astype(np.uint16)
LOSSY = {"webp": [cv2.IMWRITE_WEBP_QUALITY, 90], "avif": [cv2.IMWRITE_AVIF_QUALITY, 90]}
FORMATS = ["webp", "webp lossless", "avif", "tiff", "bmp"]


def encode(name: str, image: np.ndarray = STILL) -> bytes:
    extension, _, lossless = name.partition(" ")
    done, data = cv2.imencode(f".{extension}", image, [] if lossless else LOSSY.get(extension, []))
    assert done
    return data.tobytes()


def check(frame: Frame, data: bytes) -> None:
    """Compare up to the colours of lossy images, whose smaller planes decoders enlarge differently."""
    expected = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    error = np.abs(decode_image(frame).astype(int) - expected)
    assert error.max() <= 20
    assert error.mean() < 2


@pytest.mark.verifies(
    "recording",
    "WebP, AVIF, TIFF, BMP",
    "other implementation",
    "OpenCV writes and reads them",
    missing="animations, tiled TIFF",
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_of_images_is_what_opencv_decodes(tmp_path: Path, name: str) -> None:
    data = encode(name)
    folder = tmp_path / "desk"
    (folder / "depth").mkdir(parents=True)
    for index in range(2):
        (folder / f"{index}.{name.split()[0]}").write_bytes(data)
        (folder / "depth" / f"{index}.tiff").write_bytes(encode("tiff", STILL_DEPTH))
    with open_bag(folder) as bag:
        frames = list(bag)
        assert bag.lost is None
    assert len(frames) == 2
    for frame in frames:
        check(frame, data)
        assert np.array_equal(decode_depth(frame.depth), STILL_DEPTH)


@each_row("format_", WRITERS)
@each_row("name", FORMATS)
def test_a_compressed_message_is_what_opencv_decodes(tmp_path: Path, name: str, format_: str) -> None:
    good = encode(name)
    (colour, depth) = (f"/camera/{kind}/image_raw/compressed" for kind in ("color", "depth"))
    moments = [
        Moment(depth, "compressed", T0, encode("tiff", STILL_DEPTH), "16UC1; tiff compressed"),
        Moment(colour, "compressed", T0, good, name.split()[0]),
        Moment(colour, "compressed", T0 + 1, good[: len(good) // 3], name.split()[0]),
    ]
    with open_bag(WRITERS[format_](tmp_path / "r.mcap", moments)) as bag:
        first, *_ = frames = list(bag)
        assert len(frames) == 1 or name in ("tiff", "bmp")  # their rows are whole before the cut
        assert bag.lost is None or f"skipped 1 of {colour}" in bag.lost
    check(first, good)
    assert np.array_equal(decode_depth(first.depth), STILL_DEPTH)


@pytest.mark.parametrize("name", ["webp", "tiff", "bmp"])
@pytest.mark.parametrize("size", [(16383, 16383), (16000, MIN_STILL_PIXELS // 16000 + 1)])
def test_a_size_beyond_the_limit_is_refused_before_it_is_allocated(name: str, size: tuple[int, int]) -> None:
    with refuses(ValueError, field=str(name)):
        decode_still(declare(name, encode(name), *size))


@pytest.mark.parametrize(
    "data", [b"", b"RIFF1234WEBP", b"II*\0", b"\0\0\0\x20ftypavif", b"BM12340000" + bytes(60)]
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="expected"):
        decode_still(data)
