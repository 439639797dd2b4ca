"""Tests of the Rerun bridge: files are read back by Rerun's reader, and Rerun's program receives the live stream."""

import signal
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam3_node.bridges.rerun import TRACK_FRAMES, RerunStream, draw_ids
from sam3_node.errors import MissingExtraError, OutputError, SettingsError
from sam3_node.types import Depth, Frame, FramePose, Instance, Mask, MaskFrame
from sam3_node.visualization import pick_colour
from tests.support.node_rig import until
from tests.support.refuses import refuses
from tests.support.rrd_files import STATIC, count_rows, read_rrd, rerun_program
from tests.support.threads import Running, repeating
from tests.support.wire_examples import DRIVER, MUG, jpeg_frame, masks, raw_frame
from tools.bench.processes import free_ports

pytest.importorskip("rerun", reason="the extra rerun is not installed")
pytest.importorskip("rerun.chunk", reason="the reader of .rrd files is not installed")
IMAGE = "/cameras/wrist-1/image"
BOXES = f"{IMAGE}/boxes"


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rerun.error_utils._strict_mode", True)  # wrong values raise, instead of a warning


def write(path: Path, *shown: tuple[Any, MaskFrame]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return what a file has after these frames and masks."""
    stream = RerunStream(str(path))
    for frame, found in shown:
        assert stream.show(frame, found)
    stream.close()
    return read_rrd(path)


def seq(found: MaskFrame, number: int, **changes: Any) -> MaskFrame:
    return replace(found, seq=number, **changes)


@pytest.mark.verifies(
    "viewer",
    "Rerun, files and live",
    "own package",
    "rerun-sdk's reader reads the file back, Rerun's program receives it live",
)
def test_encoded_pictures_keep_their_bytes(tmp_path: Path) -> None:
    frame = jpeg_frame()
    entities = write(tmp_path / "a.rrd", (frame, MaskFrame(*frame.key, frame.width, frame.height)))
    image = entities["/cameras/cam0/image"][0]
    assert image["EncodedImage:blob"][0] == bytes(frame.colour)
    assert image["EncodedImage:media_type"] == ["image/jpeg"]
    assert image["capture_time"].value == frame.capture_ns


def test_raw_pictures_intrinsics_and_depth(tmp_path: Path) -> None:
    frame = raw_frame()
    other = replace(frame, seq=42, depth=replace(frame.depth, aligned=False))  # type: ignore[type-var]
    damaged = replace(frame, seq=43, depth=Depth(3, 2, "z16+zstd", 0.001, True, b"no zstd"))
    shown = [(item, seq(masks(), item.seq)) for item in (frame, other, damaged)]
    entities = write(tmp_path / "a.rrd", *shown)
    image = entities[IMAGE][41]
    assert image["Image:buffer"][0] == frame.colour
    assert (image["Image:format"][0]["width"], image["Image:format"][0]["height"]) == (3, 2)
    matrix = np.array(entities[IMAGE][STATIC]["Pinhole:image_from_camera"][0]).reshape(3, 3).T
    assert matrix[:2, 2].tolist() == [2.0, 1.5]  # from the corner of the first pixel
    depth = entities[f"{IMAGE}/depth"]
    assert list(depth) == [41]
    assert np.frombuffer(depth[41]["DepthImage:buffer"][0], "<u2").tolist() == [0, 1, 2, 500, 9, 65535]
    assert depth[41]["DepthImage:meter"] == [1000.0]
    assert list(entities["/cameras/wrist-1/depth"]) == [42]


def test_masks_boxes_and_the_colours_of_the_ids(tmp_path: Path) -> None:
    entities = write(tmp_path / "a.rrd", (None, masks()))
    (pixels,) = entities[f"{IMAGE}/masks"][41]["SegmentationImage:buffer"]
    drawn = np.frombuffer(pixels, np.uint8).reshape(5, 8)
    expected = np.where(DRIVER.full(), 4, 0)
    expected[MUG.full()] = 3
    assert drawn.tolist() == expected.tolist()
    boxes = entities[f"{IMAGE}/boxes"][41]
    assert boxes["Boxes2D:labels"] == ["3 red mug 0.88", "4 1.00?"]
    assert (boxes["Boxes2D:class_ids"], boxes["Boxes2D:centers"][0]) == ([3, 4], [4.0, 2.5])
    classes = entities["/cameras/wrist-1"][41]["AnnotationContext:context"][0]
    assert [item["class_id"] for item in classes] == [0, 3, 4, 7]
    assert classes[0]["class_description"]["info"]["color"] == 0  # what is in no mask has no tint
    first = classes[1]["class_description"]["info"]
    blue, green, red = pick_colour(3)
    assert (first["id"], first["label"]) == (3, "3 red mug")
    assert first["color"] == red << 24 | green << 16 | blue << 8 | 255


def test_a_picture_without_masks_hides_those_of_earlier_ones(tmp_path: Path) -> None:
    empty = seq(masks(), 42, instances=())
    entities = write(tmp_path / "a.rrd", (None, masks()), (None, empty))
    assert not any(entities[f"{IMAGE}/masks"][42]["SegmentationImage:buffer"][0])
    assert entities[f"{IMAGE}/boxes"][42]["Boxes2D:centers"] == []
    assert entities[f"{IMAGE}/tracks"][42]["LineStrips2D:strips"] == []


def test_the_smallest_mask_is_on_top_and_large_ids_need_two_bytes() -> None:
    whole = Mask.from_full(np.ones((5, 8), np.bool_))
    instances = (Instance(300, "", 1.0, "tracked", 1, 0, MUG), Instance(2, "", 1.0, "tracked", 1, 0, whole))
    drawn = draw_ids(replace(masks(), instances=instances))
    assert drawn.dtype == np.uint16
    assert drawn.tolist() == np.where(MUG.full(), 300, 2).tolist()


def test_tracks_are_bounded_and_end_with_the_object_and_the_epoch(tmp_path: Path) -> None:
    mug = replace(masks(), instances=masks().instances[:1], epoch=1)
    shown = [(None, seq(mug, number)) for number in range(TRACK_FRAMES + 10)]
    shown.append((None, seq(mug, 100, epoch=2)))
    entities = write(tmp_path / "a.rrd", *shown)
    strips = {number: row["LineStrips2D:strips"] for number, row in entities[f"{IMAGE}/tracks"].items()}
    assert [len(strips[number]) for number in (0, 1)] == [0, 1]
    assert len(strips[TRACK_FRAMES + 9][0]) == TRACK_FRAMES
    assert strips[5][0][0] == [4.0, 2.5]
    assert strips[100] == []


def test_positions_boxes_covariances_and_poses(tmp_path: Path) -> None:
    turned = (0.0, 0.0, 0.6, 0.8)
    points = np.array([[1, 2, 3], [4, 5, 6]], "<f4").tobytes()
    box = {
        "extent_m": (0.08, 0.09, 0.1),
        "extent_centre_m": (0.5, -0.25, 0.7),
        "extent_quaternion_xyzw": turned,
    }
    place = {"position_m": (0.5, -0.25, 0.75), "covariance_m2": (0.04, 0.0, 0.0, 0.09, 0.0, 0.01)}
    placed = replace(masks().instances[0], frame="base", points_m=points, **place, **box)
    pose = FramePose("camera", "base", 17, (0.1, 0.2, 0.3), turned)
    gripper = replace(pose, frame="gripper")
    found = replace(masks(), instances=(placed,), camera_pose=pose, robot_pose=gripper)
    gone = seq(masks(), 42, instances=(replace(placed, frame="camera"),))
    entities = write(tmp_path / "a.rrd", (None, found), (None, gone))
    place = "/objects/wrist-1"
    assert entities[f"{place}/positions"][41]["Points3D:positions"] == [[0.5, -0.25, 0.75]]
    assert np.allclose(entities[f"{place}/boxes"][41]["Boxes3D:half_sizes"], [[0.04, 0.045, 0.05]])
    assert np.allclose(entities[f"{place}/boxes"][41]["Boxes3D:quaternions"], [[0.0, 0.0, 0.6, 0.8]])
    axes = entities[f"{place}/covariances"][41]["Ellipsoids3D:half_sizes"][0]
    assert np.allclose(sorted(axes), [0.2, 0.4, 0.6])  # two standard deviations
    assert entities[f"{place}/points"][41]["Points3D:positions"] == [[1, 2, 3], [4, 5, 6]]
    assert entities[f"{place}/positions"][42]["Points3D:positions"] == []
    assert len(entities["/cameras/wrist-1/objects/positions"][42]["Points3D:positions"]) == 1
    for entity in ("/cameras/wrist-1", "/gripper"):
        assert np.allclose(entities[entity][41]["Transform3D:translation"], [[0.1, 0.2, 0.3]])


def test_latencies_and_confidences_are_curves(tmp_path: Path) -> None:
    sure = replace(masks().instances[0], confidence=0.25)
    entities = write(tmp_path / "a.rrd", (None, replace(masks(), instances=(sure,))))
    assert entities["/latency/wrist-1/encode"][41]["Scalars:scalars"] == [9.0]
    assert entities["/latency/wrist-1/total"][41]["Scalars:scalars"] == [pytest.approx(26.543211)]
    assert entities["/confidence/wrist-1/3"][41]["Scalars:scalars"] == [0.25]


def test_a_camera_that_changes_its_encoding_leaves_no_old_picture(tmp_path: Path) -> None:
    frame = jpeg_frame()
    raw = replace(frame, seq=1, encoding="mono8", colour=bytes(64))
    shown = [(item, MaskFrame(*item.key, 8, 8)) for item in (frame, raw)]
    image = write(tmp_path / "a.rrd", *shown)["/cameras/cam0/image"][1]
    assert image["Clear:is_recursive"] == [False]
    assert len(image["Image:buffer"][0]) == 64


@pytest.mark.parametrize(
    "target", ["masks.mcap", "http://127.0.0.1/proxy", "rerun+http://127.0.0.1:9876", "rerun://:x/"]
)
def test_other_targets_are_refused(target: str) -> None:
    with pytest.raises(SettingsError, match="expected a"):
        RerunStream(target)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.rrd"
    path.write_bytes(b"mine")
    with refuses(OutputError, field=("exists", "already")):
        RerunStream(str(path))
    assert path.read_bytes() == b"mine"


def test_a_missing_sdk_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rerun", None)
    with refuses(MissingExtraError, field="sam3-node"):
        RerunStream(str(tmp_path / "a.rrd"))


class Shower:
    """Shows numbered frames to a stream, also from a thread."""

    def __init__(self, stream: RerunStream) -> None:
        self.shown = 0
        self._stream = stream
        self._large = replace(jpeg_frame(), colour=bytes(1 << 20))

    def show(self, frame: Frame | None = None) -> bool:
        self.shown += 1
        return self._stream.show(frame or jpeg_frame(), seq(masks(), self.shown))

    def stalls(self) -> bool:
        """Return True if nothing was shown in a while."""
        before = self.shown
        time.sleep(0.2)
        return self.shown == before

    def keep_showing(self) -> AbstractContextManager[Running]:
        """Show large frames in a thread."""
        return repeating(lambda: self.show(self._large))


def test_a_viewer_may_come_late_hang_and_be_replaced(tmp_path: Path) -> None:
    port = free_ports(1)[0]
    stream = RerunStream(f"rerun+http://127.0.0.1:{port}/proxy")
    shower = Shower(stream)
    assert not shower.show()
    with rerun_program(port, tmp_path / "one.rrd") as viewer:
        until(shower.show, "a connection")
        until(lambda: shower.show() and count_rows(tmp_path / "one.rrd", BOXES), "what the viewer has")
        viewer.process.send_signal(signal.SIGSTOP)
        with shower.keep_showing():
            until(shower.stalls, "the wait for the viewer, without which memory would grow")
            viewer.process.send_signal(signal.SIGCONT)
            until(lambda: not shower.stalls(), "the end of the wait")
    until(lambda: not shower.show(), "the end of the connection")
    path = tmp_path / "two.rrd"
    with rerun_program(port, path):
        until(lambda: shower.show() and count_rows(path, BOXES), "what the next viewer has")
        assert "AnnotationContext:context" in next(iter(read_rrd(path)["/cameras/wrist-1"].values()))
    stream.close()
