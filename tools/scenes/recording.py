"""Converts a clip of a clip folder to a recording: python -m tools.scenes.recording FOLDER CLIP -o OUT.mcap

Writes colour as JPEG, depth as PNG, and intrinsics, camera poses, joints and the objects' true masks if the clip has
them. Times are the clip's own and start at 0, so that the same clip always gives the same file.
"""

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np

from sam3_node.bags import Pose, RecordingWriter
from sam3_node.bags.native import JOINTS_ROOT
from sam3_node.errors import Sam3NodeError
from sam3_node.files import write_output
from sam3_node.types import NANOSECONDS, Depth, Frame, Instance, Intrinsics, JointState, Mask, MaskFrame
from sam3_node.wire import pack_pose

from .clips import Clip, read_clip

CAMERA = "tabletop"
ROBOT = "robot"
FALLBACK_FPS = 15.0


def write_recording(clip: Clip, path: Path, quality: int = 80, depth_step: int = 1) -> None:
    """Write a clip to an MCAP file, and the URDF of its robot, if it has one, beside it.

    Depth keeps every `depth_step`-th pixel both ways, repeated to the full size.
    Raises CameraError if a file of the clip cannot be read, OutputError if `path` cannot be written.
    """
    if "urdf" in clip.meta:
        write_output(path.with_suffix(".urdf"), clip.meta["urdf"].encode())
    truth = _Truth(clip)
    with RecordingWriter(path, overwrite=True) as writer:
        for index in range(len(clip)):
            frame = _frame(clip, index, quality, depth_step)
            if "joints" in clip.meta:
                joints = JointState(ROBOT, frame.capture_ns, clip.meta["joints"][index], frame.clock)
                writer.write_robot(pack_pose(joints)[1], f"{JOINTS_ROOT}{ROBOT}", frame.capture_ns)
            writer.write_frame(frame, frame.capture_ns)
            writer.write_truth(truth.at(index, frame))
            if "camera_poses" in clip.meta:
                pose = Pose(CAMERA, index, np.array(clip.meta["camera_poses"][index]))
                writer.write_pose(pose, frame.capture_ns)


def _frame(clip: Clip, index: int, quality: int, depth_step: int) -> Frame:
    image = clip.image(index)
    options = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_OPTIMIZE, 1]
    return Frame(
        camera=CAMERA,
        seq=index,
        capture_ns=round(index * NANOSECONDS / clip.meta.get("fps", FALLBACK_FPS)),
        width=image.shape[1],
        height=image.shape[0],
        encoding="jpeg",
        colour=cv2.imencode(".jpg", image, options)[1].tobytes(),
        clock="device",
        depth=_depth(clip, index, depth_step),
        intrinsics=_intrinsics(clip),
    )


def _intrinsics(clip: Clip) -> Intrinsics | None:
    """Convert the principal point: a clip counts it from the corner of the top-left pixel, a frame from its centre."""
    given = clip.meta.get("intrinsics")
    return Intrinsics(given["fx"], given["fy"], given["cx"] - 0.5, given["cy"] - 0.5) if given else None


def _depth(clip: Clip, index: int, step: int) -> Depth | None:
    depth = clip.depth(index)
    if depth is None:
        return None
    coarse = depth[::step, ::step].repeat(step, axis=0).repeat(step, axis=1)
    coarse = np.ascontiguousarray(coarse[: depth.shape[0], : depth.shape[1]])
    png = cv2.imencode(".png", coarse, [cv2.IMWRITE_PNG_COMPRESSION, 9])[1].tobytes()
    return Depth(coarse.shape[1], coarse.shape[0], "png16", 0.001, True, png)


class _Truth:
    """Masks of a clip, frame by frame in order, with an instance for each object, in view or not."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        objects = clip.meta.get("objects")
        if objects:
            self._names = {item["id"]: item["name"] for item in objects}
        else:
            ids = {int(i) for index in range(len(clip)) for i in np.unique(clip.labels(index))} - {0}
            self._names = {i: f"object {i}" for i in sorted(ids)}
        self._unseen = dict.fromkeys(self._names, 0)

    def at(self, index: int, frame: Frame) -> MaskFrame:
        """Return the masks of the next frame."""
        labels = self._clip.labels(index)
        instances = tuple(self._instance(labels == object_id, object_id, index) for object_id in self._names)
        place = (frame.camera, frame.seq, frame.capture_ns, frame.width, frame.height)
        return MaskFrame(*place, model="truth", instances=instances, clock=frame.clock)

    def _instance(self, inside: np.ndarray, object_id: int, index: int) -> Instance:
        seen = bool(inside.any())
        self._unseen[object_id] = 0 if seen else self._unseen[object_id] + 1
        name = self._names[object_id]
        unseen = self._unseen[object_id]
        mask = Mask.from_full(inside)
        return Instance(object_id, name, 1.0, "tracked" if seen else "occluded", index + 1, unseen, mask)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenes.recording", description="clip to MCAP")
    parser.add_argument("folder", type=Path, help="clip folder")
    parser.add_argument("clip", help="name of the clip in that folder")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT.mcap")
    parser.add_argument("--quality", type=int, default=80, help="JPEG quality of the colour, 1..100")
    parser.add_argument("--depth-step", type=int, default=1, help="keep every n-th depth pixel, repeated")
    args = parser.parse_args()
    try:
        clip = read_clip(args.folder, args.clip)
        write_recording(clip, args.out, args.quality, args.depth_step)
    except Sam3NodeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(clip)} frames, {args.out.stat().st_size / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
