"""The node as its users meet it: camera, node, watcher and client are processes, joined by real sockets."""

from __future__ import annotations

import itertools
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from sam3_node.client import PerceptionClient
from sam3_node.errors import RequestError, UnknownFrameError, UnknownObjectError
from sam3_node.node.node import Node
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import ModelSettings, Settings, TrackerSettings, TransportSettings
from sam3_node.transport import ControlClient, FramePublisher, MaskSubscriber
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Request, pack_frame, pack_request, unpack_masks
from tests.support.node_rig import Process, Rig, ids, masks_where, until
from tests.support.repeats import repetitions

HOSTILE = repetitions(2_000, 10_000)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("rig"))
    yield rig
    rig.close()


@pytest.fixture(scope="module")
def node(rig: Rig) -> Process:
    """A node that serves a camera which draws a scene."""
    node = rig.node()
    rig.camera()
    return node


@pytest.fixture
def client(rig: Rig, node: Process) -> Iterator[PerceptionClient]:
    """A client of the node, which tracks nothing yet."""
    with rig.client() as client:
        client.resume()
        masks_where(client, lambda masks: masks.camera == "cam0", "masks of the camera")
        client.reset()
        yield client


def picture(seq: int, camera: str = "cam1", width: int = 64, height: int = 48) -> Frame:
    colour = np.full((height, width, 3), seq % 256, np.uint8)
    return Frame(camera, seq, time.time_ns(), width, height, "bgr8", colour.data)


def has_ids(camera: str, *wanted: int):
    return lambda masks: masks.camera == camera and ids(masks) == list(wanted)


def test_masks_flow_with_times_and_identity(client: PerceptionClient) -> None:
    first = masks_where(client, has_ids("cam0"), "masks")
    later = masks_where(client, lambda masks: masks.seq > first.seq, "later masks")
    assert (later.width, later.height, later.model) == (320, 240, "tiny")
    assert later.capture_ns <= later.received_ns <= later.published_ns
    assert list(later.stages_us) == ["decode", "preprocess", "encode", "track", "masks", "pack"]
    assert later.stages_us["pack"] > 0


def test_objects_are_added_refined_and_removed_live(client: PerceptionClient) -> None:
    point = client.add_object(points=[(160, 120)], label="red mug").id
    seen = masks_where(client, bool, "masks").seq
    boxed = client.add_object(box=[20, 20, 120, 100], seq=seen)
    box = boxed.id
    assert boxed.camera == "cam0"
    assert boxed.segmentation is not None
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
    assert {(known.camera, known.id) for known in client.list_objects()} == {
        ("cam0", number) for number in (point, box, mask)
    }
    client.remove_object(box)
    aged = masks_where(client, lambda masks: set(ids(masks)) == {point, mask}, "two left")
    masks_where(client, lambda masks: masks.instances[0].age > aged.instances[0].age, "tracking goes on")
    client.reset()
    masks_where(client, has_ids("cam0"), "none left")
    assert client.add_object(points=[(5, 5)]).id == mask + 1


def test_segment_on_a_frame_just_seen(client: PerceptionClient) -> None:
    seen = masks_where(client, bool, "masks")
    found = client.segment(box=[20, 20, 120, 100], seq=seen.seq)
    assert found.seq == seen.seq
    assert found.mask.size == (240, 320)
    assert client.segment(points=[(160, 120)]).seq >= seen.seq
    with pytest.raises(UnknownFrameError, match="expected one of the cached seq"):
        client.segment(box=[20, 20, 120, 100], seq=seen.seq + 100_000)


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
    with ControlClient(rig.control, timeout_ms=10000) as asker, pytest.raises(RequestError) as caught:
        asker.call(op, **args)
    assert said in str(caught.value)


def test_removing_what_is_not_there(client: PerceptionClient) -> None:
    with pytest.raises(UnknownObjectError, match="no object 999"):
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
        with pytest.raises(RequestError, match="camera: expected a name"):
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
    broken = Frame("odd", 0, time.time_ns(), 64, 48, "jpeg", jpeg_with_broken_data(64, 48))
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


def jpeg_with_broken_data(width: int, height: int) -> bytes:
    """Return a header that declares the size, followed by nothing that can be decoded."""
    size = bytes([height >> 8, height & 255, width >> 8, width & 255])
    return b"\xff\xd8\xff\xc0\x00\x11\x08" + size + b"\x03\x01\x22\x00\x02\x11\x01\x03\x11\x01" + b"\xff\xd9"


def mutations(whole: list[bytes], count: int, seed: int) -> Iterator[list[bytes]]:
    """Random bytes, and messages with bytes changed, cut, doubled or left out."""
    chance = random.Random(seed)
    for _ in range(count):
        parts = list(whole)
        index = chance.randrange(len(parts))
        part = bytearray(parts[index])
        kind = chance.randrange(5)
        if kind == 0:
            parts = [chance.randbytes(chance.randrange(200)) for _ in range(chance.randrange(1, 5))]
        elif kind == 1:
            parts[index] = bytes(part[: chance.randrange(len(part) + 1)])
        elif kind == 2:
            del parts[index]
            parts = parts or [b""]
        elif kind == 3:
            parts.insert(index, bytes(part))
        else:
            for _ in range(chance.randrange(1, 6)):
                part[chance.randrange(len(part))] = chance.randrange(256)
            parts[index] = bytes(part)
        yield parts


def test_hostile_frames_do_not_stop_the_tracking(rig: Rig, client: PerceptionClient) -> None:
    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    before = client.status()["frames_rejected"]
    whole = [bytes(part) for part in pack_frame(picture(1, "odd", 16, 12))]
    with zmq.Context() as context, context.socket(zmq.PUB) as camera:
        camera.set_hwm(0)
        camera.linger = 0
        camera.bind(rig.frames[1])
        until(lambda: camera.send(b"") or client.status()["frames_rejected"] > before, "the node listens")
        for parts in mutations(whole, HOSTILE, seed=1):
            camera.send_multipart(parts)
        end = [bytes(part) for part in pack_frame(picture(2, "odd", 16, 14))]
        last = masks_where(
            client,
            lambda masks: (masks.camera == "odd" and masks.height == 14) or camera.send_multipart(end),
            "a good frame after the bad ones",
        )
    assert last.width == 16
    assert client.status()["frames_rejected"] > before + HOSTILE / 2
    aged = masks_where(client, has_ids("cam0", tracked), "tracking")
    masks_where(
        client, lambda masks: has_ids("cam0", tracked)(masks) and masks.seq > aged.seq, "tracking goes on"
    )


def test_hostile_requests_are_each_answered(rig: Rig, client: PerceptionClient) -> None:
    tracked = client.add_object(points=[(160, 120)], camera="cam0").id
    box = {"box": [5, 5, 50, 50], "camera": "cam0"}
    wholes = [
        pack_request(Request(7, op, args))
        for op, args in (("status", {}), ("segment", box), ("list_objects", {}))
    ]
    answered = sent = 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger = 0
        asker.connect(rig.control)
        requests = [iter(mutations([whole], HOSTILE // 2, seed)) for seed, whole in enumerate(wholes)]
        while sent < HOSTILE:
            batch = [next(requests[number % 3])[-1] or b"?" for number in range(30)]
            for request in batch:
                asker.send(request)
            sent += len(batch)
            for _ in batch:
                assert asker.poll(20000), "a request was not answered"
                asker.recv()
                answered += 1
    assert answered == sent
    aged = masks_where(client, has_ids("cam0", tracked), "tracking")
    masks_where(
        client, lambda masks: has_ids("cam0", tracked)(masks) and masks.seq > aged.seq, "tracking goes on"
    )


def test_each_process_may_be_killed_and_started_again(
    rig: Rig, node: Process, client: PerceptionClient
) -> None:
    camera = rig.processes[1]
    watcher = rig.start("watch")

    def shown(process: Process) -> str:
        while not process.lines.empty():
            process.lines.get()
        return until(
            lambda: next((line for line in [process.next_line()] if "cam0 #" in line), None), "a table"
        )

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
    shown(watcher)
    node.kill()
    again = rig.node()
    fresh_masks()
    shown(watcher)
    assert client.status()["cameras"]["cam0"]["objects"] == 0
    assert_ends_with_the_frame_in_hand(rig, again)
    assert watcher.terminate() == 0


def assert_ends_with_the_frame_in_hand(rig: Rig, node: Process) -> None:
    """After SIGTERM the frame that was stepped last has been published too."""
    with zmq.Context() as context, context.socket(zmq.SUB) as masks:
        masks.subscribe(b"")
        masks.connect(rig.masks)
        assert masks.poll(10000)
        assert node.terminate() == 0
        last = -1
        while masks.poll(500):
            last = unpack_masks(masks.recv_multipart()).seq
    stepped = re.findall(r"camera cam0: .*'last_seq': (\d+)", node.log.read_text())
    assert last == int(stepped[-1])


def test_lossless_delivery_keeps_every_frame_and_still_ends(rig: Rig, tmp_path: Path) -> None:
    frames, masks_at, count = f"ipc://{tmp_path}/f", f"ipc://{tmp_path}/m", 40
    with FramePublisher(frames, "every") as camera:
        node = rig.node(
            TRANSPORT__FRAMES=frames,
            TRANSPORT__MASKS=masks_at,
            TRANSPORT__CONTROL=f"ipc://{tmp_path}/c",
            TRANSPORT__DELIVERY="every",
        )
        with MaskSubscriber(masks_at, "every") as masks:
            found: list[MaskFrame | None] = []
            for seq in range(count):
                while not camera.send(picture(seq), timeout_ms=100):
                    found.append(masks.take(timeout_ms=100))
            while (receives_masks := masks.take(timeout_ms=1500)) is not None:
                found.append(receives_masks)
        got = [receives_masks for receives_masks in found if receives_masks is not None]
        assert [receives_masks.seq for receives_masks in got] == list(range(count))
        assert not any(receives_masks.skipped for receives_masks in got)
        camera.send(picture(count), timeout_ms=1000)
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(timeout=120) == 0


def test_lossless_delivery_ends_in_time_though_its_reader_hangs(rig: Rig, tmp_path: Path) -> None:
    frames, masks_at, control = (f"ipc://{tmp_path}/{name}" for name in "fmc")
    with (
        zmq.Context() as context,
        context.socket(zmq.PULL) as reader,
        FramePublisher(frames, "every") as camera,
    ):
        reader.linger, reader.rcvhwm = 0, 1
        reader.connect(masks_at)
        node = rig.node(
            TRANSPORT__FRAMES=frames,
            TRANSPORT__MASKS=masks_at,
            TRANSPORT__CONTROL=control,
            TRANSPORT__DELIVERY="every",
        )
        assert camera.send(picture(0), timeout_ms=10_000)
        with ControlClient(control, timeout_ms=10_000) as asker:
            until(lambda: asker.call("status")["cameras"], "the camera is served")
            for _ in range(16):  # large messages fill what the operating system holds back
                asker.call("add_object", points=[[32, 24]], label="\u20ac" * 256)
        seqs = itertools.count(1)
        while camera.send(picture(next(seqs)), timeout_ms=1000):
            pass
        begin_s = time.monotonic()
        assert node.terminate() == 0
        assert time.monotonic() - begin_s < 2.5  # not the 5 s of a publisher that waits for its reader
        camera.close(0)


@pytest.fixture
def near(rig: Rig, tmp_path: Path) -> Iterator[Node]:
    """Start a node for one camera in this process, so that tests can inject faults."""
    transport = TransportSettings(
        frames=(f"ipc://{tmp_path}/f",), masks=f"ipc://{tmp_path}/m", control=f"ipc://{tmp_path}/c"
    )
    model = ModelSettings(name=str(rig.folder / "tiny"), device="cpu")
    settings = Settings(transport=transport, model=model, tracker=TrackerSettings(max_cameras=1))
    stop = threading.Event()
    with Node(settings) as node:
        loop = threading.Thread(target=node.main_loop, args=(stop,))
        loop.start()
        yield node
        stop.set()
        loop.join(timeout=120)
        assert not loop.is_alive()


def test_an_unforeseen_failure_is_counted_and_logged(
    near: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    endpoints = f"ipc://{tmp_path}/m", f"ipc://{tmp_path}/c"
    with FramePublisher(f"ipc://{tmp_path}/f") as camera, PerceptionClient(*endpoints) as client:
        numbers = itertools.count()

        def next_masks() -> MaskFrame | None:
            camera.send(picture(next(numbers)))
            return client.latest(timeout_ms=50)

        until(next_masks, "masks")
        with monkeypatch.context() as fault:
            fault.setattr(Pipeline, "step", fail)
            until(lambda: next_masks() or client.status()["cameras"]["cam1"]["failed"], "a failure")
        until(next_masks, "masks after it")
        assert "RuntimeError: out of memory" in client.status()["cameras"]["cam1"]["last_error"]
    assert "Traceback" in caplog.text


def test_a_silent_camera_gives_its_place_to_another(
    near: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FramePublisher(f"ipc://{tmp_path}/f") as camera, MaskSubscriber(f"ipc://{tmp_path}/m") as masks:

        def receives_masks(name: str, also: str = "") -> bool:
            for seq, sender in enumerate(filter(None, (name, also))):
                camera.send(picture(seq, sender))
            found = masks.take(timeout_ms=50)
            return found is not None and found.camera == name

        until(lambda: receives_masks("first"), "the first camera")
        until(
            lambda: receives_masks("first", also="second") and near.status()["frames_rejected"],
            "a refused camera",
        )
        assert list(near.perception.pipelines) == ["first"]
        monkeypatch.setattr("sam3_node.node.node.CAMERA_IDLE_S", 0.05)
        until(lambda: receives_masks("second"), "the second camera")
        assert list(near.perception.pipelines) == ["second"]
