"""All settings of a deployment, and the layers that set them."""

from .layers import load_settings, read_toml
from .tree import (
    Address,
    CameraSettings,
    DetectorSettings,
    EngineSettings,
    GroupSettings,
    HealthSettings,
    ModelSettings,
    Option,
    RecordSettings,
    Section,
    Settings,
    SnapshotSettings,
    SpatialSettings,
    TrackerSettings,
    TransportSettings,
    options,
    split_address,
)

__all__ = [
    "Address",
    "CameraSettings",
    "DetectorSettings",
    "EngineSettings",
    "GroupSettings",
    "HealthSettings",
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
    "options",
    "read_toml",
    "split_address",
]
