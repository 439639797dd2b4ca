"""Tests of the client with real publishers and a real control server."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.client import AddedObject, PerceptionClient, Segmentation, TrackedObject
from sam3_node.client.mask_reader import MAX_CAMERAS, KnownEpochs
from sam3_node.errors import NodeRestarted, RequestError, TransportError, UnknownObjectError, WireError
from sam3_node.settings import TransportSettings
from sam3_node.transport import ControlServer, MaskPublisher
from sam3_node.types import Instance, Mask, MaskFrame
from sam3_node.wire import Reply, Request, decode_mask, encode_mask, pack_masks
from tests.support.node_rig import Process, Rig, masks_where, until
from tests.support.refuses import refuses
from tests.support.transport_peer import make_masks, wait_until

MASK = make_masks(1).instances[0].mask
TCP = "tcp://127.0.0.1:*"
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_the_default_endpoints_are_those_of_the_settings() -> None:
    settings = TransportSettings()
    from sam3_node import client

    assert (settings.masks, settings.control) == (client.MASKS_ENDPOINT, client.CONTROL_ENDPOINT)


def test_it_reads_the_newest_masks() -> None:
    with node(lambda request: None) as (publisher, client, _):
        wait_until(lambda: publisher.send(make_masks(0)) and client.latest(20))
        assert client.connected
        while client.latest(100) is not None:
            pass
        for seq in (4, 5):
            publisher.send(make_masks(seq))
            masks = client.latest(5000)
            assert masks is not None
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
    for mask in (full, Mask.from_full(full)):
        args = call(reply, add(mask=mask))[2]
        assert list(args) == ["mask"]
        assert np.array_equal(decode_mask(args["mask"]).full(), full)


def test_prompts_of_the_wrong_shape_are_refused_before_they_are_sent() -> None:
    with node(lambda request: None) as (_, client, requests):
        for wrong in (
            {"points": [1, 2]},
            {"points": [[1, 2, 3]]},
            {"points": [["a", "b"]]},
            {"box": [1, 2, 3]},
            {"mask": np.zeros((4, 4))},
            {"mask": np.zeros((2, 4, 4), np.bool_)},
        ):
            with refuses(RequestError, field=str(next(iter(wrong)))):
                client.add_object(**wrong)
        assert requests == []


def test_an_object_added_on_a_past_frame_has_its_mask() -> None:
    reply = {"id": 3, "camera": "cam0", "seq": 9, "score": 0.5, "mask": encode_mask(MASK)}
    added = call(reply, lambda client: client.add_object(box=(1, 2, 3, 4), seq=9))[0]
    assert (added.id, added.camera) == (3, "cam0")
    assert (added.segmentation.seq, added.segmentation.score) == (9, 0.5)
    assert np.array_equal(added.segmentation.mask.full(), MASK.full())


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
    line = {
        "camera": "left",
        "id": 3,
        "label": "cup",
        "state": "occluded",
        "score": 0.25,
        "age": 12,
        "frames_since_seen": 2,
    }
    listed = call({"objects": [line]}, lambda client: client.list_objects())
    assert listed == ([TrackedObject(**line)], "list_objects", {})


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
    error = UnknownObjectError("expected a tracked id, found 9")
    with (
        ControlServer(TCP, lambda request: Reply.failed(request.id, error)) as control,
        PerceptionClient("tcp://127.0.0.1:9", control.endpoint) as client,
    ):
        assert not client.connected
        with pytest.raises(UnknownObjectError, match="found 9"):
            client.remove_object(9)


def test_an_answer_of_another_shape_is_an_error() -> None:
    for answer in (None, {}, {"id": "three"}, {"id": -1}):
        with refuses(WireError, field="add_object"):
            call(answer, lambda client: client.add_object(box=(0, 0, 1, 1)))


def test_a_missing_node_is_an_error_in_time() -> None:
    with PerceptionClient("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", timeout_ms=100) as client:
        assert client.latest(10) is None
        with refuses(TransportError, field=("node", "connected")):
            client.status()
    with refuses(TransportError, field="tcp://host:port"):
        PerceptionClient("masks", "tcp://127.0.0.1:9")


@pytest.mark.parametrize("prompts", ["red mug", b"red mug", {"red mug": 1}, 7, None])
def test_names_that_are_no_list_are_refused_at_once(prompts: Any) -> None:
    with PerceptionClient("tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as client:
        with refuses(RequestError, field="prompts"):
            client.set_prompts(prompts)
        with refuses(RequestError, field="prompts"):
            client.set_prompts(prompts, most=1)
        with refuses(RequestError, field="cameras"):
            client.latest_of_all(prompts)
    with refuses(RequestError, field="cameras"):
        PerceptionClient("tcp://127.0.0.1:9", "tcp://127.0.0.1:9", cameras=prompts)


def test_what_is_no_text_or_map_is_refused_at_once() -> None:
    with PerceptionClient("tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as client:
        wrong: list[Any] = [b"mug", None, ["mug"]]
        for name in wrong:
            with refuses(RequestError, field="prompts"):
                client.set_prompts(["mug", name], most=1)
            with refuses(RequestError, field="label"):
                client.wait_for(name)
        limits: Any = ["mug"]
        for argument in ("scores", "most", "priorities"):
            with refuses(RequestError, field=str(argument)):
                client.set_prompts(["mug"], **{argument: limits})


@pytest.mark.parametrize("prompts", [["red mug"], ("red mug",), iter(["red mug"])])
def test_any_sequence_of_names_is_sent(prompts: Any) -> None:
    _, op, args = call({"prompts": []}, lambda client: client.set_prompts(prompts))
    assert (op, args) == ("set_prompts", {"prompts": ["red mug"]})


def test_names_that_come_once_are_sent_with_their_most() -> None:
    once: Any = iter(["red mug"])
    _, _, args = call({"prompts": []}, lambda client: client.set_prompts(once, most=1))
    assert args == {"prompts": ["red mug"], "most": {"red mug": 1}}


@pytest.mark.parametrize(
    ("box", "told"),
    [
        ((80, 90, 40, 30), ("x0", "x1", "y0", "y1")),
        ((80, 90, 80, 95), ("x0", "x1", "y0", "y1")),
        ((0, 0, float("nan"), 5), "finite"),
        ((0, 0, float("inf"), 5), "finite"),
    ],
)
def test_a_box_that_no_frame_has_is_refused_at_once(box: Any, told: str | tuple[str, ...]) -> None:
    with PerceptionClient("tcp://127.0.0.1:9", "tcp://127.0.0.1:9") as client:
        for method in (client.add_object, client.segment):
            with refuses(RequestError, field=told):
                method(box=box)
        with refuses(RequestError, field="points"):
            client.add_object(points=[(float("nan"), 1)])


HEIGHT, WIDTH, RADIUS = 80, 120, 12
GAP_MS = 100
START = (60, 40)
STEP = (8, -4)
"""Pixels to the right and down in GAP_MS."""
PLACE_M, VELOCITY_MPS, VARIANCE_M2 = (0.1, 0.2, 0.9), (0.5, -1.0, 0.2), 1e-4


def disc(x: float, y: float) -> Mask:
    rows, columns = np.indices((HEIGHT, WIDTH))
    return Mask.from_full((columns - x) ** 2 + (rows - y) ** 2 <= RADIUS**2)


def masks_at(ms: int, shape: Mask, **changes: Any) -> MaskFrame:
    instance = replace(Instance(1, "disc", 0.9, "tracked", 5, 0, shape), **changes)
    return MaskFrame("cam0", ms, ms * 1_000_000, WIDTH, HEIGHT, instances=(instance,), epoch=5)


def moving(start: tuple[int, int] = START, **changes: Any) -> MaskFrame:
    """Return masks of a disc that has made a step to `start` since the masks before."""
    before = masks_at(1000, disc(start[0] - STEP[0], start[1] - STEP[1]))
    return replace(masks_at(1000 + GAP_MS, disc(*start), **changes), before=before)


def ahead(masks: MaskFrame, ms: float) -> int:
    return masks.capture_ns + round(ms * 1e6)


@pytest.mark.parametrize("steps", [-1, 0, 0.25, 0.5, 1, 2])
def test_a_moved_mask_is_the_disc_at_that_time(steps: float) -> None:
    masks = moving()
    moved, unmoved = masks.moved_to(ahead(masks, steps * GAP_MS))
    assert not unmoved
    truth = disc(START[0] + steps * STEP[0], START[1] + steps * STEP[1])
    assert np.array_equal(moved.instances[0].mask.full(), truth.full())
    assert moved.instances[0].box == truth.box
    assert moved.key == masks.key
    assert moved.age_origin_ns == masks.age_origin_ns


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_what_leaves_the_image_is_cut_off(steps: int) -> None:
    masks = moving((104, 20))
    moved, unmoved = masks.moved_to(ahead(masks, steps * GAP_MS), max_ms=1000)
    truth = disc(104 + steps * STEP[0], 20 + steps * STEP[1])
    assert not unmoved
    assert np.array_equal(moved.instances[0].mask.full(), truth.full())
    assert moved.instances[0].box == truth.box


def test_a_mask_that_only_grows_or_is_cut_by_the_border_stays_in_place() -> None:
    both = Mask.from_full(disc(56, 40).full() | disc(64, 40).full())
    for earlier, later in ((disc(60, 40), both), (disc(112, 40), disc(116, 40))):
        masks = replace(masks_at(1100, later), before=masks_at(1000, earlier))
        moved, unmoved = masks.moved_to(ahead(masks, GAP_MS))
        assert not unmoved
        assert moved.instances[0].box == masks.instances[0].box


SURE, EMPTY = moving(), Mask.empty((HEIGHT, WIDTH))
UNMOVED: dict[str, tuple[MaskFrame, float, str]] = {
    "older than the limit": (SURE, 251, "too far"),
    "long before the capture": (SURE, -251, "too far"),
    "occluded": (moving(state="occluded"), 50, "hidden"),
    "without a mask": (moving(mask=EMPTY), 50, "hidden"),
    "doubtful": (moving(doubtful=True), 50, "doubtful"),
    "the first masks": (replace(SURE, before=None), 50, "no motion"),
    "of another epoch": (replace(SURE, epoch=6), 50, "no motion"),
    "of another object": (moving(id=2), 50, "no motion"),
    "doubtful before": (replace(SURE, before=masks_at(1000, disc(52, 44), doubtful=True)), 50, "no motion"),
    "without a mask before": (replace(SURE, before=masks_at(1000, EMPTY)), 50, "no motion"),
    "tentative": (moving(state="tentative"), 50, "doubtful"),
    "long after the masks before": (replace(SURE, capture_ns=1_501_000_000), 50, "no motion"),
    "not after the masks before": (replace(SURE, capture_ns=1_000_000_000), 50, "no motion"),
    "of another size": (moving(mask=Mask.from_full(np.ones((9, 9), np.bool_))), 50, "no motion"),
    "with a position and no velocity": (moving(position_m=PLACE_M, frame="base"), 50, "no motion"),
}


@pytest.mark.parametrize(("masks", "ms", "why"), UNMOVED.values(), ids=UNMOVED)
def test_an_instance_is_left_as_it_was(masks: MaskFrame, ms: float, why: str) -> None:
    moved, unmoved = masks.moved_to(ahead(masks, ms))
    assert unmoved == {masks.instances[0].id: why}
    assert moved == masks


def test_ages_of_a_device_clock_count_from_the_arrival() -> None:
    masks = replace(moving(), clock="device", received_ns=9_000_000_000)
    moved, unmoved = masks.moved_to(9_000_000_000 + GAP_MS * 1_000_000)
    assert not unmoved
    assert moved.instances[0].box == disc(68, 36).box
    assert masks.moved_to().unmoved == {1: "too far"}  # now is years later


def test_places_move_by_the_velocity() -> None:
    spatial: dict[str, Any] = {
        "position_m": PLACE_M,
        "frame": "base",
        "velocity_mps": VELOCITY_MPS,
        "nearest_m": PLACE_M,
    }
    lost: dict[str, Any] = {"camera_position_m": PLACE_M, "points_m": bytes(12)}
    masks = moving(extent_centre_m=PLACE_M, extent_m=(1.0, 1.0, 1.0), **spatial, **lost)
    (moved,) = masks.moved_to(ahead(masks, 200)).masks.instances
    for place in (moved.position_m, moved.extent_centre_m, moved.nearest_m):
        assert place == pytest.approx((0.2, 0.0, 0.94))
    assert (moved.camera_position_m, moved.points_m, moved.covariance_m2) == (None, None, None)
    assert moved.extent_m == (1.0, 1.0, 1.0)


def test_the_covariance_is_of_a_line_through_two_positions() -> None:
    """Draw both errors, and the acceleration in steps of a millisecond, and look where the object is then."""
    random, ahead_ms, draws = np.random.default_rng(1), 200, 20_000
    speed = np.cumsum(random.normal(0, np.sqrt(1e-3), (GAP_MS + ahead_ms, draws)), axis=0)
    place = np.concatenate([np.zeros((1, draws)), np.cumsum(speed, axis=0) * 1e-3])
    seen = [place[ms] + random.normal(0, np.sqrt(VARIANCE_M2), draws) for ms in (0, GAP_MS)]
    error = seen[1] + (seen[1] - seen[0]) * ahead_ms / GAP_MS - place[GAP_MS + ahead_ms]
    spatial: dict[str, Any] = {"position_m": PLACE_M, "frame": "base", "velocity_mps": VELOCITY_MPS}
    masks = moving(covariance_m2=(VARIANCE_M2, 5e-5, 0.0, VARIANCE_M2, 0.0, VARIANCE_M2), **spatial)
    (moved,) = masks.moved_to(ahead(masks, ahead_ms)).masks.instances
    assert moved.covariance_m2 is not None
    xx, xy, xz, yy, yz, zz = moved.covariance_m2
    assert xx == yy == zz == pytest.approx(error.var(), rel=0.05)
    assert (xy, xz, yz) == pytest.approx((5e-5 * 13, 0, 0))


def test_a_client_keeps_the_masks_before_and_the_wire_stays_as_it_is() -> None:
    first, second = make_masks(1), make_masks(2)
    assert pack_masks(replace(second, before=first)) == pack_masks(second)
    with (
        MaskPublisher("tcp://127.0.0.1:*") as publisher,
        PerceptionClient(publisher.endpoint, "tcp://127.0.0.1:1") as client,
    ):
        wait_until(lambda: publisher.send(first) and client.latest(50) is not None)
        publisher.send(second)
        masks = client.latest(5000)
        while masks is not None and masks.seq != 2:
            masks = client.latest(5000)
        assert masks is not None
        assert masks.before is not None
        assert (masks.before.seq, masks.before.before) == (1, None)


NOBODY = "tcp://127.0.0.1:9"


class Publisher:
    """Publishes masks of chosen epochs."""

    def __init__(self) -> None:
        self.sockets = MaskPublisher("tcp://127.0.0.1:*")

    def send(self, seq: int, epoch: int | None, camera: str = "cam0") -> None:
        self.sockets.send(replace(make_masks(seq, camera), epoch=epoch, node=f"node{epoch}"))


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    publisher = Publisher()
    yield publisher
    publisher.sockets.close()


def connect(publisher: Publisher, client: PerceptionClient) -> None:
    """Wait until the client gets masks of epoch 1."""
    wait_until(lambda: publisher.send(0, 1) or client.latest(20))
    while client.latest(100) is not None:
        pass


def latest(client: PerceptionClient) -> MaskFrame:
    masks = client.latest(5000)
    assert masks is not None
    return masks


def test_another_epoch_is_raised_once_before_its_masks(publisher: Publisher) -> None:
    with PerceptionClient(publisher.sockets.endpoint, NOBODY) as client:
        connect(publisher, client)
        publisher.send(1, 1)
        assert latest(client).epoch == 1
        publisher.send(2, 2)
        with refuses(NodeRestarted, field=("add", "objects")) as caught:
            latest(client)
        error = caught.value
        assert (error.camera, error.old_epoch, error.new_epoch, error.node) == ("cam0", 1, 2, "node2")
        assert (latest(client).seq, client.latest(50)) == (2, None)
        publisher.send(3, 2)
        assert latest(client).seq == 3


def test_after_the_error_the_newest_masks_come_and_cameras_are_apart(publisher: Publisher) -> None:
    with PerceptionClient(publisher.sockets.endpoint, NOBODY) as client:
        connect(publisher, client)
        publisher.send(0, 1, "left")
        assert latest(client).camera == "left"
        publisher.send(2, 2)
        with pytest.raises(NodeRestarted):
            latest(client)
        publisher.send(3, 2)
        publisher.send(9, 1, "left")
        seen: dict[str, list[int]] = {"cam0": [], "left": []}
        while not (seen["left"] and 3 in seen["cam0"]):
            masks = latest(client)
            seen[masks.camera].append(masks.seq)
        assert seen in ({"cam0": [3], "left": [9]}, {"cam0": [2, 3], "left": [9]})  # 2, if 3 was on its way
        publisher.send(10, 3, "left")
        with refuses(NodeRestarted, field=("camera", "left")):
            latest(client)


def test_lossless_delivery_loses_no_masks_by_the_error() -> None:
    with (
        MaskPublisher("tcp://127.0.0.1:*", "every") as publisher,
        PerceptionClient(publisher.endpoint, NOBODY, delivery="every") as client,
    ):
        for seq, epoch in enumerate((1, 2, 2, None)):
            publisher.send(replace(make_masks(seq), epoch=epoch))
        seen: list[int | str] = []
        while len(seen) < 6:
            try:
                seen.append(latest(client).seq)
            except NodeRestarted as error:
                seen.append(f"{error.old_epoch} {error.new_epoch}")
        assert seen == [0, "1 2", 1, 2, "2 None", 3]


def test_a_callback_is_called_instead_and_an_iterator_goes_on(publisher: Publisher) -> None:
    errors: list[NodeRestarted] = []
    with PerceptionClient(publisher.sockets.endpoint, NOBODY, on_restart=errors.append) as client:
        connect(publisher, client)
        publisher.send(1, 2)
        assert latest(client).seq == 1
        assert [error.new_epoch for error in errors] == [2]
    with PerceptionClient(publisher.sockets.endpoint, NOBODY) as client:
        connect(publisher, client)
        publisher.send(1, 2)
        masks = iter(client)
        with pytest.raises(NodeRestarted):
            next(masks)
        assert next(masks).seq == 1
        client.close()
        assert list(masks) == []


def test_the_known_cameras_are_bounded() -> None:
    known = KnownEpochs()
    for number in range(MAX_CAMERAS + 5):
        assert known.meet(f"camera{number}", 1) is None
    known_now = [number for number in range(MAX_CAMERAS + 5) if known.find(f"camera{number}")]
    assert known_now == list(range(5, MAX_CAMERAS + 5))
    assert known.find("camera4") is None
    assert known.find("camera5") == ("camera5", 1)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("sessions"))
    rig.camera()
    yield rig
    rig.close()


class Policy:
    """A client that holds the red mug by its id, and a node that is killed and started again."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.node = rig.node()
        self.client = rig.client()
        assert self.client.wait_for_camera() == "cam0"
        added = self.client.add_object(points=[(160, 120)], label="red mug")
        self.mug, self.epoch = added.id, added.epoch
        masks_where(self.client, lambda masks: masks.instances, "the mug")

    def restart_with_a_knife(self) -> None:
        """Kill the node. Another client adds an object to the new one, which gets the mug's id."""
        self.node.kill()
        self.node: Process = self.rig.node()
        with self.rig.client() as other:
            other.wait_for_camera()
            added = other.add_object(points=[(40, 40)], label="knife")
            assert added.id == self.mug
            assert added.epoch != self.epoch
            masks_where(other, lambda masks: masks.instances, "the knife")

    def close(self) -> None:
        self.client.close()
        self.node.kill()


@pytest.fixture
def policy(rig: Rig) -> Iterator[Policy]:
    policy = Policy(rig)
    yield policy
    policy.close()


def test_a_policy_learns_of_the_restart_before_it_sees_the_new_object(policy: Policy) -> None:
    policy.restart_with_a_knife()
    seen: list[MaskFrame] = []
    with pytest.raises(NodeRestarted) as caught:
        until(lambda: seen.append(latest(policy.client)), "the restart")
    assert all(masks.epoch == policy.epoch for masks in seen)
    assert {instance.label for masks in seen for instance in masks.instances} <= {"red mug"}
    masks = masks_where(policy.client, lambda masks: masks.instances, "the knife")
    assert masks.instances[0].label == "knife"
    assert (masks.epoch, masks.node) == (caught.value.new_epoch, caught.value.node)
    status = policy.client.status()
    assert (status["node"], status["cameras"]["cam0"]["epoch"]) == (masks.node, masks.epoch)
    (listed,) = policy.client.list_objects()
    assert (listed.label, listed.epoch) == ("knife", masks.epoch)


def test_an_id_of_the_earlier_session_is_refused(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with refuses(NodeRestarted, field=str(policy.epoch)) as caught:
        policy.client.refine_object(policy.mug, points=[(10, 10)])
    assert (caught.value.camera, caught.value.old_epoch) == ("cam0", policy.epoch)
    # the error has told the policy: from here on, ids are those of the new session
    (knife,) = policy.client.list_objects()
    assert knife.label == "knife"
    assert policy.client.add_object(points=[(80, 80)], label="red mug").id != knife.id


def test_no_request_takes_an_old_id_for_a_new_one(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.remove_object(policy.mug)
    with policy.rig.client() as other:
        assert [known.label for known in other.list_objects()] == ["knife"]


def test_objects_are_added_to_the_session_that_the_policy_knows(policy: Policy) -> None:
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.add_object(points=[(160, 120)])
    assert [known.label for known in policy.client.list_objects()] == ["knife"]
    policy.restart_with_a_knife()
    with pytest.raises(NodeRestarted):
        policy.client.list_objects()
    assert [known.label for known in policy.client.list_objects()] == ["knife"]


def test_masks_of_an_ended_epoch_are_not_returned(publisher: Publisher) -> None:
    """They waited in the client when the node refused the id of that epoch."""
    refused: list[dict[str, Any]] = []

    def refuse(request: Request) -> Reply:
        refused.append(request.args)
        return Reply.failed(request.id, NodeRestarted("ids of epoch 1 are void"))

    with (
        ControlServer("tcp://127.0.0.1:*", refuse) as control,
        PerceptionClient(publisher.sockets.endpoint, control.endpoint) as client,
    ):
        connect(publisher, client)
        publisher.send(5, 1)
        with refuses(NodeRestarted, field=("1", "void")):
            client.remove_object(1)
        assert refused == [{"id": 1, "camera": "cam0", "epoch": 1}]
        publisher.send(6, 1)
        assert client.latest(200) is None
        publisher.send(7, 2)
        assert latest(client).seq == 7


def test_an_object_of_several_cameras_needs_the_name_of_one(publisher: Publisher) -> None:
    with PerceptionClient(publisher.sockets.endpoint, NOBODY) as client:
        connect(publisher, client)
        publisher.send(0, 1, "left")
        assert latest(client).camera == "left"
        with refuses(RequestError, field="cam0"):
            client.refine_object(1, points=[(1, 1)])


def test_with_a_callback_objects_are_added_to_the_new_session(rig: Rig, tmp_path: Path) -> None:
    errors: list[NodeRestarted] = []
    node = rig.node()
    with PerceptionClient(rig.masks, rig.control, timeout_ms=10000, on_restart=errors.append) as client:
        client.wait_for_camera()
        before = client.add_object(points=[(160, 120)])
        node.kill()
        node = rig.node()
        with rig.client() as other:
            other.wait_for_camera()
        after = client.add_object(points=[(160, 120)])
        assert after.id == before.id == 1
        assert after.epoch != before.epoch
        assert [error.old_epoch for error in errors] == [before.epoch]
        masks_where(client, lambda masks: masks.epoch == after.epoch, "masks")
        assert len(errors) == 1
    node.kill()
