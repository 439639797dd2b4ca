"""Tests of a whole deployment with keys: real processes of camera, node and commands, each with its own folder."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.client.values import fetch_snapshot
from sam3_node.console.views import LiveViews
from sam3_node.errors import AuthenticationError, ForbiddenError
from sam3_node.perception.snapshot import MAGIC
from sam3_node.schema.operations import HandOver, MakeSnapshot
from sam3_node.settings import load_settings
from sam3_node.transport import ControlClient, FramePublisher, Security
from sam3_node.transport.security import KeyFolder
from tests.support.key_rig import Keys
from tests.support.near_node import ask
from tests.support.node_rig import Rig, ids, masks_where, picture, until
from tests.support.processes import run_command


class KeyedRig(Rig):
    """A rig whose processes have keys. The node serves cam0 of a process, and cam1 of the test."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.keys = Keys(folder / "keys")
        self.environment["SAM3_MODEL__DTYPE"] = "float32"
        self.environment["SAM3_TRANSPORT__CAMERA_KEYS"] = "cam0,cam1"
        self.node_keys = self.keys.machine("node", "node")
        self.running = self.start("run", TRANSPORT__KEYS=str(self.node_keys.keys), HEALTH__BIND="127.0.0.1:0")
        scene = "scene:shapes?width=160&height=120"
        folder = self.keys.machine("camera", "cam0").keys
        self.camera_process = self.start("camera", scene, "--camera.loop", TRANSPORT__KEYS=str(folder))

    def connect(self, security: Security, timeout_ms: int = 60_000) -> PerceptionClient:
        return PerceptionClient(self.masks, self.control, timeout_ms=timeout_ms, security=security)

    def command(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = self.environment | {f"SAM3_{name}": value for name, value in settings.items()}
        return run_command(arguments, environment | {"PATH": "/usr/bin"})


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedRig]:
    with KeyedRig(tmp_path_factory.mktemp("keyed")) as rig:
        yield rig


@pytest.fixture(scope="module")
def policy(rig: KeyedRig) -> Iterator[PerceptionClient]:
    with rig.connect(rig.keys.machine("policy", "policy")) as client:
        yield client


def test_an_operator_receives_masks_and_controls(rig: KeyedRig, policy: PerceptionClient) -> None:
    masks_where(policy, lambda masks: masks.camera == "cam0", "masks of cam0")
    added = policy.add_object(points=[(80, 60)], camera="cam0")
    masks_where(policy, lambda masks: added.id in ids(masks), "the object")
    policy.remove_object(added.id, camera="cam0")


def test_a_reader_receives_masks_only(rig: KeyedRig) -> None:
    with rig.connect(rig.keys.machine("watcher", "watcher")) as reader:
        masks_where(reader, lambda masks: masks.camera == "cam0", "masks of cam0")
        assert reader.status()["cameras"]
        with pytest.raises(ForbiddenError, match="watcher"):
            reader.reset()


def test_a_reader_may_not_fetch_the_state_and_another_host_of_the_node_may(rig: KeyedRig) -> None:
    with ControlClient(rig.control, 60_000, rig.keys.machine("other host", "node")) as node:
        assert fetch_snapshot(node).startswith(MAGIC)
    with ControlClient(rig.control, 60_000, rig.keys.machine("curious", "watcher")) as reader:
        for request in (MakeSnapshot(), HandOver()):
            with pytest.raises(ForbiddenError, match="watcher"):
                fetch_snapshot(reader, request)
        with pytest.raises(ForbiddenError, match="watcher"):
            reader.call("confirm_hand_over", token="any")


def test_the_console_and_commands_use_keys(rig: KeyedRig) -> None:
    folder = rig.keys.machine("console", "policy").keys
    chosen = {"frames": rig.frames, "masks": rig.masks, "control": rig.control, "keys": str(folder)}
    chosen["camera_keys"] = "cam0,cam1"
    settings = load_settings(overrides={f"transport.{name}": value for name, value in chosen.items()})
    source = LiveViews(settings, lambda: None)
    try:
        until(lambda: source.state()["connected"], "the console's connection")
        until(lambda: source.next_view({}), "a picture in the console")
    finally:
        source.close()
    done = rig.command("status", TRANSPORT__KEYS=str(folder))
    assert json.loads(done.stdout)["cameras"], done.stderr


def test_strangers_are_counted_and_told(rig: KeyedRig, policy: PerceptionClient) -> None:
    before = policy.status()["peers_refused"]
    for security, reason in (
        (Security(), "expects a key"),
        (rig.keys.stranger("stranger", "operator"), "refuses the key stranger"),
    ):
        with rig.connect(security) as client:
            with pytest.raises(AuthenticationError, match=reason):
                client.reset()
            assert reason in until(lambda client=client: client.diagnosis(), "a diagnosis")
            assert client.latest(0) is None
    assert policy.status()["peers_refused"] > before
    (health,) = re.findall(r"health at (\S+)", rig.running.log.read_text())
    metrics = ask(health, "/metrics")[1]
    (refused,) = re.findall(r"^sam3_node_peers_refused_total (\S+)$", metrics, re.MULTILINE)
    assert float(refused) > before
    assert "stranger" not in policy.status()["peers_last_refusal"]  # names are known of authorised keys only
    done = rig.command("status", "--timeout", "60")
    assert done.returncode == 2
    assert "set transport.keys" in done.stderr


def test_a_camera_under_anothers_name_is_not_served(rig: KeyedRig, policy: PerceptionClient) -> None:
    camera = rig.keys.machine("cam1", "cam1")
    with FramePublisher(rig.frames[1], security=camera) as publisher:
        before = policy.status()["frames_rejected"]

        def is_rejected() -> bool:
            publisher.send(picture(1, "cam0"))
            return bool(policy.status()["frames_rejected"] > before)

        until(is_rejected, "a rejected frame")
        assert "cam1 (camera)" in policy.status()["frames_last_error"]

        def is_served() -> bool:
            publisher.send(picture(2, "cam1"))
            return "cam1" in policy.status()["cameras"]

        until(is_served, "cam1 is served under its own name")


def test_a_revoked_key_loses_its_masks(rig: KeyedRig, policy: PerceptionClient) -> None:
    rig.keys.all.create("visitor", "reader")
    security = rig.keys.machine("visitor", "visitor")
    with rig.connect(security) as visitor:
        with pytest.raises(AuthenticationError):
            visitor.status()
        public = Path("authorised") / "visitor.pub"
        (rig.node_keys.keys / public).write_bytes((rig.keys.all.path / public).read_bytes())
        masks_where(visitor, lambda masks: True, "masks for the visitor")
        done = rig.command("keys", "revoke", "visitor", TRANSPORT__KEYS=str(rig.node_keys.keys))
        assert "visitor is revoked" in done.stdout, done.stderr
        until(lambda: not visitor.connected, "the visitor is cut off")
        masks_where(policy, lambda masks: True, "masks for the policy, which has connected again")
        with pytest.raises((AuthenticationError, ForbiddenError)):
            visitor.status()


def test_no_secret_is_written_anywhere(rig: KeyedRig) -> None:
    # a request on a connection that ends is lost
    with ControlClient(rig.control, 60_000, rig.keys.machine("auditor", "policy")) as auditor:
        told = json.dumps([auditor.call("status"), auditor.call("describe")])
    told += "".join(process.log.read_text() for process in rig.processes)
    done = rig.command("keys", "list", TRANSPORT__KEYS=str(rig.keys.all.path))
    told += done.stdout + done.stderr
    folder = KeyFolder(rig.keys.all.path)
    names = sorted(folder.own_names())
    assert names == sorted(["node", "robot", "watcher", "policy", "cam0", "cam1", "visitor"])
    for name in names:
        secret = folder.find_own(("node", "robot", "reader", "operator", "camera"), name).secret.decode()
        assert secret not in told, name
