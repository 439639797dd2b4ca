"""Our YOLO-World against the public implementation: same weights, same pixels, same phrase vectors, in one run.

    python tools/bench/yolo_parity.py CHECKPOINT.pt [--vocabulary FILE] [IMAGE_OR_VIDEO …]

The public implementation is an oracle that the package never imports: bring it by hand into an environment made for
this, beside sam3-node (`pip install --no-deps ultralytics torchvision`, the former AGPL-3.0). Both get the tensors that
`sam3-node weights convert` reads, so nothing in the checkpoint is run. Compared are all boxes and scores that the
networks give for the first frame of each file, and what each one's own non-maximum suppression leaves of them. Passes
alternate, the same threads for both; the ratio of time is of medians. Exits with 1 where a difference exceeds 1e-3.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch import Tensor

from sam3_node.detection.vocabulary_build import read_source
from sam3_node.models.boxes import select
from sam3_node.models.pixels import letterbox
from sam3_node.models.yolo.config import SCALES
from sam3_node.models.yolo.convert import convert_checkpoint, read_checkpoint
from sam3_node.models.yolo.network import Detections, YoloWorld

SHARED = Path(__file__).resolve().parents[3] / "shared"
CLIP = "openai/clip-vit-base-patch32"
SCORE, IOU, LIMIT = 0.05, 0.7, 300
TOLERANCE = 1e-3


class Found(NamedTuple):
    """Boxes [n, 4] x0 y0 x1 y1, scores [n] and classes [n] after suppression, the best first."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


class Difference(NamedTuple):
    """Largest differences on one picture: pixels and scores, before and after suppression, and how many stayed."""

    boxes: float
    scores: float
    kept_boxes: float
    kept_scores: float
    kept: str


class Theirs:
    """The public network with the tensors of a checkpoint."""

    def __init__(self, checkpoint: Path, scale: str, phrases: int) -> None:
        self.network = oracle("nn.tasks").WorldModel(
            f"yolov8{scale}-worldv2.yaml", ch=3, nc=80, verbose=False
        )
        state, wanted = read_checkpoint(checkpoint), self.network.state_dict()
        # a scalar of some versions is a vector of one number in others
        self.network.load_state_dict(
            {name: state[name].float().view_as(value) for name, value in wanted.items()}
        )
        self.network.eval().model[-1].nc = phrases
        self.suppress = oracle("utils.nms").non_max_suppression

    def __call__(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Pixels [1, 3, H, W] and text [K, D] -> [1, 4 + K, A], boxes as centre and size."""
        return self.network.predict(pixels, txt_feats=text[None])[0]

    def detections(self, raw: Tensor) -> Detections:
        centres, sizes, scores = raw.transpose(1, 2).split([2, 2, raw.shape[1] - 4], dim=2)
        return Detections(torch.cat([centres - sizes / 2, centres + sizes / 2], dim=2), scores)

    def kept(self, raw: Tensor) -> Found:
        (rows,) = self.suppress(raw.clone(), conf_thres=SCORE, iou_thres=IOU, max_det=LIMIT)
        return Found(rows[:, :4], rows[:, 4], rows[:, 5].long())


def oracle(module: str) -> Any:
    """A module of the public implementation; ends the benchmark where it is not installed."""
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    os.environ.setdefault("YOLO_OFFLINE", "true")
    try:
        return importlib.import_module(f"ultralytics.{module}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"expected the public implementation as an oracle, found no module {error.name}; in an environment made "
            "for this: pip install --no-deps ultralytics torchvision, and what else it asks for"
        ) from error


def compare(mine: Detections, theirs: Detections, mine_kept: Found, theirs_kept: Found) -> Difference:
    alike = mine_kept.classes.tolist() == theirs_kept.classes.tolist()
    return Difference(
        largest(mine.boxes, theirs.boxes),
        largest(mine.scores, theirs.scores),
        largest(mine_kept.boxes, theirs_kept.boxes) if alike else float("inf"),
        largest(mine_kept.scores, theirs_kept.scores) if alike else float("inf"),
        f"{len(mine_kept.scores)}/{len(theirs_kept.scores)}",
    )


def largest(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max()) if a.numel() else 0.0


def timed(call: Callable[[Tensor, Tensor], Any], pixels: Tensor, text: Tensor) -> tuple[float, Any]:
    """Milliseconds of one pass, and what it gave."""
    start = time.perf_counter()
    found = call(pixels, text)
    return (time.perf_counter() - start) * 1e3, found


def first_frames(files: list[Path], size: int) -> Iterator[tuple[str, Tensor]]:
    """The name of each file and its first frame as pixels [1, 3, size, size]."""
    for path in files:
        image = cv2.VideoCapture(str(path)).read()[1] if path.suffix == ".mp4" else cv2.imread(str(path))
        if image is None:
            raise SystemExit(f"expected a picture, or a video in .mp4, found none at {path}")
        pixels, _ = letterbox(np.asarray(image, np.uint8), size)
        yield "/".join(path.parts[-2:]), pixels


def shared_files() -> list[Path]:
    data = SHARED / "data"
    kitchen = [data / f"rgbd/kitchen/frame-{index:06d}.color.jpg" for index in (0, 30)]
    return [*sorted(data.glob("davis/JPEGImages/*/00000.jpg")), *kitchen, *sorted(data.glob("video/*.mp4"))]


def converted(checkpoint: Path) -> tuple[YoloWorld, str]:
    """Our network, and the letter of its scale."""
    with tempfile.TemporaryDirectory() as folder:
        model = convert_checkpoint(checkpoint, Path(folder)).eval()
    scales = [name for name, config in SCALES.items() if config == model.config]
    if not scales:
        raise SystemExit(
            f"expected a checkpoint of a public scale ({', '.join(SCALES)}), found {model.config}"
        )
    return model, scales[0]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument(
        "files", type=Path, nargs="*", help="pictures and videos; those of the data folder if none"
    )
    parser.add_argument(
        "--vocabulary", type=Path, default=SHARED / "weights/vocabulary/clip_vit_b32_104.json"
    )
    parser.add_argument("--size", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each over each picture")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    text = torch.from_numpy(read_source(args.vocabulary, CLIP).vectors.copy())
    ours, scale = converted(args.checkpoint)
    theirs = Theirs(args.checkpoint, scale, len(text))
    times: list[tuple[float, float]] = []
    within = True
    print(f"{'largest difference of':28s}  boxes px    scores   kept boxes px  kept scores  kept ours/theirs")
    for name, pixels in first_frames(args.files or shared_files(), args.size):
        with torch.inference_mode():
            passes = [(timed(ours, pixels, text), timed(theirs, pixels, text)) for _ in range(args.rounds)]
            times += [(mine_ms, theirs_ms) for (mine_ms, _), (theirs_ms, _) in passes[1:]]
            mine, raw = passes[0][0][1], passes[0][1][1]
            kept = Found(*select(mine.boxes[0], mine.scores[0], SCORE, iou=IOU, limit=LIMIT))
            found = compare(mine, theirs.detections(raw), kept, theirs.kept(raw))
        within &= all(value <= TOLERANCE for value in found[:4])
        print(
            f"{name:28s} {found.boxes:9.1e} {found.scores:9.1e} {found.kept_boxes:15.1e} {found.kept_scores:12.1e}"
            f"  {found.kept}"
        )
    mine_ms, theirs_ms = (statistics.median(column) for column in zip(*times, strict=True))
    print(
        f"{len(text)} phrases, {args.size} px, {torch.get_num_threads()} threads: ours {mine_ms:.0f} ms, theirs "
        f"{theirs_ms:.0f} ms, {theirs_ms / mine_ms:.2f}x as fast"
    )
    if not within:
        raise SystemExit(f"expected differences of {TOLERANCE:g} at most, found larger ones")


if __name__ == "__main__":
    main()
