"""What GR00T reads of a dataset of version 2.1: groups of joints, and masks as numbers of regions.

MODALITY cuts the vectors of state and action into groups of joints that follow one another: `arm` and `gripper`, by the
names of the joints. An episode's masks of a camera are a .npz file with the array `arr_0`, uint8 [rows, h, w], and
`valid`, bool [rows]. A pixel has the number of its label as in the pictures of masks, else GRIPPER or ARM where the
robot is, else 0.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ...files import make_folder
from ...resources import Closeable
from ...robot.gripper import is_gripper
from ...types import MaskFrame
from .masks import FEATURE, IMAGE, MAX_NUMBER

MODALITY = "meta/modality.json"
"""File that tells GR00T which parts state and action have, and how cameras and masks are called."""
GRIPPER = MAX_NUMBER + 1
"""Number of the gripper's pixels."""
ARM = MAX_NUMBER + 2
"""Number of the pixels of the robot but its gripper."""
BACKGROUND = 0
"""Number of the pixels of nothing that was looked for."""
TASK = "human.task_description"
"""Name of the tasks among the annotations. Their numbers are in the column task_index."""
Modality = dict[str, dict[str, dict[str, Any]]]
"""Content of MODALITY: the parts, such as state and video; their groups or views; and where each of these is."""
Regions = npt.NDArray[np.uint8]
"""Numbers of regions, [h, w]."""


def list_masked(features: Mapping[str, Any]) -> list[str]:
    """Return the keys of the pictures that have masks."""
    prefix = FEATURE.format("")
    return [IMAGE.format(key.removeprefix(prefix)) for key in features if key.startswith(prefix)]


def describe_modality(features: Mapping[str, Any]) -> Modality:
    """Return the content of MODALITY for the features of a dataset."""
    videos = [key for key, feature in features.items() if feature["dtype"] == "video"]
    modality: Modality = {}
    for part, key in (("state", "observation.state"), ("action", "action")):
        if key in features:
            modality[part] = group_joints(_list_names(features[key]))
    modality["video"] = name_views(videos)
    modality["annotation"] = {TASK: {"original_key": "task_index"}}
    if masked := list_masked(features):
        modality["mask"] = name_views(masked)
    return modality


def name_views(keys: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the pictures with these keys by the names of their cameras, as MODALITY has them."""
    return {key.removeprefix("observation.").removeprefix("images."): {"original_key": key} for key in keys}


def group_joints(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the groups of joints that follow one another in a vector: {name: {start, end}}, the end excluded.

    A group is an arm or a gripper; with several robots, whose joints are named <robot>.<joint>, <robot>_arm. A second
    group of one kind has a number.
    """
    robots = [name.partition(".")[0] for name in names]
    # shoulder_pan.pos, elbow_flex.pos: there the text before the dot is the joint's
    has_robots = all("." in name for name in names) and len(set(robots)) < len(names)
    groups: dict[str, dict[str, Any]] = {}
    last = ""
    for index, (name, robot) in enumerate(zip(names, robots, strict=True)):
        joint = name.removeprefix(f"{robot}.") if has_robots else name
        kind = "gripper" if is_gripper(joint) else "arm"
        if has_robots:
            kind = f"{robot}_{kind}"
        if kind != last:
            count = sum(re.fullmatch(rf"{re.escape(kind)}(_\d+)?", known) is not None for known in groups)
            group = groups[f"{kind}_{count + 1}" if count else kind] = {"start": index, "end": index}
            last = kind
        group["end"] = index + 1
    return groups


def _list_names(feature: Mapping[str, Any]) -> list[str]:
    """Return the name of each value of a vector; empty names where the dataset does not tell them."""
    names = feature.get("names")
    if isinstance(names, dict):  # {"motors": names}
        names = next(iter(names.values()), None)
    length = feature["shape"][0]
    if not isinstance(names, list) or len(names) != length:
        return [""] * int(length)
    return [str(name) for name in names]


def name_regions(labels: Mapping[int, str]) -> dict[int, str]:
    """Return what the numbers of the regions are."""
    return {BACKGROUND: "background", **labels, GRIPPER: "gripper", ARM: "arm"}


def number_regions(
    picture: npt.NDArray[np.uint8], masks: MaskFrame | None, gripper: npt.NDArray[np.bool_] | None = None
) -> Regions:
    """Return the regions of a row from its picture of masks, [h, w, 3], and the pixels of the robot.

    `gripper` are the pixels of the gripper, [h, w] of the masks; without them all of the robot is ARM.
    """
    regions = np.ascontiguousarray(picture[..., 0])
    if masks is None or masks.robot_mask is None or not masks.robot_mask.area:
        return regions
    # the picture may be a pixel larger than the frame
    part = regions[: masks.height, : masks.width]
    x0, y0, x1, y1 = masks.robot_mask.box
    box = np.s_[y0:y1, x0:x1]
    robot = np.full(masks.robot_mask.crop.shape, ARM, np.uint8)
    if gripper is not None:
        robot[gripper[box]] = GRIPPER
    # a mask was seen, the robot's pixels follow from its joints
    is_free = masks.robot_mask.crop & (part[box] == BACKGROUND)
    part[box][is_free] = robot[is_free]
    return regions


class RegionFile(Closeable):
    """The regions of an episode and camera, which are written row by row. There is no file before the first row.

    numpy could write them at once alone, and an episode takes hundreds of MB. Rows that do not come are not valid.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self.path = path
        self._rows = rows
        self._row_bytes = 0
        self._zip: zipfile.ZipFile | None = None
        self._array: IO[bytes] | None = None
        self._valid: list[bool] = []

    def add(self, regions: Regions, is_valid: bool) -> None:
        """Add the next row."""
        if self._zip is None:
            make_folder(self.path.parent)
            # a file of others is not overwritten
            self._zip = zipfile.ZipFile(self.path, "x", zipfile.ZIP_DEFLATED, compresslevel=1)
            self._array = self._begin("arr_0", (self._rows, *regions.shape), np.dtype(np.uint8))
            self._row_bytes = regions.size
        assert self._array is not None
        self._array.write(regions.tobytes())
        self._valid.append(is_valid)

    def finish(self) -> None:
        """Write what is left, and close the file."""
        if self._zip is None or self._array is None:
            return
        while len(self._valid) < self._rows:
            self._array.write(bytes(self._row_bytes))
            self._valid.append(False)
        self._array.close()
        valid = np.array(self._valid, np.bool_)
        with self._begin("valid", valid.shape, valid.dtype) as array:
            array.write(valid.tobytes())
        self.close()

    def close(self) -> None:
        """Close the file, which is no whole one unless it was finished. Idempotent."""
        if self._zip is not None and self._array is not None:
            self._array.close()
            self._zip.close()
            self._zip = None

    def _begin(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> IO[bytes]:
        """Begin an array of the file. Its name has no time, so that the same rows give the same bytes."""
        assert self._zip is not None
        entry = zipfile.ZipInfo(f"{name}.npy")
        entry.compress_type = zipfile.ZIP_DEFLATED
        array = self._zip.open(entry, "w", force_zip64=True)
        descr = np.lib.format.dtype_to_descr(dtype)
        head = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(array, head)
        return array
