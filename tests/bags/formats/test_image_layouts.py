"""Folders of datasets: TUM, EuRoC, KITTI and BOP with their own stamps, scales and intrinsics."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags import open_bag
from sam3_node.errors import BagError
from sam3_node.types import Frame, Intrinsics
from sam3_node.wire import decode_depth
from tests.support.refuses import refuses

SIZE = (24, 32)
SECOND = 10**9


def picture(path: Path, depth: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full(SIZE, 5000, np.uint16) if depth else np.full((*SIZE, 3), 90, np.uint8)
    assert cv2.imwrite(str(path), image)


def read(path: Path) -> tuple[list[Frame], str | None]:
    with open_bag(path) as bag:
        return list(bag), bag.lost


def write_tum(folder: Path) -> Path:
    """Write three images and their depth 10 ms later, as in fr1/desk; the depth of the last is missing."""
    colour, depth = ["# color images", "# timestamp filename"], ["# depth maps"]
    for index in range(3):
        name = f"13050311{index:02}.175304.png"
        picture(folder / "rgb" / name)
        colour.append(f"13050311{index:02}.175304 rgb/{name}")
        if index < 2:
            picture(folder / "depth" / name, depth=True)
            depth.append(f"13050311{index:02}.185304 depth/{name}")
    (folder / "rgb.txt").write_text("\n".join(colour))
    (folder / "depth.txt").write_text("\n".join(depth))
    (folder / "groundtruth.txt").write_text("# no list of files")
    return folder


@pytest.mark.verifies(
    "recording", "TUM RGB-D", "layout", "lists, stamps and scale as published", "a sequence of the set"
)
def test_tum_has_its_stamps_and_depth_in_fifths_of_a_millimetre(tmp_path: Path) -> None:
    frames, lost = read(write_tum(tmp_path / "rgbd_dataset_freiburg1_desk"))
    assert lost is None
    assert [frame.capture_ns for frame in frames] == [
        (1305031100 + index) * SECOND + 175304000 for index in range(3)
    ]
    assert {(frame.camera, frame.clock) for frame in frames} == {("rgbd_dataset_freiburg1_desk", "system")}
    depth = frames[0].depth
    assert depth.aligned
    assert np.allclose(decode_depth(depth) * depth.scale_m, 1.0)
    assert [frame.depth is None for frame in frames] == [False, False, True]


def test_a_list_does_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    folder = write_tum(tmp_path / "desk")
    picture(tmp_path / "secret.png")
    with (folder / "rgb.txt").open("a") as file:
        file.write(
            f"\n1305031110.0 ../secret.png\n1305031111.0 {tmp_path}/secret.png\n1305031112.0 rgb/gone.png"
        )
    frames, lost = read(folder)
    assert len(frames) == 3
    assert "gone.png" in str(lost)


@pytest.mark.parametrize("line", ["soon rgb/a.png", "1e300 rgb/a.png"])
def test_a_damaged_list_is_refused_by_name(tmp_path: Path, line: str) -> None:
    folder = write_tum(tmp_path / "desk")
    (folder / "rgb.txt").write_text(line)
    with refuses(BagError, field="rgb.txt"):
        open_bag(folder)


def write_euroc(root: Path) -> Path:
    for camera in range(2):
        folder, rows = root / "mav0" / f"cam{camera}", ["#timestamp [ns],filename"]
        for index in range(3):
            stamp = 1403636579763555584 + index * 50_000_000 + camera * 1000
            picture(folder / "data" / f"{stamp}.png")
            rows.append(f"{stamp},{stamp}.png")
        (folder / "data.csv").write_text("\r\n".join(rows))
        (folder / "sensor.yaml").write_text(
            "sensor_type: camera\ncamera_model: pinhole\n"
            "intrinsics: [458.654, 457.296, 367.215, 248.375] #fu, fv, cu, cv\n"
            "distortion_model: radial-tangential\n"
            "distortion_coefficients: [-0.28340811, 0.07395907, 0.00019359, 1.76187114e-05]\n"
        )
    imu = root / "mav0" / "imu0"
    imu.mkdir()
    (imu / "data.csv").write_text("#timestamp,w_x,w_y\n1,2,3")
    return root


@pytest.mark.verifies(
    "recording",
    "EuRoC MAV",
    "layout",
    "data.csv and sensor.yaml as published",
    "a sequence of the set; equidistant lenses",
)
@pytest.mark.parametrize("below", [".", "mav0", "mav0/cam0"])
def test_euroc_has_its_stamps_and_intrinsics_and_both_cameras_together(tmp_path: Path, below: str) -> None:
    frames, lost = read(write_euroc(tmp_path) / below)
    assert lost is None
    cameras = ["cam0"] if below.endswith("cam0") else ["cam0", "cam1"]
    assert [frame.camera for frame in frames] == cameras * 3
    assert frames[0].capture_ns == 1403636579763555584
    expected = Intrinsics(
        458.654,
        457.296,
        367.215,
        248.375,
        "brown_conrady",
        (-0.28340811, 0.07395907, 0.00019359, 1.76187114e-05),
    )
    assert frames[-1].intrinsics == expected


@pytest.mark.verifies(
    "recording", "KITTI, raw and odometry", "layout", "names and dates as published", "a drive of the set"
)
def test_kitti_raw_has_its_dates(tmp_path: Path) -> None:
    for camera in ("image_00", "image_02"):
        for index in range(2):
            picture(tmp_path / camera / "data" / f"{index:010}.png")
        (tmp_path / camera / "timestamps.txt").write_text(
            "2011-09-26 13:02:25.964389445\n2011-09-26 13:02:26.074343\n2011-09-26 13:02:26.2\n"
        )
    (tmp_path / "velodyne_points").mkdir()
    frames, lost = read(tmp_path)
    assert lost is None
    assert {frame.camera for frame in frames} == {"image_00", "image_02"}
    assert [frame.capture_ns for frame in frames if frame.camera == "image_00"] == [
        1317042145964389445,
        1317042146074343000,
    ]


@pytest.mark.verifies(
    "recording", "KITTI, raw and odometry", "layout", "times.txt and calib.txt as published"
)
def test_kitti_odometry_has_its_times_and_projection(tmp_path: Path) -> None:
    for index in range(2):
        picture(tmp_path / "image_0" / f"{index:06}.png")
    (tmp_path / "times.txt").write_text("0.000000e+00\n1.036224e-01\n")
    (tmp_path / "calib.txt").write_text(
        "P0: 718.856 0 607.1928 0 0 718.856 185.2157 0 0 0 1 0\nTr: 1 0 0 0\n"
    )
    frames, _ = read(tmp_path)
    assert [frame.capture_ns for frame in frames] == [0, 103622400]
    assert frames[0].intrinsics == Intrinsics(718.856, 718.856, 607.1928, 185.2157)


def write_bop(root: Path) -> Path:
    for scene in ("000001", "000002"):
        table = {}
        for index in (0, 4):
            picture(root / scene / "rgb" / f"{index:06}.png")
            picture(root / scene / "depth" / f"{index:06}.png", depth=True)
            for folder in ("mask", "mask_visib"):
                picture(root / scene / folder / f"{index:06}_000000.png")
            table[str(index)] = {"cam_K": [572.4, 0, 325.2, 0, 573.5, 242.0, 0, 0, 1], "depth_scale": 0.1}
        (root / scene / "scene_camera.json").write_text(json.dumps(table))
    return root


@pytest.mark.verifies("recording", "BOP", "layout", "scene_camera.json as published", "a scene of the set")
def test_bop_has_a_camera_for_each_scene_with_its_scale_and_intrinsics(tmp_path: Path) -> None:
    frames, lost = read(write_bop(tmp_path))
    assert lost is None
    assert [(frame.camera, frame.capture_ns) for frame in frames] == [
        (scene, index * SECOND // 24) for scene in ("000001", "000002") for index in (0, 4)
    ]
    for frame in frames:
        assert np.allclose(decode_depth(frame.depth) * frame.depth.scale_m, 0.5)
        assert frame.intrinsics == Intrinsics(572.4, 573.5, 325.2, 242.0)


@pytest.mark.parametrize("text", ["[1]", '{"0": 1}', '{"0": {"cam_K": ["a"]}}', '{"0": {}}', "{", '{"x": 1}'])
def test_another_table_of_cameras_is_refused_by_name(tmp_path: Path, text: str) -> None:
    write_bop(tmp_path)
    (tmp_path / "000001" / "scene_camera.json").write_text(text)
    with refuses(BagError, field=("scene_camera.json", "BOP")):
        open_bag(tmp_path)
