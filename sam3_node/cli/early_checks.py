"""Checks what settings and options name before torch is imported, which takes seconds.

Later code makes the same checks again: a file may change meanwhile, and other programs call it without a command.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import require_installed
from ..files import check_weights_name
from ..settings import Settings

if TYPE_CHECKING:
    from ..replay.job import Job


def check_named_files(settings: Settings) -> None:
    """Raise for weights, a calibration or a URDF of the settings that cannot be there, as their loading would.

    Raises MissingExtraError if the extra `node` is missing.
    """
    from ..calibration import load_calibration
    from ..perception.robot_model import check_file

    for module in ("torch", "transformers"):
        require_installed(module, "node")
    check_weights_name(settings.model.name)
    for path in settings.spatial.calibration:
        load_calibration(path)
    if settings.robot.urdf is not None:
        check_file(settings.robot.urdf)


def check_recording(job: Job) -> None:
    """Raise BagError for a single recording on this machine that is none. One of several must not stop the others."""
    from ..bags.bag import find_reader
    from ..replay.store import local_path

    path = local_path(job.bags[0])
    if len(job.bags) == 1 and path is not None:
        find_reader(Path(path))
