"""Folders of images, with depth beside them, and the layouts of TUM, EuRoC, KITTI and BOP."""

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags import open_bag
from sam3_node.bags.bag import sample_images
from sam3_node.bags.formats.image_folders import FPS, ImagesBag
from sam3_node.bags.samples import Sample
from sam3_node.errors import BagError
from sam3_node.types import Intrinsics
from sam3_node.wire import decode_depth
from tests.support.damaged_recordings import write_bop, write_picture, write_tum
from tests.support.paths import SHARED
from tests.support.recordings import read_bag
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

DATA = SHARED / "data"
SIZE = (24, 32)


def picture(index: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (*size, 3), dtype=np.uint8)


def millimetres(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 9000, SIZE, dtype=np.uint16)


def write(folder: Path, names: list[str], depth: bool = False) -> Path:
    """Write an image for each name; its content depends on the index."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(names):
        assert cv2.imwrite(str(folder / name), millimetres(index) if depth else picture(index))
    return folder


def read(path: Path) -> tuple[dict[str, list[Sample]], str | None]:
    with ImagesBag(path) as bag:
        found: dict[str, list[Sample]] = {topic.name: [] for topic in bag.topics}
        for item in bag.samples(set(found)):
            found[item.topic].append(item)
        return found, bag.lost


def check_colour(samples: list[Sample], files: list[Path]) -> None:
    """Check that samples hold the bytes of these files, at their times."""
    assert [item.stamp_ns for item in samples] == [index * 10**9 // FPS for index in range(len(files))]
    for item, file in zip(samples, files, strict=True):
        assert (item.payload.height, item.payload.width) == SIZE
        assert item.payload.encoding == ("png" if file.suffix == ".png" else "jpeg")
        assert bytes(item.payload.data) == file.read_bytes()


def check_depth(samples: list[Sample], indices: list[int]) -> None:
    assert [item.stamp_ns for item in samples] == [index * 10**9 // FPS for index in indices]
    for item, index in zip(samples, indices, strict=True):
        assert (item.payload.encoding, item.payload.scale_m) == ("png16", 0.001)
        assert np.array_equal(decode_depth(item.payload), millimetres(index))


@pytest.mark.verifies("recording", "folders of images", "other implementation", "OpenCV writes them")
@pytest.mark.parametrize("suffix", ["jpg", "png", "JPEG"])
def test_a_folder_is_a_sequence_in_natural_order(tmp_path: Path, suffix: str) -> None:
    names = [f"{number}.{suffix}" for number in (1, 2, 9, 10, 100)]
    folder = write(tmp_path / "desk", names)
    (folder / "notes.txt").write_text("no image")
    assert ImagesBag.recognises(folder)
    found, lost = read(folder)
    assert list(found) == ["/desk/image"]
    check_colour(found["/desk/image"], [folder / name for name in names])
    assert lost is None


@pytest.mark.parametrize("below", ["JPEGImages/480p", "JPEGImages", "."])
def test_the_layout_of_davis_is_a_camera_for_each_sequence(tmp_path: Path, below: str) -> None:
    names = [f"{number:05}.jpg" for number in range(4)]
    for sequence in ("dog", "cows"):
        write(tmp_path / below / sequence, names)
        write(tmp_path / "Annotations" / "480p" / sequence, [name.replace("jpg", "png") for name in names])
    for path in (tmp_path, tmp_path / below):
        assert ImagesBag.recognises(path)
        found, lost = read(path)
        assert list(found) == ["/cows/image", "/dog/image"]
        for sequence in ("dog", "cows"):
            files = [tmp_path / below / sequence / name for name in names]
            check_colour(found[f"/{sequence}/image"], files)
        assert lost is None


def test_two_resolutions_of_a_sequence_are_two_cameras(tmp_path: Path) -> None:
    for resolution in ("480p", "1080p"):
        write(tmp_path / "JPEGImages" / resolution / "dog", ["0.jpg"])
    assert list(read(tmp_path)[0]) == ["/480p_dog/image", "/1080p_dog/image"]


@each_row(
    ("colour", "depth", "names"),
    [
        ("desk/color", "desk/depth", ("{}.jpg", "{}.png")),
        ("desk", "desk/depth", ("{}.jpg", "{}.png")),
        ("desk/rgb", "desk/depth", ("rgb_{}.jpg", "depth_{}.png")),
        ("desk", "desk", ("frame-{}.color.jpg", "frame-{}.depth.png")),
        ("desk/RGB", "desk/Depth", ("{}.png", "{}.png")),
        ("desk/rgb", "desk/depth_raw", ("{}.jpg", "{}.png")),
        ("desk/color", "desk/aligned_depth_to_color", ("{}.jpg", "{}.png")),
        ("desk", "desk/depth_images", ("rgb_{}.jpg", "depth_{}.png")),
    ],
)
def test_depth_beside_the_images_has_their_times(
    tmp_path: Path, colour: str, depth: str, names: tuple[str, str]
) -> None:
    write(tmp_path / colour, [names[0].format(index) for index in range(5)])
    write(tmp_path / depth, [names[1].format(index) for index in range(5)], depth=True)
    (tmp_path / depth / names[1].format(3)).unlink()
    found, lost = read(tmp_path / "desk")
    assert list(found) == ["/desk/image", "/desk/depth"]
    check_colour(found["/desk/image"], [tmp_path / colour / names[0].format(index) for index in range(5)])
    check_depth(found["/desk/depth"], [0, 1, 2, 4])
    assert lost is None


def test_folders_that_are_only_named_alike_are_cameras(tmp_path: Path) -> None:
    for name in ("rgb", "depth_camera", "depth_color", "in_depth"):
        write(tmp_path / name, ["0.png", "1.png"])
    assert len(read(tmp_path)[0]) == 4
    write(tmp_path / "alone/depth_maps", ["0.png"])
    assert list(read(tmp_path / "alone")[0]) == ["/depth_maps/image"]


def test_of_several_depth_folders_the_plain_one_is_read(tmp_path: Path) -> None:
    write(tmp_path / "desk/rgb", ["0.png", "1.png"])
    write(tmp_path / "desk/depth", ["0.png", "1.png"], depth=True)
    write(tmp_path / "desk/aligned_depth", ["0.png", "1.png"])
    found, lost = read(tmp_path / "desk")
    assert list(found) == ["/desk/image", "/desk/depth"]
    check_depth(found["/desk/depth"], [0, 1])
    assert lost is None


def test_depth_of_other_names_goes_by_its_place(tmp_path: Path) -> None:
    write(tmp_path / "rgb", ["1305.1.png", "1305.2.png"])
    write(tmp_path / "depth", ["1305.15.png", "1305.25.png"], depth=True)
    found, _ = read(tmp_path)
    check_depth(found[f"/{tmp_path.name}/depth"], [0, 1])


def test_what_is_no_image_is_passed_over_and_told(tmp_path: Path) -> None:
    names = [f"{number}.jpg" for number in range(7)]
    folder = write(tmp_path / "desk", names)
    (folder / "2.jpg").write_bytes((folder / "2.jpg").read_bytes()[:-300])
    (folder / "3.jpg").write_bytes(b"")
    cv2.imwrite(str(folder / "5.jpg"), picture(5, (30, 40)))
    write(folder / "depth", [f"{number}.png" for number in range(7)], depth=True)
    cv2.imwrite(str(folder / "depth" / "1.png"), picture(1))
    found, lost = read(folder)
    period = 10**9 / FPS
    assert [round(item.stamp_ns / period) for item in found["/desk/image"]] == [0, 1, 4, 6]
    assert [round(item.stamp_ns / period) for item in found["/desk/depth"]] == [0, 2, 3, 4, 5, 6]
    assert mentions(str(lost), "skipped 3", "/desk/image", "2.jpg")
    assert mentions(str(lost), "skipped 1", "/desk/depth", "1.png")


@pytest.mark.verifies("recording", "DAVIS", "real data", "five sequences of DAVIS")
def test_real_sequences_are_read_whole() -> None:
    if not (DATA / "davis").is_dir():
        pytest.skip("the shared images are not here")
    with ImagesBag(DATA / "davis") as bag:
        assert "/dog/image" in {topic.name for topic in bag.topics}
        samples = list(bag.samples({"/dog/image"}))
        assert len(samples) == 60
        assert bag.lost is None
    with ImagesBag(DATA / "rgbd" / "kitchen") as bag:
        assert len(list(bag.samples({"/kitchen/depth"}))) == 60


def test_depth_of_the_images_size_is_taken_as_aligned_and_told(tmp_path: Path) -> None:
    write(tmp_path / "desk/rgb", [f"{index}.png" for index in range(3)])
    write(tmp_path / "desk/depth", [f"{index}.png" for index in range(3)], depth=True)
    with open_bag(tmp_path / "desk") as bag:
        assert [frame.depth is not None and frame.depth.aligned for frame in bag] == [True] * 3
        (note,) = bag.notes
        assert mentions(note, "aligned")
        assert bag.lost is None


@pytest.mark.parametrize("stated", [False, True])
def test_depth_of_another_size_is_aligned_only_if_that_is_stated(tmp_path: Path, stated: bool) -> None:
    folder = write(tmp_path / "desk/depth", ["0.png", "1.png"], depth=True)
    (tmp_path / "desk/color").mkdir()
    for path in folder.iterdir():
        cv2.imwrite(str(tmp_path / "desk/color" / path.name), picture(0, (2 * SIZE[0], 2 * SIZE[1])))
    with open_bag(tmp_path / "desk", depth_aligned=stated) as bag:
        assert [frame.depth is not None and frame.depth.aligned for frame in bag] == [stated] * 2
        assert mentions(bag.notes[0], "32 x 24", "64 x 48")


def test_depth_that_belongs_to_no_image_is_told(tmp_path: Path) -> None:
    write(tmp_path / "desk/rgb", ["a.png", "b.png"])
    write(tmp_path / "desk/depth", ["x.png", "y.png", "z.png"], depth=True)
    with open_bag(tmp_path / "desk") as bag:
        assert [frame.depth for frame in bag] == [None, None]
        assert mentions(str(bag.lost), "3", "depth", "desk")


@pytest.mark.skipif(not (DATA / "rgbd/kitchen").is_dir(), reason="data not present")
def test_depth_of_a_real_folder_is_aligned() -> None:
    with open_bag(DATA / "rgbd/kitchen") as bag:
        frames = list(bag)
        assert all(frame.depth is not None and frame.depth.aligned for frame in frames)
        assert mentions(bag.notes[0], "aligned")


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    """Return a JPEG with this EXIF orientation."""
    tiff = b"MM\0*" + struct.pack(">IHHHIHHI", 8, 1, 0x0112, 3, 1, orientation, 0, 0)
    segment = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment + jpeg[2:]


@pytest.mark.parametrize("orientations", [(1, 6), (3, 3, 8), (1, 1), (6, 6, 6), (0, 1)])
def test_photos_that_ask_for_different_turns_are_warned_about(
    tmp_path: Path, orientations: tuple[int, ...]
) -> None:
    jpeg = cv2.imencode(".jpg", picture(0))[1].tobytes()
    is_mixed = len(set(orientations) - {0}) > 1
    for index, orientation in enumerate(orientations):
        (tmp_path / f"{index}.jpg").write_bytes(with_orientation(jpeg, orientation))
    with ImagesBag(tmp_path) as bag:
        for _ in range(2):
            sizes = {(item.payload.width, item.payload.height) for item in bag.samples({bag.topics[0].name})}
            assert sizes == {SIZE[::-1]}  # these turns are not made
        assert [(mentions(note, "EXIF")) for note in bag.notes] == [True] * is_mixed
    expected = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    for image in sample_images(tmp_path, 3):
        assert np.array_equal(image, expected)


def test_pointers_and_links_to_absent_files_are_told(tmp_path: Path) -> None:
    write(tmp_path, ["0.png", "1.png", "2.png"])
    (tmp_path / "1.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (tmp_path / "3.png").symlink_to("../.git/annex/objects/00/3.png")
    found, lost = read(tmp_path)
    assert [len(samples) for samples in found.values()] == [2]
    assert mentions(str(lost), "2 of")
    assert mentions(str(lost), "git lfs pull")


SECOND = 10**9


@pytest.mark.verifies(
    "recording", "TUM RGB-D", "layout", "lists, stamps and scale as published", "a sequence of the set"
)
def test_tum_has_its_stamps_and_depth_in_fifths_of_a_millimetre(tmp_path: Path) -> None:
    frames, lost = read_bag(write_tum(tmp_path / "rgbd_dataset_freiburg1_desk"))
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
    write_picture(tmp_path / "secret.png")
    with (folder / "rgb.txt").open("a") as file:
        file.write(
            f"\n1305031110.0 ../secret.png\n1305031111.0 {tmp_path}/secret.png\n1305031112.0 rgb/gone.png"
        )
    frames, lost = read_bag(folder)
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
        folder = root / "mav0" / f"cam{camera}"
        rows = ["#timestamp [ns],filename"]
        for index in range(3):
            stamp = 1403636579763555584 + index * 50_000_000 + camera * 1000
            write_picture(folder / "data" / f"{stamp}.png")
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
    frames, lost = read_bag(write_euroc(tmp_path) / below)
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
            write_picture(tmp_path / camera / "data" / f"{index:010}.png")
        (tmp_path / camera / "timestamps.txt").write_text(
            "2011-09-26 13:02:25.964389445\n2011-09-26 13:02:26.074343\n2011-09-26 13:02:26.2\n"
        )
    (tmp_path / "velodyne_points").mkdir()
    frames, lost = read_bag(tmp_path)
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
        write_picture(tmp_path / "image_0" / f"{index:06}.png")
    (tmp_path / "times.txt").write_text("0.000000e+00\n1.036224e-01\n")
    (tmp_path / "calib.txt").write_text(
        "P0: 718.856 0 607.1928 0 0 718.856 185.2157 0 0 0 1 0\nTr: 1 0 0 0\n"
    )
    frames, _ = read_bag(tmp_path)
    assert [frame.capture_ns for frame in frames] == [0, 103622400]
    assert frames[0].intrinsics == Intrinsics(718.856, 718.856, 607.1928, 185.2157)


@pytest.mark.verifies("recording", "BOP", "layout", "scene_camera.json as published", "a scene of the set")
def test_bop_has_a_camera_for_each_scene_with_its_scale_and_intrinsics(tmp_path: Path) -> None:
    frames, lost = read_bag(write_bop(tmp_path))
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
