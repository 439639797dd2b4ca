"""The reason why a client gets no masks, from what the node says about itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..types import CAMERA_SILENT_S, Delivery

NO_FRAME_YET = "no camera has sent a frame yet; start one: sam3-node camera …"


class Wanted(NamedTuple):
    """Endpoints, delivery and cameras that a client asks for. No `cameras` means all."""

    masks: str
    control: str
    delivery: Delivery
    cameras: tuple[str, ...]


Description = Mapping[str, Any]
"""The node's reply to `describe`."""


def find_sending_camera(description: Description | None, cameras: Sequence[str]) -> str | None:
    """Return the first of `cameras` (empty: of all) that sends frames and has had one processed; None if none does."""
    for camera, stats in _select(description, cameras).items():
        if stats["stepped"] and not _is_silent(stats):
            return camera
    return None


def diagnose(description: Description | None, wanted: Wanted, connected: bool) -> str:
    """Return one line that says what keeps masks from arriving, and what to do about it.

    `description` is None if no node answers; `connected` says whether the masks endpoint has a peer.
    """
    if description is None:
        return _diagnose_no_answer(wanted, connected)
    transport = description["settings"]["transport"]
    if transport["delivery"] != wanted.delivery:
        return (
            f"the node at {wanted.control} delivers {transport['delivery']!r}, this client expects "
            f"{wanted.delivery!r}: set transport.delivery alike on both sides"
        )
    if not connected:
        return (
            f"the node at {wanted.control} answers, but its masks are not at {wanted.masks}: it binds "
            f"{transport['masks']}"
        )
    return _diagnose_cameras(description, wanted.cameras)


def _diagnose_no_answer(wanted: Wanted, connected: bool) -> str:
    if connected:
        return (
            f"masks come from {wanted.masks}, but no node answers at {wanted.control}: correct the control "
            "endpoint, or wait if the node still loads its model"
        )
    return (
        f"no node is connected at {wanted.masks} (masks) and {wanted.control} (control): start one with "
        "sam3-node run, or correct the endpoints"
    )


def _diagnose_cameras(description: Description, cameras: Sequence[str]) -> str:
    """Say which state of node or cameras keeps masks from a client that is connected."""
    if description["paused"]:
        return "the node is paused: resume it with client.resume() or sam3-node resume"
    if not description["cameras"]:
        frames = ", ".join(description["settings"]["transport"]["frames"])
        return f"{NO_FRAME_YET} (the node reads frames from {frames})"
    served = _select(description, cameras)
    if not served:
        return f"all masks are of other cameras, {', '.join(description['cameras'])}; expected {', '.join(cameras)}"
    if all(map(_is_silent, served.values())):
        silent = ", ".join(f"{camera} for {stats['silent_s']:.0f} s" for camera, stats in served.items())
        return f"the cameras send no frames: {silent}; check that they run"
    if not any(stats["stepped"] for stats in served.values()):
        errors = "; ".join(f"{camera}: {stats['last_error']}" for camera, stats in served.items())
        return f"the node cannot use the frames of its cameras: {errors}"
    return f"masks are published for {', '.join(served)}; nothing keeps them from arriving"


def _select(description: Description | None, cameras: Sequence[str]) -> dict[str, Any]:
    """Return the counts of the node's cameras that are among `cameras`, which means all if it is empty."""
    served = description["cameras"] if description else {}
    return {camera: stats for camera, stats in served.items() if not cameras or camera in cameras}


def _is_silent(stats: Mapping[str, Any]) -> bool:
    """Return True if a camera has sent nothing lately. An older node does not say so."""
    silent_s = stats.get("silent_s")
    return silent_s is not None and bool(silent_s >= CAMERA_SILENT_S)
