"""Estimates of the GPU memory that trackers take. Nothing is loaded, and torch need not be installed."""

from collections.abc import Callable
from typing import NamedTuple

WEIGHTS_GB = 0.92
"""GB of 461 million weights in bfloat16."""
CONTEXT_GB = 0.6
"""GB of the libraries on the GPU."""
FRAME_GB = 0.0106
"""GB of the features of a frame that is kept for prompts."""
SLOT_GB = 72 * 72 * 64 * 2 / 1e9
"""GB of a memory of one object on one frame."""
PROMPTED_FRAMES = 4
"""Prompted frames that the bank holds in addition to the recent ones."""
KEPT_FRAMES = 60
"""Frames whose features are kept: 2 s at 30 FPS."""
BATCH = 64
"""Objects that read their memories at once."""
OBJECT_GB = 0.09
"""GB of keys, values and tokens of a read, for each object."""
GROUP_OBJECTS = 16
"""Objects of SAM 3.1 that share a memory."""
SPARE_GROUPS = 4
"""Groups that are allocated for objects that catch up, apart from the others."""
GROUPS_WEIGHTS_GB = 0.96
"""GB of 480 million weights of SAM 3.1 in bfloat16."""
GROUP_SLOT_GB = 72 * 72 * 2 * 256 * 2 / 1e9
"""GB of a memory of one group on one frame: tokens of masks and of the image."""
GROUP_MASKS_GB = 16 * 288 * 288 * 2 / 1e9
"""GB of the masks of one group on one frame: 16 slots of 288 x 288 values of two bytes."""
RECENT_MASK_FRAMES = 2
"""Newest frames whose masks a group keeps, so that these frames can be encoded again."""
GROUP_READ_GB = 0.66
"""GB of a read of one group, by what 64 objects took more than 16 on an H200."""
GROUPS_WORK_GB = 1.3
"""GB of activations and graphs, without reads: the measured peak less the other terms."""
CACHE_GB = 1.0
"""Most GB of the features that are kept, tracker.feature_cache_mb."""


class GpuMemory(NamedTuple):
    """How the memory of a family of weights is estimated."""

    title: str
    """the weights that are meant"""
    estimate_gb: Callable[[int, int, int], float]
    """(objects of each camera, bank_size, cameras) -> GB"""


def estimate_gpu_gb(objects: int, bank_size: int = 7, cameras: int = 1) -> float:
    """Estimate the GB of GPU memory that SAM 3 takes at 1008 pixels in bfloat16; it is not measured.

    It counts 461 million weights, the libraries, a memory [72 * 72, 64] for each object and frame of the bank and each
    of 4 prompted frames, the features of 2 s at 30 FPS, and the keys, values and tokens of an eager read of up to 64
    objects at once. objects: of each camera.
    """
    bank_gb = objects * (bank_size + PROMPTED_FRAMES) * SLOT_GB
    camera_gb = bank_gb + KEPT_FRAMES * FRAME_GB
    read_gb = min(objects, BATCH) * OBJECT_GB
    return WEIGHTS_GB + CONTEXT_GB + cameras * camera_gb + read_gb


def estimate_groups_gpu_gb(objects: int, bank_size: int = 7, cameras: int = 1) -> float:
    """Estimate what `estimate_gpu_gb` does, of SAM 3.1, whose objects share their memories in groups of 16.

    The table of groups includes the groups of objects that catch up. Reads and activations are by the peaks measured on
    an H200, everything else by the sizes of tensors.
    """
    groups = -(-objects // GROUP_OBJECTS)
    slots = bank_size + PROMPTED_FRAMES
    mask_frames = RECENT_MASK_FRAMES + PROMPTED_FRAMES
    bank_gb = (groups + SPARE_GROUPS) * (slots * GROUP_SLOT_GB + mask_frames * GROUP_MASKS_GB)
    # each frame also has features for prompts, as large as the others
    kept_gb = min(KEPT_FRAMES * 2 * FRAME_GB, CACHE_GB)
    read_gb = min(groups, BATCH) * GROUP_READ_GB
    return GROUPS_WEIGHTS_GB + CONTEXT_GB + GROUPS_WORK_GB + cameras * (bank_gb + kept_gb) + read_gb


OBJECTS = GpuMemory("SAM 3", estimate_gpu_gb)
GROUPS = GpuMemory("SAM 3.1", estimate_groups_gpu_gb)
BY_HUB_NAME = {"facebook/sam3.1": GROUPS}
"""Of weights on the hub other than OBJECTS, where no family can be asked because torch is not installed."""
