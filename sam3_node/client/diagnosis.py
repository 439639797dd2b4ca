"""The reason why a client gets no masks, from what the node says about itself."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..transport.channels import Arrivals
from ..types import CAMERA_SILENT_S, Delivery

DEFAULT_PORTS = "by default, masks are at port 5551, frames at 5550 and control at 5552"
_KINDS = {"frame/": "frames of a camera", "pose/": "poses of a robot"}  # by the beginning of the topic
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
        if stats["stepped"] and not is_silent(stats):
            return camera
    return None


def diagnose(
    description: Description | None, wanted: Wanted, connected: bool, arrivals: Arrivals | None = None
) -> str:
    """Return one line that says what keeps masks from arriving, and what to do about it.

    `description` is None if no node answers; `connected` says whether the masks endpoint has a peer, and `arrivals`
    what has come from it.
    """
    # from what is seen to what is said: messages, then the node's answer, then its settings and cameras
    found = _diagnose_arrivals(description, wanted, arrivals)
    if found is not None:
        return found
    # nothing came that tells more: what does the node say?
    if description is None:
        return _diagnose_no_answer(wanted, connected, arrivals)
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
    return f"{_diagnose_cameras(description, wanted.cameras)}{_describe_count(arrivals)}"


def _diagnose_arrivals(
    description: Description | None, wanted: Wanted, arrivals: Arrivals | None
) -> str | None:
    """Say what comes from the endpoint instead of masks; None if masks come, or nothing else does."""
    if arrivals is None or arrivals.masks:
        return None
    transport: Mapping[str, Any] = {}
    advice = DEFAULT_PORTS
    if description is not None:
        transport = description["settings"]["transport"]
        advice = f"the node binds its masks at {transport['masks']}"
    if wanted.masks in transport.get("frames", ()):
        return f"{wanted.masks} is an endpoint of frames: expected the endpoint of masks; {advice}"
    # masks of other cameras only, masks that cannot be read, or no masks at all
    others = {topic: count for topic, count in arrivals.sample.items() if not topic.startswith("masks/")}
    cameras = [topic.removeprefix("masks/") for topic in arrivals.sample]
    if cameras and not others and wanted.cameras and not set(cameras) & set(wanted.cameras):
        return f"all masks are of other cameras, {', '.join(cameras)}; expected {', '.join(wanted.cameras)}"
    if arrivals.rejected and len(others) < len(arrivals.sample):
        return (
            f"{arrivals.rejected} messages came from {wanted.masks}, and none can be read as masks:"
            f" {arrivals.last_error}; {advice}"
        )
    if not others or len(others) < len(arrivals.sample):
        return None
    topic, count = next(iter(others.items()))
    kind = "messages of another program"
    for root, known in _KINDS.items():
        if topic.startswith(root):
            kind = known
    return (
        f"{count} messages were looked at that {wanted.masks} sends, and none were masks: they are {kind}"
        f" ({topic[:40]!r}); expected the endpoint of masks; {advice}"
    )


def _describe_count(arrivals: Arrivals | None) -> str:
    """Say how many masks have come, and how many messages could not be read."""
    if arrivals is None:
        return ""
    text = f"; {arrivals.masks or 'no'} masks have come from this endpoint"
    if arrivals.rejected:
        text += f", and {arrivals.rejected} messages that cannot be read: {arrivals.last_error}"
    return text


def _diagnose_no_answer(wanted: Wanted, connected: bool, arrivals: Arrivals | None) -> str:
    # half of the node is reached: a wrong port, or a node that does not answer yet
    if connected:
        sender = f"masks come from {wanted.masks}"
        if arrivals is not None and not (arrivals.masks or arrivals.sample):
            sender = f"{wanted.masks} is connected and sends no masks"
        return (
            f"{sender}, but no node answers at {wanted.control}: correct the control "
            "endpoint, or wait if the node still loads its model"
        )
    return (
        f"no node is connected at {wanted.masks} (masks) and {wanted.control} (control): start one with "
        "sam3-node run, or correct the endpoints"
    )


def _diagnose_cameras(description: Description, cameras: Sequence[str]) -> str:
    """Say which state of node or cameras keeps masks from a client that is connected."""
    # the first reason that holds: nothing is processed, no camera, no wanted camera, no frames, frames that fail
    if description["paused"]:
        return "the node is paused: resume it with client.resume() or sam3-node resume"
    refused = _describe_refused(description, cameras)
    if refused is not None and all(map(_is_idle, _select(description, cameras).values())):
        return refused
    if not description["cameras"]:
        frames = ", ".join(description["settings"]["transport"]["frames"])
        return f"{NO_FRAME_YET} (the node reads frames from {frames})"
    served = _select(description, cameras)
    if not served:
        return f"all masks are of other cameras, {', '.join(description['cameras'])}; expected {', '.join(cameras)}"
    if all(map(is_silent, served.values())):
        silent = ", ".join(f"{camera} for {stats['silent_s']:.0f} s" for camera, stats in served.items())
        return f"the cameras send no frames: {silent}; check that they run"
    if not any(stats["stepped"] for stats in served.values()):
        known = [
            f"{camera}: {stats['last_error']}" for camera, stats in served.items() if stats["last_error"]
        ]
        if not known:
            return f"no frame of {', '.join(served)} was processed yet; wait until the node is ready"
        return f"the node cannot use the frames of its cameras: {'; '.join(known)}"
    sending = {camera: stats for camera, stats in served.items() if not is_silent(stats)}
    if all(map(_is_hindered, sending.values())):
        reasons = "; ".join(f"{camera}: {stats['last_error']}" for camera, stats in sending.items())
        return f"the node has published no masks for {CAMERA_SILENT_S:g} s, though frames come: {reasons}"
    return f"masks are published for {', '.join(served)}; nothing keeps them from arriving"


def _select(description: Description | None, cameras: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
    """Return the counts of the node's cameras that are among `cameras`, which means all if it is empty."""
    if description is None:
        return {}
    served = description["cameras"]
    return {camera: stats for camera, stats in served.items() if not cameras or camera in cameras}


def _describe_refused(description: Description, cameras: Sequence[str]) -> str | None:
    """Say which cameras send frames that the node refuses, and why; None if none does lately."""
    # an older node does not tell
    refused = description.get("frames_refused", {})
    lines = []
    for camera, found in refused.items():
        is_wanted = not cameras or not camera or camera in cameras
        if is_wanted and not is_silent(found):
            whose = f"frames of camera {camera}" if camera else "messages without the topic of a camera"
            lines.append(
                f"{found['frames']} {whose} came from {found['endpoint']}, and the node refused them: "
                f"{found['last_error']}"
            )
    if not lines:
        return None
    return f"{'; '.join(lines)}; correct what the sender packs: docs/own-camera.md"


def _is_idle(stats: Mapping[str, Any]) -> bool:
    """Return True if a camera is silent, or none of its frames could be processed."""
    return is_silent(stats) or not stats["stepped"]


def _is_hindered(stats: Mapping[str, Any]) -> bool:
    """Return True if frames of a camera come, and an error has kept the node from publishing masks of them lately."""
    # an older node does not tell
    error_s = stats.get("last_error_age_s")
    masks_ms = stats.get("masks_age_ms")
    has_error = error_s is not None and error_s < CAMERA_SILENT_S
    return has_error and (masks_ms is None or masks_ms >= 1000 * CAMERA_SILENT_S)


def is_silent(stats: Mapping[str, Any]) -> bool:
    """Return True if a camera has sent nothing lately."""
    return bool(stats["silent_s"] >= CAMERA_SILENT_S)
