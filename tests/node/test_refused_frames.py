"""A camera whose frames are refused is told as that, by node, client, recorder and doctor, and never as absent."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import zmq

from sam3_node.client.diagnosis import NO_FRAME_YET, Wanted, diagnose
from sam3_node.errors import TransportError, WireError
from sam3_node.transport import FrameSubscriber
from sam3_node.types import Intrinsics
from sam3_node.wire import find_camera, pack_frame, unpack_frame
from tests.support.node_rig import Rig, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tests.support.threads import repeating
from tests.support.transport_peer import make_frame

FISHEYE = {"fx": 100.0, "fy": 100.0, "cx": 80.0, "cy": 60.0, "model": "fisheye"}
PINHOLE = FISHEYE | {"model": "none"}


def pack(camera: str, intrinsics: dict[str, Any]) -> list[bytes]:
    """Return a frame's message as a sender without this package packs it."""
    parts = [bytes(part) for part in pack_frame(make_frame(1, camera))]
    header = msgpack.unpackb(parts[1])
    header["intrinsics"] = intrinsics
    return [parts[0], msgpack.packb(header), *parts[2:]]


@contextmanager
def sending(parts: list[bytes], endpoint: str = "tcp://127.0.0.1:*") -> Iterator[str]:
    """Publish a message again and again; yield the endpoint."""
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.linger = 0
        socket.bind(endpoint)
        bound = socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        with repeating(lambda: (socket.send_multipart(parts), time.sleep(0.01))):
            yield bound


def test_a_pinhole_needs_no_coefficients_and_a_distorted_lens_does() -> None:
    assert unpack_frame(pack("cam0", PINHOLE)).intrinsics == Intrinsics(100.0, 100.0, 80.0, 60.0)
    for model in ("fisheye", "brown_conrady"):
        with refuses(WireError, field=("coeffs", model)):
            unpack_frame(pack("cam0", FISHEYE | {"model": model}))
    assert unpack_frame(pack("cam0", FISHEYE | {"coeffs": []})).intrinsics is not None


@each_row(
    ("topic", "camera"),
    [
        (b"frame/cam0", "cam0"),
        (b"masks/cam0", "cam0"),
        (b"pose/gripper", None),
        (b"frame/", None),
        (b"frame/a b", None),
        (b"frame/\xff", None),
        (b"frame/" + b"a" * 1000, None),
        (b"", None),
    ],
)
def test_the_camera_of_a_topic(topic: bytes, camera: str | None) -> None:
    assert find_camera(topic) == camera


def test_refused_frames_are_counted_by_camera_with_the_reason() -> None:
    with sending(pack("wrist", FISHEYE)) as endpoint, FrameSubscriber([endpoint]) as subscriber:
        until(lambda: "wrist" in subscriber.refused, "a refusal")
        told = subscriber.refused["wrist"].describe()
        assert (told.endpoint, told.frames >= 1, told.silent_s < 5) == (endpoint, True, True)
        assert "coeffs" in told.last_error


def test_many_invented_names_fill_no_memory() -> None:
    with sending([b"frame/cam0", b"x", b"y"]) as endpoint, FrameSubscriber([endpoint]) as subscriber:
        until(lambda: subscriber.refused, "a refusal")
        for index in range(1000):
            subscriber._note_refusal([memoryview(b"frame/n%d" % index)], subscriber._sockets[0], "x" * 9999)
        assert len(subscriber.refused) <= 64
        assert max(len(found.last_error) for found in subscriber.refused.values()) <= 200


def test_node_and_client_name_the_camera_and_the_reason(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        node = rig.node()
        with sending(pack("wrist", FISHEYE), rig.frames[0]), rig.client() as client:
            until(lambda: client.connected, "a connection")
            until(lambda: "wrist" in client.status()["frames_refused"], "a refusal")
            assert mentions(client.diagnosis(), "camera wrist", "refused", "coeffs")
            with refuses(TransportError, field=("wrist", "coeffs")):
                client.wait_for_camera(1500)
            assert "camera wrist at" in node.log.read_text()
        # once it sends what can be read, it is a camera as any other
        with sending(pack("wrist", PINHOLE), rig.frames[0]), rig.client() as client:
            assert client.wait_for_camera(PATIENCE_MS) == "wrist"


def test_an_older_node_and_a_refusal_that_is_long_past_change_nothing() -> None:
    base: dict[str, Any] = {
        "paused": False,
        "cameras": {},
        "settings": {"transport": {"delivery": "newest", "frames": ["tcp://a:1"], "masks": "m"}},
    }
    wanted = Wanted("m", "c", "newest", ())
    past = {"frames": 3, "last_error": "bad", "endpoint": "tcp://a:1", "silent_s": 600.0}
    assert diagnose(base, wanted, True).startswith(NO_FRAME_YET)
    assert diagnose(base | {"frames_refused": {"cam0": past}}, wanted, True).startswith(NO_FRAME_YET)
    now = {"cam0": past | {"silent_s": 0.1}}
    assert mentions(diagnose(base | {"frames_refused": now}, wanted, True), "3 frames of camera cam0", "bad")
    # the refused one is not the camera that is asked for
    other = wanted._replace(cameras=("left",))
    assert diagnose(base | {"frames_refused": now}, other, True).startswith(NO_FRAME_YET)
    sending = {"left": {"stepped": 3, "silent_s": 0.1, "last_error": None}}
    assert diagnose(base | {"frames_refused": now, "cameras": sending}, wanted, True).startswith("masks are")
