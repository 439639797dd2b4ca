"""Observations and features of a dataset for lerobot. `lerobot_step` has a step for its pipelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy.typing as npt

from ...types import Image
from .inputs import check_images, check_vectors, merge
from .slots import FIELDS, ObjectSlots, SlotObservation

IMAGES = "observation.images"
STATE = "observation.state"
ENVIRONMENT_STATE = "observation.environment_state"
"""Key of what lerobot's policies read beside the robot's own state."""


def as_lerobot(
    objects: SlotObservation,
    *,
    images: Mapping[str, Image] | None = None,
    state: npt.ArrayLike | None = None,
    name: str = "objects",
) -> dict[str, npt.NDArray[Any]]:
    """Return an observation of arrays, as lerobot's `predict_action` and `LeRobotDataset.add_frame` take it.

    `images` are uint8 [H, W, 3] in RGB order by camera, `state` is a vector [D]. The result has
    "observation.images.KEY" of each image and of the masks, `name`_0, `name`_1 …, three slots in the channels of each
    (see `SlotObservation.pictures`); "observation.state", float32 [D]; and "observation.environment_state", float32
    [N * len(FIELDS)], with the flags, ages and boxes (`SlotObservation.vector`). For a dataset, add "action" and
    "task". Raises PolicyError for a wrong shape or dtype.
    """
    pictures = merge(images or {}, objects.pictures(name), "images")
    observation: dict[str, npt.NDArray[Any]] = {
        f"{IMAGES}.{key}": check_images(image, f"image {key}") for key, image in pictures.items()
    }
    if state is not None:
        observation[STATE] = check_vectors(state, "state")
    return observation | {ENVIRONMENT_STATE: objects.vector()}


def lerobot_features(
    slots: ObjectSlots, *, name: str = "objects", dtype: Literal["image", "video"] = "image"
) -> dict[str, dict[str, Any]]:
    """Return the features that the masks add to a dataset, for `LeRobotDataset.create(features=…)`.

    They are the masks' images, and "observation.environment_state" with a name for each element, SLOT.LABEL.FIELD. Of
    `dtype` "image" the masks are kept exactly; "video" is smaller, and blurs their edges.
    """
    pictures = slots.observe().pictures(name)
    images = {
        f"{IMAGES}.{key}": {"dtype": dtype, "shape": image.shape, "names": ["height", "width", "channels"]}
        for key, image in pictures.items()
    }
    elements = [f"{slot}.{label}.{field}" for slot, label in enumerate(slots.names) for field in FIELDS]
    return images | {ENVIRONMENT_STATE: {"dtype": "float32", "shape": (len(elements),), "names": elements}}
