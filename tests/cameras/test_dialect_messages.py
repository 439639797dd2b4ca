"""Messages of other projects' camera servers: what is read, and that no bytes do harm."""

import importlib.util
import json
import math
import random
import sys
import time
from typing import Any

import cv2
import msgpack
import numpy as np
import pytest

from sam3_node.cameras.server_source import MAX_IMAGES, Contents, detect_dialect, read_message
from sam3_node.errors import WireError
from sam3_node.types import Frame
from sam3_node.wire import decode_depth, decode_image, pack_frame
from tests.support.camera_servers import (
    BLUE,
    RED,
    bare_jpeg,
    base64_depth,
    base64_jpeg,
    groot,
    image_where,
    imagezmq,
    imagezmq_jpeg,
    jpeg,
    lerobot,
    opened,
    picture,
    views,
)
from tests.support.hostility import declare_jpeg, limited_memory, mutations
from tests.support.processes import Process
from tests.support.refuses import mentions, refuses
from tests.support.repeats import repetitions
from tests.support.tables import each_row

VALID = {
    "groot": groot({"head": base64_jpeg(picture()), "wrist": jpeg(picture())}, {"head": 5.5, "wrist": 6}),
    "lerobot": lerobot({"head": base64_jpeg(picture())}, {"head": 5.5}),
    "imagezmq": imagezmq("pi", picture()),
    "jpeg": bare_jpeg(picture()),
}


def read(dialect: Any, parts: list[bytes]) -> Contents:
    return read_message(dialect, views(parts))


def test_groot_images_keep_names_and_stamps_and_say_which_are_swapped() -> None:
    head, wrist = read("groot", VALID["groot"]).images
    assert [(image.name, image.stamp_s, image.swapped) for image in (head, wrist)] == [
        ("head", 5.5, True),
        ("wrist", 6.0, False),
    ]
    assert np.abs(decode_image(wrist.frame)[10, 10].astype(int) - RED).max() <= 2
    assert np.abs(decode_image(head.frame)[10, 10].astype(int) - BLUE).max() <= 2


@pytest.mark.verifies(
    "stream", "GR00T's camera server", "layout", "depth and single cameras as published", "a robot"
)
def test_groot_depth_belongs_to_the_colour_of_its_name() -> None:
    depth = np.full((48, 64), 1234, np.uint16)
    packed = base64_depth(depth)
    contents = read(
        "groot", groot({"ego": base64_jpeg(picture()), "ego_depth": packed, "lone_depth": packed})
    )
    assert [image.name for image in contents.images] == ["ego"]
    found = contents.images[0].frame.depth
    assert (found.scale_m, found.aligned) == (0.001, True)
    np.testing.assert_array_equal(decode_depth(found), depth)
    (saturated,) = read("groot", groot({"ego": jpeg(picture()), "ego_depth": base64_jpeg(picture())})).images
    assert saturated.frame.depth is None
    for value in ({**base64_depth(depth), "data": 7}, base64_depth(depth.astype(np.uint8))):
        damaged = read("groot", groot({"ego": base64_jpeg(picture()), "ego_depth": value}))
        assert damaged.images[0].frame.depth is None
        assert len(damaged.rejected) == 1
    small = read("groot", groot({"ego": base64_jpeg(picture()), "ego_depth": base64_depth(depth[:24])}))
    assert not small.images[0].frame.depth.aligned


def test_a_groot_server_of_one_camera_nests_its_message() -> None:
    inner = {"timestamps": {"ego": 7.0}, "images": {"ego": jpeg(picture())}}
    (image,) = read("groot", [msgpack.packb({"ego": inner})]).images
    assert (image.name, image.stamp_s) == ("ego", 7.0)


def test_lerobot_images_are_swapped_and_empty_images_are_nothing() -> None:
    (image,) = read("lerobot", VALID["lerobot"]).images
    assert (image.name, image.stamp_s, image.swapped, image.frame.encoding) == ("head", 5.5, True, "jpeg")
    assert read("lerobot", lerobot({})) == ([], [])
    assert read("lerobot", [b'{"images": null}']) == ([], [])


@each_row("stamp", [None, "now", True, [], math.nan, -math.inf, 1 << 63])
def test_a_stamp_that_is_no_number_is_none(stamp: Any) -> None:
    for dialect, make in (("groot", groot), ("lerobot", lerobot)):
        (image,) = read(dialect, make({"head": base64_jpeg(picture())}, {"head": stamp})).images
        assert image.stamp_s is None
    (image,) = read("lerobot", lerobot({"head": base64_jpeg(picture())}, {"head": 10**400})).images
    assert image.stamp_s is None


def test_imagezmq_sends_raw_images_and_jpegs() -> None:
    image = np.random.default_rng(3).integers(0, 255, (30, 40, 4), np.uint8)
    for sent, encoding in ((image[:, :, :3], "bgr8"), (image[:, :, 0], "mono8"), (image[:, :, :1], "mono8")):
        (found,) = read("imagezmq", imagezmq("pi", sent)).images
        assert (found.name, found.stamp_s, found.swapped) == ("pi", None, False)
        assert found.frame.encoding == encoding
        expected = sent if sent.shape[-1] == 3 else np.repeat(sent.reshape(30, 40, 1), 3, axis=2)
        np.testing.assert_array_equal(decode_image(found.frame), expected)
    (found,) = read("imagezmq", imagezmq("pi", image)).images
    np.testing.assert_array_equal(decode_image(found.frame), image[:, :, :3])
    (found,) = read("imagezmq", imagezmq_jpeg({"host": 1}, picture())).images
    assert (found.name, found.frame.encoding, found.frame.width) == ("", "jpeg", 64)


@pytest.mark.verifies(
    "stream", "bare JPEGs and PNGs over ZeroMQ", "layout", "alone or after a topic, by OpenCV", "a robot"
)
def test_bare_images_are_read_alone_and_after_a_topic() -> None:
    png = cv2.imencode(".png", picture())[1].tobytes()
    for parts, name, encoding in (
        (bare_jpeg(picture()), "", "jpeg"),
        (bare_jpeg(picture(), "left"), "left", "jpeg"),
        (bare_jpeg(picture(), " left "), "left", "jpeg"),
        (bare_jpeg(picture(), ""), "", "jpeg"),
        ([b"\xff\xfe", jpeg(picture())], "\ufffd\ufffd", "jpeg"),
        ([png], "", "png"),
        ([b"left", png], "left", "png"),
    ):
        (image,) = read("jpeg", parts).images
        assert (image.name, image.stamp_s, image.swapped) == (name, None, False)
        assert (image.frame.encoding, image.frame.width, image.frame.height) == (encoding, 64, 48)
        assert np.abs(decode_image(image.frame)[10, 10].astype(int) - RED).max() <= 2
        assert detect_dialect(views(parts)) == "jpeg"


def test_one_damaged_image_does_not_take_the_others_with_it() -> None:
    good = base64_jpeg(picture())
    contents = read("groot", groot({"a": good[:40], "b": good, "c": 7, "d": "", "e": "no base64!"}))
    assert [image.name for image in contents.images] == ["b"]
    assert len(contents.rejected) == 4
    assert mentions(str(contents.rejected[1]), "'c'", "JPEG", "7")


@each_row("sent", VALID)
@each_row("dialect", VALID)
def test_a_message_of_another_dialect_is_named(dialect: str, sent: str) -> None:
    if dialect == sent:
        assert detect_dialect(views(VALID[sent])) == sent
        return
    with refuses(WireError, field=str(sent)):
        read(dialect, VALID[sent])


def test_frames_of_our_own_are_named() -> None:
    frame = Frame("cam0", 1, time.time_ns(), 4, 4, "mono8", bytes(16), sent_ns=1)
    with refuses(WireError, field="sam3-node"):
        read("groot", [bytes(part) for part in pack_frame(frame)])


@each_row(
    ("dialect", "parts", "reason"),
    [
        ("groot", [], "a message of 0 parts"),
        ("groot", [b""], "truncated"),
        ("groot", [b"\xdf\xff\xff\xff\xff"], "truncated"),
        ("groot", [b"\x91" * 1000 + b"\xc0"], "nesting|levels"),
        ("groot", [msgpack.packb({"images": [1]})], "'images' to be a map of cameras"),
        ("groot", groot({str(i): b"" for i in range(MAX_IMAGES + 1)}), "at most 32 images, found 33"),
        ("groot", [msgpack.packb({"images": {}, "more": [[]] * 3000})], "at most 4096 items"),
        ("groot", [msgpack.packb({"head": 1})], "without 'images'"),
        ("lerobot", [b"\xff\xfe{}"], "expected JSON"),
        ("lerobot", [b'{"images":' + b"[" * 4000], "expected JSON"),
        ("lerobot", [b'{"images":' + b"[" * 100_000], "at most 4096 items"),
        ("lerobot", [b'{"images": {}, "n": [' + b"[]," * 100_000 + b"0]}"], "at most 4096 items"),
        ("lerobot", [b'{"images": {}, "n": ' + b"9" * 5000 + b"}"], "expected JSON"),
        ("lerobot", [b"[]"], "without 'images'"),
        ("imagezmq", [b"{}", b""], "a map with 'msg'"),
        ("imagezmq", [b"{" + b" " * (64 << 10), b""], "at most 65536 bytes"),
        ("imagezmq", [b'{"msg": "a"}', b"\xff\xd8"], "complete JPEG"),
        ("jpeg", [], "a message of 0 parts"),
        ("jpeg", [b"a", b"b", jpeg(picture())], "a message of 3 parts"),
        ("jpeg", [b""], "expected a JPEG or PNG"),
        ("jpeg", [jpeg(picture()), b"topic"], "expected a JPEG or PNG"),
        ("jpeg", [jpeg(picture())[:60]], "complete JPEG"),
        ("jpeg", [b"GIF89a" + b"x" * 100], "expected a JPEG or PNG"),
        *(
            ("imagezmq", [json.dumps({"msg": "a", "dtype": dtype, "shape": shape}).encode(), b"12"], reason)
            for dtype, shape, reason in (
                ("uint8", [1 << 40, 1 << 40, 3], "sides of 1 to"),
                ("uint8", [16384, 16384], "at most 67108864 pixels"),
                ("uint8", [-1, -2], "sides of 1 to"),
                ("uint8", [True, True], "uint8 of shape"),
                ("uint8", [1, 1, 2], "uint8 of shape"),
                ("uint8", 7, "uint8 of shape"),
                ("uint16", [1, 1], "uint8 of shape"),
                ("object", [1], "uint8 of shape"),
                (["uint8"], [1, 1], "uint8 of shape"),
                ("uint8", [1, 1], "expected 1 bytes"),
                ("uint8", [1, 1, 4], "expected 4 bytes, found 2"),
            )
        ),
    ],
)
def test_hostile_messages_are_refused_within_bounds(dialect: str, parts: list[bytes], reason: str) -> None:
    with limited_memory(4), pytest.raises(WireError, match=reason):
        read(dialect, parts)


def test_an_image_that_declares_more_pixels_than_it_has_is_refused_without_decoding() -> None:
    png = cv2.imencode(".png", picture())[1].tobytes()
    images = {"head": declare_jpeg(jpeg(picture()), 16384, 16384), "wrist": png}
    with limited_memory(4):
        contents = read("groot", groot(images))
    assert mentions(str(contents.rejected[0]), "16384 x 16384")
    assert contents.images[0].frame.encoding == "png"


@pytest.mark.parametrize("dialect", VALID)
def test_no_mutation_of_a_message_does_harm(dialect: str) -> None:
    random_ = random.Random(dialect)
    outcomes = set()
    with limited_memory(8):
        for parts in mutations(VALID[dialect], repetitions(300, 1500), dialect):
            try:
                read(random_.choice(list(VALID)) if random_.random() < 0.1 else dialect, parts)
                outcomes.add("read")
            except WireError:
                outcomes.add("refused")
    assert outcomes == {"read", "refused"}


SIZE = (48, 64)
DRAW = f"""
import sys, time
import cv2, numpy as np, zmq
RED = np.full(({SIZE[0]}, {SIZE[1]}, 3), {RED}, np.uint8)  # BGR
def announce(socket):
    print(socket.getsockopt_string(zmq.LAST_ENDPOINT).replace("0.0.0.0", "127.0.0.1"), flush=True)
"""
IMAGEZMQ = """
import imagezmq
address, kind = sys.argv[1:]
sender = imagezmq.ImageSender(address, REQ_REP=kind == "hub")
if kind == "pub":
    announce(sender.zmq_socket)
jpg = cv2.imencode(".jpg", RED)[1].tobytes()
while True:
    answers = [sender.send_image("raw", RED), sender.send_jpg("jpg", jpg)]
    assert answers == ([b"OK"] * 2 if kind == "hub" else [None] * 2), answers
    time.sleep(0.01)
"""
# lerobot's own camera reads a capture device that is drawn here
LEROBOT = """
from lerobot.cameras.zmq import image_server
class Capture:
    def __init__(self, *_): self.values = {}
    def isOpened(self): return True
    def set(self, key, value): self.values[key] = value; return True
    def get(self, key): return self.values.get(key, 0.0)
    def read(self): time.sleep(0.01); return True, RED
    def release(self): ...
cv2.VideoCapture = Capture
cameras = {name: {"device_id": i, "shape": RED.shape[:2]} for i, name in enumerate(("head_camera", "wrist"))}
server = image_server.ImageServer({"fps": 50, "cameras": cameras}, port=0)
announce(server.socket)
server.run()
"""
GROOT = """
from gear_sonic.camera.sensor_server import ImageMessageSchema, SensorServer
server = SensorServer()
server.start_server(0)
announce(server.socket)
jpg = cv2.imencode(".jpg", RED)[1].tobytes()
depth = np.full(RED.shape[:2], 0.75, np.float32)
while True:
    stamps = {"ego_view": time.time() - 0.2, "left_wrist": time.monotonic()}
    images = {"ego_view": RED[:, :, ::-1], "left_wrist": jpg, "ego_view_depth": depth}
    server.send_message(ImageMessageSchema(timestamps=stamps, images=images).serialize())
    time.sleep(0.01)
"""


def peer(program: str, *arguments: str) -> Process:
    return Process.spawn([sys.executable, "-c", DRAW + program, *arguments], stderr=None)


def read_endpoint(process: Process) -> str:
    """Return the address that the server prints; other lines of it are skipped."""
    return next(line for line in iter(process.next_line, None) if line.startswith("tcp://"))


def is_red(image: np.ndarray) -> bool:
    return image.shape == (*SIZE, 3) and bool(np.abs(image.astype(int) - RED).max() <= 2)


@pytest.mark.verifies("stream", "imagezmq, PUB/SUB and REQ/REP", "own package", "imagezmq sends")
def test_imagezmq_in_pub_sub_mode() -> None:
    pytest.importorskip("imagezmq")
    server = peer(IMAGEZMQ, "tcp://127.0.0.1:0", "pub")
    with server as process, opened(read_endpoint(process), "imagezmq") as source:
        for camera in ("raw", "jpg"):
            assert is_red(image_where(source, lambda image, name=camera: image.camera == name).pixels())
        assert source.counts.rejected == 0


def test_imagezmq_in_req_rep_mode() -> None:
    pytest.importorskip("imagezmq")
    with opened("tcp://127.0.0.1:0", "imagezmq-hub") as source, peer(IMAGEZMQ, source.endpoint, "hub"):
        for camera in ("raw", "jpg") * 3:
            assert is_red(image_where(source, lambda image, name=camera: image.camera == name).pixels())
        assert source.counts.rejected == 0


@pytest.mark.verifies(
    "stream", "lerobot's `ImageServer`", "own package", "lerobot 0.4.4 sends", "servers of later versions"
)
def test_lerobots_image_server() -> None:
    pytest.importorskip("lerobot.cameras.zmq.image_server", exc_type=ImportError)
    before_ns = time.time_ns()
    with peer(LEROBOT) as process, opened(read_endpoint(process), "lerobot") as source:
        for camera in ("head_camera", "wrist"):
            image = image_where(source, lambda image, name=camera: image.camera == name)
            assert is_red(image.pixels())
            assert before_ns < image.capture_ns < image.times["arrival_ns"]
        assert source.counts.rejected == 0


@pytest.mark.verifies(
    "stream", "GR00T's camera server", "own package", "its sensor server of August 2026 sends"
)
def test_groots_sensor_server(caplog: pytest.LogCaptureFixture) -> None:
    if importlib.util.find_spec("gear_sonic") is None:
        pytest.skip("needs a checkout of GR00T-WholeBodyControl and msgpack_numpy")
    with peer(GROOT) as process, opened(read_endpoint(process), "groot") as source:
        ego = image_where(source, lambda image: image.camera == "ego_view")
        wrist = image_where(source, lambda image: image.camera == "left_wrist")
        assert source.counts.rejected == 0
    assert is_red(ego.pixels())
    assert is_red(wrist.pixels())
    assert set(source._cameras) == {"ego_view", "left_wrist"}
    depth = ego.depth
    # older servers send it as a JPEG, which is left out
    assert depth is None or np.all(decode_depth(depth) == 750)
    assert ego.times["arrival_ns"] - ego.capture_ns >= 0.2e9
    assert 0 <= wrist.times["arrival_ns"] - wrist.capture_ns < 1e9
    assert mentions(caplog.text, "left_wrist", "stamps")
