"""Every command says on stderr what it waits for: no node, no camera, a paused node, nobody who receives."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from sam3_node.cameras.publish import run_camera
from sam3_node.cli import main as cli
from sam3_node.cli.watch import run_watch
from sam3_node.processes import waiting
from sam3_node.settings import Settings, load_settings
from sam3_node.transport import ControlServer, FrameSubscriber
from sam3_node.types import Delivery
from sam3_node.wire import Reply
from tests.client.test_diagnosis import NOBODY, SENDING, SILENT, TCP, describing_node
from tests.support.node_rig import PATIENCE_S, until

SMALL = "scene:shapes?width=96&height=64&fps=30"


@pytest.fixture(autouse=True)
def notices(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Return what is printed on stderr; notices come soon."""
    monkeypatch.setattr(waiting, "NOTICE_S", 0.1)
    monkeypatch.setattr(waiting, "REPEAT_S", 0.05)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        yield printed


@contextmanager
def running(run: Callable[..., object], *arguments: Any) -> Iterator[threading.Event]:
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(*arguments, stop))
    thread.start()
    try:
        yield stop
    finally:
        stop.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def wait_for(notices: io.StringIO, text: str) -> None:
    until(lambda: text in notices.getvalue(), f"{text!r}, found {notices.getvalue()!r}")


def watch(settings: Settings, stop: threading.Event) -> None:
    run_watch(settings, None, 0, stop, io.StringIO())


def settings_for(masks: str, control: str, **others: str) -> Settings:
    return load_settings(None, {"transport.masks": masks, "transport.control": control, **others})


def test_watch_without_a_node(notices: io.StringIO) -> None:
    with running(watch, settings_for(NOBODY, NOBODY)):
        wait_for(notices, f"watch: no node is connected at {NOBODY}")


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
    state: dict[str, Any], delivery: str, said: str, notices: io.StringIO
) -> None:
    with describing_node(**state) as endpoints:
        settings = load_settings(
            None,
            {
                "transport.masks": endpoints[0],
                "transport.control": endpoints[1],
                "transport.delivery": delivery,
            },
        )
        with running(watch, settings):
            wait_for(notices, said)


def camera_settings(source: str, delivery: str = "newest") -> Settings:
    return load_settings(
        None, {"camera.source": source, "transport.delivery": delivery, "transport.frames": TCP}
    )


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_a_camera_that_nobody_hears(delivery: str, notices: io.StringIO) -> None:
    with running(run_camera, camera_settings(SMALL, delivery)):
        wait_for(notices, "camera: nobody receives frames from tcp://")


@pytest.mark.parametrize(("here", "there"), [("newest", "every"), ("every", "newest")])
def test_a_camera_and_a_node_of_another_delivery(
    here: Delivery, there: Delivery, notices: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(run_camera, camera_settings(SMALL, here)):
        printed = until(lambda: capsys.readouterr().out, "the ready line")
        with FrameSubscriber([printed.split()[4]], there):
            wait_for(notices, f"cannot receive frames: this camera delivers {here!r}")


def test_a_source_that_ends_waits_for_its_receiver(
    notices: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(run_camera, camera_settings(SMALL + "&frames=5", "newest")):
        printed = until(lambda: capsys.readouterr().out, "the ready line")
        wait_for(notices, "camera: nobody receives frames")
        with FrameSubscriber([printed.split()[4]]) as subscriber:
            received = subscriber.take(int(PATIENCE_S * 1000))
            assert received is not None
            assert received.frame.seq == 0
        until(lambda: "captured 5 frames" in capsys.readouterr().out, "the end")


def test_a_control_command_says_why_it_waits_and_ends_with_its_timeout(notices: io.StringIO) -> None:
    arguments = ["status", "--timeout", "1.5", "--transport.control", NOBODY]
    assert cli.main(arguments) == 3
    lines = notices.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"no node answers at {NOBODY}: start it with sam3-node run")
    assert "within 1500 ms" in lines[1]


@pytest.mark.parametrize("command", [["prompt", "red mug"], ["object", "add", "--point", "3,3"]])
def test_what_is_accepted_by_a_paused_node_is_said_to_wait(
    command: list[str], notices: io.StringIO, capsys: pytest.CaptureFixture[str]
) -> None:
    transport = {"delivery": "newest", "frames": [], "masks": ""}
    description = {"paused": True, "cameras": {"cam0": SENDING}, "settings": {"transport": transport}}
    results = {
        "describe": description,
        "set_prompts": {"prompts": ["red mug"]},
        "add_object": {"id": 4, "camera": "cam0"},
    }
    with ControlServer(TCP) as server:

        def serve(stop: threading.Event) -> None:
            while not stop.is_set():
                if received := server.receive(20):
                    server.reply(received[0], Reply(received[1].id, results[received[1].op]))

        with running(serve):
            assert cli.main([*command, "--transport.control", server.endpoint]) == 0
    assert notices.getvalue().startswith("nothing happens yet: the node is paused")
    assert capsys.readouterr().out == ("4\n" if command[0] == "object" else "")
