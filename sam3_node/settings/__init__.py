"""All settings of a deployment, and the layers that set them."""

from .load import load_settings, read_toml
from .monitoring import Address, HealthSettings, LoggingSettings, split_address
from .section import Section
from .tree import (
    CameraSettings,
    DeadlineSettings,
    DetectorSettings,
    EngineSettings,
    GroupSettings,
    ModelSettings,
    Option,
    RecordSettings,
    Settings,
    SnapshotSettings,
    SpatialSettings,
    TrackerSettings,
    TransportSettings,
    old_names,
    options,
)

__all__ = [
    "Address",
    "CameraSettings",
    "DeadlineSettings",
    "DetectorSettings",
    "EngineSettings",
    "GroupSettings",
    "HealthSettings",
    "LoggingSettings",
    "ModelSettings",
    "Option",
    "RecordSettings",
    "Section",
    "Settings",
    "SnapshotSettings",
    "SpatialSettings",
    "TrackerSettings",
    "TransportSettings",
    "load_settings",
    "old_names",
    "options",
    "read_toml",
    "split_address",
]
