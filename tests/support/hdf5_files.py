"""HDF5 episodes in the layouts of ALOHA's record_episodes and of robomimic's dataset_states_to_obs."""

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

HEIGHT = 24
WIDTH = 32

Pictures = npt.NDArray[np.uint8]


def make_pictures(rows: int, seed: int = 0) -> Pictures:
    """Return smooth RGB pictures, uint8 [rows, height, width, 3]."""
    noise = np.random.default_rng(seed).integers(0, 255, (rows, 3, 4, 3), np.uint8)
    return np.stack([cv2.resize(image, (WIDTH, HEIGHT)) for image in noise])


def make_joints(rows: int, count: int) -> npt.NDArray[np.float64]:
    """Return positions of joints, [rows, count]."""
    return np.arange(rows * count).reshape(rows, count) / 8


def write_aloha(path: Path, pictures: dict[str, Pictures], compress: bool = False, **attributes: Any) -> Path:
    """Write one episode: raw pictures, or JPEG padded to the longest one with the lengths beside."""
    import h5py

    with h5py.File(path, "w") as file:
        file.attrs["sim"] = False
        file.attrs.update(attributes)
        images = file.create_group("observations/images")
        lengths = []
        for camera, frames in pictures.items():
            if not compress:
                images.create_dataset(camera, data=frames, chunks=(1, HEIGHT, WIDTH, 3))
                continue
            encoded = [cv2.imencode(".jpg", frame[..., ::-1])[1].ravel() for frame in frames]
            lengths.append([len(data) for data in encoded])
            longest = max(lengths[-1])
            padded = np.stack([np.pad(data, (0, longest - len(data))) for data in encoded])
            images.create_dataset(camera, data=padded, chunks=(1, longest))
        if compress:
            file["compress_len"] = np.array(lengths, np.float64)
        rows = len(next(iter(pictures.values())))
        file["observations/qpos"] = make_joints(rows, 14)
        file["action"] = np.zeros((rows, 14))
    return path


def write_robomimic(path: Path, demos: dict[int, Pictures], control_freq: int | None = 20) -> Path:
    """Write demonstrations with one camera, compressed, and with its depth beside."""
    import h5py

    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        arguments = {"env_name": "Lift", "env_kwargs": {"control_freq": control_freq} if control_freq else {}}
        data.attrs["env_args"] = json.dumps(arguments)
        for number, frames in demos.items():
            demo = data.create_group(f"demo_{number}")
            demo.attrs["num_samples"] = len(frames)
            for group in ("obs", "next_obs"):
                demo.create_dataset(f"{group}/agentview_image", data=frames, compression="gzip")
            demo["obs/agentview_depth"] = np.ones((len(frames), HEIGHT, WIDTH, 1), np.float32)
            demo["obs/robot0_eef_pos"] = np.zeros((len(frames), 3))
            demo["obs/robot0_joint_pos"] = make_joints(len(frames), 7).astype(np.float32)
    return path
