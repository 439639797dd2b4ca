"""The client for robot policies: it reads the newest masks and controls the node while it runs.

It needs pyzmq, msgpack, numpy and zstandard only.
"""

from ..transport import Security
from .perception_client import CONTROL_ENDPOINT, MASKS_ENDPOINT, PerceptionClient
from .values import AddedObject, Segmentation, SurfacePoints, TrackedObject

__all__ = [
    "CONTROL_ENDPOINT",
    "MASKS_ENDPOINT",
    "AddedObject",
    "PerceptionClient",
    "Security",
    "Segmentation",
    "SurfacePoints",
    "TrackedObject",
]
