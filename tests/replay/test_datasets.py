"""Labels to train a network on: Ultralytics' YOLO layout and YouTube-VIS, read back by other programs."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

from sam3_node.errors import OutputError
from sam3_node.replay.outputs.output import Sources
from sam3_node.replay.outputs.write import join_outputs, write_outputs
from sam3_node.replay.outputs.yolo import fill_polygon, make_polygon
from sam3_node.types import NANOSECONDS, Frame, Instance, Mask, MaskFrame
from tests.replay.test_outputs import (
    ALL,
    HEIGHT,
    WIDTH,
    all_frames,
    all_masks,
    blob,
    doubtful_masks,
    frame_of,
    masks_of,
    restarted_frames,
    restarted_masks,
    told,
)
from tests.support.refuses import refuses

Full = np.typing.NDArray[np.bool_]

RATE = 10
"""Frames a second of the long recording."""


def with_hole() -> Full:
    full = np.zeros((HEIGHT, WIDTH), np.bool_)
    full[4:30, 10:40] = True
    full[8:20, 15:22] = False
    full[10:12, 17:19] = False
    full[9:25, 30:33] = False
    return full


def in_parts() -> Full:
    """Return a mask in three parts, one of them in a hole and one a single pixel."""
    full = with_hole()
    full[12:16, 17:20] = True
    full[50, 80] = True
    return full


def instance_of(full: Full, object_id: int = 1, label: str = "mug") -> Instance:
    return Instance(object_id, label, 0.75, "tracked", 0, 0, Mask.from_full(full))


def long_masks(label: str = "mug", seconds: int = 20) -> Iterator[MaskFrame]:
    for seq in range(RATE * seconds):
        time_ns = seq * NANOSECONDS // RATE
        instances = (replace(blob(1, seq % 12), label=label),)
        yield MaskFrame("left", seq, time_ns, WIDTH, HEIGHT, instances=instances)


def long_frames(seconds: int = 20) -> Iterator[Frame]:
    frame = frame_of("left", 0)
    for seq in range(RATE * seconds):
        yield replace(frame, seq=seq, capture_ns=seq * NANOSECONDS // RATE)


def read_names(dataset: Path) -> list[str]:
    """Return the classes in data.yaml, as YAML has them."""
    yaml = pytest.importorskip("yaml")
    data = yaml.safe_load((dataset / "data.yaml").read_text(encoding="utf-8"))
    assert (data["train"], data["val"], data["nc"]) == ("images/train", "images/val", len(data["names"]))
    names: list[str] = data["names"]
    return names


def read_labels(path: Path, to_pixels: Callable[[Any], Any]) -> list[tuple[int, Full]]:
    """Read a file of labels as other programs do: corners become pixels, and OpenCV fills them."""
    labels = []
    for line in path.read_text().splitlines():
        number, *numbers = line.split()
        corners = np.array(numbers, np.float32).reshape(-1, 2) * np.array([WIDTH, HEIGHT], np.float32)
        labels.append((int(number), fill_polygon(to_pixels(corners), (HEIGHT, WIDTH))))
    return labels


def pictures(dataset: Path) -> dict[str, list[str]]:
    """Return the names of the pictures of each part, and check that each has its labels."""
    found = {}
    for part in ("train", "val"):
        found[part] = sorted(path.name for path in (dataset / "images" / part).iterdir())
        labels = sorted(path.stem for path in (dataset / "labels" / part).iterdir())
        assert labels == [Path(name).stem for name in found[part]]
    return found


@pytest.mark.verifies(
    "results",
    "YOLO segmentation in Ultralytics' layout",
    "other implementation",
    "supervision reads pictures, classes and masks back",
    "a training by Ultralytics",
)
def test_supervision_reads_the_same_masks_back(tmp_path: Path) -> None:
    """Supervision is not among the development tools: it would install a second OpenCV."""
    supervision = pytest.importorskip("supervision")
    shapes = [with_hole(), blob(2, 3).mask.full()]

    def masks() -> Iterator[MaskFrame]:
        for found in all_masks():
            added = tuple(instance_of(full, 7 + n, "bowl") for n, full in enumerate(shapes))
            yield replace(found, instances=(*found.instances, *added))

    write_outputs(tmp_path, ["yolo"], Sources(masks, all_frames), told)
    expected = {f"{found.camera}-{found.seq:05d}.png": found for found in masks()}
    count = 0
    for part in ("train", "val"):
        folders = [str(tmp_path / "yolo" / kind / part) for kind in ("images", "labels")]
        dataset = supervision.DetectionDataset.from_yolo(*folders, str(tmp_path / "yolo/data.yaml"))
        assert dataset.classes == ["bowl", "mug"]
        for path, image, detections in dataset:
            found = expected[Path(path).name]
            shown = [instance for instance in found.instances if instance.mask.area]
            assert [dataset.classes[number] for number in detections.class_id] == [
                instance.label for instance in shown
            ]
            assert image.shape == (HEIGHT, WIDTH, 3)
            for instance, mask in zip(shown, detections.mask, strict=True):
                assert np.array_equal(mask, instance.mask.full())
                count += 1
    assert count >= 4 * 16


@pytest.mark.parametrize("to_pixels", [np.trunc, np.round], ids=["truncates", "rounds"])
def test_readers_that_truncate_or_round_find_the_same_pixels(to_pixels: Any, tmp_path: Path) -> None:
    shapes = [with_hole(), blob(2, 5).mask.full(), np.zeros((HEIGHT, WIDTH), np.bool_)]
    shapes[2][40, 50:53] = True
    corner = np.zeros((HEIGHT, WIDTH), np.bool_)
    corner[-1, -1] = True
    shapes.append(corner)
    instances = tuple(instance_of(full, n + 1) for n, full in enumerate(shapes))

    def masks() -> Iterator[MaskFrame]:
        return iter([MaskFrame("left", 0, 0, WIDTH, HEIGHT, instances=instances)])

    written = write_outputs(tmp_path, ["yolo"], Sources(masks, all_frames), told)
    labels = read_labels(tmp_path / "yolo/labels/train/left-00000.txt", to_pixels)
    assert [number for number, _ in labels] == [0] * 4
    for (_, mask), full in zip(labels, shapes, strict=True):
        assert np.array_equal(mask, full)
    assert "polygons" not in written.notes["yolo"]


def test_polygons_of_one_part_are_exact_also_with_holes() -> None:
    random = np.random.default_rng(0)
    checked = 0
    while checked < 200:
        full = random.random((10, 14)) < random.choice([0.6, 0.8, 0.9])
        parts, _ = cv2.connectedComponents(full.view(np.uint8), connectivity=8)
        if parts == 2:
            checked += 1
            mask = Mask.from_full(full)
            assert np.array_equal(fill_polygon(make_polygon(mask), mask.size), full)


def test_ways_between_parts_add_pixels_and_are_counted(tmp_path: Path) -> None:
    def masks() -> Iterator[MaskFrame]:
        return iter([MaskFrame("left", 0, 0, WIDTH, HEIGHT, instances=(instance_of(in_parts()),))])

    written = write_outputs(tmp_path, ["yolo"], Sources(masks, all_frames), told)
    ((_, mask),) = read_labels(tmp_path / "yolo/labels/train/left-00000.txt", np.trunc)
    added = np.count_nonzero(mask & ~in_parts())
    assert not np.any(in_parts() & ~mask)
    # from (39, 29) to (80, 50), and one pixel beside the part in the hole
    assert 30 < added < 60
    found = re.search(r"polygons of 1 masks in several parts add (\d+) pixels", written.notes["yolo"])
    assert found is not None
    assert int(found[1]) == added


def test_classes_are_numbered_by_the_prompts_first(tmp_path: Path) -> None:
    sources = Sources(all_masks, all_frames, dataset=None)
    write_outputs(tmp_path, ["yolo"], sources, told)
    assert read_names(tmp_path / "yolo") == ["bowl", "mug"]
    from sam3_node.replay.outputs.output import Dataset

    named = Dataset(tmp_path, ("mug", 'a "small" öse'))
    write_outputs(tmp_path, ["yolo"], sources._replace(dataset=named), told)
    assert read_names(tmp_path / "yolo") == ["mug", 'a "small" öse', "bowl"]
    first = (tmp_path / "yolo/labels/train/left-00000.txt").read_text().splitlines()
    assert [line.split()[0] for line in first] == ["0", "2"]


def test_pictures_with_a_doubtful_mask_are_left_out(tmp_path: Path) -> None:
    """Without the mask, the picture would teach that the object is background."""
    sources = Sources(doubtful_masks, all_frames)
    note = write_outputs(tmp_path, ["yolo"], sources, told).notes["yolo"]
    names = [name for part in pictures(tmp_path / "yolo").values() for name in part]
    assert not {f"left-{seq:05d}.png" for seq in (3, 4, 5, 8)} & set(names)
    assert "4 pictures with 4 doubtful masks" in note
    note = write_outputs(tmp_path, ["yolo"], sources._replace(doubtful="drawn"), told).notes["yolo"]
    assert "left-00004.png" in pictures(tmp_path / "yolo")["train"]
    assert "0 pictures with 0 doubtful masks" in note


def test_the_end_of_a_recording_is_for_validation_a_second_apart(tmp_path: Path) -> None:
    note = write_outputs(tmp_path, ["yolo"], Sources(long_masks, long_frames), told).notes["yolo"]
    found = pictures(tmp_path / "yolo")
    numbers = {
        part: [int(name.split("-")[1].split(".")[0]) for name in names] for part, names in found.items()
    }
    assert numbers["val"] == list(range(160, 200))
    assert numbers["train"] == list(range(151))
    assert note.startswith("yolo: 151 pictures to train on, 40 to validate, 191 masks; ")
    assert "9 between training and validation" in note


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_dataset_of_few_pictures_trains_on_the_first(count: int, tmp_path: Path) -> None:
    def masks() -> Iterator[MaskFrame]:
        return (masks_of("left", seq) for seq in range(count))

    write_outputs(tmp_path, ["yolo"], Sources(masks, all_frames), told)
    assert [len(names) for names in pictures(tmp_path / "yolo").values()] == [
        min(count, 1),
        max(count - 1, 0),
    ]
    assert (tmp_path / "yolo/contact.jpg").is_file() == (count > 0)


def test_frames_without_a_readable_picture_are_left_out_and_counted(tmp_path: Path) -> None:
    def frames() -> Iterator[Frame]:
        for frame in all_frames():
            if frame.seq == 4:
                yield replace(frame, colour=b"broken")
            elif frame.camera == "left" and frame.seq != 7:
                yield frame

    note = write_outputs(tmp_path, ["yolo"], Sources(all_masks, frames), told).notes["yolo"]
    names = {name for part in pictures(tmp_path / "yolo").values() for name in part}
    assert not {"left-00004.png", "left-00007.png"} & names
    assert all(name.startswith("left-") for name in names)
    assert "8 frames have no picture" in note


def test_the_contact_sheet_shows_what_the_files_have(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["yolo"], ALL, told)
    sheet = cv2.imread(str(tmp_path / "yolo/contact.jpg"))
    assert sheet is not None
    # four in a row, each 480 wide with its rim
    assert sheet.shape[1] == 4 * (480 + 4)
    assert sheet.std() > 20


def write_recordings(tmp_path: Path, count: int) -> list[Path]:
    """Write datasets of recordings whose only label differs, and return their folders."""
    folders = []
    for number, label in zip(range(count), ("mug", "bowl", "mug", "jar"), strict=False):
        masks = partial(long_masks, label, 2)
        folders.append(tmp_path / f"day{number}")
        write_outputs(folders[-1], ["yolo"], Sources(masks, partial(long_frames, 2)), told)
    return folders


def test_of_several_recordings_the_last_is_for_validation(tmp_path: Path) -> None:
    folders = write_recordings(tmp_path, 4)
    note = join_outputs(tmp_path, "yolo", folders)
    found = pictures(tmp_path / "yolo")
    assert {name.split("-")[0] for name in found["train"]} == {"day0", "day1", "day2"}
    assert {name.split("-")[0] for name in found["val"]} == {"day3"}
    assert "4 recordings; to validate: day3" in note
    assert read_names(tmp_path / "yolo") == ["mug", "bowl", "jar"]
    for number, part in ((0, "train"), (1, "train"), (2, "val")):
        day = (0, 1, 3)[number]
        ours = tmp_path / f"yolo/labels/{part}/day{day}-left-00001.txt"
        theirs = tmp_path / f"day{day}/yolo/labels/train/left-00001.txt"
        assert ours.read_text() == re.sub("^0", str(number), theirs.read_text())
        picture = tmp_path / f"yolo/images/{part}/day{day}-left-00001.png"
        assert picture.read_bytes() == (tmp_path / f"day{day}/yolo/images/train/left-00001.png").read_bytes()
    assert (tmp_path / "yolo/contact.jpg").is_file()


def test_two_recordings_are_split_by_time_each(tmp_path: Path) -> None:
    folders = write_recordings(tmp_path, 2)
    assert "each is split by time" in join_outputs(tmp_path, "yolo", folders)
    found = pictures(tmp_path / "yolo")
    for part in ("train", "val"):
        assert {name.split("-")[0] for name in found[part]} == {"day0", "day1"}
        assert len(found[part]) == sum(len(pictures(folder / "yolo")[part]) for folder in folders)


def test_without_a_dataset_there_is_nothing_to_join(tmp_path: Path) -> None:
    with refuses(OutputError, field="dataset"):
        join_outputs(tmp_path, "yolo", [tmp_path / "missing"])
    assert not list(tmp_path.iterdir())


def read_ytvis(path: Path) -> Any:
    return json.loads((path / "ytvis.json").read_text())


@pytest.mark.verifies(
    "results",
    "YouTube-VIS",
    "other implementation",
    "pycocotools decodes the masks, exactly",
    "YouTube-VIS' own API, a fork of pycocotools",
)
def test_pycocotools_decodes_the_masks_of_youtube_vis(tmp_path: Path) -> None:
    sources = Sources(restarted_masks, restarted_frames)
    note = write_outputs(tmp_path, ["ytvis", "images"], sources, told).notes["ytvis"]
    found = read_ytvis(tmp_path)
    names = {category["id"]: category["name"] for category in found["categories"]}
    videos = {video["id"]: video for video in found["videos"]}
    # the left camera was restarted: a video begins
    assert [(video["name"], video["length"]) for video in videos.values()] == [
        ("left", 12),
        ("left", 3),
        ("right", 6),
    ]
    expected: dict[str, MaskFrame] = {}
    listed = [video["file_names"] for video in videos.values()]
    left, again, right = ([*names_of] for names_of in listed)
    for masks in restarted_masks():
        queue = right
        if masks.camera == "left":
            queue = left or again
        expected[queue.pop(0)] = masks
    assert len(expected) == 21

    count = 0
    for row in found["annotations"]:
        video = videos[row["video_id"]]
        assert {row[key] == video[key] for key in ("width", "height", "length")} == {True}
        assert {len(row[key]) for key in ("segmentations", "bboxes", "areas", "doubtful")} == {
            video["length"]
        }
        for index, file_name in enumerate(video["file_names"]):
            assert (tmp_path / file_name).is_file()
            instance = next(item for item in expected[file_name].instances if item.id == row["instance_id"])
            assert names[row["category_id"]] == instance.label
            mask = coco_mask.decode(row["segmentations"][index])
            assert np.array_equal(mask, instance.mask.full())
            assert row["areas"][index] == coco_mask.area(row["segmentations"][index]) == instance.area
            assert row["bboxes"][index] == coco_mask.toBbox(row["segmentations"][index]).tolist()
            count += 1
    assert count == 2 * 21
    assert note == "ytvis.json: 42 masks in 3 videos; 0 doubtful masks are left out"


@pytest.mark.parametrize("doubtful", ["marked", "drawn", "left-out"])
def test_doubtful_masks_of_youtube_vis_are_none_unless_they_are_asked_for(
    doubtful: Any, tmp_path: Path
) -> None:
    sources = Sources(doubtful_masks, all_frames, "pick.mcap", doubtful=doubtful)
    note = write_outputs(tmp_path, ["ytvis"], sources, told).notes["ytvis"]
    found = read_ytvis(tmp_path)
    (bowl,) = [row for row in found["annotations"] if row["instance_id"] == 2]
    missing = [index for index, value in enumerate(bowl["segmentations"]) if value is None]
    if doubtful == "drawn":
        assert missing == []
        assert [index for index, value in enumerate(bowl["doubtful"]) if value] == [3, 4, 5, 8]
        assert "0 doubtful masks" in note
    else:
        assert missing == [3, 4, 5, 8]
        assert bowl["bboxes"][4] is bowl["areas"][4] is bowl["scores"][4] is bowl["doubtful"][4] is None
        assert "4 doubtful masks are left out" in note
    assert found["videos"][0]["file_names"][2] == "pick.mcap#left/2"


def test_a_dataset_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write_outputs(tmp_path, ["yolo"], ALL, told)
    (tmp_path / "yolo/images/train/left-99999.png").write_bytes(b"of an earlier run")
    shutil.rmtree(tmp_path / "yolo/labels")
    write_outputs(tmp_path, ["yolo"], ALL, told)
    assert "left-99999.png" not in pictures(tmp_path / "yolo")["train"]
