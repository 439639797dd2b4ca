"""Every command says on stderr what it waits for: no node, no camera, a paused node, nobody who receives."""

import io
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import zmq

from sam3_node.cameras.publish import run_camera
from sam3_node.cli import main as cli
from sam3_node.cli.watch import run_watch
from sam3_node.errors import NoCameraError
from sam3_node.processes import signals
from sam3_node.settings import Settings, load_settings
from sam3_node.transport import MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Failure, Reply, Request, frame_topic, unpack_frame
from tests.client.test_diagnosis import NOBODY, SENDING, SILENT, TCP, TRANSPORT, describing_node
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.threads import Running, in_thread
from tests.support.transport_peer import open_peer

SMALL = "scene:shapes?width=96&height=64&fps=30"


class Printed:
    """Everything that a test has printed so far."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    @property
    def out(self) -> str:
        return self._peek("out")

    @property
    def err(self) -> str:
        return self._peek("err")

    def wait_for(self, text: str) -> None:
        """Wait until a text is on stderr."""
        until(lambda: text in self.err, f"{text!r}", PATIENCE_S)

    def wait_for_endpoint(self) -> str:
        """Wait until a camera is ready. Return its endpoint."""
        return until(lambda: self.out, "the ready line", PATIENCE_S).split()[4]

    def _peek(self, stream: str) -> str:
        # readouterr() empties the capture, and would lose what another thread prints in that moment
        text: str = getattr(self._capture._capture, stream).tmpfile.getvalue()
        return text


@pytest.fixture(autouse=True)
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    """Make notices come soon, and read what is printed."""
    monkeypatch.setattr(signals, "NOTICE_S", 0.1)
    monkeypatch.setattr(signals, "REPEAT_S", 0.05)
    return Printed(capsys)


def watching(settings: Settings) -> AbstractContextManager[Running]:
    return in_thread(lambda stop: run_watch(settings, None, 0, stop, io.StringIO()))


def settings_for(masks: str, control: str, **others: str) -> Settings:
    return load_settings(None, {"transport.masks": masks, "transport.control": control, **others})


def test_watch_without_a_node(printed: Printed) -> None:
    with watching(settings_for(NOBODY, "tcp://127.0.0.1:8")):
        printed.wait_for(f"watch: no node is connected at {NOBODY}")


@pytest.mark.parametrize(
    ("state", "delivery", "said"),
    [
        ({"paused": True}, "newest", "watch: the node is paused"),
        ({}, "newest", "watch: no camera has sent a frame yet"),
        ({"cam0": SILENT}, "newest", "watch: the cameras send no frames"),
        ({"cam0": SENDING}, "every", "delivers 'newest', this client expects 'every'"),
    ],
)
def test_watch_beside_a_node_that_publishes_nothing(
    state: dict[str, Any], delivery: str, said: str, printed: Printed
) -> None:
    with (
        describing_node(**state) as endpoints,
        watching(settings_for(*endpoints, **{"transport.delivery": delivery})),
    ):
        printed.wait_for(said)


def camera_settings(folder: Path, source: str, delivery: str = "newest") -> Settings:
    """Return settings with an endpoint that no other process of this machine can know."""
    frames = f"ipc://{folder}/frames"
    return load_settings(
        None, {"camera.source": source, "transport.delivery": delivery, "transport.frames": frames}
    )


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_a_camera_that_nobody_hears(delivery: str, printed: Printed, tmp_path: Path) -> None:
    with in_thread(partial(run_camera, camera_settings(tmp_path, SMALL, delivery))):
        printed.wait_for("camera: no node receives frames from ipc://")


def test_a_source_that_ends_waits_for_its_receiver(printed: Printed, tmp_path: Path) -> None:
    with in_thread(partial(run_camera, camera_settings(tmp_path, SMALL + "&frames=5", "newest"))):
        endpoint = printed.wait_for_endpoint()
        printed.wait_for("camera: no node receives frames")
        # a plain socket keeps all frames: a subscriber of the newest may wake up after the second has come
        with open_peer(zmq.SUB, endpoint) as subscriber:
            subscriber.subscribe(frame_topic("cam0"))
            assert subscriber.poll(1000 * PATIENCE_S)
            assert unpack_frame(subscriber.recv_multipart()).seq == 0
        until(lambda: mentions(printed.out, "5 frames"), "the end", PATIENCE_S)


def test_a_control_command_says_why_it_waits_and_ends_with_its_timeout(printed: Printed) -> None:
    arguments = ["status", "--timeout", "1.5", "--transport.control", NOBODY]
    assert cli.main(arguments) == 3
    lines = printed.err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"no node answers at {NOBODY}: start it with sam3-node run")
    assert mentions(lines[1], "1500 ms")


def test_an_object_waits_for_a_camera_that_was_just_started(printed: Printed) -> None:
    stats: list[dict[str, Any]] = [{}, {}, {"cam0": SENDING}]
    asked: list[str] = []

    def answer(request: Request) -> Reply:
        asked.append(request.op)
        if request.op == "describe":
            cameras = stats.pop(0) if len(stats) > 1 else stats[0]
            return Reply(
                request.id, {"paused": False, "cameras": cameras, "settings": {"transport": TRANSPORT}}
            )
        if "cam0" in stats[0]:
            return Reply(request.id, {"id": 4, "camera": "cam0"})
        return Reply(request.id, error=Failure(NoCameraError.code, "no camera has sent a frame yet"))

    with ControlServer(TCP, answer) as control, MaskPublisher(TCP) as masks:
        endpoints = ["--transport.control", control.endpoint, "--transport.masks", masks.endpoint]
        assert cli.main(["object", "add", "--point", "3,3", *endpoints]) == 0
    assert printed.out == "4\n"
    assert asked.count("add_object") == 2


@pytest.mark.parametrize("command", [["prompt", "red mug"], ["object", "add", "--point", "3,3"]])
def test_what_is_accepted_by_a_paused_node_is_said_to_wait(command: list[str], printed: Printed) -> None:
    transport = {"delivery": "newest", "frames": [], "masks": ""}
    description = {"paused": True, "cameras": {"cam0": SENDING}, "settings": {"transport": transport}}
    results = {
        "describe": description,
        "set_prompts": {"prompts": ["red mug"]},
        "add_object": {"id": 4, "camera": "cam0"},
    }
    with ControlServer(TCP, lambda request: Reply(request.id, results[request.op])) as server:
        assert cli.main([*command, "--transport.control", server.endpoint]) == 0
    assert printed.err.startswith("nothing happens yet: the node is paused")
    assert printed.out == ("4\n" if command[0] == "object" else "")
