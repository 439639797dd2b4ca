"""Make labelled clips of real video: a teacher follows the objects that it finds, forward and back.

    python -m training.doubt.pseudo VIDEO... --teacher ../shared/weights/sam2-hiera-tiny -o out/doubt/real

VIDEO is a file, or a folder of numbered JPEG files. The teacher segments single frames. The prompt on a frame is the
box of the mask on the frame before, with its logits. An object is kept if the way to the last frame and back ends on
its first mask. Where the two ways disagree, its truth is unknown; see `tools.vos.sequences.UNKNOWN`. So the truth is a
pseudo-truth, and objects that the teacher loses are missing.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sam3_node.models import Features, TrackerModel
from sam3_node.types import Image
from tools.command import errors_in_one_line, new_parser
from tools.scenes.clips import Clip, write_clip
from tools.vos.sequences import UNKNOWN
from training.nano.teach import Teacher, paired_iou

Bools = npt.NDArray[np.bool_]

RETURNED_IOU = 0.6  # of the first mask with the mask after the way forward and back
AGREED_IOU = 0.75  # of the masks of both ways on a frame
# of the image that an object may cover at first
MIN_SHARE = 0.003
MAX_SHARE = 0.25
OVERLAP = 0.1  # share of an object that may lie in another


def read_video(path: Path, stride: int, max_frames: int) -> list[Image]:
    """Return every `stride`-th frame of a video, or of a folder of numbered JPEG files, BGR."""
    if path.is_dir():
        return [np.asarray(cv2.imread(str(name)), np.uint8) for name in sorted(path.glob("*.jpg"))[::stride]][
            :max_frames
        ]
    video = cv2.VideoCapture(str(path))
    images: list[Image] = []
    number = 0
    while len(images) < max_frames:
        found, image = video.read()
        if not found:
            break
        if number % stride == 0:
            images.append(np.asarray(image, np.uint8))
        number += 1
    return images


def choose(masks: Bools, count: int) -> list[int]:
    """Choose masks [N, h, w] of middle size that do not overlap: wholes before their parts, as they are prompted."""
    chosen: list[int] = []
    covered = np.zeros(masks.shape[1:], np.bool_)
    for index in np.argsort(-masks.sum(axis=(1, 2)), kind="stable").tolist():
        mask = masks[index]
        share = mask.mean()
        if MIN_SHARE <= share <= MAX_SHARE and (mask & covered).sum() <= OVERLAP * mask.sum():
            chosen.append(index)
            covered |= mask
    return chosen[:count]


@torch.inference_mode()
def follow(model: TrackerModel, frames: Iterable[Features], logits: Tensor) -> list[Tensor]:
    """Follow N objects from logits [N, h, w] through frames; return their logits on each. A lost object stays empty."""
    out = []
    for features in frames:
        step = [_segment(model, features, one) if (one > 0).any() else one for one in logits]
        logits = torch.stack(step)
        out.append(logits)
    return out


def _segment(model: TrackerModel, features: Features, logits: Tensor) -> Tensor:
    decoder = model.decode_stage
    rows, columns = (torch.nonzero((logits > 0).any(dim=axis))[:, 0] for axis in (1, 0))
    scale = model.image_size / logits.shape[-1]
    corners = torch.stack(
        [
            torch.stack([columns[0], rows[0]]).float() * scale,
            torch.stack([columns[-1] + 1, rows[-1] + 1]).float() * scale,
        ]
    )
    labels = torch.tensor([2, 3], dtype=torch.int32)
    sparse, dense = decoder.prompt(corners, labels, logits.clamp(-32, 32))
    top = features.top + decoder.no_memory.reshape(1, -1, 1, 1)
    decoded = decoder(top, features.fine, features.middle, sparse, dense, False)
    return torch.as_tensor(decoded.logits[0].float())


def label_clip(
    teacher: Teacher, name: str, images: list[Image], count: int
) -> tuple[Clip, list[list[int]]] | None:
    """Return the clip with its labels and the [frame, id] pairs of unknown truth; None if no object is kept."""
    model = teacher.model
    size = images[0].shape[:2]
    found = teacher.find(images[0])
    chosen = choose(found.masks, count)
    if not chosen:
        return None
    with torch.inference_mode():
        frames = [model.encode(model.preprocess(image)) for image in images]
        full = torch.from_numpy(found.masks[chosen]).float()[:, None]
        first = torch.nn.functional.interpolate(full, size=model.mask_size, mode="area")[:, 0] * 20 - 10
    forward = follow(model, frames, first)
    back = follow(model, frames[::-1], forward[-1])[::-1]
    returned = paired_iou(first > 0, back[0] > 0)
    kept = [index for index, iou in enumerate(returned.tolist()) if iou >= RETURNED_IOU]
    if not kept:
        return None
    labels = []
    invalid = []
    for number, (one, other) in enumerate(zip(forward, back, strict=True)):
        agreed = paired_iou(one > 0, other > 0)
        order = sorted(kept, key=lambda index: -float((one[index] > 0).sum()))
        image: Any = np.zeros(size, np.uint8)
        for index in order:
            object_id = kept.index(index) + 1
            low = one[index].numpy()
            image[cv2.resize(low, size[::-1], interpolation=cv2.INTER_LINEAR) > 0] = object_id
            if agreed[index] < AGREED_IOU:
                invalid.append([number, object_id])
        labels.append(image)
    objects = [{"id": number + 1, "name": f"object {number + 1}"} for number in range(len(kept))]
    meta = {"fps": 10, "width": size[1], "height": size[0], "objects": objects, "scenario": "real"}
    return Clip(name, images, labels, meta=meta), invalid


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("videos", type=Path, nargs="+", help="video files, or folders of JPEG files")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of SAM weights")
    parser.add_argument("--size", type=int, default=512, help="image size of the teacher")
    parser.add_argument("--stride", type=int, default=2, help="use every N-th frame")
    parser.add_argument("--frames", type=int, default=60, help="frames of a clip at most")
    parser.add_argument("--objects", type=int, default=4, help="objects of a clip at most")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the clips")
    args = parser.parse_args()
    with errors_in_one_line():
        label_videos(args)


def label_videos(args: argparse.Namespace) -> None:
    """Label the videos that are not labelled yet."""
    teacher = Teacher(args.teacher, args.size)
    path = args.out / UNKNOWN
    args.out.mkdir(parents=True, exist_ok=True)
    invalid = json.loads(path.read_text()) if path.is_file() else {}
    for video in args.videos:
        name = video.stem
        images = read_video(video, args.stride, args.frames)
        if name in invalid or len(images) < 2:
            continue
        labelled = label_clip(teacher, name, images, args.objects)
        invalid[name] = labelled[1] if labelled else []
        if labelled:
            write_clip(args.out, name, labelled[0])
        path.write_text(json.dumps(invalid))
        kept = len(labelled[0].meta["objects"]) if labelled else 0
        print(f"{name}: {len(images)} frames, {kept} objects", flush=True)


if __name__ == "__main__":
    main()
