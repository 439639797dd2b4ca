"""All settings of a deployment, and the layers that set them."""

from .load import load_settings, read_toml
from .tree import (
    CameraSettings,
    DetectorSettings,
    EngineSettings,
    GroupSettings,
    ModelSettings,
    Option,
    RecordSettings,
    Section,
    Settings,
    SnapshotSettings,
    SpatialSettings,
    TrackerSettings,
    TransportSettings,
    old_names,
    options,
)

__all__ = [
    "CameraSettings",
    "DetectorSettings",
    "EngineSettings",
    "GroupSettings",
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
]
