"""Old is old: the node skips frames and withholds masks that are too old, and says how old a prompted frame is."""

import itertools
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from sam3_node.client import PerceptionClient
from sam3_node.errors import RequestError, UnknownFrameError
from sam3_node.geometry import mask_iou as iou
from sam3_node.node.cameras import AgeLimits
from sam3_node.transport import FramePublisher, ReceivedFrame
from sam3_node.types import CAMERA_SILENT_S, Frame, Instance, Mask, MaskFrame
from tests.support.node_rig import Process, Rig, ids, masks_where, picture, until
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.tabletop import cut, true_instance, truth

S = 1_000_000_000
MAX_AGE_S = 0.5
HANG_S = 2.0
NUMBERS = itertools.count()


ENVIRONMENT = {"SAM3_TRACKER__MAX_AGE_MS": str(MAX_AGE_S * 1000)}


@pytest.fixture(scope="module")
def node(rig: Rig) -> Process:
    return rig.node()


@pytest.fixture
def client(rig: Rig, node: Process) -> Iterator[PerceptionClient]:
    with rig.client() as client:
        yield client


class Camera:
    """Publishes frames as the camera `name`."""

    def __init__(self, publisher: FramePublisher, client: PerceptionClient, name: str) -> None:
        self.publisher = publisher
        self.client = client
        self.name = name
        self.seq = 0

    def send(self, **changes: Any) -> Frame:
        frame = replace(picture(self.seq, self.name), **changes)
        self.seq += 1
        self.publisher.send(frame)
        return frame

    def send_until_masks(self) -> MaskFrame:
        """Send good frames until masks of one of them come."""
        first = self.seq

        def find() -> MaskFrame | None:
            self.send()
            masks = self.client.latest(timeout_ms=100)
            return masks if masks and masks.camera == self.name and masks.seq >= first else None

        return until(find, "masks of a good frame")

    def status(self) -> dict[str, Any]:
        return self.client.status()["cameras"].get(self.name, {})


@pytest.fixture
def camera(rig: Rig, client: PerceptionClient) -> Iterator[Camera]:
    """A camera with a name of its own, served already."""
    with FramePublisher(rig.frames[0]) as publisher:
        camera = Camera(publisher, client, f"c{next(NUMBERS)}")
        camera.send_until_masks()
        while client.latest(timeout_ms=100) is not None:
            pass
        yield camera


@pytest.mark.parametrize(
    ("shift_s", "count", "said"),
    [
        (-10, "too_old", "10.* s old, expected at most 500 ms"),
        (5, "clock_ahead", "its clock is .* s ahead; sync"),
    ],
)
def test_frames_of_another_time_are_skipped_and_counted(
    camera: Camera, node: Process, shift_s: int, count: str, said: str
) -> None:
    before = camera.status()
    first = camera.seq
    for _ in range(3):
        camera.send(capture_ns=time.time_ns() + shift_s * S)
        until(lambda: camera.status()[count] == before[count] + camera.seq - first, count)
    status = camera.status()
    assert status["skipped"] == before["skipped"] + 3
    assert status["stepped"] == before["stepped"]
    assert camera.client.latest(timeout_ms=0) is None
    assert re.search(said, status["last_error"])
    masks = camera.send_until_masks()

    def count_settled() -> dict[str, Any] | None:
        found = camera.status()
        return found if found["received"] == found["stepped"] + found["skipped"] + found["failed"] else None

    after = until(count_settled, "every frame is counted")
    assert after[count] == status[count]
    # on a busy machine, masks of a later frame came in time
    assert masks.skipped == 3 or masks.seq > first + 3
    assert re.search(f"camera {camera.name}: .*{said}", node.log.read_text())


def test_another_clock_counts_from_the_arrival(camera: Camera) -> None:
    for clock, capture_ns in (("monotonic", time.time_ns() + 1000 * S), ("device", 5)):
        sent = camera.send(clock=clock, capture_ns=capture_ns)
        masks = masks_where(camera.client, lambda masks: masks.camera == camera.name, "masks")
        assert (masks.seq, masks.capture_ns, masks.clock) == (sent.seq, capture_ns, clock)


def test_a_capture_time_out_of_reach_is_refused_at_the_wire(camera: Camera) -> None:
    rejected = camera.client.status()["frames_rejected"]
    camera.send(capture_ns=2**63 - 1)
    until(lambda: camera.client.status()["frames_rejected"] == rejected + 1, "the refusal")
    assert "'capture_ns' to be an integer in 0.." in camera.client.status()["frames_last_error"]


def stop_and_continue(process: Process, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Stop a process for longer than any limit here, as a hanging machine would."""
    process.process.send_signal(signal.SIGSTOP)
    try:
        end_s = time.monotonic() + HANG_S
        while time.monotonic() < end_s:
            meanwhile()
            time.sleep(0.02)
    finally:
        process.process.send_signal(signal.SIGCONT)


def test_no_old_masks_are_published_after_the_node_hung(camera: Camera, node: Process) -> None:
    stop_and_continue(node, camera.send)
    end_seq = camera.seq
    seen: list[MaskFrame] = []

    def reached() -> bool:
        camera.send()
        masks = camera.client.latest(timeout_ms=50)
        seen.extend([masks] if masks else [])
        return masks is not None and masks.seq >= end_seq

    until(reached, "masks of new frames")
    assert max(masks.published_ns - masks.capture_ns for masks in seen) < HANG_S * S


def test_a_silent_camera_is_told_and_not_chosen(camera: Camera, rig: Rig) -> None:
    with FramePublisher(rig.frames[1]) as publisher:
        other = Camera(publisher, camera.client, camera.name + "b")
        other.send_until_masks()
        camera.send_until_masks()
        with refuses(RequestError, field="camera"):
            camera.client.segment(points=[(5, 5)])

        def is_silent() -> bool:
            other.send_until_masks()
            return camera.status()["silent_s"] > CAMERA_SILENT_S

        added = camera.client.add_object(points=[(5, 5)], camera=camera.name)
        until(is_silent, "silence")
        assert other.status()["silent_s"] < CAMERA_SILENT_S
        with rig.client() as policy:
            segmented = policy.segment(points=[(5, 5)])
            assert segmented.age_ms < 1000
            assert segmented.seq <= other.seq
            (listed,) = policy.list_objects(camera=camera.name)
            assert listed.id == added.id
            assert listed.silent_s > CAMERA_SILENT_S
            assert policy.add_object(points=[(5, 5)]).camera == other.name
            with refuses(RequestError, field="camera"):
                policy.remove_object(added.id)
            assert policy.segment(points=[(5, 5)], camera=camera.name).age_ms > CAMERA_SILENT_S * 1000


def test_prompts_on_an_old_frame_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    with Rig(tmp_path_factory.mktemp("prompts")) as rig:
        rig.node(TRACKER__MAX_PROMPT_AGE_S="0.7")
        process = rig.camera()
        with rig.client() as client:
            client.wait_for_camera(PATIENCE_MS)
            added = client.add_object(points=[(160, 120)])
            seq = masks_where(client, lambda masks: masks.instances, "the object").seq
            process.process.send_signal(signal.SIGSTOP)
            until(lambda: client.status()["cameras"]["cam0"]["silent_s"] > 0.8, "silence")
            last = client.status()["cameras"]["cam0"]["last_seq"]
            for request in (
                lambda: client.segment(points=[(5, 5)]),
                lambda: client.refine_object(added.id, points=[(5, 5)]),
                lambda: client.add_object(points=[(5, 5)]),
                lambda: client.add_object(points=[(5, 5)], seq=last),
            ):
                with refuses(UnknownFrameError, field="0.7"):
                    request()
            assert [known.id for known in client.list_objects()] == [added.id]
            client.pause()  # then the frame is old on purpose
            assert client.segment(points=[(5, 5)]).age_ms > 700
            client.resume()
            process.process.send_signal(signal.SIGCONT)
            masks_where(client, lambda masks: masks.seq > seq + 5, "new masks")
            assert client.segment(points=[(5, 5)]).mask.size == (240, 320)


def received(age_s: float, clock: str = "system") -> ReceivedFrame:
    now_ns = time.time_ns()
    return ReceivedFrame(replace(picture(1), capture_ns=int(now_ns - age_s * S), clock=clock), now_ns, 0)


def made(age_s: float) -> MaskFrame:
    return MaskFrame("cam0", 1, int(time.time_ns() - age_s * S), 64, 48)


def kind_of_refusal(limits: AgeLimits, frame: ReceivedFrame) -> str | None:
    refusal = limits.check_frame(frame)
    return refusal and refusal.kind


def test_the_limits_of_frames_and_masks() -> None:
    live = AgeLimits(1000.0, live=True)
    assert live.check_frame(received(0.1)) is None
    assert live.check_frame(received(-0.5)) is None
    assert kind_of_refusal(live, received(2)) == "too_old"
    assert kind_of_refusal(live, received(-60)) == "clock_ahead"
    assert live.check_frame(received(-60, "device")) is None
    for unlimited in (AgeLimits(0.0, live=True), AgeLimits(1000.0, live=False)):
        assert unlimited.check_frame(received(1000)) is None
        assert unlimited.check_masks(made(1000), 1) is None
    assert AgeLimits(1000.0, live=False).check_frame(received(-60)) is None


def test_masks_may_be_older_by_three_median_steps() -> None:
    limits = AgeLimits(1000.0, live=True)
    assert limits.check_masks(made(30), 20 * S) is not None  # the first step has none to compare with
    assert limits.check_masks(made(30), 20 * S) is None
    assert limits.check_masks(made(90), 20 * S) is not None
    quick = AgeLimits(1000.0, live=True)
    for _ in range(5):
        assert quick.check_masks(made(0.1), S // 100) is None
    withheld = "masks withheld: they were 11.0 s old, expected at most 1.0 s"
    assert withheld in quick.check_masks(made(11), 11 * S)
    assert quick.check_masks(made(0.5), S // 100) is None


FPS = 5
BALL = "orange ball"
MOVES_FROM = 130
DELAY_FRAMES = 8  # 1.5 s, also where the camera's process is late


@pytest.fixture(scope="module")
def past_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("past")) as past_rig:
        past_rig.environment |= {
            "SAM3_MODEL__NAME": "nano",
            "SAM3_CAMERA__FPS": str(FPS),
            # on a busy machine, all frames are stepped nevertheless, and kept for a client that is slow to ask
            "SAM3_TRANSPORT__DELIVERY": "every",
            "SAM3_TRACKER__FEATURE_CACHE_S": "100",
        }
        yield past_rig


def true_ball(seq: int) -> Instance:
    """Return the ball on the camera's frame `seq`, the first of which is frame MOVES_FROM of the recording."""
    return true_instance(MOVES_FROM + seq, BALL)


def centre(instance: Instance) -> tuple[float, float]:
    x0, y0, x1, y1 = instance.box
    return (x0 + x1) / 2, (y0 + y1) / 2


def mask_of(masks: MaskFrame, object_id: int) -> Mask:
    return next(instance.mask for instance in masks.instances if instance.id == object_id)


def test_a_late_click_on_a_moving_object_gives_what_a_live_click_gave(past_rig: Rig) -> None:
    """Most of the ball has left the place that the second click points at."""
    past_rig.node()
    past_rig.start("camera", f"bag:{cut(past_rig.folder / 'ball.mcap', MOVES_FROM, len(truth()))}")
    with PerceptionClient(past_rig.masks, past_rig.control, delivery="every", timeout_ms=10000) as client:
        seen = masks_where(client, lambda masks: True, "masks")
        there = centre(true_ball(seen.seq))
        live = client.add_object(points=[there], seq=seen.seq)
        now = masks_where(client, lambda masks: masks.seq - seen.seq >= DELAY_FRAMES, "a later frame")
        late = client.add_object(points=[there], seq=seen.seq)
        assert late.segmentation.seq == seen.seq
        assert iou(late.segmentation.mask, true_ball(seen.seq).mask) > 0.5
        assert iou(late.segmentation.mask, true_ball(now.seq).mask) < 0.3
        both = masks_where(client, lambda masks: {live.id, late.id} <= set(ids(masks)), "both objects")
        assert iou(mask_of(both, late.id), mask_of(both, live.id)) > 0.95
        assert iou(mask_of(both, late.id), true_ball(both.seq).mask) > 0.5
        usage = client.status()["cameras"]["cam0"]
        assert usage["catching_up"] == 0
        assert usage["cached_bytes"] > usage["cached_frames"] > 0
