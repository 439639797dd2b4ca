"""Options of RealSense sensors from the settings: preset, exposure and emitter."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import CameraError
from ..settings import CameraSettings

_log = logging.getLogger(__name__)
_UVC_UNITS_PER_MS = 10  # a colour sensor of its own counts in 100 us, a stereo sensor in us
_STEREO_UNITS_PER_MS = 1000


def apply_options(rs: Any, colour: Any, depth: Any | None, settings: CameraSettings, name: str) -> None:
    """Set the preset, then the exposure and the emitter, which the preset would overwrite.

    `colour` and `depth` are sensors, the same one in some cameras. Warns about an option that the camera lacks. Raises
    CameraError for a value out of the option's range.
    """
    if settings.exposure_ms:
        units = _STEREO_UNITS_PER_MS if _is_same(colour, depth) else _UVC_UNITS_PER_MS
        _set_exposure(rs, colour, settings.exposure_ms, units, f"{name}: camera.exposure_ms")
    if depth is None:
        return
    if settings.preset != "keep":
        preset = int(getattr(rs.rs400_visual_preset, settings.preset))
        _set(depth, rs.option.visual_preset, preset, f"{name}: camera.preset")
    if settings.depth_exposure_ms:
        exposure_ms = settings.depth_exposure_ms
        _set_exposure(rs, depth, exposure_ms, _STEREO_UNITS_PER_MS, f"{name}: camera.depth_exposure_ms")
    if settings.emitter != "keep":
        _set(depth, rs.option.emitter_enabled, settings.emitter == "on", f"{name}: camera.emitter")


def _is_same(colour: Any, depth: Any | None) -> bool:
    return depth is not None and any(
        profile.stream_type().name == "depth" for profile in colour.get_stream_profiles()
    )


def _set_exposure(rs: Any, sensor: Any, exposure_ms: float, units_per_ms: int, what: str) -> None:
    if sensor.supports(rs.option.enable_auto_exposure):
        sensor.set_option(rs.option.enable_auto_exposure, 0)
    _set(sensor, rs.option.exposure, exposure_ms * units_per_ms, what, units_per_ms)


def _set(sensor: Any, option: Any, value: float, what: str, units: int = 1) -> None:
    if not sensor.supports(option):
        _log.warning("%s is not used: the camera has no such option", what)
        return
    limits = sensor.get_option_range(option)
    if not limits.min <= value <= limits.max:
        raise CameraError(
            f"{what}: expected {limits.min / units:g} to {limits.max / units:g}, found {value / units:g}"
        )
    step = limits.step or 1
    sensor.set_option(option, limits.min + round((value - limits.min) / step) * step)
