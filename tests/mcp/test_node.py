"""Tests of `sam3-node mcp` beside a real node and camera, by the SDK's own client over stdio."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.agents import Agent, start_agent
from tests.support.node_rig import Process, Rig, until
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

PAGE = ROOT / "docs/mcp.md"
READ = ["find", "look", "points", "where", "wait", "next_pick", "list_names"]
EDIT = ["add", "name", "remove"]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A node with tiny weights, and a camera with depth."""
    with Rig(tmp_path_factory.mktemp("agents")) as rig:
        rig.environment |= {
            "SAM3_CAMERA__FPS": "8",
            "SAM3_CAMERA__LOOP": "true",
            "SAM3_TRACKER__MIN_CONFIDENCE": "0",
        }
        rig.start("camera", "scene:tabletop")
        yield rig


@pytest.fixture(scope="module")
def node(rig: Rig) -> Process:
    return rig.node()


@pytest.fixture(scope="module")
def editor(rig: Rig, node: Process) -> Iterator[Agent]:
    """An agent that may change what is tracked."""
    with start_agent(rig.environment, "--allow-edits") as agent:
        wait_for_masks(agent)
        yield agent


@pytest.fixture(scope="module")
def reader(rig: Rig, node: Process) -> Iterator[Agent]:
    """An agent of a server as it is by default."""
    with start_agent(rig.environment) as agent:
        wait_for_masks(agent)
        yield agent


def wait_for_masks(agent: Agent) -> None:
    until(lambda: not agent.call("find").is_error, "masks for the agent")


def test_without_the_option_no_tool_edits(rig: Rig, reader: Agent) -> None:
    assert list(reader.tools) == READ
    for tool in reader.tools.values():
        assert tool.annotations.read_only_hint
        assert tool.annotations.open_world_hint is False
        assert tool.input_schema["additionalProperties"] is False
    for name in EDIT:
        assert "start it with --allow-edits" in reader.fail(name)
    assert "keep_s" in reader.fail("look", keep_s=5)
    with rig.client() as client:
        assert not client.list_objects()


def test_the_next_pick_of_a_node_without_objects_is_none(reader: Agent) -> None:
    facts = reader.ask("next_pick", opening_m=0.1).facts
    assert (facts["picks"], facts["refused"]) == ([], [])
    assert facts["age_ms"] >= 0
    assert "opening_m" in reader.fail("next_pick", opening_m=-1)


@pytest.mark.verifies(
    "viewer",
    "Model Context Protocol",
    "own package",
    "the client of the SDK 2.3, over stdio and HTTP",
    "no host of agents",
)
def test_an_agent_marks_what_it_saw_and_finds_it(rig: Rig, editor: Agent) -> None:
    assert list(editor.tools) == READ + EDIT
    assert [name for name in editor.tools if not editor.tools[name].annotations.read_only_hint] == EDIT
    seen = editor.ask("look", keep_s=60)
    assert seen.picture is not None
    assert seen.picture.shape == (480, 640, 3)
    assert seen.facts["kept_s"] == 60
    # the node goes on meanwhile, and the mark is that of the picture all the same
    time.sleep(1)
    added = editor.ask("add", points=[[320, 240]], label="thing", seq=seen.facts["seq"]).facts
    assert added["label"] == "thing"
    found = editor.ask("find", name="THING").facts
    assert [item["id"] for item in found["objects"]] == [added["id"]]
    (item,) = found["objects"]
    assert item["epoch"] == added["epoch"]
    assert 0 <= item["age_ms"] < 1000 * PATIENCE_S
    assert {"score", "confidence", "doubtful", "hidden", "state"} <= item.keys()
    assert len(found["cameras"]) == 1
    until(lambda: editor.ask("find").facts["cameras"][0]["current"], "the camera is current")
    # drawn on the picture, and not on a bare one
    drawn = editor.ask("look", max_side=320)
    bare = editor.ask("look", max_side=320, masks=False)
    assert drawn.picture is not None
    assert bare.picture is not None
    assert drawn.picture.shape == bare.picture.shape == (240, 320, 3)
    assert drawn.facts["scale"] == 2
    assert [item["id"] for item in drawn.facts["objects"]] == [added["id"]]
    assert np.abs(drawn.picture.astype(int) - bare.picture).mean() > 1
    editor.ask("remove", id=added["id"], epoch=added["epoch"])
    until(lambda: not editor.ask("find").facts["objects"], "the object is gone")
    assert "nothing is tracked as 'thing'" in editor.ask("find", name="thing").facts["notes"][0]


def test_pixels_of_a_small_picture_are_scaled(editor: Agent) -> None:
    seen = editor.ask("look", max_side=160, keep_s=60).facts
    added = editor.ask("add", box=[20, 30, 100, 110], seq=seen["seq"], scale=seen["scale"]).facts
    wrong = editor.fail("add", box=[900, 30, 1000, 110], seq=seen["seq"], scale=seen["scale"])
    assert "box" in wrong
    editor.ask("remove", id=added["id"])


def test_points_have_their_frame_and_their_doubt(editor: Agent) -> None:
    added = editor.ask("add", points=[[320, 240]]).facts
    found = []

    def measures() -> bool:
        # on some frames of the clip there is no depth under the mask
        answer = editor.call("points", id=added["id"], count=10)
        if not answer.is_error:
            found.append(answer.facts)
        return bool(found)

    until(measures, "points of the object")
    points = found[0]
    assert points["frame"] == "camera"
    assert 1 <= len(points["points_m"]) <= 10
    assert all(0.05 < z < 10 for _, _, z in points["points_m"])
    assert any("camera's frame" in note for note in points["notes"])
    assert {"doubtful", "hidden", "age_ms", "position_m"} <= points.keys()
    assert set(points["box_m"]) == {"centre", "size", "quaternion_xyzw"}
    places = []

    def places_it() -> bool:
        answer = editor.call("points", id=added["id"], count=0)
        if not answer.is_error and answer.facts["position_m"]:
            places.append(answer.facts)
        return bool(places)

    until(places_it, "a position of the object")
    assert "points_m" not in places[0]
    assert "call find" in editor.fail("points", id=9999)
    editor.ask("remove", id=added["id"])


def test_the_names_of_a_node_without_a_detector_are_none(reader: Agent) -> None:
    facts = reader.ask("list_names").facts
    assert (facts["names"], facts["is_open"], facts["count"]) == ([], False, 0)


def test_what_the_node_refuses_has_its_own_text(editor: Agent) -> None:
    assert "set detector.kind" in editor.fail("name", names=["red mug"])
    assert "unknown_object" in editor.fail("remove", id=9999)
    assert "did you mean cam0?" in editor.fail("find", camera="cam00")


def test_the_example_of_the_page_runs(rig: Rig, reader: Agent) -> None:
    (code,) = (block.text for block in blocks(PAGE) if block.language == "python")
    # the command is the one of this environment
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | rig.environment | {"PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["cameras"][0]["camera"] == "cam0"


HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("find", {"name": "x" * 1_000_000}, "expected 'name' to be 1 to 256 characters"),
    ("find", {"name": ""}, "expected 'name' to be 1 to 256 characters, found 0"),
    ("find", {"name": 7}, "expected 'name' to be a string, found 7"),
    ("find", {"nmae": "mug"}, "unknown argument 'nmae'; expected name, camera"),
    ("find", {"max_age_ms": -1}, "expected 'max_age_ms' to be a finite number above 0, found -1"),
    ("find", {f"a{number}": 1 for number in range(1000)}, "and 995 more"),
    ("look", {"max_side": 10**9}, "expected 'max_side' to be an integer in 64..1568"),
    ("look", {"camera": "\x00\x1b[31m"}, "camera: expected one of the node's cameras"),
    ("points", {}, "expected 'id' to be an integer in 0..9223372036854775807, found nothing"),
    ("points", {"id": -1}, "expected 'id' to be an integer in 0.."),
    ("points", {"id": 2**80}, "expected 'id' to be an integer in 0.."),
    ("points", {"id": 1, "count": 10**6}, "expected 'count' to be an integer in 0..1000"),
    ("points", {"id": [[[[[[1]]]]]]}, "expected 'id' to be an integer in 0.."),
    ("add", {}, "bad_request"),
    ("add", {"box": [0, 0, 1e308, 1e308], "scale": 1000}, "box"),
    ("add", {"box": [1, 2, 3]}, "box"),
    ("add", {"box": [-1e9, -1e9, -1, -1]}, "box"),
    ("add", {"points": [[1, 2]] * 1000}, "points"),
    ("add", {"points": [[1, 2], [3]]}, "points"),
    ("add", {"points": [[1, 2]], "labels": [1, 1, 1]}, "labels"),
    ("add", {"points": [[1, 2]], "label": "a\x1bb"}, "label"),
    ("add", {"points": [[1, 2]], "seq": 2**53}, "unknown_frame"),
    ("name", {"names": "mug"}, "expected 'names' to be a list"),
    ("name", {"names": ["x"] * 1000}, "names"),
    ("name", {"names": ["x" * 10_000]}, "names"),
    ("zap", {}, "unknown tool 'zap': expected one of find"),
    ("f" * 100_000, {}, "unknown tool"),
]


@pytest.mark.parametrize(("tool", "arguments", "error"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_arguments_are_errors_of_the_tool(
    editor: Agent, tool: str, arguments: dict[str, Any], error: str
) -> None:
    text = editor.fail(tool, **arguments)
    assert error in text
    assert len(text) <= 2000
    assert not editor.call("find").is_error


def test_a_flood_is_bounded_and_answered(rig: Rig, reader: Agent) -> None:
    with rig.client() as client:
        before = client.status()["cameras"]["cam0"]["stepped"]
        results = reader.flood("find", 100)
        assert len(results) == 100
        refused = [result.text for result in results if result.is_error]
        assert refused
        assert all("busy: expected at most" in text for text in refused)
        assert len(refused) < 100
        assert client.status()["cameras"]["cam0"]["stepped"] > before
    assert not reader.call("find").is_error


class RawServer:
    """`sam3-node mcp` whose stdin and stdout a test speaks itself. The end of a `with` block kills it."""

    def __init__(self, rig: Rig, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sam3_node", "mcp", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | rig.environment,
            cwd=ROOT,
        )
        self.ask(
            "initialize",
            protocolVersion="2025-06-18",
            capabilities={},
            clientInfo={"name": "test", "version": "1"},
        )
        self.write(b'{"jsonrpc": "2.0", "method": "notifications/initialized"}')

    def write(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Return the next message. Each line of stdout must be one."""
        assert self.process.stdout is not None
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert message["jsonrpc"] == "2.0"
        return message

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}).encode())
        return self.read()

    def __enter__(self) -> "RawServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


CALL = b'{"jsonrpc": "2.0", "id": %d, "method": "tools/call", "params": {"name": "%s", "arguments": %s}}'


def test_stdout_has_messages_alone_and_damaged_lines_end_nothing(rig: Rig, node: Process) -> None:
    with RawServer(rig, "--allow-edits") as server:
        nan = CALL % (2, b"add", b'{"box": [NaN, 0, Infinity, 5]}')
        half = CALL % (3, b"find", b'{"name": "\\ud800"}')
        for line in (b"", b"no json", b"\xff\xfe\x00", b"[" * 100_000, b"{}", nan, half):
            server.write(line)
        answers = {}
        server.write(CALL % (4, b"find", b"{}"))
        while 4 not in answers:
            message = server.read()
            answers[message.get("id")] = message
        assert "result" in answers[4]
        assert not answers[4]["result"].get("isError")
        # these never reach the node, whether the SDK or the tool refuses them
        for number in (2, 3):
            answer = answers.get(number, {"error": None})
            assert "error" in answer or answer["result"]["isError"]


def test_the_process_ends_with_its_host(rig: Rig, node: Process) -> None:
    with RawServer(rig) as server:
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(PATIENCE_S) == 0
    with RawServer(rig) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE_S) == 0
        assert server.process.stderr is not None
        assert b"Traceback" not in server.process.stderr.read()


def test_a_node_that_has_gone_is_told_and_its_ids_are_void_when_it_is_back(rig: Rig) -> None:
    node = rig.node(TRANSPORT__MASKS=f"ipc://{rig.folder}/m2", TRANSPORT__CONTROL=f"ipc://{rig.folder}/c2")
    environment = rig.environment | {
        "SAM3_TRANSPORT__MASKS": f"ipc://{rig.folder}/m2",
        "SAM3_TRANSPORT__CONTROL": f"ipc://{rig.folder}/c2",
    }
    with start_agent(environment, "--allow-edits", "--timeout", "5") as agent:
        wait_for_masks(agent)
        added = agent.ask("add", points=[[320, 240]], label="thing").facts
        node.kill()
        for tool, arguments in (
            ("find", {}),
            ("look", {}),
            ("points", {"id": added["id"]}),
            ("add", {"points": [[320, 240]]}),
        ):
            text = agent.fail(tool, **arguments)
            assert text.startswith("no_answer: the node does not answer")
            assert "What was found before is old" in text
            assert "sam3-node run" in text
        rig.node(TRANSPORT__MASKS=f"ipc://{rig.folder}/m2", TRANSPORT__CONTROL=f"ipc://{rig.folder}/c2")
        until(lambda: not agent.call("look").is_error, "a picture from the node that is back")
        # an id of before is refused, whether the agent has looked since or not
        stale = agent.fail("points", id=added["id"], epoch=added["epoch"])
        # the node answers before its first masks are here: until then the old ones are too old to point at
        assert "node_restarted" in stale or "call find" in stale or "no current masks" in stale
        wait_for_masks(agent)
        result = agent.ask("find")
        assert result.facts["objects"] == []
        assert result.facts["cameras"][0]["epoch"] != added["epoch"]
        again = agent.ask("add", points=[[320, 240]], label="thing").facts
        assert again["epoch"] != added["epoch"]
        assert "node_restarted" in agent.fail("remove", id=again["id"], epoch=added["epoch"])
        assert [item["id"] for item in agent.ask("find").facts["objects"]] == [again["id"]]
