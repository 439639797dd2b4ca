"""A replay leaves out what the live node left out to keep its budget."""

from dataclasses import replace
from pathlib import Path

import cv2

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.perception.perception import Perception
from sam3_node.replay.job import Job
from sam3_node.replay.run import compare_job, run_job
from sam3_node.settings import Settings
from sam3_node.types import Frame, MaskFrame, Shed, StepDecisions
from sam3_node.wire import pack_masks
from tests.support.live import BOX, MS, Live, moving_frame, tiny_settings

LEVELS = [*[0] * 4, *[1] * 4, *[2] * 20, *[1] * 4, *[0] * 4]


def plain(masks: MaskFrame) -> list[bytes]:
    """Return the message without its times."""
    return pack_masks(replace(masks, stages_us={}, published_ns=0))


def record(live: Live) -> None:
    """A node that sheds load for some time. Some of its frames fail, and some masks are withheld."""
    for seq, level in enumerate(LEVELS):
        frame = moving_frame(seq)
        decisions = StepDecisions(shed=Shed(level) if level else None)
        if seq in (10, 11):
            frame = replace(frame, colour=bytes(frame.colour)[:-40])
        live.step(frame, withheld=seq in (15, 16), decisions=decisions)
        if seq in (2, 3, 6):
            live.ask("add_object", camera="left", box=BOX, priority="normal" if seq == 6 else "low")
        if seq in (20, 21):
            live.ask("refine_object", camera="left", id=1, points=[[30, 20]])


def test_a_replay_leaves_out_what_the_node_left_out(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, feature_cache_s=0)
    path = tmp_path / "live.mcap"
    with Live(path, Perception.load(settings)) as live:
        record(live)
    assert {masks.shed.held for masks in live.masks if masks.shed} == {(), (1,), (2,)}
    summary = run_job(Job((str(path),), str(tmp_path / "out"), "as-recorded"))
    assert (summary.failed, summary.notes) == (2, [])
    assert compare_job(Job((str(path),), str(tmp_path / "out"), "as-recorded")).is_identical
    replayed = list(read_masks(tmp_path / "out" / "masks.mcap"))
    assert [plain(masks) for masks in replayed] == [plain(masks) for masks in live.masks]


def read_tabletop(count: int) -> list[Frame]:
    """Return the first frames of the bundled recording, which are larger than nano's input."""
    clip = LabelledClip.load(TABLETOP)
    images = [clip.image(number) for number in range(count)]
    return [
        Frame(
            "left",
            seq,
            (1000 + 66 * seq) * MS,
            image.shape[1],
            image.shape[0],
            "jpeg",
            cv2.imencode(".jpg", image)[1].tobytes(),
            sent_ns=1,
        )
        for seq, image in enumerate(images)
    ]


def test_a_replay_follows_as_many_windows_as_the_node_did(tmp_path: Path) -> None:
    settings = Settings(
        model={"name": "nano", "device": "cpu", "threads": 1},  # type: ignore[arg-type]
        tracker={"window": "auto"},  # type: ignore[arg-type]
        detector={"kind": "none"},  # type: ignore[arg-type]
    )
    path = tmp_path / "live.mcap"
    limits = [0, 0, 1, 1, 2, 2, 1, None, None]
    frames = read_tabletop(len(limits))
    camera = frames[0].camera
    with Live(path, Perception.load(settings)) as live:
        for frame, limit in zip(frames, limits, strict=True):
            live.step(frame, withheld=frame is frames[3], decisions=StepDecisions(windows=limit))
            if frame is frames[0]:
                live.ask("add_object", camera=camera, box=[211.0, 285.0, 346.0, 427.0])
                live.ask("add_object", camera=camera, box=[190.0, 120.0, 330.0, 300.0])
            if frame is frames[5]:
                live.ask("refine_object", camera=camera, id=1, points=[[280, 350]])
    job = Job((str(path),), str(tmp_path / "out"), "as-recorded")
    assert run_job(job).notes == []
    assert compare_job(job).is_identical
    replayed = list(read_masks(tmp_path / "out" / "masks.mcap"))
    assert [masks.windows for masks in replayed] == [*limits[:3], *limits[4:]]
    # windows were at work: without them, the masks are others
    other = replace(job, out=str(tmp_path / "off"), settings={"tracker": {"window": "off"}})
    run_job(other)
    assert not compare_job(other).is_identical
