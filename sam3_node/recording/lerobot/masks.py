"""Masks of one frame as features of a LeRobot dataset: a picture of them, and the numbers of each object.

The picture `observation.masks.<camera>` has the size of the camera's frames. Its pixels are (label, object, score x
255), and 0 for the background. It has three channels, so that policies take it as any camera. Where masks overlap, the
one of the higher score is on top. `observation.objects.<camera>` has the OBJECT_FIELDS of the first objects: row k of
it belongs to the pixels whose object is k. Labels are numbered over the dataset, objects over their episode and camera,
both from 1. NAMES says what they are. `observation.masks_valid.<camera>` is false where the picture is empty, or lacks
objects, because the frame was not tracked.
"""

from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ...types import Instance, MaskFrame
from .forms import Feature, ObjectRow

IMAGE = "observation.images.{}"
"""Name of the pictures of a camera."""
FEATURE = "observation.masks.{}"
"""Name of the picture of a camera's masks."""
OBJECTS_FEATURE = "observation.objects.{}"
"""Name of the numbers of a camera's objects."""
VALID_FEATURE = "observation.masks_valid.{}"
"""Name of the column that is true where a camera's frame was tracked."""
VALID: Feature = {"dtype": "bool", "shape": [1], "names": None}
"""The description of VALID_FEATURE."""
NAMES = "meta/sam3_masks.json"
"""File that names labels and objects, and lists the frames on which an object was doubtful."""
CHANNELS = ("label", "object", "score")
"""Meaning of a pixel's channels."""
OBJECT_FIELDS = ("label", "score", "confidence", "doubtful")
"""Numbers of an object. `label` is 0 where the frame does not have the object; `doubtful` is 1 or 0."""
UNKNOWN = -1.0
"""Confidence of an object whose confidence is not known."""
MAX_NUMBER = 253
"""Largest number of a label or an object in a pixel. Above, numbers repeat from 1. GR00T's masks have two more."""

Objects = dict[int, str]
"""Labels of an episode's objects by their ids, in the order of the objects' numbers."""


def wrap_number(number: int) -> int:
    """Return the number of a label or object as a pixel has it, 1 to MAX_NUMBER."""
    return 1 + (number - 1) % MAX_NUMBER


def paint_object(
    image: npt.NDArray[np.uint8], instance: Instance, objects: Objects, number_label: Callable[[str], int]
) -> None:
    """Draw an object into the picture [h, w, 3] of its frame. Add it to the episode's `objects` if it is new."""
    # an object keeps the number of its first appearance in the episode
    objects.setdefault(instance.id, instance.label)
    label = wrap_number(number_label(instance.label))
    number = wrap_number(list(objects).index(instance.id) + 1)
    score = round(min(max(instance.score, 0.0), 1.0) * 255)
    instance.mask.paint(image, (label, number, score))


def encode_picture(image: npt.NDArray[np.uint8]) -> bytes:
    """Return a picture of masks as a PNG whose channels are in the order of CHANNELS."""
    # OpenCV takes the channels of an image in the reverse order
    return cv2.imencode(".png", image[..., ::-1])[1].tobytes()


def add_to_runs(runs: list[list[int]], number: int) -> None:
    """Add a number to a list of runs [first, last] of consecutive numbers, as JSON has them."""
    if runs and runs[-1][1] == number - 1:
        runs[-1][1] = number
    else:
        runs.append([number, number])


def make_object_row(
    episode: int, camera: str, index: int, object_id: int, label: str, doubtful: list[list[int]] | None
) -> ObjectRow:
    """Return an object as NAMES lists it. `doubtful` are runs of rows, if it was doubtful on any."""
    row: ObjectRow = {"episode": episode, "camera": camera, "index": index, "id": object_id, "label": label}
    if doubtful:
        row["doubtful"] = doubtful
    return row


class RowMasks(NamedTuple):
    """The masks of a row: the picture [h, w, 3], numbers of objects [slots, OBJECT_FIELDS], and VALID_FEATURE."""

    picture: npt.NDArray[np.uint8]
    numbers: npt.NDArray[np.float32]
    is_valid: bool


class CameraMasks:
    """Turns the masks of one camera in one episode into pictures and numbers, row by row.

    `size` is that of the camera's pictures, (height, width). Masks of another size are left out. Objects beyond the
    `slots` have pixels, but no numbers.
    """

    def __init__(self, size: tuple[int, int], slots: int, number_label: Callable[[str], int]) -> None:
        self.objects: Objects = {}
        self.doubtful: dict[int, list[list[int]]] = {}
        """Runs of rows on which an object was doubtful, by its id."""
        self.doubted: set[int] = set()
        """Rows on which an object was doubtful."""
        self.invalid: set[int] = set()
        """Rows without masks, or without those of all objects."""
        self._size = size
        self._slots = slots
        self._number_label = number_label

    @property
    def missing(self) -> int:
        """Number of rows without masks, or without those of all objects."""
        return len(self.invalid)

    def add(self, row: int, masks: MaskFrame | None) -> RowMasks:
        """Return a row's masks."""
        image = np.zeros((*self._size, len(CHANNELS)), np.uint8)
        numbers = np.zeros((self._slots, len(OBJECT_FIELDS)), np.float32)
        # a busy node may step a frame without some of its objects
        is_valid = masks is not None and self._fits(masks) and not (masks.shed and masks.shed.held)
        if not is_valid:
            self.invalid.add(row)
        if masks is None or not self._fits(masks):
            return RowMasks(image, numbers, is_valid)

        # masks may be smaller than a picture that was padded to even sides
        frame = image[: masks.height, : masks.width]
        for instance in sorted(masks.instances, key=lambda instance: instance.paint_order):
            paint_object(frame, instance, self.objects, self._number_label)
            if instance.doubtful:
                add_to_runs(self.doubtful.setdefault(instance.id, []), row)
                self.doubted.add(row)
            slot = list(self.objects).index(instance.id)
            if slot < self._slots:
                numbers[slot] = self._describe(instance)
        return RowMasks(image, numbers, is_valid)

    def describe(self, episode: int, camera: str) -> list[ObjectRow]:
        """Return the objects of the episode as NAMES lists them."""
        rows = []
        for index, (object_id, label) in enumerate(self.objects.items(), start=1):
            rows.append(
                make_object_row(episode, camera, index, object_id, label, self.doubtful.get(object_id))
            )
        return rows

    def _fits(self, masks: MaskFrame) -> bool:
        height, width = self._size
        return height - masks.height in (0, 1) and width - masks.width in (0, 1)

    def _describe(self, instance: Instance) -> tuple[float, float, float, float]:
        confidence = UNKNOWN
        if instance.confidence is not None:
            confidence = instance.confidence
        label = float(self._number_label(instance.label))
        return label, instance.score, confidence, float(instance.doubtful)


def name_numbers(slots: int) -> list[str]:
    """Return the names of the numbers of so many objects, such as object_1.label."""
    return [f"object_{slot}.{field}" for slot in range(1, slots + 1) for field in OBJECT_FIELDS]


def describe_objects(slots: int) -> Feature:
    """Return the description of OBJECTS_FEATURE with so many objects."""
    names = name_numbers(slots)
    return {"dtype": "float32", "shape": [len(names)], "names": names}
