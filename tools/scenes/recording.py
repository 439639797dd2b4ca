"""A clip folder's clip as a recording: python -m tools.scenes.recording FOLDER CLIP -o OUT.mcap

Colour as JPEG, depth as PNG or zstd, whichever is smaller, and, where the clip has them, intrinsics, camera poses
and the objects' true masks. Times are the clip's own, from 0, so that the same clip always gives the same file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import cv2
import numpy as np

from sam3_node.bags import Pose, RecordingWriter
from sam3_node.errors import Sam3NodeError
from sam3_node.types import NANOSECONDS, Depth, Frame, Instance, Intrinsics, Mask, MaskFrame
from sam3_node.wire import encode_depth

from .clips import Clip, read_clip

CAMERA = "tabletop"
FALLBACK_FPS = 15.0


def write_recording(clip: Clip, path: Path, quality: int = 80, depth_step: int = 1) -> None:
    """Write a clip to an MCAP file; of depth every `depth_step`-th pixel both ways, repeated to the full size.

    Raises CameraError where a file of the clip cannot be read, OutputError where `path` cannot be written.
    """
    truth = _Truth(clip)
    with RecordingWriter(path, overwrite=True) as writer:
        for index in range(len(clip)):
            frame = _frame(clip, index, quality, depth_step)
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
    """A clip's principal point counts from the corner of the top-left pixel, a frame's from its centre."""
    given = clip.meta.get("intrinsics")
    return Intrinsics(given["fx"], given["fy"], given["cx"] - 0.5, given["cy"] - 0.5) if given else None


def _depth(clip: Clip, index: int, step: int) -> Depth | None:
    depth = clip.depth(index)
    if depth is None:
        return None
    coarse = depth[::step, ::step].repeat(step, axis=0).repeat(step, axis=1)
    coarse = np.ascontiguousarray(coarse[: depth.shape[0], : depth.shape[1]])
    packed = encode_depth(coarse, "z16+zstd", 0.001, aligned=True)
    png = cv2.imencode(".png", coarse, [cv2.IMWRITE_PNG_COMPRESSION, 9])[1].tobytes()
    if len(png) >= memoryview(packed.data).nbytes:
        return packed
    return Depth(packed.width, packed.height, "png16", packed.scale_m, True, png)


class _Truth:
    """A clip's masks, frame by frame in order: an instance for each object, in view or not."""

    def __init__(self, clip: Clip) -> None:
        self._clip = clip
        known = clip.meta.get("objects")
        ids = (
            []
            if known
            else sorted({int(i) for n in range(len(clip)) for i in np.unique(clip.labels(n))} - {0})
        )
        self._names = (
            {item["id"]: item["name"] for item in known} if known else {i: f"object {i}" for i in ids}
        )
        self._unseen = dict.fromkeys(self._names, 0)

    def at(self, index: int, frame: Frame) -> MaskFrame:
        labels = self._clip.labels(index)
        instances = tuple(self._instance(labels == known, known, index) for known in self._names)
        return MaskFrame(
            frame.camera,
            frame.seq,
            frame.capture_ns,
            frame.width,
            frame.height,
            model="truth",
            instances=instances,
            clock=frame.clock,
        )

    def _instance(self, inside: np.ndarray, object_id: int, index: int) -> Instance:
        seen = bool(inside.any())
        self._unseen[object_id] = 0 if seen else self._unseen[object_id] + 1
        return Instance(
            id=object_id,
            label=self._names[object_id],
            score=1.0,
            state="tracked" if seen else "occluded",
            age=index + 1,
            frames_since_seen=self._unseen[object_id],
            mask=Mask.from_full(inside),
        )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.scenes.recording", description="clip to MCAP")
    parser.add_argument("folder", type=Path, help="clip folder")
    parser.add_argument("clip", help="name of the clip in it")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="OUT.mcap")
    parser.add_argument("--quality", type=int, default=80, help="of the JPEG colour, 1..100")
    parser.add_argument("--depth-step", type=int, default=1, help="keep every n-th pixel of depth, repeated")
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
