"""Make labelled clips of real video: a teacher follows the objects that it finds, forward and back.

    python -m training.doubt.pseudo VIDEO... --teacher ../shared/weights/sam2-hiera-tiny -o out/doubt/real
    python -m training.doubt.pseudo VIDEO... --teacher ... --moving --best 100 --days train -o out/tracks/train

VIDEO is a file, or a folder of numbered JPEG files. The teacher segments single frames. The prompt on a frame is the
box of the mask on the frame before, with its logits. An object is kept if the way to the last frame and back ends on
its first mask. Where the two ways disagree, its truth is unknown; see `tools.vos.sequences.UNKNOWN`. So the truth is a
pseudo-truth, and objects that the teacher loses are missing.

In most videos of robots nearly all objects stand still. With `--moving` stretches of most motion are cut out of each
video, the teacher is asked where pixels move, its prompts move with the pixels (dense flow, DIS), and an object is kept
if its box moves by half of its longer side. `--best` takes the stretches of most motion alone. At the end a table tells
what the folder holds; `--sheet` draws some tracks.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sam3_node.models import Features, TrackerModel
from sam3_node.types import Image
from tools.command import errors_in_one_line, new_parser
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from tools.vos.sequences import UNKNOWN
from training.nano.teach import Teacher, is_held, paired_iou

Bools = npt.NDArray[np.bool_]
Flow = npt.NDArray[np.float32]
"""Way of each pixel in px [h, w, 2]."""

RETURNED_IOU = 0.6  # of the first mask with the mask after the way forward and back
AGREED_IOU = 0.75  # of the masks of both ways on a frame
# of the image that an object may cover at first
MIN_SHARE = 0.003
MAX_SHARE = 0.25
OVERLAP = 0.1  # share of an object that may lie in another
# of objects that move
MIN_TRAVEL = 0.5
"""Way of an object's centre from its first place, in longer sides of its first box."""
MIN_AGREED = 0.7
"""Share of the frames on which both ways agree."""
MIN_FLOW_PX = 1.0
"""Way of a pixel over FLOW_AHEAD frames from which it moves."""
FLOW_AHEAD = 2
MOVING_SHARE = 0.5
"""Share of the pixels of a cell, or of a mask, that move."""
CELLS = 24
"""Cells along each side of the picture; the teacher is asked in the middle of those that move."""
MOST_SEEDS = 40
MAX_ENERGY = 5.0
"""Mean change of the grey levels from frame to frame. Above it an arm sweeps through the whole picture."""
SMALL = (80, 45)
"""Width and height in pixels of the grey pictures whose differences are the energy of motion."""
ENERGIES = "energy.json"
"""File of the motion of each video, beside the clips."""
SHEET_FRAMES = 6


def read_video(path: Path, stride: int, max_frames: int) -> list[Image]:
    """Return every `stride`-th frame of a video, or of a folder of numbered JPEG files, BGR."""
    if path.is_dir():
        return [np.asarray(cv2.imread(str(name)), np.uint8) for name in sorted(path.glob("*.jpg"))[::stride]][
            :max_frames
        ]
    video = cv2.VideoCapture(str(path))
    images: list[Image] = []
    number = 0
    while len(images) < max_frames and video.grab():
        if number % stride == 0:
            images.append(np.asarray(video.retrieve()[1], np.uint8))
        number += 1
    return images


class Stretch(NamedTuple):
    """Frames of a video: the number of the first, and their mean change from one to the next in grey levels."""

    begin: int
    energy: float


def find_stretches(images: list[Image], frames: int, count: int) -> list[Stretch]:
    """Return up to `count` stretches of `frames` frames with most motion, which do not overlap.

    Those in which nearly the whole picture changes are left out: nothing can be followed there.
    """
    small = [
        cv2.cvtColor(cv2.resize(i, SMALL, interpolation=cv2.INTER_AREA), cv2.COLOR_BGR2GRAY) for i in images
    ]
    changes = [float(cv2.absdiff(one, other).mean()) for one, other in pairwise(small)]
    length = min(frames, len(images)) - 1
    begins = range(0, len(changes) - length + 1, max(1, frames // 2))
    found = [Stretch(begin, float(np.mean(changes[begin : begin + length]))) for begin in begins]
    chosen: list[Stretch] = []
    for stretch in sorted(found, key=lambda one: -one.energy):
        apart = all(abs(stretch.begin - other.begin) >= frames for other in chosen)
        if stretch.energy <= MAX_ENERGY and apart:
            chosen.append(stretch)
    return chosen[:count]


def flow_between(one: Image, other: Image) -> Flow:
    """Return where the pixels of one image go in the other, px [h, w, 2]."""
    grey = [cv2.cvtColor(image, cv2.COLOR_BGR2GRAY) for image in (one, other)]
    dense = cv2.DISOpticalFlow.create(cv2.DISOPTICAL_FLOW_PRESET_FAST)
    return np.asarray(dense.calc(grey[0], grey[1], None), np.float32)


def choose_seeds(moving: Bools, size: int) -> Tensor:
    """Return points [N, 1, 2], in px of the teacher's square image, in cells of pixels [h, w] that move; N may be 0."""
    cells = cv2.resize(moving.astype(np.float64), (CELLS, CELLS), interpolation=cv2.INTER_AREA).ravel()
    found = np.flatnonzero(cells >= MOVING_SHARE)
    found = np.random.default_rng(0).permutation(found)[:MOST_SEEDS]
    places = np.stack([found % CELLS, found // CELLS], axis=1)
    return torch.from_numpy((places + 0.5) * size / CELLS).float()[:, None]


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


def find_objects(teacher: Teacher, images: list[Image], count: int, moving: bool) -> Bools:
    """Return masks [N, 256, 256] of up to `count` objects of the first image; of those that move, if `moving`."""
    if not moving:
        masks = teacher.find(images[0]).masks
        return masks[choose(masks, count)]
    ahead = images[min(FLOW_AHEAD, len(images) - 1)]
    moves = np.linalg.norm(flow_between(images[0], ahead), axis=2) >= MIN_FLOW_PX
    masks = teacher.find(images[0], choose_seeds(moves, teacher.model.image_size)).masks
    square = cv2.resize(moves.astype(np.float64), masks.shape[:0:-1], interpolation=cv2.INTER_AREA)
    masks = masks[[bool(square[mask].mean() >= MOVING_SHARE) for mask in masks]]
    return masks[choose(masks, count)]


@torch.inference_mode()
def follow(
    model: TrackerModel, frames: Iterable[Features], logits: Tensor, flows: Sequence[Flow] = ()
) -> list[Tensor]:
    """Follow N objects from logits [N, h, w] through frames; return their logits on each. A lost object stays empty.

    flows: of the pixels between each frame and the next. With them the prompt goes with the object.
    """
    out = []
    for number, features in enumerate(frames):
        step = []
        for one in logits:
            if number and len(flows) and (one > 0).any():
                one = _shifted(one, flows[number - 1])
            step.append(_segment(model, features, one) if (one > 0).any() else one)
        logits = torch.stack(step)
        out.append(logits)
    return out


def _shifted(logits: Tensor, flow: Flow) -> Tensor:
    """Return logits [h, w] moved by the median flow within their mask."""
    values = logits.numpy()
    height, width = values.shape
    small = cv2.resize(flow, (width, height), interpolation=cv2.INTER_AREA)
    small = small * np.array([width / flow.shape[1], height / flow.shape[0]], np.float32)
    across, down = np.median(small[values > 0], axis=0)
    shift = np.array([[1, 0, across], [0, 1, down]], np.float32)
    moved = cv2.warpAffine(values, shift, (width, height), borderMode=cv2.BORDER_REPLICATE)
    return torch.from_numpy(moved)


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


class Way(NamedTuple):
    """How far an object goes from its first place, in longer sides of its first box, and how many times it grows."""

    travel: float
    growth: float


def measure_way(masks: Bools, size: tuple[int, int]) -> Way:
    """Measure masks [T, h, w], stretched to a square, of one object in images of `size` = (height, width).

    Frames without a mask are skipped. The first must have one.
    """
    unit = np.array([size[1] / masks.shape[2], size[0] / masks.shape[1]])
    boxes = np.array([cv2.boundingRect(mask.astype(np.uint8)) for mask in masks if mask.any()])
    sides = boxes[:, 2:] * unit
    centres = boxes[:, :2] * unit + sides / 2
    ways = np.linalg.norm(centres - centres[0], axis=1) / sides[0].max()
    areas = np.array([mask.sum() for mask in masks if mask.any()])
    grown = np.sqrt(areas.max() / areas[0])
    return Way(float(ways.max()), float(max(grown, np.sqrt(areas[0] / areas.min()))))


class Track(NamedTuple):
    """One object that came back to its first mask: logits [T, h, w], on which frames both ways agree, and its way."""

    logits: npt.NDArray[np.float32]
    agreed: Bools
    way: Way


def follow_both_ways(model: TrackerModel, images: list[Image], first: Tensor, moving: bool) -> list[Track]:
    """Follow objects from logits [N, h, w] on the first image to the last and back; return those that come back.

    With `moving`, only those that move, and on most frames by both ways alike.
    """
    size = images[0].shape[:2]
    with torch.inference_mode():
        frames = [model.encode(model.preprocess(image)) for image in images]
    flows = [flow_between(one, other) for one, other in pairwise(images)] if moving else []
    forward = torch.stack(follow(model, frames, first, flows))
    if moving:
        # the way back is as dear as the way forward, so those that stand still are left out before it
        kept = [
            index
            for index in range(len(first))
            if (forward[-1, index] > 0).any()
            and measure_way((forward[:, index] > 0).numpy(), size).travel >= MIN_TRAVEL
        ]
        forward = forward[:, kept]
        first = first[kept]
    if not len(first):
        return []
    flows = [flow_between(one, other) for one, other in pairwise(images[::-1])] if moving else []
    back = torch.stack(follow(model, frames[::-1], forward[-1], flows)[::-1])
    returned = paired_iou(first > 0, back[0] > 0) >= RETURNED_IOU
    tracks = []
    for index in torch.nonzero(returned)[:, 0].tolist():
        one = forward[:, index]
        agreed = (paired_iou(one > 0, back[:, index] > 0) >= AGREED_IOU).numpy()
        if not agreed[0]:
            continue
        way = measure_way((one > 0).numpy()[agreed], size)
        if not moving or (way.travel >= MIN_TRAVEL and agreed.mean() >= MIN_AGREED):
            tracks.append(Track(one.numpy(), agreed, way))
    return tracks


def label_clip(
    teacher: Teacher, name: str, images: list[Image], count: int, moving: bool = False
) -> tuple[Clip, list[list[int]]] | None:
    """Return the clip with its labels and the [frame, id] pairs of unknown truth; None if no object is kept."""
    model = teacher.model
    masks = find_objects(teacher, images, count, moving)
    if not len(masks):
        return None
    full = torch.from_numpy(masks).float()[:, None]
    first = torch.nn.functional.interpolate(full, size=model.mask_size, mode="area")[:, 0] * 20 - 10
    tracks = follow_both_ways(model, images, first, moving)
    if not tracks:
        return None
    size = images[0].shape[:2]
    labels = []
    invalid = []
    for number in range(len(images)):
        # the larger first, so that what lies in front of a larger one keeps its pixels
        order = sorted(range(len(tracks)), key=lambda index: -float((tracks[index].logits[number] > 0).sum()))
        image: Any = np.zeros(size, np.uint8)
        for index in order:
            large = cv2.resize(tracks[index].logits[number], size[::-1], interpolation=cv2.INTER_LINEAR)
            image[large > 0] = index + 1
        invalid += [[number, index + 1] for index, track in enumerate(tracks) if not track.agreed[number]]
        labels.append(image)
    objects = [
        {
            "id": number + 1,
            "name": f"object {number + 1}",
            "travel": round(track.way.travel, 2),
            "growth": round(track.way.growth, 2),
        }
        for number, track in enumerate(tracks)
    ]
    meta = {"fps": 10, "width": size[1], "height": size[0], "objects": objects, "scenario": "real"}
    return Clip(name, images, labels, meta=meta), invalid


def choose_stretches(videos: list[Path], args: argparse.Namespace) -> list[tuple[Path, Stretch]]:
    """Return the `--best` stretches of most motion of all videos, from the most to the least; 0: all."""
    file = args.out / ENERGIES
    known = json.loads(file.read_text()) if file.is_file() else {}
    for video in videos:
        if video.stem not in known:
            images = read_video(video, args.stride, args.longest)
            known[video.stem] = find_stretches(images, args.frames, args.parts) if len(images) > 1 else []
    file.write_text(json.dumps(known))
    found = [(video, Stretch(*each)) for video in videos for each in known[video.stem]]
    found.sort(key=lambda one: -one[1].energy)
    return found[: args.best or None]


def open_stretches(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], list[Image]]]]:
    """Yield the name of each clip to be made, and what reads its images."""
    videos = [
        path for path in args.videos if args.days == "all" or is_held(path.stem) == (args.days == "held")
    ]
    if not args.moving:
        for video in videos:
            yield video.stem, partial(read_video, video, args.stride, args.frames)
        return
    for video, stretch in choose_stretches(videos, args):
        begin = stretch.begin
        yield f"{video.stem}.{begin:03d}", partial(_read_stretch, video, begin, args)


def _read_stretch(video: Path, begin: int, args: argparse.Namespace) -> list[Image]:
    return read_video(video, args.stride, begin + args.frames)[begin:]


def label_videos(args: argparse.Namespace) -> None:
    """Label the videos that are not labelled yet."""
    teacher = Teacher(args.teacher, args.size, dtype=args.dtype)
    path = args.out / UNKNOWN
    invalid = json.loads(path.read_text()) if path.is_file() else {}
    for name, read in open_stretches(args):
        if name in invalid:
            continue
        images = read()
        if len(images) < 2:
            continue
        labelled = label_clip(teacher, name, images, args.objects, args.moving)
        invalid[name] = labelled[1] if labelled else []
        if labelled:
            write_clip(args.out, name, labelled[0])
        path.write_text(json.dumps(invalid))
        kept = len(labelled[0].meta["objects"]) if labelled else 0
        print(f"{name}: {len(images)} frames, {kept} objects", flush=True)


def summarise(folder: Path) -> Mapping[str, Any]:
    """Return how many videos a folder is made of, its tracks, their frames, and how far they move."""
    unknown = json.loads((folder / UNKNOWN).read_text())
    clips = [read_clip(folder, name) for name in list_clips(folder)]
    objects = [(clip, entry) for clip in clips for entry in clip.meta["objects"]]
    known = [
        len(clip) - sum(object_id == entry["id"] for _, object_id in unknown.get(clip.name, []))
        for clip, entry in objects
    ]
    travel = [entry["travel"] for _, entry in objects] or [0.0]
    growth = [entry["growth"] for _, entry in objects] or [1.0]
    return {
        "stretches": len(unknown),
        "clips": len(clips),
        "tracks": len(objects),
        "frames of a track, median": float(np.median(known or [0])),
        "frames of all tracks": int(sum(known)),
        "travel in own sizes, median": round(float(np.median(travel)), 2),
        "travel, nine in ten below": round(float(np.quantile(travel, 0.9)), 2),
        "growth or shrinking, median": round(float(np.median(growth)), 2),
        "growth, nine in ten below": round(float(np.quantile(growth, 0.9)), 2),
    }


def draw_sheet(folder: Path, path: Path, rows: int) -> None:
    """Draw some frames of `rows` clips, objects in colours; those of unknown truth in grey."""
    unknown = json.loads((folder / UNKNOWN).read_text())
    names = list_clips(folder)
    palette = np.array([(0, 0, 0), (60, 60, 255), (60, 220, 60), (255, 120, 40), (40, 200, 255)])
    pictures = []
    for name in names[:: max(1, len(names) // rows)][:rows]:
        clip = read_clip(folder, name)
        views = []
        for number in np.linspace(0, len(clip) - 1, SHEET_FRAMES).astype(int).tolist():
            labels = clip.labels(number)
            colours = palette.copy()
            for object_id in [i for at, i in unknown.get(name, []) if at == number]:
                colours[object_id] = 128
            tinted = (clip.image(number) * 0.5 + colours[labels] * 0.5).astype(np.uint8)
            image = np.where(labels[..., None] > 0, tinted, clip.image(number))
            views.append(cv2.resize(image, (256, 144), interpolation=cv2.INTER_AREA))
        pictures.append(np.hstack(views))
    if pictures:
        cv2.imwrite(str(path), np.vstack(pictures))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("videos", type=Path, nargs="+", help="video files, or folders of JPEG files")
    parser.add_argument("--teacher", type=Path, required=True, help="folder of SAM weights")
    parser.add_argument("--size", type=int, default=512, help="image size of the teacher")
    parser.add_argument("--dtype", default="auto", help="of the teacher")
    parser.add_argument("--stride", type=int, default=2, help="use every N-th frame")
    parser.add_argument("--frames", type=int, default=60, help="frames of a clip at most")
    parser.add_argument("--objects", type=int, default=4, help="objects of a clip at most")
    parser.add_argument("--moving", action="store_true", help="only objects that move")
    parser.add_argument("--best", type=int, default=0, help="only the N stretches of most motion; 0: all")
    parser.add_argument("--parts", type=int, default=1, help="stretches of a video at most")
    parser.add_argument(
        "--longest", type=int, default=400, help="frames of a video that are looked at for motion"
    )
    parser.add_argument(
        "--days", choices=("all", "train", "held"), default="all", help="videos of these days alone"
    )
    parser.add_argument("--sheet", type=Path, help="draw some tracks into this picture")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the clips")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with errors_in_one_line():
        label_videos(args)
    if (args.out / "JPEGImages").is_dir():
        for name, value in summarise(args.out).items():
            print(f"{name:30s} {value}")
        if args.sheet:
            draw_sheet(args.out, args.sheet, rows=10)


if __name__ == "__main__":
    main()
