"""The RealSense SDK: its import, its devices by their serial numbers, and its errors in terms of what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import CameraError, MissingExtraError, did_you_mean, require

_BUSY = ("busy", "in use", "already", "is streaming")
_FORBIDDEN = ("permission", "access denied", "errno=13")
_LIST_HINT = "sam3-node camera list shows the cameras that are found"


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
    by_serial = {read_info(rs, device, "serial_number"): device for device in devices}
    names = ", ".join(f"{number} ({read_info(rs, each, 'name')})" for number, each in by_serial.items())
    if serial in by_serial:
        return by_serial[serial]
    if not devices:
        raise CameraError(
            f"expected a RealSense camera{f' {serial}' if serial else ''}, found none; check its cable and that the "
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
        return str(device.get_info(key)) if device.supports(key) else ""
    except RuntimeError:
        return ""


def explain(name: str, error: RuntimeError) -> CameraError:
    """Return an error of the SDK as a CameraError that says what to do."""
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
