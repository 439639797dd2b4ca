"""Pipes, endless devices and files that are too large, in the place of every kind of file that is read by a path."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sam3_node.bags.bag import open_bag, sample_images
from sam3_node.calibration import load_calibration
from sam3_node.calibration.camera_file import back_up
from sam3_node.calibration.poses import read_poses
from sam3_node.cameras.playback import open_files
from sam3_node.cli import calibration_views, requests
from sam3_node.detection.vocabulary import Vocabulary, read_phrases
from sam3_node.engines.engine_store import checkpoint_digest
from sam3_node.engines.quantize import Scales, load_recipe
from sam3_node.errors import (
    AuthenticationError,
    BagError,
    CalibrationError,
    CameraError,
    EngineError,
    ModelError,
    OutputError,
    ReplayError,
    Sam3NodeError,
    SettingsError,
    SnapshotError,
    VocabularyError,
)
from sam3_node.models import weight_files
from sam3_node.models.yolo.network import load_yolo_world
from sam3_node.node.saved_state import Saved
from sam3_node.replay.davis_png import read_labels
from sam3_node.replay.job import read_prompts
from sam3_node.replay.store import FolderStore
from sam3_node.settings import load_settings
from sam3_node.transport.security import KeyFolder
from tests.support.hostility import limited_memory, link_to_device, make_huge, make_pipe
from tests.support.patience import PATIENCE_S
from tests.support.resources import nothing_added
from tests.support.tables import each_row

pytestmark = pytest.mark.timeout(PATIENCE_S)


class Kind(NamedTuple):
    """A kind of file that the node or a command reads."""

    name: str
    """path of the file in a folder"""
    read: Callable[[Path], Any]
    """reads this path"""
    error: type[Sam3NodeError]
    """what the family of its readers raises"""
    is_bounded: bool = True
    """False for files that are read in pieces, so that any size is good"""


def read_recording(path: Path) -> object:
    """Read a recording. One that is lost as a whole counts as refused."""
    with open_bag(path) as bag:
        frames = list(bag)
    if not frames:
        raise BagError(str(bag.lost))
    return frames


def read_folder(path: Path) -> object:
    """Read the recording that the file is a part of."""
    return read_recording(path.parent)


def read_dataset(path: Path) -> object:
    return read_recording(path.parents[1])


def read_settings(path: Path) -> object:
    return load_settings(path)


def read_views(path: Path) -> object:
    return list(calibration_views._open_sources([str(path)], "", 1, {}))


def read_store(path: Path) -> bytes:
    return FolderStore(path.parent).read(path.name)


def read_weights(path: Path) -> object:
    """Check the files of a folder of weights, as each load of weights does first."""
    for name in (weight_files.CONFIG, "model.safetensors"):
        if path.name != name:
            (path.parent / name).write_bytes(b"{}")
    return weight_files.check_weight_files(path.parent)


def read_digest(path: Path) -> object:
    weights = path.with_suffix("")
    weights.write_bytes(b"weights")
    return weight_files.check_digest(weights)


def identify_weights(path: Path) -> object:
    return checkpoint_digest(str(path.parent))


def read_key(path: Path) -> object:
    path.parent.chmod(0o700)
    return KeyFolder(path.parent).find_server("node")


def play_video(path: Path) -> object:
    import threading

    return open_files("cam0", "video", path, 0.0, False, threading.Event())


KINDS = [
    Kind("node.snapshot", Saved.read, SnapshotError),
    Kind("000001.state", read_store, OutputError),
    Kind("profile.toml", read_settings, SettingsError),
    Kind("recipe.toml", load_recipe, SettingsError),
    Kind("calibration.toml", load_calibration, SettingsError),
    Kind("calibration.toml", back_up, OutputError),
    Kind("poses.csv", read_poses, CalibrationError),
    Kind("poses.json", read_poses, CalibrationError),
    Kind("board.png", read_views, CalibrationError),
    Kind("scales.json", Scales.load, EngineError),
    Kind("objects.json", read_prompts, ReplayError),
    Kind("objects.png", read_prompts, ReplayError),
    Kind("labels.png", read_labels, ReplayError),
    Kind("mugs.json", requests._read_set, SettingsError),
    Kind("phrases.txt", read_phrases, VocabularyError),
    Kind("vocabulary.safetensors", Vocabulary.load, VocabularyError, is_bounded=False),
    Kind("config.json", lambda path: load_yolo_world(path.parent), ModelError),
    Kind("model.safetensors", read_weights, ModelError, is_bounded=False),
    Kind("model.safetensors", identify_weights, EngineError, is_bounded=False),
    Kind("weights.sha256", read_digest, ModelError),
    Kind("node.pub", read_key, AuthenticationError),
    Kind("recording.mcap", read_recording, BagError, is_bounded=False),
    Kind("recording.mcap.zst", read_recording, BagError, is_bounded=False),
    Kind("recording.bag", read_recording, BagError, is_bounded=False),
    Kind("recording.bag.lz4", read_recording, BagError, is_bounded=False),
    Kind("recording.db3", read_recording, BagError, is_bounded=False),
    Kind("recording.hdf5", read_recording, BagError, is_bounded=False),
    Kind("recording.hdf5#episode=0", read_recording, BagError, is_bounded=False),
    Kind("recording.mp4", read_recording, BagError, is_bounded=False),
    Kind("recording.zarr.zip", read_recording, BagError, is_bounded=False),
    Kind("recording.mp4", play_video, CameraError, is_bounded=False),
    Kind("part_0.db3", read_folder, BagError, is_bounded=False),
    Kind("split_0.mcap", read_folder, BagError, is_bounded=False),
    Kind("metadata.yaml", read_folder, BagError),
    Kind("rgb.txt", read_folder, BagError),
    Kind("scene_camera.json", read_folder, BagError),
    Kind("data.csv", read_folder, BagError),
    Kind("meta/info.json", read_dataset, BagError),
    Kind("image.png", read_folder, BagError),
    Kind("image.png", lambda path: list(sample_images(path.parent, 1)), BagError),
]


@pytest.mark.parametrize("make", [make_pipe, link_to_device, make_huge])
def test_what_is_no_file_is_refused_at_once(make: Callable[[Path], None], tmp_path: Path) -> None:
    @each_row("kind", [kind for kind in KINDS if make is not make_huge or kind.is_bounded])
    def refuse(kind: Kind, tmp_path: Path) -> None:
        path = tmp_path / "folder" / kind.name
        path.parent.mkdir(parents=True)
        make(path.with_name(path.name.partition("#")[0]))
        with limited_memory(64), pytest.raises(kind.error) as caught:
            kind.read(path)
        assert str(caught.value)

    with nothing_added():  # once, because it collects all garbage
        refuse(tmp_path=tmp_path)
