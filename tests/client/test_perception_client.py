"""Tests of the client with real publishers and a real control server."""

import contextlib
import copy
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sam3_node import errors
from sam3_node.client import (
    AddedObject,
    LastPicture,
    ObjectPlace,
    PerceptionClient,
    Segmentation,
    SurfacePoints,
    TrackedObject,
)
from sam3_node.client import requests as client_requests
from sam3_node.client.observations import ObjectSlots
from sam3_node.client.requests import EVERYTHING_MS
from sam3_node.schema.operations import Pause, RenameObject
from sam3_node.settings import TransportSettings
from sam3_node.transport import ControlClient, MaskPublisher, MaskSubscriber
from sam3_node.transport.channels import NewestMasks
from sam3_node.transport.control_server import ControlServer
from sam3_node.types import Depth, FramePose, Mask
from sam3_node.wire import Reply, Request, decode_mask, encode_mask
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row
from tests.support.transport_peer import NOBODY, TCP, make_frame, make_masks, wait_until

MASK = make_masks(1).instances[0].mask
Answer = Callable[[Request], Any]


@contextmanager
def node(answer: Answer) -> Iterator[tuple[MaskPublisher, PerceptionClient, list[Request]]]:
    """Open the sockets of a node that replies with `answer`, and a client. Collect the requests."""
    requests: list[Request] = []

    def reply(request: Request) -> Reply:
        requests.append(request)
        return Reply(request.id, answer(request))

    with (
        ControlServer(TCP, reply) as control,
        MaskPublisher(TCP) as masks,
        PerceptionClient(masks.endpoint, control.endpoint) as client,
    ):
        yield masks, client, requests


def call(answer: Any, operation: Callable[[PerceptionClient], Any]) -> tuple[Any, str, dict[str, Any]]:
    """Return the result of an operation when the node replies `answer`, and the request that it sent."""
    with node(lambda request: answer) as (_, client, requests):
        result = operation(client)
    (request,) = requests
    return result, request.op, request.args


@pytest.mark.parametrize("module", ["sam3_node.client", "sam3_node.client.observations"])
def test_it_imports_nothing_heavy(module: str) -> None:
    heavy = "cv2", "torch", "transformers", "gymnasium", "lerobot", "pydantic", "scipy"
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_default_endpoints_are_those_of_the_settings() -> None:
    settings = TransportSettings()
    from sam3_node import client

    assert (settings.masks, settings.control) == (client.MASKS_ENDPOINT, client.CONTROL_ENDPOINT)


def test_endpoints_come_from_the_environment_unless_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        ControlServer(TCP, lambda request: Reply(request.id, {"paused": False})) as control,
        MaskPublisher(TCP) as masks,
    ):
        monkeypatch.setenv("SAM3_TRANSPORT__MASKS", masks.endpoint)
        monkeypatch.setenv("SAM3_TRANSPORT__CONTROL", control.endpoint)
        with PerceptionClient() as client:
            assert client.status() == {"paused": False}
            wait_until(lambda: masks.send(make_masks(0)) and client.latest(20))
        with (
            PerceptionClient(control=NOBODY, timeout_ms=50) as other,
            refuses(errors.NoAnswerError, field=NOBODY),
        ):
            other.status()


@pytest.mark.parametrize("copy_it", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_cannot_be_copied(copy_it: Callable[[object], object]) -> None:
    with PerceptionClient(NOBODY, NOBODY) as client:
        with pytest.raises(TypeError, match="another client"):
            copy_it(client)
        assert client.latest(0) is None


def test_the_end_of_a_wait_is_a_number() -> None:
    with node(lambda request: None) as (publisher, client, _):
        for wrong in ("100", float("nan"), True):
            for wait in (client.latest, partial(client.wait_for, "cup"), client.wait_for_camera):
                with refuses(errors.RequestError, field=("timeout_ms", repr(wrong))):
                    wait(timeout_ms=wrong)
        assert client.latest(0.5) is None  # type: ignore[arg-type]
        assert client.latest(np.int64(1)) is None  # type: ignore[arg-type]
        sending = threading.Thread(
            target=lambda: wait_until(lambda: not publisher.send(make_masks(3)) or got)
        )
        got: list[object] = []
        sending.start()
        got.append(client.latest(float("inf")))  # type: ignore[arg-type]
        sending.join()
        assert got[0] is not None


def test_it_reads_the_newest_masks() -> None:
    with node(lambda request: None) as (publisher, client, _):
        wait_until(lambda: publisher.send(make_masks(0)) and client.latest(20))
        assert client.connected
        while client.latest(100) is not None:
            pass
        for seq in (4, 5):
            publisher.send(make_masks(seq))
            masks = client.latest(PATIENCE_MS)
            assert masks.seq == seq
            assert np.array_equal(masks.instances[0].mask.full(), make_masks(seq).instances[0].mask.full())
        publisher.send(make_masks(6))
        assert next(iter(client)).seq == 6
        threading.Timer(0.1, client.close).start()
        assert list(client) == []


def test_objects_are_added_by_points_box_or_mask() -> None:
    def add(**prompt: Any) -> Callable[[PerceptionClient], Any]:
        return lambda client: client.add_object(**prompt)

    reply = {"id": 3, "camera": "cam0"}
    assert call(reply, add(points=[(1, 2.5)], labels=[1], label="cup")) == (
        AddedObject(3, "cam0", None),
        "add_object",
        {"points": [[1.0, 2.5]], "labels": [1], "label": "cup"},
    )
    box = np.array([1, 2, 30, 40])
    assert call(reply, add(box=box, seq=9, camera="cam0"))[2] == {
        "box": [1.0, 2.0, 30.0, 40.0],
        "seq": 9,
        "camera": "cam0",
    }
    full = np.zeros((20, 30), np.bool_)
    full[3:9, 4:8] = True
    for mask in (full, Mask.from_full(full), full.astype(np.uint8), full.astype(np.uint8) * 255):
        args = call(reply, add(mask=mask))[2]
        assert list(args) == ["mask"]
        assert np.array_equal(decode_mask(args["mask"]).full(), full)


NO_LISTS: list[Any] = ["red mug", b"red mug", {"red mug": 1}, 7, None]
NO_TEXTS: list[Any] = [b"mug", None, ["mug"]]
NO_PROMPTS: list[dict[str, Any]] = [
    {"points": [1, 2]},
    {"points": [[1, 2, 3]]},
    {"points": [["a", "b"]]},
    {"points": [(float("nan"), 1)]},
    {"box": [1, 2, 3]},
    {"mask": np.zeros((4, 4))},
    {"mask": np.full((4, 4), 7, np.uint8)},
    {"mask": np.array([[0, 1, 255]], np.uint8)},
    {"mask": np.zeros((2, 4, 4), np.bool_)},
]
NO_BOXES = [
    ((80, 90, 40, 30), ("x0", "x1", "y0", "y1")),
    ((80, 90, 80, 95), ("x0", "x1", "y0", "y1")),
    ((0, 0, float("nan"), 5), "finite"),
    ((0, 0, float("inf"), 5), "finite"),
]


@each_row(
    ("method", "given", "told"),
    [
        *[("add_object", wrong, str(next(iter(wrong)))) for wrong in NO_PROMPTS],
        *[(method, {"box": box}, told) for method in ("add_object", "segment") for box, told in NO_BOXES],
        *[
            ("set_prompts", {"prompts": wrong} | more, "prompts")
            for wrong in NO_LISTS
            for more in ({}, {"most": 1})
        ],
        *[
            (method, {"cameras": wrong}, "cameras")
            for method in ("latest_of_all", "__init__")
            for wrong in NO_LISTS
        ],
        *[("set_prompts", {"prompts": ["mug", wrong], "most": 1}, "prompts") for wrong in NO_TEXTS],
        *[("wait_for", {"label": wrong}, "label") for wrong in NO_TEXTS],
        *[
            ("set_prompts", {"prompts": ["mug"], name: ["mug"]}, name)
            for name in ("scores", "most", "priorities")
        ],
    ],
)
def test_what_has_no_meaning_is_refused_before_it_is_sent(
    method: str, given: dict[str, Any], told: str | tuple[str, ...]
) -> None:
    with PerceptionClient(NOBODY, NOBODY) as client, refuses(errors.RequestError, field=told):
        PerceptionClient(**given) if method == "__init__" else getattr(client, method)(**given)


def test_an_object_added_on_a_past_frame_has_its_mask() -> None:
    reply = {"id": 3, "camera": "cam0", "seq": 9, "score": 0.5, "mask": encode_mask(MASK)}
    added = call(reply, lambda client: client.add_object(box=(1, 2, 3, 4), seq=9))[0]
    assert (added.id, added.camera) == (3, "cam0")
    assert (added.segmentation.seq, added.segmentation.score) == (9, 0.5)
    assert np.array_equal(added.segmentation.mask.full(), MASK.full())


@pytest.mark.parametrize("method", ["add_object", "segment"])
def test_a_box_that_reaches_beyond_the_frame_is_told(method: str, caplog: pytest.LogCaptureFixture) -> None:
    reply = {"id": 3, "camera": "cam0", "seq": 9, "score": 0.5, "mask": encode_mask(MASK)}
    for box, told in (((30, -5, 50, 20), ("30.0", "0.0", "40.0", "20.0", "40 x 30")), ((3, 0, 40, 30), ())):
        note = call(reply, lambda client, box=box: getattr(client, method)(box=box, seq=9))[0].note
        assert bool(note) is bool(told)
        assert mentions(note, *told)
    assert [record.message for record in caplog.records if "beyond" in record.message]


def test_a_box_on_the_next_frame_is_compared_with_the_newest_masks() -> None:
    with node(lambda request: {"id": 3, "camera": "cam0"}) as (publisher, client, _):
        assert client.add_object(box=(1, 2, 300, 20)).note == ""
        wait_until(lambda: publisher.send(make_masks(0)) and client.newest())
        assert "reaches beyond" in client.add_object(box=(1, 2, 300, 20)).note


def test_the_next_pick_is_asked_for_with_what_the_robot_can_do() -> None:
    turn = {"quaternion_xyzw": [1.0, 0.0, 0.0, 0.0], "normal": [0.0, 0.0, 1.0]}
    place = {"position_m": [0.1, 0.2, 0.3], "radius_m": 0.02, **turn}
    pick = {"id": 3, "label": "cup", "rank": 1, "reason": "nothing lies on it", "suction": place}
    other = {"id": 4, "label": "cup", "reason": "it is hidden"}
    reply = {"camera": "cam0", "seq": 7, "frame": "base", "picks": [pick], "refused": [other]}
    with node(lambda request: reply) as (_, client, requests):
        found = client.next_pick("cup", opening_m=0.1, covered=True, most=3)
        assert (found.picks[0].id, found.picks[0].grip, found.refused[0].reason) == (3, None, "it is hidden")
        assert found.picks[0].suction.normal == (0.0, 0.0, 1.0)
        assert requests[-1].op == "next_pick"
        assert requests[-1].args == {"label": "cup", "opening_m": 0.1, "covered": True, "most": 3}
        with refuses(errors.RequestError, field="label"):
            client.next_pick(3)  # type: ignore[arg-type]


def test_what_users_print_is_one_short_line() -> None:
    masks = make_masks(1)
    points = np.zeros((1000, 3), np.float32)
    many = replace(masks, instances=masks.instances * 20)
    depth = Depth(16, 16, "z16", 0.001, True, b"\0" * 512)
    slots = ObjectSlots(["cup", "can"], (30, 40)).observe(masks)
    values = [
        masks,
        many,
        masks.instances[0],
        MASK,
        decode_mask(encode_mask(MASK)),
        Segmentation(1, 0.5, MASK),
    ]
    for value in (*values, replace(make_frame(1), depth=depth), SurfacePoints(1, "base", points), slots):
        assert len(repr(value)) < 300
        assert not re.search(r"\n|array|\\x", repr(value))
    assert repr(masks) == "MaskFrame(cam0 #1, 40x30: 7 'cup')"
    assert repr(many).endswith("12 more)")
    assert repr(slots) == "SlotObservation(cam0 #1: 'cup' object 7, 'can' empty)"


class SlowNode:
    """A clock, and a node that is connected and silent: whatever is asked for takes all of the time given for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.budgets_s = list[float]()
        for module in ("mask_reader", "perception_client"):
            monkeypatch.setattr(f"sam3_node.client.{module}.time", self)
        monkeypatch.setattr(PerceptionClient, "connected", True)
        monkeypatch.setattr(NewestMasks, "wait", lambda _, find, left_s: self.sleep(left_s))
        monkeypatch.setattr(MaskSubscriber, "count_arrivals", lambda _, left_ms: self.sleep(left_ms / 1000))
        monkeypatch.setattr(ControlClient, "call_within", lambda _, left_ms, op, **args: self.refuse(left_ms))
        self.error: Exception = errors.NoAnswerError("silent")

    def refuse(self, timeout_ms: int) -> None:
        self.sleep(timeout_ms / 1000)
        raise self.error

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.budgets_s.append(seconds)
        self.now_s += seconds


@pytest.mark.parametrize("timeout_ms", [0, 100, 500, 3000, 30_000])
@pytest.mark.parametrize("wait", ["wait_for", "wait_for_camera"])
def test_a_silent_node_takes_no_more_than_the_time_given(
    wait: str, timeout_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PerceptionClient(NOBODY, NOBODY) as client:
        slow = SlowNode(monkeypatch)
        with refuses(errors.TransportError, field=(str(timeout_ms), NOBODY)):
            client.wait_for("cup", timeout_ms) if wait == "wait_for" else client.wait_for_camera(timeout_ms)
    assert timeout_ms / 1000 <= sum(slow.budgets_s) <= timeout_ms / 1000 + 0.2


def test_a_request_that_is_sent_again_gets_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with PerceptionClient(NOBODY, NOBODY, timeout_ms=1000, on_restart=lambda _: None) as client:
        slow = SlowNode(monkeypatch)
        slow.error = errors.NodeRestarted()
        with pytest.raises(errors.NodeRestarted):
            client.add_object(box=(0, 0, 9, 9))
    assert sum(slow.budgets_s) <= 1.2


def test_the_turns_of_other_threads_count() -> None:
    with PerceptionClient(NOBODY, NOBODY, timeout_ms=50) as client:
        with client._control._turn, refuses(errors.NoAnswerError, field=("50", "threads")):
            client.status()
        with refuses(errors.NoAnswerError, field=("50", "connected")):
            client.status()


def test_objects_are_refined_removed_and_listed() -> None:
    reply = {"id": 3, "camera": "cam0", "seq": 5, "score": 0.25, "mask": encode_mask(MASK)}
    refined, op, args = call(
        reply, lambda client: client.refine_object(3, points=np.ones((2, 2)), labels=(1, 0), seq=5)
    )
    assert (refined.seq, refined.score) == (5, 0.25)
    assert np.array_equal(refined.mask.full(), MASK.full())
    assert (op, args) == ("refine_object", {"id": 3, "points": [[1, 1], [1, 1]], "labels": [1, 0], "seq": 5})
    assert call({}, lambda client: client.remove_object(3, camera="a")) == (
        None,
        "remove_object",
        {"id": 3, "camera": "a"},
    )
    line = {"camera": "left", "id": 3, "label": "cup", "state": "occluded"}
    line |= {"score": 0.25, "age": 12, "frames_since_seen": 2}
    listed = call({"objects": [line]}, lambda client: client.list_objects())
    assert listed == ([TrackedObject(**line)], "list_objects", {})


PLACE: dict[str, Any] = {
    **{"camera": "cam0", "epoch": 1, "id": 7, "label": "mug", "state": "lost", "in_view": False},
    **{"age_s": 12.5, "seq": 9, "capture_ns": 17, "box": [1, 2, 3, 4], "confidence": 0.9, "silent_s": 0.1},
    **{"frame": "base", "position_m": [0.5, 0.0, 0.1], "camera_position_m": [0.0, 0.0, 0.4], "size_m": 0.1},
    "covariance_m2": [1e-6, 0.0, 0.0, 1e-6, 0.0, 4e-6],
    "camera_pose": {
        **{"frame": "camera", "parent": "base", "stamp_ns": 17, "clock": "system"},
        **{"position": [0.5, 0.0, 0.5], "quaternion": [1.0, 0.0, 0.0, 0.0]},
    },
    **{"held": True, "hidden_by": None, "has_picture": True},
}
UNSEEN = {"camera": "cam0", "epoch": 1, "id": 8, "label": "", "state": "tracked", "in_view": False}


def test_places_are_asked_for_by_name_id_or_all() -> None:
    reply = {"objects": [PLACE, UNSEEN | {"age_s": None, "box": None, "camera_pose": None}]}
    places, op, args = call(reply, lambda client: client.where("mug"))
    assert (op, args) == ("where", {"label": "mug"})
    pose = FramePose("camera", "base", 17, (0.5, 0.0, 0.5), (1.0, 0.0, 0.0, 0.0))
    assert places[0] == ObjectPlace(
        **PLACE
        | {"box": (1, 2, 3, 4), "position_m": (0.5, 0.0, 0.1), "camera_position_m": (0.0, 0.0, 0.4)}
        | {"covariance_m2": (1e-6, 0.0, 0.0, 1e-6, 0.0, 4e-6), "camera_pose": pose}
    )
    assert places[1] == ObjectPlace("cam0", 8, "", "tracked", False, epoch=1)
    found, _, args = call({"objects": []}, lambda client: client.where(7, camera="cam0", epoch=2))
    assert (found, args) == ([], {"id": 7, "camera": "cam0", "epoch": 2})
    assert call({"objects": []}, lambda client: client.where())[2] == {}


@pytest.mark.parametrize(
    "wrong",
    [{"box": [1, 2, 3]}, {"position_m": [1.0, 2.0]}, {"state": "gone"}, {"camera_pose": {}}, {"label": None}],
)
def test_a_place_of_another_shape_is_an_error(wrong: dict[str, Any]) -> None:
    with refuses(errors.WireError, field=next(iter(wrong))):
        call({"objects": [PLACE | wrong]}, lambda client: client.where())


@pytest.mark.parametrize("wrong", [True, 1.5, b"mug", ["mug"]])
def test_an_object_is_named_by_text_or_id(wrong: Any) -> None:
    with PerceptionClient(NOBODY, NOBODY) as client:
        for ask in (client.where, client.wait_until_seen):
            with refuses(errors.RequestError, field="name_or_id"):
                ask(wrong)


def test_the_epoch_of_places_is_that_of_later_requests() -> None:
    with node(lambda request: {"objects": [PLACE]}) as (_, client, requests):
        (place,) = client.where("mug")
        client.where(place.id)
        assert requests[1].args == {"id": 7, "camera": "cam0", "epoch": 1}


def test_any_operation_is_asked_for_with_the_epoch_of_its_object() -> None:
    replies = {
        "where": {"objects": [PLACE]},
        "rename_object": {"id": 7, "camera": "cam0", "epoch": 1, "label": "cup"},
        "pause": {"paused": True},
    }
    with node(lambda request: replies[request.op]) as (_, client, requests):
        client.where("mug")
        renamed = client.ask(RenameObject(id=7, label="cup"))
        assert (renamed.label, client.ask(Pause()).paused) == ("cup", True)
        assert requests[1].args == {"id": 7, "label": "cup", "camera": "cam0", "epoch": 1}
        assert requests[2].args == {}


def test_a_picture_is_bytes_with_its_frame() -> None:
    reply = {"id": 7, "camera": "cam0", "epoch": 1, "seq": 9, "capture_ns": 17, "box": [1, 2, 30, 40]}
    picture, op, args = call(reply | {"jpeg": b"JPEG"}, lambda client: client.picture(7, camera="cam0"))
    assert (picture, op) == (LastPicture(9, 17, (1, 2, 30, 40), b"JPEG"), "picture")
    assert args == {"id": 7, "camera": "cam0"}


def test_an_object_is_added_by_the_looks_of_one_of_another_camera() -> None:
    reply = {"id": 3, "camera": "left", "seq": 9, "score": 0.5, "mask": encode_mask(MASK), "epoch": 1}
    added, op, args = call(
        reply, lambda client: client.add_object(like=7, like_camera="cam0", camera="left", label="cup")
    )
    assert (op, args) == ("add_like", {"like": 7, "like_camera": "cam0", "camera": "left", "label": "cup"})
    assert (added.id, added.camera, added.segmentation.seq) == (3, "left", 9)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"like": 7}, "like_camera"),
        ({"like_camera": "cam0"}, "like"),
        ({"like": 7, "like_camera": "cam0", "box": (1, 2, 9, 9)}, "prompt"),
        ({"like": 7, "like_camera": "cam0", "seq": 3}, "seq"),
    ],
)
def test_looks_stand_in_the_place_of_a_prompt(arguments: dict[str, Any], field: str) -> None:
    with PerceptionClient(NOBODY, NOBODY) as client, refuses(errors.RequestError, field=field):
        client.add_object(**arguments)


def test_segment_gives_mask_and_score() -> None:
    answer = {"seq": 8, "score": 0.75, "mask": encode_mask(MASK)}
    result, op, args = call(answer, lambda client: client.segment(box=(1, 2, 3, 4), seq=8))
    assert isinstance(result, Segmentation)
    assert (result.seq, result.score) == (8, 0.75)
    assert np.array_equal(result.mask.full(), MASK.full())
    assert (op, args, result.candidates) == ("segment", {"box": [1, 2, 3, 4], "seq": 8}, ())


def test_segment_gives_the_masks_to_choose_from_and_an_object_begins_with_one() -> None:
    shown = [{"mask": encode_mask(MASK), "score": score} for score in (0.75, 0.5)]
    answer = {"seq": 8, "camera": "cam0", **shown[0], "masks": shown}
    result, _, args = call(answer, lambda client: client.segment(points=[(1, 2)], multimask=True))
    assert args == {"points": [[1, 2]], "multimask": True}
    assert [(one.seq, one.camera, one.score) for one in result.candidates] == [
        (8, "cam0", 0.75),
        (8, "cam0", 0.5),
    ]
    assert np.array_equal(result.candidates[1].mask.full(), MASK.full())
    added = {"id": 3, "camera": "cam0"}
    args = call(added, lambda client: client.add_object(points=[(1, 2)], choice=0))[2]
    assert args == {"points": [[1, 2]], "choice": 0}


def test_a_picture_is_sent_with_prompts_or_names() -> None:
    answer = {"masks": [{"label": "cup", "score": 0.75, "mask": encode_mask(MASK)}]}
    result, op, args = call(answer, lambda client: client.segment_photo(b"JPEG", [{"box": (1, 2, 3, 4)}]))
    assert (op, args) == ("segment_photo", {"photo": b"JPEG", "objects": [{"box": [1, 2, 3, 4]}]})
    (found,) = result
    assert (found.label, found.score) == ("cup", 0.75)
    assert np.array_equal(found.mask.full(), MASK.full())
    args = call(answer, lambda client: client.segment_photo(b"PNG", names=["cup"], scores={"cup": 0.5}))[2]
    assert args == {"photo": b"PNG", "names": ["cup"], "scores": {"cup": 0.5}}


def test_fractions_of_the_frame_are_noted(caplog: pytest.LogCaptureFixture) -> None:
    answer = {"seq": 8, "score": 0.75, "mask": encode_mask(MASK)}
    for points, is_odd in (([(0.4, 0.5)], True), ([(0.4, 30)], False), ([(2, 2)], False)):
        caplog.clear()
        result, _, _ = call(answer, lambda client, points=points: client.segment(points=points))
        assert mentions(result.note, "first pixel", "multiply") is is_odd
        assert ("first pixel" in caplog.text) is is_odd
    added = {"id": 3, "camera": "cam0"}
    result, _, _ = call(added, lambda client: client.add_object(points=[(0.4, 0.5)], labels=[1]))
    assert mentions(result.note, "first pixel")


def test_everything_is_waited_for_longer_than_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: Request) -> Reply:
        if request.op == "segment_everything":
            time.sleep(0.4)
        return Reply(request.id, {"masks": [], "seq": 8, "note": "nothing is sure"})

    def is_connected() -> bool:
        with contextlib.suppress(errors.NoAnswerError):
            client.status()
            return True
        return False

    with (
        ControlServer(TCP, answer) as control,
        PerceptionClient(NOBODY, control.endpoint, timeout_ms=200) as client,
    ):
        # a busy machine takes longer to connect than this client waits
        wait_until(is_connected)
        assert client.segment_everything().note
        with refuses(errors.NoAnswerError, field="100 ms"):
            client.segment_everything(timeout_ms=100)
        # a client that waits longer for any answer waits so for this one, too
        monkeypatch.setattr(client_requests, "EVERYTHING_MS", 1)
        with PerceptionClient(NOBODY, control.endpoint, timeout_ms=PATIENCE_S * 1000) as patient:
            assert patient.segment_everything().note == "nothing is sure"
        monkeypatch.undo()
    with PerceptionClient(NOBODY, NOBODY, timeout_ms=100) as client:
        begin_s = time.monotonic()
        with refuses(errors.NoAnswerError, field=("connected", "100 ms")):
            client.segment_everything()
        assert time.monotonic() - begin_s < EVERYTHING_MS / 1000


def test_each_command_sends_its_request() -> None:
    assert call({}, lambda client: client.set_prompts(("red mug", "tape")))[1:] == (
        "set_prompts",
        {"prompts": ["red mug", "tape"]},
    )
    assert call({}, lambda client: client.set_prompts(["mug", "tape"], most=1))[2] == {
        "prompts": ["mug", "tape"],
        "most": {"mug": 1, "tape": 1},
    }
    assert call({}, lambda client: client.pause())[1:] == ("pause", {})
    assert call({}, lambda client: client.resume())[1:] == ("resume", {})
    assert call({}, lambda client: client.reset(camera="a"))[1:] == ("reset", {"camera": "a"})
    assert call({"paused": False}, lambda client: client.status()) == ({"paused": False}, "status", {})


def test_errors_of_the_node_are_raised() -> None:
    error = errors.UnknownObjectError("expected a tracked id, found 9")
    with (
        ControlServer(TCP, lambda request: Reply.failed(request.id, error)) as control,
        PerceptionClient(NOBODY, control.endpoint) as client,
    ):
        assert not client.connected
        with pytest.raises(errors.UnknownObjectError, match="found 9"):
            client.remove_object(9)


def test_an_answer_of_another_shape_is_an_error() -> None:
    for answer in (None, {}, {"id": "three"}, {"id": -1}):
        with refuses(errors.WireError, field="add_object"):
            call(answer, lambda client: client.add_object(box=(0, 0, 1, 1)))


def test_a_missing_node_is_an_error_in_time() -> None:
    with PerceptionClient(NOBODY, NOBODY, timeout_ms=100) as client:
        assert client.latest(10) is None
        with refuses(errors.TransportError, field=("node", "connected")):
            client.status()
    with refuses(errors.TransportError, field="tcp://host:port"):
        PerceptionClient("masks", "tcp://127.0.0.1:9")


@pytest.mark.parametrize("prompts", [["red mug"], ("red mug",), iter(["red mug"])])
def test_any_sequence_of_names_is_sent(prompts: Any) -> None:
    _, op, args = call({"prompts": []}, lambda client: client.set_prompts(prompts))
    assert (op, args) == ("set_prompts", {"prompts": ["red mug"]})


def test_names_that_come_once_are_sent_with_their_most() -> None:
    once: Any = iter(["red mug"])
    _, _, args = call({"prompts": []}, lambda client: client.set_prompts(once, most=1))
    assert args == {"prompts": ["red mug"], "most": {"red mug": 1}}
