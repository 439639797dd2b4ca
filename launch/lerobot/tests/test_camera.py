"""The camera plugin by lerobot's own registry, robot and data set, with real sockets, in lerobot's environment."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import draccus
import numpy as np
import pytest
from lerobot.cameras.configs import CameraConfig
from lerobot.cameras.utils import make_cameras_from_configs
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.robots.so_follower.so_follower import SOFollower
from lerobot.utils.feature_utils import build_dataset_frame, hw_to_dataset_features
from lerobot.utils.import_utils import register_third_party_plugins

from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import encode_depth

HEIGHT = 48
WIDTH = 64
IMAGE = np.full((HEIGHT, WIDTH, 3), (10, 20, 200), np.uint8)  # BGR
DEPTH = (np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) % 500) * 2 + 400
"""In units of half a millimetre."""
INSIDE = np.zeros((HEIGHT, WIDTH), np.bool_)
INSIDE[8:24, 16:40] = True
MUG = Instance(1, "red mug", 0.9, "tracked", 5, 0, Mask.from_full(INSIDE), confidence=0.95)

register_third_party_plugins()


@contextmanager
def node(folder: Path, *instances: Instance, aligned: bool = True) -> Iterator[dict[str, Any]]:
    """Publish frames and masks of these instances. Yields the camera's options."""
    done = threading.Event()
    options = {"type": "sam3", "frames": f"ipc://{folder}/frames", "masks": f"ipc://{folder}/masks"}

    def run() -> None:
        with FramePublisher(options["frames"]) as frames, MaskPublisher(options["masks"]) as masks:
            for seq in itertools.count():
                if done.wait(0.02):
                    return
                depth = encode_depth(DEPTH, "z16", 0.0005, aligned)
                now_ns = time.time_ns()
                frames.send(Frame("cam0", seq, now_ns, WIDTH, HEIGHT, "bgr8", IMAGE.tobytes(), depth=depth))
                masks.send(MaskFrame("cam0", seq, now_ns, WIDTH, HEIGHT, instances=instances, epoch=1))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield options | {"width": WIDTH, "height": HEIGHT, "timeout_s": 60, "mask_max_age_ms": 50_000}
    finally:
        done.set()
        thread.join()


def make(options: dict[str, Any]) -> Any:
    """Return the camera that lerobot makes from a description as on its command line."""
    return make_cameras_from_configs({"front": draccus.decode(CameraConfig, options)})["front"]


def read_with_masks(camera: Any) -> np.ndarray:
    """Return the first picture with a mask: at first, frames may come without."""
    while not camera._pair.masks or not camera._pair.masks.instances:
        camera.read()
    return camera.read_latest(60_000)


def test_the_overlay_tints_the_usable_masks(tmp_path: Path) -> None:
    with node(tmp_path, MUG) as options, make(options) as camera:
        picture = read_with_masks(camera)
        assert (picture.shape, picture.dtype) == ((HEIGHT, WIDTH, 3), np.uint8)
        changed = (picture != IMAGE[..., ::-1]).any(axis=-1)
        np.testing.assert_array_equal(changed, INSIDE)
        assert camera.async_read(60_000).shape == picture.shape
        with pytest.raises(TimeoutError):
            camera.read_latest(max_age_ms=-1)
    assert not camera.is_connected


def test_masks_have_a_channel_for_each_label_and_none_for_doubt(tmp_path: Path) -> None:
    bottle = replace(MUG, id=2, label="bottle", doubtful=True)
    with node(tmp_path, MUG, bottle) as options:
        with make(options | {"content": "masks", "labels": ["bottle", "red mug"]}) as camera:
            picture = read_with_masks(camera)
        np.testing.assert_array_equal(picture[..., 1], INSIDE * np.uint8(255))
        assert not picture[..., [0, 2]].any()
        half = {"content": "image", "width": WIDTH // 2, "height": HEIGHT // 2, "use_depth": True}
        with make(options | half) as camera:
            np.testing.assert_array_equal(camera.read(), IMAGE[::2, ::2, ::-1])
            assert camera.read_depth(60_000).shape == (HEIGHT // 2, WIDTH // 2, 1)


def test_depth_is_in_millimetres_and_must_be_aligned(tmp_path: Path) -> None:
    with node(tmp_path, MUG) as options, make(options | {"use_depth": True}) as camera:
        np.testing.assert_array_equal(camera.read_latest_depth(60_000)[..., 0], np.rint(DEPTH / 2))
    with (
        node(tmp_path, MUG, aligned=False) as options,
        make(options | {"use_depth": True}) as camera,
        pytest.raises(RuntimeError, match="aligned"),
    ):
        camera.read_latest_depth(60_000)


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"width": None}, "width"), ({"content": "video"}, "content"), ({"content": "masks"}, "labels")],
)
def test_wrong_settings_are_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        CameraConfig.get_choice_class("sam3")(**{"width": 4, "height": 4, **changes})


def test_an_absent_camera_is_named(tmp_path: Path) -> None:
    camera = make(
        {"type": "sam3", "frames": f"ipc://{tmp_path}/f", "width": 4, "height": 4, "timeout_s": 0.1}
    )
    with pytest.raises(ConnectionError, match="cam0"):
        camera.connect()
    assert not camera.is_connected


def test_a_robot_of_lerobot_records_pictures_and_depth(tmp_path: Path) -> None:
    """The bus of the motors is a stand-in; the robot's cameras, features and observations are lerobot's own."""
    with node(tmp_path, MUG) as options, make(options | {"use_depth": True}) as camera:
        read_with_masks(camera)
        bus = SimpleNamespace(
            motors={"gripper": None}, is_connected=True, sync_read=lambda *_, **__: {"gripper": 0.5}
        )
        robot = object.__new__(SOFollower)
        robot.id = "arm"
        robot.cameras = {"front": camera}
        robot.bus = bus
        robot.config = SimpleNamespace(num_read_retries=0)
        features = hw_to_dataset_features(robot.observation_features, "observation")
        assert features["observation.images.front_depth"]["info"]["is_depth_map"]
        features["action"] = {"dtype": "float32", "shape": (1,), "names": ["gripper.pos"]}
        dataset = LeRobotDataset.create("me/seen", 10, features, root=tmp_path / "dataset")
        for _ in range(3):
            row = build_dataset_frame(dataset.features, robot.get_observation(), prefix="observation")
            dataset.add_frame({**row, "action": np.zeros(1, np.float32), "task": "lift"})
        dataset.save_episode()
        dataset.finalize()
    read = LeRobotDataset("me/seen", root=tmp_path / "dataset", video_backend="pyav")
    assert read.meta.depth_keys == ["observation.images.front_depth"]
    depth = read[0]["observation.images.front_depth"].numpy().squeeze()
    np.testing.assert_allclose(depth, DEPTH / 2, atol=4)  # 12 bits over 10 m in steps of a logarithm
