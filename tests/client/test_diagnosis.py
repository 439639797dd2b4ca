"""The client says why no masks come, and waits for a camera: with real sockets and, at the end, a real node."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sam3_node.client import PerceptionClient, diagnosis
from sam3_node.client.diagnosis import Wanted
from sam3_node.errors import RequestError, TransportError
from sam3_node.transport import FramePublisher, MaskPublisher, PosePublisher
from sam3_node.transport.channels import Arrivals
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Reply
from tests.support.camera_servers import StubServer, jpeg, picture
from tests.support.node_rig import Rig, masks_where, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import mentions, refuses
from tests.support.threads import Running, repeating
from tests.support.transport_peer import NOBODY, TCP, make_frame, make_masks, wait_until
from tests.support.wire_examples import gripper_pose

TRANSPORT = {"delivery": "newest", "frames": ["tcp://a:1", "tcp://b:1"], "masks": "tcp://127.0.0.1:7"}
SENDING = {"stepped": 3, "silent_s": 0.1, "last_error": None}
SILENT = SENDING | {"silent_s": 12.3}
REFUSED = SENDING | {
    "last_error": "frame 7 is 2.0 s old",
    "last_error_age_s": 0.1,
    "masks_age_ms": 9000.0,
}
FAILING = SENDING | {"stepped": 0, "last_error": "WireError: bad"}


@contextmanager
def describing_node(paused: bool = False, **cameras: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Open the sockets of a node that answers `describe` with these cameras; yield its endpoints."""
    description = {"paused": paused, "cameras": cameras, "settings": {"transport": TRANSPORT}}
    with (
        ControlServer(TCP, lambda request: Reply(request.id, description)) as control,
        MaskPublisher(TCP) as masks,
    ):
        yield masks.endpoint, control.endpoint


def diagnose(endpoints: tuple[str, str], connected: bool = True, **options: Any) -> str:
    with PerceptionClient(*endpoints, **options) as client:
        wait_until(lambda: client.connected == connected)
        return client.diagnosis()


@pytest.mark.parametrize(
    ("state", "cameras", "said"),
    [
        ({"paused": True}, (), "the node is paused: resume it with client.resume()"),
        ({}, (), "no camera has sent a frame yet; start one: sam3-node camera … (the node reads frames from"),
        ({"cam0": SENDING}, ("left",), "all masks are of other cameras, cam0; expected left"),
        ({"cam0": SILENT}, (), "the cameras send no frames: cam0 for 12 s"),
        ({"cam0": FAILING}, (), "the node cannot use the frames of its cameras: cam0: WireError: bad"),
        ({"cam0": SENDING, "left": SILENT}, (), "masks are published for cam0, left"),
        (
            {"cam0": REFUSED, "left": SILENT},
            (),
            "the node has published no masks for 3 s, though frames come: cam0: frame 7 is 2.0 s old",
        ),
        ({"cam0": REFUSED, "left": SENDING}, (), "masks are published for cam0, left"),
        ({"cam0": REFUSED | {"masks_age_ms": 40.0}}, (), "masks are published for cam0"),
    ],
)
def test_the_state_of_the_node_and_its_cameras(state: Any, cameras: tuple[str, ...], said: str) -> None:
    with describing_node(**state) as endpoints:
        assert diagnose(endpoints, cameras=cameras).startswith(said)


def test_wrong_endpoints_and_delivery() -> None:
    with describing_node(cam0=SENDING) as (masks, control):
        assert mentions(diagnose((NOBODY, NOBODY), False, timeout_ms=100), "sam3-node run")
        assert mentions(diagnose((masks, NOBODY), timeout_ms=100), "tcp://127.0.0.1:9")
        assert mentions(diagnose((NOBODY, control), False), "tcp://127.0.0.1:7")
        assert mentions(diagnose((NOBODY, control), False, delivery="every"), "transport.delivery")


def test_waiting_for_a_camera_ends_in_time_and_with_the_client() -> None:
    with PerceptionClient(NOBODY, NOBODY, timeout_ms=100) as client:
        with refuses(TransportError, field=("50", "connected")):
            client.wait_for_camera(50)
        threading.Timer(0.1, client.close).start()
        with refuses(TransportError, field=("client", "closed")):
            client.wait_for_camera(None)
    with describing_node(cam0=SILENT, left=SENDING) as endpoints:
        with PerceptionClient(*endpoints) as client:
            assert client.wait_for_camera(PATIENCE_MS) == "left"
        with (
            PerceptionClient(*endpoints, cameras=["cam0"]) as client,
            refuses(TransportError, field=("cam0", "12")),
        ):
            client.wait_for_camera(50)


def test_a_policy_may_start_before_its_camera(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.node()
        with rig.client() as client:
            until(lambda: client.connected, "a connection")
            assert mentions(client.diagnosis(), "no camera")
            with (
                PerceptionClient(rig.masks, rig.control, timeout_ms=500) as hasty,
                refuses(RequestError, field="sam3-node"),
            ):
                hasty.add_object(points=[(160, 120)])
            with ThreadPoolExecutor(1) as thread:
                adding = thread.submit(client.add_object, points=[(160, 120)])
                rig.camera()
                added = adding.result().id
            assert client.wait_for_camera(PATIENCE_MS) == "cam0"
            masks_where(client, lambda masks: [instance.id for instance in masks.instances] == [added], "it")
            assert client.diagnosis().startswith("masks are published for cam0")
            client.pause()
            assert mentions(client.diagnosis(), "paused")


def sending(send: Callable[[], object]) -> AbstractContextManager[Running]:
    """Send again and again in a thread."""
    return repeating(lambda: (send(), time.sleep(0.01)))


def test_other_messages_than_masks_are_named() -> None:
    with (
        describing_node(cam0=SENDING) as (_, control),
        FramePublisher(TCP) as frames,
        PosePublisher(TCP) as poses,
        StubServer(lambda _: [jpeg(picture())]) as images,
        sending(lambda: (frames.send(make_frame(1)), poses.send(gripper_pose()))),
    ):
        said = diagnose((frames.endpoint, control))
        assert mentions(said, "'frame/cam0'")
        assert mentions(said, "tcp://127.0.0.1:7")
        assert mentions(diagnose((frames.endpoint, NOBODY), timeout_ms=100), "5551")
        assert mentions(diagnose((poses.endpoint, control)), "poses")
        assert mentions(diagnose((images.endpoint, control)), "another program")
        with (
            PerceptionClient(frames.endpoint, control) as client,
            refuses(TransportError, field=("frames", "camera")),
        ):
            client.wait_for("cup", 300)


def test_lossless_frames_are_named() -> None:
    with (
        describing_node(cam0=SENDING) as (_, control),
        FramePublisher(TCP, "every") as frames,
        sending(lambda: frames.send(make_frame(1), 50)),
        PerceptionClient(frames.endpoint, control, delivery="every") as client,
    ):
        wait_until(lambda: mentions(client.diagnosis(), "frames", "camera"))


def test_an_idle_endpoint_of_frames_is_known_from_the_node() -> None:
    wanted = Wanted(TRANSPORT["frames"][0], "tcp://c:1", "newest", ())
    description = {"paused": False, "cameras": {"cam0": SENDING}, "settings": {"transport": TRANSPORT}}
    assert mentions(diagnosis.diagnose(description, wanted, True, Arrivals(0, 0, None)), "endpoint", "frames")
    assert mentions(diagnosis.diagnose(description, wanted, True, Arrivals(3, 0, None)), "nothing")


def test_masks_are_counted_and_what_cannot_be_read_is_told() -> None:
    with describing_node(cam0=SENDING) as (masks, control):
        assert diagnose((masks, control)).endswith("no masks have come from this endpoint")
        with MaskPublisher(TCP) as publisher, PerceptionClient(publisher.endpoint, control) as client:
            wait_until(lambda: publisher.send(make_masks(1)) and client.newest())
            assert mentions(client.diagnosis(), "masks", "endpoint")
            assert not mentions(client.diagnosis(), "no masks")
        with (
            StubServer(lambda _: [b"masks/cam0", b"junk"]) as server,
            PerceptionClient(server.endpoint, control) as client,
        ):
            wait_until(lambda: mentions(client.diagnosis(), "msgpack"))
    with (
        MaskPublisher(TCP) as publisher,
        sending(lambda: publisher.send(make_masks(1))),
        PerceptionClient(publisher.endpoint, NOBODY, cameras=["left"], timeout_ms=100) as client,
    ):
        wait_until(lambda: client.connected)
        assert client.diagnosis() == "all masks are of other cameras, cam0; expected left"
