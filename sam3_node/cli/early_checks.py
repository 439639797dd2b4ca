"""Checks what settings and options name before torch is imported, which takes seconds.

Later code makes the same checks again: a file may change meanwhile, and other programs call it without a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..engines.tensorrt.packages import check_packages
from ..errors import EngineError, require_installed
from ..files import check_weights_name, explain_os_error
from ..settings import Settings

if TYPE_CHECKING:
    from ..replay.job import Job


INDUCTOR = "inductor"
"""Kind of engines that torch itself compiles."""
EXPORT_PACKAGES = (("onnx", "onnx"), ("onnxscript", "onnx"))
"""What an export to ONNX needs, each with its extra."""
FP8_PACKAGES = (("modelopt", "quantize"), ("requests", "quantize"))
"""What FP8 scales need. modelopt imports requests without declaring it."""


def check_named_files(settings: Settings) -> None:
    """Raise for weights, a calibration or a URDF of the settings that cannot be there, as their loading would.

    Raises MissingExtraError if the extra `node` is missing.
    """
    from ..calibration import load_calibration
    from ..robot.robot_model import check_file

    check_node()
    # here, because it needs the extra `node`
    from ..detection.loading import check_chosen

    if settings.robot.urdf is not None:
        for module in ("lxml", "yourdfpy", "trimesh"):
            require_installed(module, "robot")
    check_weights_name(settings.model.name)
    check_chosen(settings.detector.kind, settings.detector.name)
    for path in settings.spatial.calibration:
        load_calibration(path)
    if settings.robot.urdf is not None:
        check_file(settings.robot.urdf)


def check_node(*more: tuple[str, str]) -> None:
    """Raise MissingExtraError if the extra `node` is missing, or a package of `more`: modules with their extras."""
    for module, extra in (("torch", "node"), ("transformers", "node"), ("safetensors", "node"), *more):
        require_installed(module, extra)


def check_engine_build(settings: Settings, scales: Path | None) -> None:
    """Raise EngineError for scales that cannot be read, MissingExtraError for what a build of engines would lack."""
    if scales is not None:
        with explain_os_error(EngineError, f"cannot read FP8 scales from {scales}"):
            scales.open("rb").close()
    check_node()
    if settings.engine.kind != INDUCTOR:
        # TensorRT first, whose extras bring ONNX
        check_packages()
        check_node(*EXPORT_PACKAGES)
    if scales is not None:
        check_node(*FP8_PACKAGES)


def check_tracing(settings: Settings) -> None:
    """Raise MissingExtraError if the settings name a collector, and the extra `otel` is missing."""
    if settings.monitoring.otlp_endpoint:
        for module in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
            require_installed(module, "otel")


def check_job(job: Job, uses_ray: bool) -> None:
    """Raise MissingExtraError for what a replay of this job would lack, BagError as `check_source`.

    Several recordings are not looked at: one of them must not stop the others.
    """
    from ..replay.cluster import check_ray
    from ..replay.store import check_protocol, local_path

    if uses_ray:
        check_ray()
    for place in (*job.bags, job.out):
        check_protocol(place)
    path = local_path(job.bags[0])
    if len(job.bags) == 1 and path is not None:
        check_source(path)


def check_source(path: Path) -> None:
    """Raise BagError for a path that is no recording, MissingExtraError if its format's library is missing."""
    from ..bags.bag import find_reader
    from ..bags.formats.hdf5 import Hdf5Bag
    from ..bags.formats.lerobot import LeRobotBag
    from ..bags.formats.mcap import McapBag
    from ..bags.formats.realsense import RealSenseBag
    from ..bags.formats.rosbag import RosBag
    from ..bags.formats.video import VideoBag

    packages = {
        McapBag: ("mcap", "bags"),
        RealSenseBag: ("rosbags", "bags"),
        RosBag: ("rosbags", "bags"),
        VideoBag: ("av", "bags"),
        LeRobotBag: ("pyarrow", "lerobot-datasets"),
        Hdf5Bag: ("h5py", "hdf5"),
    }
    # folders of images need none
    package = packages.get(find_reader(path))
    if package is not None:
        require_installed(*package)
