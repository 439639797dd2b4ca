"""Runs the policies of docs/policies.md with a live node. (lerobot's runs in launch/lerobot.) Each is short."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.node_rig import Rig, until
from tests.support.paths import ROOT
from tests.support.policy_servers import serve_gr00t, serve_openpi
from tests.test_docs import blocks

MAX_LINES = 15
BOX = ("(200, 275, 350, 435)", "(100, 100, 200, 200)")  # on the rig's smaller frames
POLICIES = {
    heading: next(block.text for block in blocks(ROOT / "docs" / "policies.md") if text in block.text)
    for heading, text in (
        ("gr00t", "as_gr00t"),
        ("openpi", "as_openpi"),
        ("lerobot", "ObjectsProcessorStep"),
        ("gymnasium", "ObjectsObservation"),
    )
}


class Robot:
    """A robot that runs until it has moved three times. It notes why it held still."""

    def __init__(self) -> None:
        self.moves: list[Any] = []
        self.reasons: list[str] = []

    def is_running(self) -> bool:
        return len(self.moves) < 3 and len(self.reasons) < 3000

    def image(self) -> Any:
        return np.zeros((240, 320, 3), np.uint8)

    def joints(self) -> list[float]:
        return [0.0] * 7

    def move(self, action: Any) -> None:
        self.moves.append(action)

    def hold(self, reason: str) -> None:
        self.reasons.append(reason)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig")) as rig:
        rig.node(TRACKER__MIN_CONFIDENCE="0")  # random weights are never sure
        rig.camera()
        with rig.client() as client:
            until(lambda: client.latest(timeout_ms=200), "masks")
        yield rig


def run(name: str, rig: Rig, robot: Robot, *replacements: tuple[str, str], **names: Any) -> None:
    """Run a policy of the page at the rig's endpoints, without objects of earlier ones."""
    with rig.client() as client:
        client.reset()
    policy = POLICIES[name]
    connect = ("PerceptionClient()", f"PerceptionClient({rig.masks!r}, {rig.control!r}, timeout_ms=60_000)")
    patient = ("(240, 320)", "(240, 320), max_age_s=50")  # this machine may be busy
    for written, used in (BOX, connect, patient, *replacements):
        assert written in policy
        policy = policy.replace(written, used)
    exec(policy, {"robot": robot, **names})
    assert len(robot.moves) == 3, robot.reasons[-1:]


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_short(name: str) -> None:
    lines = [line for line in POLICIES[name].splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


def test_gr00t(rig: Rig) -> None:
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any], options: Any) -> Any:
        seen.append(observation)
        return [{"arm": np.zeros((1, 16, 7), np.float32)}, {}]

    robot = Robot()
    with serve_gr00t(act) as endpoint:
        run("gr00t", rig, robot, ("tcp://127.0.0.1:5555", endpoint))
    assert robot.moves[0].shape == (16, 7)
    assert seen[-1]["video"]["front"].shape == seen[-1]["video"]["objects_0"].shape == (1, 1, 240, 320, 3)
    assert seen[-1]["video"]["objects_0"].any()


def test_openpi(rig: Rig) -> None:
    pytest.importorskip("websockets")
    seen: list[dict[str, Any]] = []

    def act(observation: dict[str, Any]) -> dict[str, Any]:
        seen.append(observation)
        return {"actions": np.zeros((10, 7))}

    robot = Robot()
    with serve_openpi(act) as address:
        run("openpi", rig, robot, ("ws://127.0.0.1:8000", address))
    assert robot.moves[0].shape == (10, 7)
    assert seen[-1]["observation/objects_0"].any()
    assert seen[-1]["prompt"] == "pick up the red mug"


def test_gymnasium(rig: Rig) -> None:
    gymnasium = pytest.importorskip("gymnasium")
    robot = Robot()

    class Arm(gymnasium.Env):  # type: ignore[misc]
        """An environment whose steps are the robot's: to hold still without an action, else to move."""

        observation_space = gymnasium.spaces.Box(-1, 1, (7,), np.float32)
        action_space = observation_space

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            return np.zeros(7, np.float32), {}

        def step(self, action: Any) -> Any:
            robot.hold("not usable") if action is None else robot.move(action)
            return np.zeros(7, np.float32), 0.0, False, False, {}

    def policy(observation: dict[str, Any]) -> Any:
        return observation["objects"]["masks"]

    run("gymnasium", rig, robot, env=Arm(), policy=policy, action_that_holds_still=None)
    assert robot.moves[0].shape == (1, 240, 320)
    assert robot.moves[0].any()
