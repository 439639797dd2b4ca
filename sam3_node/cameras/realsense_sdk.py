"""Wraps the RealSense SDK: its import, devices by serial number, streams and their modes, lenses, and its errors."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..bags.formats.realsense import make_intrinsics
from ..errors import BagError, CameraError, MissingExtraError, did_you_mean, require
from ..settings import CameraSettings
from ..types import Intrinsics
from .camera_source import Mode, choose_mode, wanted_mode, warn_about_mode

# words in the SDK's errors: of a camera that another program uses, and of one that this user may not open
_BUSY = ("busy", "in use", "already", "is streaming")
_FORBIDDEN = ("permission", "access denied", "errno=13")
# the formats of colour that are read, the best first
_COLOUR_FORMATS = ("bgr8", "rgb8", "yuyv", "y8")
_LIST_HINT = "sam3-node camera list shows the cameras that are found"

_log = logging.getLogger(__name__)


def load_sdk() -> Any:
    """Import and return pyrealsense2.

    Raises MissingExtraError if it is not installed, CameraError if it cannot be loaded because a library is missing.
    """
    try:
        return require("pyrealsense2", "realsense")
    except MissingExtraError:
        raise
    except ImportError as error:
        raise CameraError(
            f"pyrealsense2 is installed, but cannot be loaded ({error}); it needs the library libusb: "
            "sudo apt install libusb-1.0-0"
        ) from error


def find_device(rs: Any, devices: Sequence[Any], serial: str) -> Any:
    """Return the device with this serial number, or the only one if it is empty. Raises CameraError otherwise."""
    # a device that is lost while it is listed has no serial number
    by_serial = {read_info(rs, device, "serial_number"): device for device in devices}
    names = ", ".join(f"{number} ({read_info(rs, each, 'name')})" for number, each in by_serial.items())
    if serial in by_serial:
        return by_serial[serial]
    if not devices:
        expected = f"a RealSense camera {serial}".rstrip()
        raise CameraError(
            f"expected {expected}, found none; check its cable and that the "
            "udev rules of librealsense are installed, then plug it in again"
        )
    if serial:
        raise CameraError(
            f"expected the RealSense camera {serial}, found {names}{did_you_mean(serial, by_serial)}; {_LIST_HINT}"
        )
    if len(devices) > 1:
        raise CameraError(f"expected one RealSense camera, found {names}; name one: realsense:SERIAL")
    return devices[0]


def read_info(rs: Any, device: Any, name: str) -> str:
    """Return a text of the device, such as "serial_number"; "" if it has none, or is lost."""
    key = getattr(rs.camera_info, name)
    try:
        if device.supports(key):
            return str(device.get_info(key))
    except RuntimeError:
        pass
    return ""


def explain(name: str, error: RuntimeError) -> CameraError:
    """Return an error of the SDK as a CameraError that says what to do."""
    # the SDK has one kind of error for everything: its words tell the cause
    text = str(error).lower()
    if any(word in text for word in _BUSY):
        advice = (
            "another program uses the camera: end it, such as realsense-viewer or another sam3-node camera"
        )
    elif any(word in text for word in _FORBIDDEN):
        advice = "this user may not open it: install the udev rules of librealsense, then plug it in again"
    else:
        advice = "plug it in again; if that does not help, into another port"
    return CameraError(f"{name}: the SDK says {str(error).strip()!r}; {advice}")


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream of a sensor in one of its modes."""

    sensor: Any
    profile: Any
    mode: Mode


def choose_streams(rs: Any, device: Any, settings: CameraSettings, name: str) -> tuple[Stream, Stream | None]:
    """Choose the modes of colour and depth that are nearest to the settings. Warns about another size or rate.

    Raises CameraError for a camera without colour.
    """
    wanted = wanted_mode(settings)
    colour = _choose(list_streams(rs, device, rs.stream.color), wanted, _COLOUR_FORMATS)
    if colour is None:
        raise CameraError(
            f"{name}: expected a colour stream ({', '.join(_COLOUR_FORMATS)}), found none; "
            "choose a camera with a colour sensor"
        )
    # depth as fast and as large as colour, if the camera has it
    depth = None
    if settings.depth:
        depth = _choose(list_streams(rs, device, rs.stream.depth), colour.mode, ("z16",))
    if not device.is_playback():
        usb = read_info(rs, device, "usb_type_descriptor")
        if usb.startswith("2"):
            _log.warning(
                "%s: expected USB 3, found USB %s, which has few modes: uses %s; use a USB 3 port and its own cable",
                name,
                usb,
                colour.mode,
            )
        else:
            warn_about_mode(name, colour.mode, wanted)
    return colour, depth


def list_streams(rs: Any, device: Any, kind: Any) -> list[Stream]:
    """List the streams of one kind, such as rs.stream.color, in all modes."""
    streams = []
    for sensor in device.query_sensors():
        for profile in sensor.get_stream_profiles():
            if profile.stream_type() == kind and profile.is_video_stream_profile():
                video = profile.as_video_stream_profile()
                mode = Mode(video.width(), video.height(), float(video.fps()), video.format().name)
                streams.append(Stream(sensor, video, mode))
    return streams


def _choose(streams: Sequence[Stream], wanted: Mode, forms: Sequence[str]) -> Stream | None:
    # of several sensors with a mode, the first one counts
    by_mode = {stream.mode: stream for stream in reversed(streams)}
    mode = choose_mode(by_mode, wanted, forms)
    if mode is None:
        return None
    return by_mode[mode]


def has_extrinsics(depth: Any, colour: Any) -> bool:
    """Return True if the camera says how depth lies to colour."""
    try:
        depth.get_extrinsics_to(colour)
    except RuntimeError:
        return False
    return True


def read_lens(profile: Any, name: str) -> Intrinsics | None:
    """Return the intrinsics of a stream as the SDK has them. Warns and returns None for an unknown lens."""
    # the names are those in recordings of the SDK: brown_conrady becomes Brown Conrady
    lens = profile.get_intrinsics()
    model = lens.model.name.replace("_", " ").title()
    try:
        return make_intrinsics(
            (lens.width, lens.height), (lens.fx, lens.fy, lens.ppx, lens.ppy), model, tuple(lens.coeffs)
        )
    except BagError as error:
        _log.warning("%s: the frames have no intrinsics: %s; set camera.calibration", name, error)
        return None
