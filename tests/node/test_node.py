"""The node as its users meet it: camera, node, watcher and client are processes, joined by real sockets."""

import ctypes
import itertools
import operator
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq

from sam3_node.client import PerceptionClient, request_id
from sam3_node.errors import DeviceError, NodeRestarted, RequestError, UnknownFrameError, UnknownObjectError
from sam3_node.node import node
from sam3_node.perception.pipeline import Pipeline
from sam3_node.schema.operations import OPERATIONS
from sam3_node.settings import TrackerSettings
from sam3_node.transport import ControlClient, FramePublisher, MaskSubscriber
from sam3_node.transport.limits import rss_bytes
from sam3_node.transport.tap import StreamTap
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import (
    EVENTS_TOPIC,
    Request,
    encode_image,
    pack_request,
    unpack_event,
    unpack_masks,
    unpack_reply,
)
from tests.support.near_node import NearNode
from tests.support.node_rig import Process, Rig, has_ids, ids, masks_where, picture, until
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import refuses
from tests.support.transport_peer import open_peer


def test_masks_flow_with_times_and_identity(client: PerceptionClient) -> None:
    first = masks_where(client, has_ids("cam0"), "masks")
    later = masks_where(client, lambda masks: masks.seq > first.seq, "later masks")
    assert (later.width, later.height, later.model) == (320, 240, "tiny")
    assert later.capture_ns <= later.received_ns <= later.published_ns
    assert list(later.stages_us) == ["decode", "preprocess", "encode", "track", "masks", "remember", "pack"]
    assert later.stages_us["pack"] > 0


def test_objects_are_added_refined_and_removed_live(client: PerceptionClient) -> None:
    point = client.add_object(points=[(160, 120)], label="red mug").id
    seen = masks_where(client, bool, "masks").seq
    boxed = client.add_object(box=[20, 20, 120, 100], seq=seen)
    box = boxed.id
    assert boxed.camera == "cam0"
    assert boxed.segmentation.seq == seen
    assert boxed.segmentation.mask.size == (240, 320)
    full = np.zeros((240, 320), dtype=np.bool_)
    full[100:180, 200:280] = True
    mask = client.add_object(mask=full).id
    masks = masks_where(client, lambda masks: set(ids(masks)) == {point, box, mask}, "all three")
    assert {instance.label for instance in masks.instances} == {"red mug", "object"}
    refined = client.refine_object(point, points=[(10, 10)], labels=[0])
    assert refined.seq >= masks.seq
    assert refined.mask.size == (240, 320)
    known = {(known.camera, known.id) for known in client.list_objects()}
    assert known == {("cam0", number) for number in (point, box, mask)}
    client.rename_object(mask, " blue  box ")
    masks_where(client, lambda masks: "blue box" in {item.label for item in masks.instances}, "the new label")
    client.remove_object(box)
    aged = masks_where(client, lambda masks: set(ids(masks)) == {point, mask}, "two left")
    masks_where(client, lambda masks: masks.instances[0].age > aged.instances[0].age, "tracking goes on")
    client.reset()
    masks_where(client, has_ids("cam0"), "none left")
    assert client.add_object(points=[(5, 5)]).id == mask + 1


def test_a_request_is_followed_from_client_to_log_and_event(
    rig: Rig, node: Process, client: PerceptionClient
) -> None:
    with StreamTap([rig.frames[1]], rig.masks, [], 1 << 26) as tap:
        seen = masks_where(client, bool, "masks").seq
        until(lambda: tap.take(100), "the tap is connected")
        masks_where(client, lambda masks: masks.seq > seen + 2, "later masks")
        with request_id("shelf-3"):
            added = client.add_object(points=[(160, 120)], seq=seen).id
            with pytest.raises(UnknownObjectError) as refused:
                client.remove_object(added + 1)
        events = []

        def has_caught_up() -> bool:
            message = tap.take(100)
            if message is not None and message.parts[0] == EVENTS_TOPIC:
                events.append(unpack_event(message.parts))
            return "caught_up" in [event.op for event in events]

        until(has_caught_up, "the object has caught up")
        assert {event.op: event.request_id for event in events} == dict.fromkeys(
            ("add_object", "caught_up"), "shelf-3"
        )
    assert refused.value.request_id == "shelf-3"
    until(lambda: node.log.read_text().count("[request shelf-3]") == 3, "the lines of the log")
    lines = [line for line in node.log.read_text().splitlines() if line.endswith("[request shelf-3]")]
    told = (
        f"event {events[0].n}: add_object",
        "remove_object was refused: unknown_object",
        f"event {events[-1].n}: ",
    )
    assert [sum(text in line for line in lines) for text in told] + [len(lines)] == [1, 1, 1, 3]


def test_segment_on_a_frame_just_seen(client: PerceptionClient) -> None:
    seen = masks_where(client, bool, "masks")
    found = client.segment(box=[20, 20, 120, 100], seq=seen.seq)
    assert found.seq == seen.seq
    assert found.mask.size == (240, 320)
    assert client.segment(points=[(160, 120)]).seq >= seen.seq
    with refuses(UnknownFrameError, field=("cached", "seq")):
        client.segment(box=[20, 20, 120, 100], seq=seen.seq + 100_000)


def test_a_mouse_that_moves_gets_the_newest_mask_and_an_answer_to_every_request(
    rig: Rig, client: PerceptionClient
) -> None:
    args = {"points": [[160, 120]], "camera": "cam0"}
    client.segment(**args)
    codes = []
    with open_peer(zmq.DEALER, rig.control) as mouse:
        for number in range(1, 61):
            mouse.send(pack_request(Request(number, "segment", args)))
        while len(codes) < 60:
            assert mouse.poll(PATIENCE_MS)
            reply = unpack_reply(mouse.recv())
            codes.append((reply.id, reply.error.code if reply.error else "ok"))
    assert sorted(number for number, _ in codes) == list(range(1, 61))
    assert codes[-1] == (60, "ok")
    assert {code for _, code in codes} == {"ok", "superseded"}


def test_everything_on_a_frame_just_seen(client: PerceptionClient) -> None:
    seen = masks_where(client, bool, "masks")
    client.pause()  # the frame stays cached
    found = client.segment_everything(grid=3, min_iou=0, min_stability=0, max_overlap=1, most=5, seq=seen.seq)
    assert 1 <= len(found) <= 5
    assert all(item.seq == seen.seq and item.mask.size == (240, 320) and item.mask.area for item in found)
    assert [item.score for item in found] == sorted((item.score for item in found), reverse=True)
    nothing = client.segment_everything(grid=1, min_iou=1)
    assert nothing == []
    assert "0 had a predicted IoU above min_iou 1" in nothing.note
    assert not found.note
    followed = client.add_object(mask=found[0].mask, seq=seen.seq).id
    client.resume()
    masks_where(client, lambda masks: ids(masks) == [followed], "the mask that was found")
    with refuses(RequestError, field=("grid", "1", "32", "99")):
        client.segment_everything(grid=99)


def test_pausing_stops_the_frames_and_nothing_else(client: PerceptionClient) -> None:
    client.pause()
    seen = client.segment(points=[(160, 120)]).seq
    while client.latest(timeout_ms=500) is not None:
        pass
    status = client.status()
    assert status["paused"]
    assert status["cameras"]["cam0"]["last_seq"] == seen
    client.add_object(points=[(160, 120)])
    client.resume()
    masks_where(client, lambda masks: len(masks.instances) == 1, "masks after the pause")


@pytest.mark.parametrize(
    ("op", "args", "said"),
    [
        ("fly", {}, "unknown operation 'fly'"),
        ("status", {"loud": True}, "unknown argument 'loud'; expected none"),
        ("add_object", {}, "expected points, a box or a mask"),
        ("add_object", {"points": "here"}, "points: expected"),
        ("add_object", {"points": [[5, 5]], "label": "x" * 1000}, "label: expected at most 256"),
        ("add_object", {"points": [[5, 5]], "seq": -1}, "'seq'"),
        ("add_object", {"mask": {"encoding": "bits+zstd"}}, "mask: expected"),
        ("refine_object", {"points": [[5, 5]]}, "'id'"),
        ("segment", {"box": [0, 0, 1e9, float("nan")]}, "box: expected"),
        ("segment", {"points": [[5, 5]], "camera": "cam9"}, "no camera 'cam9'"),
        ("set_prompts", {"prompts": ["red mug"]}, "no detector is configured"),
        ("set_prompts", {"prompts": 7}, "'prompts'"),
    ],
)
def test_requests_that_are_refused(
    rig: Rig, client: PerceptionClient, op: str, args: dict, said: str
) -> None:
    with ControlClient(rig.control, timeout_ms=PATIENCE_MS) as asker, pytest.raises(RequestError) as caught:
        asker.call(op, **args)
    assert said in str(caught.value)


def test_removing_what_is_not_there(client: PerceptionClient) -> None:
    with refuses(UnknownObjectError, field=("999", "object")):
        client.remove_object(999)


def test_status_tells_of_each_camera(client: PerceptionClient) -> None:
    client.add_object(points=[(160, 120)])
    status = client.status()
    camera = status["cameras"]["cam0"]
    assert camera["received"] == camera["stepped"] + camera["skipped"] + camera["failed"]
    assert camera["objects"] == 1
    assert camera["age_p99_ms"] >= camera["age_p50_ms"] > 0
    assert status["rss_bytes"] > 1e6
    assert (status["model"], status["device"]) == ("tiny", "cpu")


is_doubtful = operator.attrgetter("doubtful")


def test_a_client_that_wants_sure_masks_gets_no_doubtful_ones(rig: Rig, client: PerceptionClient) -> None:
    """Random weights lose the object at once, so its masks become doubtful."""
    full = np.zeros((240, 320), dtype=np.bool_)
    full[100:180, 200:280] = True
    object_id = client.add_object(mask=full).id
    (instance,) = masks_where(client, lambda masks: any(map(is_doubtful, masks.instances)), "doubt").instances
    assert instance.state == "tracked"
    assert 0 <= instance.confidence < TrackerSettings().min_confidence
    plain: dict[int, MaskFrame] = {}
    with PerceptionClient(rig.masks, rig.control, sure_only=True) as sure_client:

        def filtered() -> bool:
            masks = client.latest(timeout_ms=200)
            if masks is not None:
                plain[masks.seq] = masks
            masks = sure_client.latest(timeout_ms=200)
            if masks is None:
                return False
            assert not any(map(is_doubtful, masks.instances))
            return masks.seq in plain and ids(plain[masks.seq]) == [object_id] != ids(masks)

        until(filtered, "the same frame with and without its doubtful mask")


def test_two_cameras_are_served_apart(rig: Rig, client: PerceptionClient) -> None:
    with FramePublisher(rig.frames[1]) as camera:
        seqs = iter(range(10**6))

        def masks_of_both(accept) -> MaskFrame:
            def find() -> MaskFrame | None:
                camera.send(picture(next(seqs)))
                masks = client.latest(timeout_ms=100)
                return masks if masks is not None and accept(masks) else None

            return until(find, "masks")

        masks_of_both(has_ids("cam1"))
        with refuses(RequestError, field="camera"):
            client.add_object(points=[(5, 5)])
        first = client.add_object(points=[(5, 5)], camera="cam1").id
        masks_of_both(has_ids("cam1", first))
        masks_of_both(has_ids("cam0"))
        other = client.add_object(points=[(160, 120)], camera="cam0").id
        masks_of_both(has_ids("cam0", other))
        masks_of_both(has_ids("cam1", first))
        client.remove_object(first, camera="cam1")


def test_the_newest_frame_wins_and_the_skipped_are_counted(rig: Rig, node: Process) -> None:
    received: list[MaskFrame] = []
    with FramePublisher(rig.frames[1]) as camera, MaskSubscriber(rig.masks, cameras=["fast"]) as masks:
        numbers = itertools.count()

        def send_and_receive() -> bool:
            """A frame every two milliseconds, far faster than the node steps them."""
            camera.send(picture(next(numbers), "fast", 640, 480))
            found = masks.take(timeout_ms=2)
            received.extend([found] if found else [])
            return len(received) > 30

        until(send_and_receive, "the fast camera's masks")
        time.sleep(0.1)
        last = next(numbers)
        camera.send(picture(last, "fast", 640, 480))
        until(lambda: (found := masks.take(timeout_ms=100)) and found.seq == last, "the newest frame")
    assert sum(found.skipped for found in received) > 0
    assert all(later.seq > earlier.seq for earlier, later in itertools.pairwise(received))


def test_a_bad_image_is_counted_and_the_size_may_change(rig: Rig, client: PerceptionClient) -> None:
    whole = bytes(encode_image(np.zeros((48, 64, 3), np.uint8), "jpeg"))
    header = whole[: whole.index(b"\xff\xda")] + b"\xff\xd9"  # without any pixels
    broken = Frame("odd", 0, time.time_ns(), 64, 48, "jpeg", header)
    with FramePublisher(rig.frames[1]) as camera, MaskSubscriber(rig.masks, cameras=["odd"]) as masks:
        sizes = iter([(64, 48), (48, 64), (320, 240)] * 1000)

        def find(wanted: set[tuple[int, int]]) -> bool:
            width, height = next(sizes)
            camera.send(broken)
            camera.send(picture(1, "odd", width, height))
            found = masks.take(timeout_ms=200)
            wanted -= {(found.width, found.height)} if found else set()
            return not wanted

        wanted = {(64, 48), (48, 64), (320, 240)}
        until(lambda: find(wanted), "masks of each size")
        camera.send(broken)

        def failures() -> int:
            camera.send(broken)
            time.sleep(0.05)
            status = client.status()
            return int(status["cameras"]["odd"]["failed"]) + int(status["frames_rejected"])

        until(failures, "the broken frame is counted")


def test_each_process_may_be_killed_and_started_again(
    rig: Rig, node: Process, client: PerceptionClient
) -> None:
    camera = rig.processes[1]
    watcher = rig.start("watch")

    def fresh_masks() -> None:
        while client.latest(timeout_ms=0) is not None:
            pass
        masks_where(client, lambda masks: masks.camera == "cam0", "masks")

    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    camera.kill()
    rig.camera()
    fresh_masks()
    assert tracked in [known.id for known in client.list_objects(camera="cam0")]
    watcher.kill()
    watcher = rig.start("watch")
    watcher.new_line("cam0 #")
    node.kill()
    again = rig.node()
    with refuses(NodeRestarted, field="cam0"):
        fresh_masks()
    fresh_masks()
    watcher.new_line("cam0 #")
    assert client.status()["cameras"]["cam0"]["objects"] == 0
    assert_ends_with_the_frame_in_hand(rig, again)
    assert watcher.terminate() == 0


def assert_ends_with_the_frame_in_hand(rig: Rig, node: Process) -> None:
    """After SIGTERM the frame that was stepped last has been published too."""
    with open_peer(zmq.SUB, rig.masks) as masks:
        masks.subscribe(b"masks/")
        assert masks.poll(PATIENCE_MS)
        assert node.terminate() == 0
        last = -1
        while masks.poll(500):
            last = unpack_masks(masks.recv_multipart()).seq
    stepped = re.findall(r"camera cam0: .*last_seq (\d+)", node.log.read_text())
    assert last == int(stepped[-1])


CHUNK = 100_000
COUNT = 400


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
def test_free_memory_between_chunks_in_use_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmer = node.HeapTrimmer()
    chunks = [ctypes.create_string_buffer(b"x" * (CHUNK - 1)) for _ in range(COUNT)]
    kept = chunks[::20]
    chunks.clear()
    before = rss_bytes()
    trimmer.tick()
    assert before - rss_bytes() < CHUNK * COUNT // 2  # it is not time yet
    later_s = time.monotonic() + node.TRIM_EVERY_S
    monkeypatch.setattr(node.time, "monotonic", lambda: later_s)
    trimmer.tick()
    assert before - rss_bytes() > CHUNK * COUNT // 2
    assert len(kept) == COUNT // 20


def endpoints(folder: Path) -> list[str]:
    return [f"ipc://{folder}/{name}" for name in "fmc"]


def lossless_node(rig: Rig, folder: Path) -> Process:
    names = ("TRANSPORT__FRAMES", "TRANSPORT__MASKS", "TRANSPORT__CONTROL")
    return rig.node(**dict(zip(names, endpoints(folder), strict=True)), TRANSPORT__DELIVERY="every")


def test_lossless_delivery_keeps_every_frame_and_still_ends(rig: Rig, tmp_path: Path) -> None:
    (frames, masks_at, _) = endpoints(tmp_path)
    count = 40
    with FramePublisher(frames, "every") as camera:
        node = lossless_node(rig, tmp_path)
        with MaskSubscriber(masks_at, "every") as masks:
            found: list[MaskFrame | None] = []
            for seq in range(count):
                while not camera.send(picture(seq), timeout_ms=100):
                    found.append(masks.take(timeout_ms=100))
            found += iter(lambda: masks.take(timeout_ms=1500), None)
        got = [item for item in found if item is not None]
        assert [(item.seq, item.skipped) for item in got] == [(seq, 0) for seq in range(count)]
        camera.send(picture(count), timeout_ms=1000)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(timeout=PATIENCE_S) == 0


def test_lossless_delivery_ends_in_time_though_its_reader_hangs(rig: Rig, tmp_path: Path) -> None:
    frames, masks_at, control = endpoints(tmp_path)
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as reader,
        FramePublisher(frames, "every") as camera,
    ):
        reader.linger = 0
        reader.rcvhwm = 1
        reader.connect(masks_at)
        node = lossless_node(rig, tmp_path)
        assert camera.send(picture(0), timeout_ms=PATIENCE_MS)
        with ControlClient(control, timeout_ms=PATIENCE_MS) as asker:
            until(lambda: asker.call("status")["cameras"], "the camera is served")
            for _ in range(16):  # large messages fill what the operating system holds back
                asker.call("add_object", points=[[32, 24]], label="\u20ac" * 256)
        seqs = itertools.count(1)
        # one second without space may also be a slow step of a busy machine
        while any(camera.send(picture(seq), timeout_ms=1000) for seq in itertools.repeat(next(seqs), 3)):
            pass
        assert node.terminate() == 0
        # libzmq would wait for the reader without end; what it has not taken by then is lost
        assert "dropped: no subscriber receives them" in node.log.read_text()
        camera.close(0)


@pytest.fixture
def near(rig: Rig, tmp_path: Path) -> Iterator[NearNode]:
    """Start a node for one camera in this process, so that tests can inject faults."""
    with NearNode(tmp_path, rig.folder / "tiny", tracker=TrackerSettings(max_cameras=1)) as near:
        yield near


def test_an_unforeseen_failure_is_counted_and_logged(
    near: NearNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    near.send()
    with monkeypatch.context() as fault:
        fault.setattr(Pipeline, "step", fail)
        until(lambda: near.next_masks() or near.status()["cameras"]["cam1"]["failed"], "a failure")
    near.send()
    assert "RuntimeError: out of memory" in near.status()["cameras"]["cam1"]["last_error"]
    assert "Traceback" in caplog.text


def fail_on_the_device(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")


@pytest.mark.parametrize("failing", ["step", "add"])
def test_a_lost_gpu_ends_the_node_with_the_reason(
    near: NearNode, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """No later frame could succeed, and a supervisor starts processes again that end with an error."""
    near.send()
    monkeypatch.setattr(Pipeline, failing, fail_on_the_device)
    if failing == "add":
        with refuses(DeviceError, field=("memory", "access")):
            near.client.call("add_object", points=[(5, 5)])
    until(lambda: (near.next_masks(), not near.loop.is_alive())[1], "the end")
    assert re.search("GPU has failed.*AcceleratorError: CUDA error: an illegal.*;", str(near.error))


def test_a_silent_camera_gives_its_place_to_another(near: NearNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def receives_masks(name: str, also: str = "") -> bool:
        for seq, sender in enumerate(filter(None, (name, also))):
            near.camera.send(picture(seq, sender))
        masks = near.masks.take(timeout_ms=50)
        return masks is not None and masks.camera == name

    served = near.node.perception.pipelines
    until(lambda: receives_masks("first"), "the first camera")
    until(lambda: receives_masks("first", "second") and near.status()["frames_rejected"], "a refused camera")
    assert list(served) == ["first"]
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.05)
    until(lambda: receives_masks("second"), "the second camera")
    assert list(served) == ["second"]


def test_every_operation_that_users_need_has_a_method_of_the_client() -> None:
    internal = {"add_like", "describe", "pin_frame", "read_snapshot", "hand_over", "confirm_hand_over"}
    assert all(hasattr(PerceptionClient, op) for op in OPERATIONS.keys() - internal)
