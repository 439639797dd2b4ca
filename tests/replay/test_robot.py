"""A live node that knows where its robot is, its recording and its replay, all processes; and replays of datasets."""

import json
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from sam3_node.bags import read_masks
from sam3_node.bags.bag import Bag
from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.calibration import load_calibration
from sam3_node.client import PerceptionClient
from sam3_node.replay.event_log import Step
from sam3_node.replay.job import Job
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.replay.schedule import open_schedule
from sam3_node.settings import Settings
from sam3_node.transport import FramePublisher, PosePublisher
from sam3_node.types import ROBOT, Frame, Instance, JointState, MaskFrame
from tests.replay.test_as_recorded import is_whole, log_of, read_results, replay
from tests.support.hdf5_files import make_pictures, write_aloha
from tests.support.live import chosen
from tests.support.node_rig import Rig, until
from tests.support.paths import ROOT
from tests.support.refuses import mentions
from tests.support.tabletop import iou, truth

pytest.importorskip("yourdfpy", reason="needs the extra robot")

MS = 1_000_000
CALIBRATION = TABLETOP.with_suffix(".toml")
FOCAL_PX = 577.295
CENTRE = (319.5, 239.5)
FAR_M = 0.5
WIDE_M = 0.2
HIGH_M = 0.3
UP_M = 0.022
URDF = f"""<robot name="gate">
  <link name="post"/>
  <link name="plate"><collision><geometry><box size="{WIDE_M} {HIGH_M} 0.001"/></geometry></collision></link>
  <joint name="slide" type="prismatic"><parent link="post"/><child link="plate"/>
    <origin xyz="0 {-UP_M} {FAR_M}"/><axis xyz="1 0 0"/><limit lower="-1" upper="1" effort="1" velocity="1"/></joint>
</robot>"""
LABEL = "green bottle"
BOTTLE = next(item.mask for item in truth()[0].instances if item.label == LABEL)
MIDDLE_PX = (BOTTLE.box[0] + BOTTLE.box[2]) / 2


def slide_to(column: float) -> float:
    """Return the position of the joint at which the middle of the plate is in a column of the image."""
    return (column - CENTRE[0]) * FAR_M / FOCAL_PX


AWAY = slide_to(620)
OVER = slide_to(MIDDLE_PX)
PART = slide_to(MIDDLE_PX - 15) - WIDE_M / 2
"""the plate covers a quarter of the bottle"""


def plate(slide: float, size: tuple[int, int] = (480, 640), scale: float = 1.0) -> np.ndarray:
    """Return the pixels of the plate, by the pinhole."""
    rows, columns = (np.indices(size) + 0.5) / scale - 0.5
    x = (columns - CENTRE[0]) * FAR_M / FOCAL_PX - slide
    y = (rows - CENTRE[1]) * FAR_M / FOCAL_PX + UP_M
    found: np.ndarray = (abs(x) <= WIDE_M / 2) & (abs(y) <= HIGH_M / 2)
    return found


@dataclass
class Scene:
    """A camera that sees the same picture again and again, and a robot that publishes where its plate is."""

    frames: FramePublisher
    robot: PosePublisher
    client: PerceptionClient
    picture: Frame
    seq: int = 0

    def show(self, slide: float, state: str | None = None) -> tuple[MaskFrame, list[Instance]]:
        """Publish frames with the joints at their times until the masks of one have joints, and objects in a state."""

        def attempt() -> tuple[MaskFrame, list[Instance]] | None:
            self.seq = self.seq + 1
            now_ns = time.time_ns()
            for ms in (-10, 10):
                self.robot.send(JointState("gate", now_ns + ms * MS, {"slide": slide + ms / 1e5}))
            self.frames.send(replace(self.picture, seq=self.seq, capture_ns=now_ns))
            masks = self.client.latest(timeout_ms=5000)
            if not masks or not masks.joints or masks.seq != self.seq:
                return None
            found = [item for item in masks.instances if item.state == state]
            return (masks, found) if found or state is None else None

        return until(attempt, f"masks with joints, {state}")

    def check(self) -> None:
        """Let the plate come over the bottle, and go."""
        self.show(AWAY)
        x0, y0, x1, y1 = BOTTLE.box
        object_id = self.client.add_object(box=(x0, y0, x1, y1), label=LABEL).id
        _, (whole,) = self.show(AWAY, "tracked")
        assert iou(whole.mask.full(), BOTTLE.full()) > 0.8
        masks, (part,) = self.show(PART, "tracked")
        assert masks.joints is not None
        assert (masks.joints.robot, masks.joints.stamp_ns) == ("gate", masks.capture_ns)
        assert masks.joints.positions == pytest.approx({"slide": PART})
        assert masks.robot_mask is not None
        assert iou(masks.robot_mask.full(), plate(PART)) > 0.98
        assert not (part.mask.full() & masks.robot_mask.full()).any()
        assert iou(part.mask.full(), BOTTLE.full() & ~plate(PART)) > 0.7
        assert part.hidden_by is None
        masks, (hidden,) = self.show(OVER, "occluded")
        assert (hidden.id, hidden.hidden_by, hidden.area) == (object_id, "robot", 0)
        assert iou(masks.robot_mask.full(), plate(OVER)) > 0.98
        _, (back,) = self.show(AWAY, "tracked")
        assert (back.id, back.hidden_by) == (object_id, None)
        assert iou(back.mask.full(), whole.mask.full()) > 0.8


def record_scene(folder: Path) -> Path:
    """Play the scene before a recorder and a node with a robot. Return the recording."""
    folder.mkdir()
    rig = Rig(folder)
    urdf = folder / "gate.urdf"
    path = folder / "live.mcap"
    poses = f"ipc://{folder}/poses"
    urdf.write_text(URDF)
    rig.environment |= {"SAM3_MODEL__NAME": "nano", "SAM3_TRACKER__MAX_AGE_MS": "0"}
    rig.environment |= {"SAM3_ROBOT__URDF": str(urdf), "SAM3_ROBOT__NAME": "gate"}
    rig.environment |= {"SAM3_SPATIAL__CALIBRATION": str(CALIBRATION), "SAM3_SPATIAL__POSES": poses}
    with rig, PosePublisher(poses) as robot, FramePublisher(rig.frames[0]) as frames:
        recorder = rig.start("record", str(path))
        rig.node()
        with rig.client() as client:
            picture = replace(LabelledClip.load(TABLETOP).frames[0], depth=None, sent_ns=0, clock="system")
            Scene(frames, robot, client, picture).check()
        recorder.terminate()
    return path


@pytest.mark.timeout(1200)
def test_a_live_node_leaves_out_its_robot_and_a_replay_repeats_it(tmp_path: Path) -> None:
    for attempt in range(3):  # a recorder on a busy machine may miss a frame
        path = record_scene(tmp_path / str(attempt))
        if is_whole(path):
            break
    live = [item.masks for item in log_of(path) if hasattr(item, "masks")]
    done = replay(path, tmp_path / "out", "--as-recorded", "--compare")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"identical: the masks of all {len(live)} recorded frames" in done.stdout
    seen = [(masks.seq, masks.joints) for masks in live]
    assert [(masks.seq, masks.joints) for masks in read_results(tmp_path / "out")] == seen
    assert any(item.hidden_by == "robot" for masks in live for item in masks.instances)


@pytest.mark.parametrize("columns", [1, 2])
def test_a_dataset_s_joints_show_the_robot(
    tmp_path: Path, settings: Settings, load: PerceptionCache, columns: int
) -> None:
    """Without names, as many positions as the URDF has joints are theirs."""
    rows = 4
    urdf = tmp_path / "gate.urdf"
    urdf.write_text(URDF)
    write_aloha(path := tmp_path / "episode_0.hdf5", {"top": make_pictures(rows)}, fps=10)
    slides = np.linspace(-0.1, 0.1, rows)
    with h5py.File(path, "r+") as file:
        del file["observations/qpos"]
        file["observations/qpos"] = np.repeat(slides[:, None], columns, axis=1)
    values: dict[str, Any] = {**chosen(settings), "robot": {"urdf": str(urdf), "name": "gate"}}
    text = load_calibration(CALIBRATION).model_dump_json()
    job = Job((str(path),), str(tmp_path / "out"), everything=True, calibrations=(text,), settings=values)
    summary = run_job(job, load)
    results = list(read_masks(tmp_path / "out/masks.mcap"))
    assert len(results) == rows
    if columns == 2:
        assert any(mentions(note, "robot", "joints", "slide") for note in summary.notes)
        assert not any(masks.robot_mask for masks in results)
        return
    for masks, slide in zip(results, slides, strict=True):
        size = masks.height, masks.width
        assert iou(masks.robot_mask.full(), plate(slide, size, size[1] / 640)) > 0.8


@pytest.mark.parametrize("has_robot", [False, True])
def test_joints_are_read_for_a_robot_alone(tmp_path: Path, has_robot: bool) -> None:
    """Without a robot, a note on the unit of joints would speak of what nobody draws."""
    dataset = Path(shutil.copytree(ROOT / "tests/data/lerobot/v2.1", tmp_path / "arm"))
    info = json.loads((dataset / "meta/info.json").read_text())
    state = info["features"]["observation.state"]
    state["names"] = [f"joint_{index}.pos" for index in range(state["shape"][0])]
    (dataset / "meta/info.json").write_text(json.dumps(info))
    settings: dict[str, Any] = {}
    if has_robot:
        urdf = tmp_path / "gate.urdf"
        urdf.write_text(URDF)
        settings["robot"] = {"urdf": str(urdf), "name": "gate"}
        settings["spatial"] = {"poses": f"ipc://{tmp_path}/poses"}
    job = Job((str(dataset),), str(tmp_path / "out"), everything=True, settings=settings)
    with open_schedule(job) as schedule:
        assert any(isinstance(action, Step) for action in schedule.actions())
        assert any(mentions(remark, "degrees") for remark in schedule.remarks) == has_robot
        # a plan lists them all the same
        assert any(isinstance(message, JointState) for message in schedule.robot())


def test_joints_of_no_urdf_that_came_once_do_not_take_the_robot_away(
    tmp_path: Path, settings: Settings, load: PerceptionCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a live node."""
    rows = 6
    urdf = tmp_path / "gate.urdf"
    urdf.write_text(URDF)
    write_aloha(path := tmp_path / "episode_0.hdf5", {"top": make_pictures(rows)}, fps=10)
    values: dict[str, Any] = {**chosen(settings), "robot": {"urdf": str(urdf), "name": "gate"}}
    text = load_calibration(CALIBRATION).model_dump_json()
    job = Job((str(path),), str(tmp_path / "out"), everything=True, calibrations=(text,), settings=values)
    with open_schedule(job) as schedule:
        frames = [action.frame for action in schedule.actions() if isinstance(action, Step)]
    messages = [JointState(ROBOT, frame.capture_ns, {"slide": 0.0}, frame.clock) for frame in frames]
    messages.insert(1, replace(messages[0], positions={"wheel": 1.0}))
    monkeypatch.setattr(Bag, "robot", lambda self, joints=True: iter(messages))
    run_job(job, load)
    results = list(read_masks(tmp_path / "out/masks.mcap"))
    assert [bool(masks.robot_mask) for masks in results] == [True] * rows
