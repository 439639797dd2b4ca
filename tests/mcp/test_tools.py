"""Tests of the tools on masks and answers of a node that the test plays: ages, cameras, restarts and notes."""

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sam3_node.cli.services import mcp
from sam3_node.errors import NodeRestarted, RequestError, Sam3NodeError, SettingsError, TransportError
from sam3_node.mcp.answers import MAX_OBJECTS, describe_place, describe_reply
from sam3_node.mcp.tools import AgentTools, RestWatch
from sam3_node.schema.operations import OPERATIONS, RenameObject
from sam3_node.schema.replies import PausedReply, PinnedFrame, PromptedObject, SnapshotPart
from sam3_node.schema.values import MaskMap
from sam3_node.settings import load_settings
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import NANOSECONDS, Instance, Mask, MaskFrame
from sam3_node.wire import Reply, Request
from tests.support.command_line import command_parser
from tests.support.node_rig import until
from tests.support.pages import blocks
from tests.support.paths import ROOT
from tests.support.threads import in_thread
from tests.support.transport_peer import TCP, make_frame, make_masks


class PlayedNode:
    """The sockets of a node and of its cameras, which answer as the attributes say."""

    def __init__(self, stack: ExitStack) -> None:
        self.cameras: dict[str, float] = {"cam0": 0.0}
        """seconds since the last frame of each camera"""
        self.status: dict[str, Any] = {"paused": False, "prompts": ["cup"], "node": "0" * 16}
        self.answers: dict[str, Any] = {}
        self.requests: list[Request] = []
        self.frames = stack.enter_context(FramePublisher(TCP))
        self.masks = stack.enter_context(MaskPublisher(TCP))
        self.control = stack.enter_context(ControlServer(TCP, self._answer))
        chosen = {
            "frames": self.frames.endpoint,
            "masks": self.masks.endpoint,
            "control": self.control.endpoint,
        }
        self.settings = load_settings(overrides={f"transport.{name}": chosen[name] for name in chosen})

    def _answer(self, request: Request) -> Reply:
        self.requests.append(request)
        cameras = {
            name: {"silent_s": silent_s, "stepped": 1, "last_error": None}
            for name, silent_s in self.cameras.items()
        }
        known = {"status": self.status | {"cameras": cameras}}
        known["describe"] = known["status"] | {
            "settings": {"transport": {"delivery": "newest", "masks": self.masks.endpoint, "frames": []}}
        }
        return Reply(request.id, (known | self.answers)[request.op])


@pytest.fixture
def node() -> Iterator[PlayedNode]:
    with ExitStack() as stack:
        yield PlayedNode(stack)


@pytest.fixture
def tools(node: PlayedNode) -> Iterator[AgentTools]:
    with AgentTools(node.settings, allow_edits=True) as tools:
        yield tools


def show(node: PlayedNode, tools: AgentTools, masks: MaskFrame) -> None:
    """Publish masks until the tools have them."""

    def has_come() -> bool:
        node.masks.send(masks)
        newest = tools._client.newest(masks.camera)
        return newest is not None and newest.key == masks.key

    until(has_come, "the masks")


def make_instance(id: int = 1, label: str = "cup", **fields: Any) -> Instance:
    full = np.ones((30, 40), np.bool_)
    plain = Instance(id, label, 0.9, "tracked", 3, 0, Mask.from_full(full))
    return replace(plain, **fields)


def masks_of(*instances: Instance, seq: int = 1, camera: str = "cam0", epoch: int = 5) -> MaskFrame:
    return replace(make_masks(seq, camera), instances=instances, epoch=epoch, node="0" * 16)


def test_places_in_the_frame_of_a_camera_are_told_to_be(node: PlayedNode, tools: AgentTools) -> None:
    """A robot expects places in its base, so a note tells of the others alone."""
    place: dict[str, Any] = {"position_m": (0.1, 0.2, 0.3)}
    for seq, frame in enumerate(("base", "camera"), 1):
        show(node, tools, masks_of(make_instance(frame=frame, **place), seq=seq))
        notes = tools.call("find", {}).facts["notes"]
        assert ["hand_eye" in note for note in notes] == [True] * (frame == "camera")
    found = {"camera": "cam0", "seq": 1, "frame": "camera", "picks": [], "refused": []}
    node.answers["next_pick"] = found
    (note,) = tools.call("next_pick", {}).facts["notes"]
    assert "camera's frame" in note
    node.answers["next_pick"] = found | {"frame": "base"}
    assert "notes" not in tools.call("next_pick", {}).facts


def test_picks_of_all_objects_need_no_id_of_the_present(node: PlayedNode, tools: AgentTools) -> None:
    """After a restart, a request that names an object fails once; one that names none has nothing old in it."""
    reply = {"camera": "cam0", "seq": 1, "picks": [], "refused": []}
    node.answers["next_pick"] = reply
    show(node, tools, masks_of(make_instance()))
    tools.call("next_pick", {"id": 1})
    assert node.requests[-1].args == {"id": 1, "camera": "cam0", "epoch": 5}
    show(node, tools, masks_of(make_instance(), seq=2, epoch=6))
    with pytest.raises(NodeRestarted):
        tools.call("next_pick", {"id": 1})
    show(node, tools, masks_of(make_instance(), seq=3, epoch=7))
    facts = tools.call("next_pick", {"label": "cup"}).facts
    assert node.requests[-1].args == {"label": "cup"}
    assert "begun again" in facts["notes"][0]


def test_old_masks_are_left_out_and_named(node: PlayedNode, tools: AgentTools) -> None:
    old = replace(masks_of(make_instance()), capture_ns=time.time_ns() - 10_000_000_000)
    show(node, tools, old)
    node.cameras["cam0"] = 10.0
    with pytest.raises(TransportError, match=r"masks are 10\d\d\d ms old, which is more than 3000") as failed:
        tools.call("find", {})
    assert "the cameras send no frames: cam0 for 10 s" in str(failed.value)
    with pytest.raises(TransportError, match="no current masks"):
        tools.call("points", {"id": 1, "count": 0})
    # who asks for old ones gets them with their age
    facts = tools.call("find", {"max_age_ms": 60_000}).facts
    assert facts["objects"][0]["age_ms"] >= 10_000
    # one camera that sends is enough; the other is named
    node.cameras["left"] = 0.0
    show(node, tools, masks_of(make_instance(), camera="left"))
    facts = tools.call("find", {}).facts
    assert [item["camera"] for item in facts["objects"]] == ["left"]
    assert [item["current"] for item in facts["cameras"]] == [False, True]
    assert "camera cam0: its masks are" in facts["notes"][0]


def test_doubt_is_told_and_left_out_on_request(node: PlayedNode, tools: AgentTools) -> None:
    sure = make_instance(1, confidence=0.97, position_m=(0.12345678, 0, 1), frame="base", held=True)
    doubtful = make_instance(2, confidence=0.2, doubtful=True)
    empty = Mask.empty((30, 40))
    hidden = make_instance(3, state="occluded", frames_since_seen=9, hidden_by="robot", mask=empty)
    show(node, tools, masks_of(sure, doubtful, hidden))
    first, second, third = tools.call("find", {"name": "CUP"}).facts["objects"]
    assert (first["position_m"], first["frame"], first["held"]) == ([0.1235, 0, 1], "base", True)
    assert (first["doubtful"], second["doubtful"]) == (False, True)
    assert (third["hidden"], third["hidden_by"], third["box"], third["unseen_frames"]) == (
        True,
        "robot",
        None,
        9,
    )
    facts = tools.call("find", {"sure_only": True}).facts
    assert [item["id"] for item in facts["objects"]] == [1]


def test_a_name_that_nothing_surely_has_is_told(node: PlayedNode, tools: AgentTools) -> None:
    unsure = [
        make_instance(number, doubtful=True, name_confidence=value) for number, value in ((1, 0.2), (4, 0.6))
    ]
    show(node, tools, masks_of(*unsure, make_instance(2, "box")))
    (note,) = tools.call("find", {"name": "cup"}).facts["notes"]
    assert note.startswith("nothing surely is a 'cup': object 4 is the nearest, with a confidence of 0.60")
    assert tools.call("find", {"name": "box"}).facts["notes"] == []
    show(node, tools, masks_of(*unsure, make_instance(2, name_confidence=0.97), seq=2))
    assert tools.call("find", {"name": "cup"}).facts["notes"] == []


def test_a_wait_ends_when_the_thing_is_surely_in_view(node: PlayedNode, tools: AgentTools) -> None:
    show(node, tools, masks_of(make_instance(doubtful=True)))
    facts = tools.call("wait", {"name": "cup", "timeout_s": 0.1}).facts
    assert not facts["objects"]
    assert "no 'cup' was surely seen within 0.1 s; seen meanwhile: cup" in facts["notes"][0]
    show(node, tools, masks_of(make_instance(), seq=2))
    assert [item["id"] for item in tools.call("wait", {"name": "CUP"}).facts["objects"]] == [1]


def test_a_wait_sees_a_camera_that_comes_meanwhile(node: PlayedNode, tools: AgentTools) -> None:
    def bring(over: threading.Event) -> None:
        until(lambda: node.requests, "the first question of the wait")
        node.cameras["left"] = 0.0
        while not over.wait(0.05):
            node.masks.send(masks_of(make_instance(), camera="left"))

    node.requests.clear()
    with in_thread(bring):
        (found,) = tools.call("wait", {"name": "cup"}).facts["objects"]
    assert found["camera"] == "left"


def test_a_thing_lies_still_when_its_box_has_not_moved_for_a_second() -> None:
    watch = RestWatch()
    here = make_instance()
    moved = np.zeros((30, 40), np.bool_)
    moved[:, 5:] = True

    def rests(instance: Instance, at_s: float) -> bool:
        masks = replace(masks_of(instance), capture_ns=round(at_s * NANOSECONDS))
        return watch.observe(masks, instance)

    assert not rests(here, 5.0)
    assert not rests(here, 5.9)
    assert rests(here, 6.0)
    assert not rests(replace(here, mask=Mask.from_full(moved)), 6.1)
    assert not rests(here, 6.2)
    # a doubtful mask may be that of another thing
    assert not rests(replace(here, doubtful=True), 7.0)
    assert not rests(here, 7.3)
    assert rests(here, 8.3)


def test_an_answer_has_a_bounded_number_of_objects(node: PlayedNode, tools: AgentTools) -> None:
    show(node, tools, masks_of(*(make_instance(number) for number in range(MAX_OBJECTS + 7))))
    facts = tools.call("find", {}).facts
    assert len(facts["objects"]) == MAX_OBJECTS
    assert "7 more objects are left out" in facts["notes"][0]


def test_which_camera_is_meant(node: PlayedNode, tools: AgentTools) -> None:
    node.cameras = {"left": 0.0, "right": 0.0}
    for name in ("look", "points", "add", "remove"):
        given: dict[str, Any] = {"id": 1} if name in ("points", "remove") else {}
        with pytest.raises(RequestError, match="several cameras: left, right"):
            tools.call(name, given)
    node.cameras = {}
    with pytest.raises(TransportError, match="serves no camera yet"):
        tools.call("look", {})
    with pytest.raises(TransportError, match="no camera has sent a frame yet"):
        tools.call("find", {})


def test_a_restart_is_noted_once_and_old_ids_are_refused(node: PlayedNode, tools: AgentTools) -> None:
    show(node, tools, masks_of(make_instance(), epoch=5))
    tools.call("find", {})
    show(node, tools, masks_of(make_instance(), seq=2, epoch=6))
    facts = tools.call("find", {}).facts
    assert facts["notes"] == [
        "object ids of camera cam0 have begun again: forget the ids from before, and call find"
    ]
    assert tools.call("find", {}).facts["notes"] == []
    with pytest.raises(NodeRestarted, match="epoch 5 are void, now it is 6"):
        tools.call("points", {"id": 1, "epoch": 5, "count": 0})
    assert tools.call("points", {"id": 1, "epoch": 6, "count": 0}).facts["id"] == 1


@pytest.mark.parametrize("tool", ["points", "remove", "where"])
def test_an_id_of_before_never_names_another_object(node: PlayedNode, tools: AgentTools, tool: str) -> None:
    node.answers |= {"remove_object": {}, "where": {"objects": [SEEN | {"epoch": 6}]}}
    show(node, tools, masks_of(make_instance(), epoch=5))
    tools.call("find", {})
    # the agent has not been told, so it means the object of before, whether or not it gives the epoch
    show(node, tools, masks_of(make_instance(), seq=2, epoch=6))
    given = {"id": 1} | ({"count": 0} if tool == "points" else {})
    with pytest.raises(NodeRestarted, match="forget the ids from before"):
        tools.call(tool, given)
    assert not [request for request in node.requests if request.op in ("remove_object", "where")]
    facts = tools.call(tool, given).facts
    assert (facts.get("objects") or [facts])[0]["camera"] == "cam0"


def test_points_are_of_the_frame_whose_masks_are_shown(node: PlayedNode, tools: AgentTools) -> None:
    points = np.array([[0.1, 0.2, 0.3], [np.pi, 0, 1]], np.float32).tobytes()
    node.answers["points"] = {"seq": 2, "frame": "base", "points_m": points}
    show(node, tools, masks_of(make_instance(doubtful=False), seq=1))
    show(node, tools, masks_of(make_instance(doubtful=True), seq=2))
    facts = tools.call("points", {"id": 1}).facts
    assert facts["points_m"] == [[0.1, 0.2, 0.3], [3.1416, 0, 1]]
    assert (facts["points_seq"], facts["seq"], facts["frame"], facts["doubtful"]) == (2, 2, "base", True)


SEEN = {
    **{
        "camera": "cam0",
        "epoch": 5,
        "id": 1,
        "label": "mug",
        "state": "lost",
        "in_view": False,
        "age_s": 62.5,
    },
    **{"seq": 2, "capture_ns": 17, "box": [1, 2, 3, 4], "frame": "base", "position_m": [0.5, 0.0, 0.123456]},
    **{"held": True, "hidden_by": None, "has_picture": True},
}
CROP = {"id": 1, "camera": "cam0", "seq": 2, "capture_ns": 17, "box": [0, 0, 9, 9], "jpeg": b"JPEG"}


def test_a_place_says_how_long_ago_and_has_a_picture(node: PlayedNode, tools: AgentTools) -> None:
    node.answers |= {"where": {"objects": [SEEN]}, "picture": CROP}
    answer = tools.call("where", {"name": "mug"})
    (place,) = answer.facts["objects"]
    assert (place["age_s"], place["in_view"], place["held"], place["state"]) == (62.5, False, True, "lost")
    assert (place["position_m"], place["frame"]) == ([0.5, 0.0, 0.1235], "base")
    assert answer.jpeg is None
    assert tools.call("where", {"id": 1, "picture": True}).jpeg == b"JPEG"
    assert node.requests[-1].args == {"id": 1, "camera": "cam0", "epoch": 5}
    with pytest.raises(RequestError, match="found both"):
        tools.call("where", {"id": 1, "name": "mug"})


def test_an_unknown_place_names_what_is_known(node: PlayedNode, tools: AgentTools) -> None:
    node.answers["where"] = {"objects": []}
    facts = tools.call("where", {"name": "cup"}).facts
    assert (facts["objects"], len(facts["notes"])) == ([], 1)
    assert "unknown where 'cup' is" in facts["notes"][0]


def test_a_picture_without_masks_says_why(node: PlayedNode, tools: AgentTools, monkeypatch: Any) -> None:
    monkeypatch.setattr("sam3_node.mcp.pictures.LOOK_S", 0.5)
    node.status["paused"] = True
    with pytest.raises(TransportError, match="expected a frame of camera cam0 within"):
        tools.call("look", {})


def test_names_replace_those_before_and_say_so(node: PlayedNode, tools: AgentTools) -> None:
    node.answers["set_prompts"] = {"prompts": []}
    facts = tools.call("name", {"names": ["red mug"], "most": 2}).facts
    assert facts["before"] == ["cup"]
    (request,) = [request for request in node.requests if request.op == "set_prompts"]
    assert request.args == {"prompts": ["red mug"], "most": {"red mug": 2}}


def test_an_operation_for_agents_is_a_tool(node: PlayedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.mcp.tools.FOR_AGENTS", (RenameObject,))
    node.answers["rename_object"] = {"id": 1, "camera": "cam0", "epoch": 5, "label": "blue mug"}
    with AgentTools(node.settings) as reading:
        assert "rename_object" not in [tool.name for tool in reading.tools]
    with AgentTools(node.settings, allow_edits=True) as tools:
        (tool,) = (tool for tool in tools.tools if tool.name == "rename_object")
        assert tool.arguments.list_names() == ("id", "label", "camera", "epoch")
        assert tool.arguments.describe() == "Change the label of an object."
        assert (
            tool.arguments.schema()["properties"]["id"]["description"] == "The object's id. `find` lists it."
        )
        facts = tools.call("rename_object", {"id": 1, "label": "blue mug", "epoch": 5}).facts
        assert facts == node.answers["rename_object"]
        assert node.requests[-1].args == {"id": 1, "label": "blue mug", "epoch": 5}
        tools.call("rename_object", {"id": "1", "label": "2", "epoch": 5})
        assert node.requests[-1].args == {"id": 1, "label": "2", "epoch": 5}
        with pytest.raises(RequestError, match="expected 'id' to be an integer"):
            tools.call("rename_object", {"id": "one", "label": "mug"})


def test_an_added_object_that_was_tracked_already_is_named(node: PlayedNode, tools: AgentTools) -> None:
    node.answers["add_object"] = {"id": 7, "camera": "cam0", "epoch": 5}
    show(node, tools, masks_of(make_instance(4), make_instance(7, "thing")))
    given = {"points": [[3, 4]], "label": "thing"}
    assert "this is object 4, 'cup'" in tools.call("add", given).facts["notes"][0]
    beside = np.zeros((30, 40), np.bool_)
    beside[:, 30:] = True
    other = make_instance(7, "thing", mask=Mask.from_full(beside))
    show(node, tools, masks_of(make_instance(4), other, seq=2))
    assert tools.call("add", given).facts["notes"] == []


def test_a_reply_is_told_by_its_fields() -> None:
    pinned = PinnedFrame(camera="cam0", seq=7, lease_s=60.0, age_ms=12.5)
    assert describe_reply(pinned) == {"camera": "cam0", "seq": 7, "lease_s": 60.0, "age_ms": 12.5}
    # what is required is told also if it is false
    assert describe_reply(PausedReply(paused=False)) == {"paused": False}
    # pixels and bytes are not for agents
    mask = MaskMap("rle", (30, 40), (1, 2, 3, 4), b"")
    prompted = PromptedObject(id=1, camera="cam0", mask=mask, score=0.5)
    assert describe_reply(prompted)["mask"] == {"box": [1, 2, 3, 4]}
    assert describe_reply(SnapshotPart(ready=True, data=b"DATA")) == {"ready": True}


def test_lossless_delivery_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"mcp needs transport.delivery = 'newest'"):
        AgentTools(load_settings(overrides={"transport.delivery": "every"}))


def test_answers_are_json_whatever_was_measured() -> None:
    odd = make_instance(
        label='"\x1b]0;\n\u202e',
        score=float("nan"),
        confidence=float("inf"),
        position_m=(float("nan"), 1e300, 0.0),
        frame="camera",
        covariance_m2=(float("nan"),) * 6,
        extent_centre_m=(0.0, 0.0, 1.0),
        extent_m=(0.1, 0.1, float("inf")),
        upright_centre_m=(0.0, 0.0, 1.0),
        upright_quaternion_xyzw=(0.0, 0.0, 0.0, 1.0),
        upright_size_m=(0.1, 0.2, 0.3),
    )
    facts = describe_place(masks_of(odd), odd)
    text = json.dumps(facts, allow_nan=False)
    assert "\n" not in text
    assert facts["upright_box_m"]["size"] == [0.1, 0.2, 0.3]


def test_a_closed_connection_is_an_error_of_ours(node: PlayedNode) -> None:
    tools = AgentTools(node.settings)
    tools.close()
    tools.close()
    with pytest.raises(Sam3NodeError, match="closed"):
        tools.call("find", {})


def test_a_frame_is_taken_with_its_own_masks(node: PlayedNode, tools: AgentTools) -> None:
    frame = replace(make_frame(3, side=128), capture_ns=time.time_ns())
    full = np.zeros((128, 128), np.bool_)
    full[6:30, 4:40] = True
    instance = replace(make_instance(), mask=Mask.from_full(full))
    masks = MaskFrame("cam0", 3, frame.capture_ns, 128, 128, instances=(instance,), epoch=5, node="0" * 16)
    stop = threading.Event()

    def publish() -> None:
        while not stop.wait(0.02):
            node.frames.send(frame)
            node.masks.send(replace(masks, seq=2, capture_ns=1))
            node.masks.send(masks)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        answer = tools.call("look", {})
        small = tools.call("look", {"max_side": "64"})
    finally:
        stop.set()
        thread.join()
    assert (answer.facts["seq"], answer.facts["scale"], answer.facts["epoch"]) == (3, 1, 5)
    assert [item["id"] for item in answer.facts["objects"]] == [1]
    # in pixels of the picture that is shown
    boxes = [each.facts["objects"][0]["box"] for each in (answer, small)]
    assert (small.facts["scale"], boxes) == (2, [[4, 6, 40, 30], [2, 3, 20, 15]])
    assert answer.jpeg is not None
    assert answer.jpeg[:2] == b"\xff\xd8"


def test_the_page_has_every_tool_and_argument(tools: AgentTools) -> None:
    page = ROOT / "docs/mcp.md"
    rows = dict(re.findall(r"^\| `(\w+)`(?: \(edits\))? \| (.*?) \|", page.read_text(), re.MULTILINE))
    # those of operations are in the table of operations
    written = [tool for tool in tools.tools if tool.name not in OPERATIONS or tool.name in rows]
    assert list(rows) == [tool.name for tool in written]
    for tool in written:
        assert re.findall(r"`(\w+)`", rows[tool.name]) == list(tool.arguments.list_names()), tool.name


def test_the_page_configures_a_host() -> None:
    (text,) = (block.text for block in blocks(ROOT / "docs/mcp.md") if block.language == "json")
    (configured,) = json.loads(text)["mcpServers"].values()
    assert command_parser().parse(configured["args"]).run is mcp


def test_every_tool_tells_an_agent_what_it_takes(tools: AgentTools) -> None:
    for tool in tools.tools:
        assert tool.arguments.describe().endswith(".")
        fields = tool.arguments.schema()["properties"]
        assert all(len(field["description"]) > 1 for field in fields.values()), tool.name
    assert "newest picture" in tools.tools[1].arguments.describe()
    assert "With `keep_s`" in tools.tools[1].arguments.describe()
