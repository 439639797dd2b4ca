"""The client for robot policies: it reads the newest masks and controls the node while it runs.

It needs pyzmq, msgpack, msgspec, numpy and zstandard only. Numpy is imported with the first pixels, asyncio with
AsyncPerceptionClient.
"""

from typing import TYPE_CHECKING, Any

from ..errors import request_id
from ..schema.replies import ObjectPlace, TrackedObject
from ..transport import Security
from .mask_reader import FoundObject
from .perception_client import CONTROL_ENDPOINT, MASKS_ENDPOINT, PerceptionClient
from .values import (
    AddedObject,
    Grasps,
    LastPicture,
    MasksOfCameras,
    PhotoMask,
    Segmentation,
    SurfacePoints,
)

if TYPE_CHECKING:
    from .async_client import AsyncPerceptionClient

__all__ = [
    "CONTROL_ENDPOINT",
    "MASKS_ENDPOINT",
    "AddedObject",
    "AsyncPerceptionClient",
    "FoundObject",
    "Grasps",
    "LastPicture",
    "MasksOfCameras",
    "ObjectPlace",
    "PerceptionClient",
    "PhotoMask",
    "Security",
    "Segmentation",
    "SurfacePoints",
    "TrackedObject",
    "request_id",
]


def __getattr__(name: str) -> Any:
    # imported when it is asked for: asyncio slows the start of a client that does not use it
    if name == "AsyncPerceptionClient":
        from .async_client import AsyncPerceptionClient

        return AsyncPerceptionClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
