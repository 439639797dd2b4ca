"""Small good recordings of every format, and damage to them."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from foxglove_schemas_protobuf.CompressedVideo_pb2 import CompressedVideo
from mcap_protobuf.writer import Writer

from tests.support import ros_recordings as ros
from tests.support.grey_video import encode
from tests.support.hostile_media import video
from tests.support.hostility import damage
from tests.support.mcap_files import T0, WRITERS, rgbd, uncompressed
from tests.support.recordings import write_recording

Write = Callable[[Path], Path]


def _mcap(kind: str, path: Path) -> Path:
    options = {"enable_crcs": False, **uncompressed(4000)}  # damage is not found by its sum alone
    return WRITERS[kind](path.with_suffix(".mcap"), rgbd(3), **options)


def _packets(path: Path) -> Path:
    with path.open("wb") as file, Writer(file, enable_crcs=False, **uncompressed(4000)) as writer:
        for index, packet in enumerate(encode("mpeg4", 8, (48, 64))):
            message = CompressedVideo(frame_id="cam", data=packet, format="mpeg4")
            writer.write_message("/cam/video", message, T0 + index, T0 + index)
    return path


def _database(path: Path) -> Path:
    folder = ros.write_ros2(path.with_name("whole"), 2)
    return next(folder.glob("*.db3")).rename(path.with_suffix(".db3"))


def _video(format_: str, path: Path) -> Path:
    path.write_bytes(video(format_, "mpeg4", (48, 64), 8))
    return path


def write_images(extension: str, path: Path) -> Path:
    path.mkdir()
    picture = np.random.default_rng(0).integers(0, 255, (24, 32, 3), np.uint8)
    for index in range(2):
        assert cv2.imwrite(str(path / f"{index}.{extension}"), picture)
    return path


def write_picture(path: Path, depth: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.full((24, 32), 5000, np.uint16) if depth else np.full((24, 32, 3), 90, np.uint8)
    assert cv2.imwrite(str(path), image)


def write_tum(folder: Path) -> Path:
    """Write three images and their depth 10 ms later, as in fr1/desk; the depth of the last is missing."""
    colour = ["# color images", "# timestamp filename"]
    depth = ["# depth maps"]
    for index in range(3):
        name = f"13050311{index:02}.175304.png"
        write_picture(folder / "rgb" / name)
        colour.append(f"13050311{index:02}.175304 rgb/{name}")
        if index < 2:
            write_picture(folder / "depth" / name, depth=True)
            depth.append(f"13050311{index:02}.185304 depth/{name}")
    (folder / "rgb.txt").write_text("\n".join(colour))
    (folder / "depth.txt").write_text("\n".join(depth))
    (folder / "groundtruth.txt").write_text("# no list of files")
    return folder


def write_bop(root: Path) -> Path:
    """Write two scenes of two images with their depth, whose unit is 0.1 mm."""
    for scene in ("000001", "000002"):
        table = {}
        for index in (0, 4):
            write_picture(root / scene / "rgb" / f"{index:06}.png")
            write_picture(root / scene / "depth" / f"{index:06}.png", depth=True)
            for folder in ("mask", "mask_visib"):
                write_picture(root / scene / folder / f"{index:06}_000000.png")
            table[str(index)] = {"cam_K": [572.4, 0, 325.2, 0, 573.5, 242.0, 0, 0, 1], "depth_scale": 0.1}
        (root / scene / "scene_camera.json").write_text(json.dumps(table))
    return root


GOOD: dict[str, Write] = {
    **{f"mcap of {kind}": partial(_mcap, kind) for kind in WRITERS},
    "mcap of video": _packets,
    "recording of this package": lambda path: write_recording(path.with_suffix(".mcap"), 3),
    **{
        f"bag, {compression or 'plain'}": partial(ros.write_ros1, frames=2, compression=compression)
        for compression in (None, "BZ2", "LZ4")
    },
    "db3": _database,
    **{f"video in {format_}": partial(_video, format_) for format_ in ("mp4", "matroska", "avi", "mpegts")},
    **{
        f"images in {suffix}": partial(write_images, suffix)
        for suffix in ("jpg", "png", "webp", "avif", "tiff", "bmp")
    },
    "TUM": write_tum,
    "BOP": write_bop,
}


def damaged(good: Path, target: Path, seed: int) -> Path:
    """Copy a recording to `target`, with one of its files damaged; the same seed makes the same damage."""
    rng = random.Random(seed)
    if good.is_dir():
        shutil.copytree(good, target)
        files = sorted(path for path in target.rglob("*") if path.is_file())
        file = rng.choice(files)
    else:
        file = target = target.with_suffix(good.suffix)
        shutil.copy(good, target)
    file.write_bytes(damage(file.read_bytes(), rng))
    return target


def write_damaged(folder: Path, count: int, only: str = "") -> Iterator[tuple[str, Path]]:
    """Yield name and path of `count` damaged recordings, the formats whose names contain `only` in turn."""
    names = [name for name in GOOD if only in name]
    good = {}
    for index in range(count if names else 0):
        name = names[index % len(names)]
        if name not in good:
            (folder / f"good{index}").mkdir()
            good[name] = GOOD[name](folder / f"good{index}" / "r")
        yield f"{name}, seed {index}", damaged(good[name], folder / f"{index}", index)
