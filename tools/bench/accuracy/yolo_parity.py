"""Compare our YOLO-World with the public implementation on the same weights, pixels and phrase vectors.

    python -m tools.bench.accuracy.yolo_parity CHECKPOINT.pt [--vocabulary FILE] [IMAGE_OR_VIDEO …]

The package never imports the public implementation: install it by hand beside sam3-node in a separate environment
(`pip install --no-deps ultralytics torchvision`; ultralytics is AGPL-3.0). Both networks get the tensors that
`sam3-node weights convert` reads, so no code of the checkpoint is run. The benchmark compares all boxes and scores that
the networks give for the first frame of each file, those that each implementation's own non-maximum suppression keeps,
and, from the frame to the boxes on it, all detections from a score of 0.2. Passes alternate, with the same threads for
both. Each of --runs runs is one pass of each over all frames; the ratio of a run compares its median times. The exit
code is 1 if a difference exceeds 1e-3, or 0.5 px and 0.01 from frame to boxes.
"""

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

from sam3_node.detection.vocabulary import Vocabulary, read_source
from sam3_node.detection.yolo_world import VectorQuery, YoloWorldDetector
from sam3_node.models.pixels import letterbox, select
from sam3_node.models.yolo.convert import convert_checkpoint, read_checkpoint
from sam3_node.models.yolo.network import SCALES, STRIDES, Detections, YoloWorld
from sam3_node.types import Image
from tools.bench.common import RUNS, SHARED, Figures, make_parser

CLIP = "openai/clip-vit-base-patch32"
SCORE = 0.05
IOU = 0.7
LIMIT = 300
TOLERANCE = 1e-3
WHOLE_SCORE = 0.2
WHOLE_PX = 0.5
WHOLE_TOLERANCE = 0.01


class Kept(NamedTuple):
    """Boxes [n, 4] x0 y0 x1 y1, scores [n] and classes [n] after suppression, by falling score."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


class Difference(NamedTuple):
    """Largest differences on one picture, in pixels and scores, before and after suppression; numbers of boxes kept."""

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
        state = read_checkpoint(checkpoint)
        expected = self.network.state_dict()
        # some versions store a scalar where others store a vector of one number
        self.network.load_state_dict(
            {name: state[name].float().view_as(value) for name, value in expected.items()}
        )
        self.network.eval().model[-1].nc = phrases
        self.suppress = oracle("utils.nms").non_max_suppression

    def __call__(self, pixels: Tensor, text: Tensor) -> Tensor:
        """Turn pixels [1, 3, H, W] and text [K, D] into [1, 4 + K, A], boxes as centre and size."""
        return self.network.predict(pixels, txt_feats=text[None])[0]

    def detections(self, raw: Tensor) -> Detections:
        """Convert the raw output to our form, boxes as corners."""
        centres, sizes, scores = raw.transpose(1, 2).split([2, 2, raw.shape[1] - 4], dim=2)
        return Detections(torch.cat([centres - sizes / 2, centres + sizes / 2], dim=2), scores)

    def kept(self, raw: Tensor, score: float = SCORE) -> Kept:
        """Suppress with the public implementation."""
        (rows,) = self.suppress(raw.clone(), conf_thres=score, iou_thres=IOU, max_det=LIMIT)
        return Kept(rows[:, :4], rows[:, 4], rows[:, 5].long())

    def detect(self, image: Image, size: int, text: Tensor) -> Kept:
        """Detect on a BGR frame as the public predictor does, boxes on the frame."""
        fitted = oracle("data.augment").LetterBox((size, size), auto=True, stride=STRIDES[-1])(image=image)
        pixels = (
            torch.from_numpy(np.ascontiguousarray(fitted[..., ::-1].transpose(2, 0, 1)))[None].float() / 255
        )
        boxes, scores, classes = self.kept(self(pixels, text), WHOLE_SCORE)
        scaled = oracle("utils.ops").scale_boxes(pixels.shape[2:], boxes, image.shape)
        return Kept(scaled, scores, classes)


def oracle(module: str) -> Any:
    """Import a module of the public implementation; end the benchmark if it is not installed."""
    os.environ.setdefault("YOLO_AUTOINSTALL", "false")
    os.environ.setdefault("YOLO_OFFLINE", "true")
    try:
        return importlib.import_module(f"ultralytics.{module}")
    except ModuleNotFoundError as error:
        raise SystemExit(
            f"expected the public implementation, found no module {error.name}; in a separate environment run "
            "pip install --no-deps ultralytics torchvision, and install the other packages that it imports"
        ) from error


def compare(ours: Detections, theirs: Detections, ours_kept: Kept, theirs_kept: Kept) -> Difference:
    """Compare one picture; kept boxes of different classes differ by infinity."""
    same_classes = ours_kept.classes.tolist() == theirs_kept.classes.tolist()
    return Difference(
        largest(ours.boxes, theirs.boxes),
        largest(ours.scores, theirs.scores),
        largest(ours_kept.boxes, theirs_kept.boxes) if same_classes else float("inf"),
        largest(ours_kept.scores, theirs_kept.scores) if same_classes else float("inf"),
        f"{len(ours_kept.scores)}/{len(theirs_kept.scores)}",
    )


def largest(a: Tensor, b: Tensor) -> float:
    """Return the largest absolute difference; 0 for empty tensors."""
    return float((a - b).abs().max()) if a.numel() else 0.0


def timed(call: Callable[[Tensor, Tensor], Any], pixels: Tensor, text: Tensor) -> tuple[float, Any]:
    """Return the milliseconds of one pass, and its result."""
    begin_s = time.perf_counter()
    result = call(pixels, text)
    return (time.perf_counter() - begin_s) * 1e3, result


def detect(model: YoloWorld, image: Image, size: int, text: Tensor) -> Kept:
    """Detect on a BGR frame as our detector does, boxes on the frame."""
    vectors = Vocabulary(tuple(map(str, range(len(text)))), text.numpy(), CLIP)
    detector = YoloWorldDetector(model, vectors, name="ours", image_size=size, iou=IOU, limit=LIMIT)
    found = detector.detect(image, VectorQuery(vectors.phrases, text), WHOLE_SCORE)
    return Kept(
        torch.tensor([item.box for item in found]).reshape(-1, 4),
        torch.tensor([item.score for item in found]),
        torch.tensor([int(item.label) for item in found]),
    )


def compare_whole(ours: Kept, theirs: Kept) -> tuple[float, float]:
    """Return the largest differences of boxes and scores; infinity if other things were detected."""
    if ours.classes.tolist() != theirs.classes.tolist():
        return float("inf"), float("inf")
    return largest(ours.boxes, theirs.boxes), largest(ours.scores, theirs.scores)


def first_frames(files: list[Path]) -> Iterator[tuple[str, Image]]:
    """Yield the name of each file and its first frame, BGR."""
    for path in files:
        image = cv2.VideoCapture(str(path)).read()[1] if path.suffix == ".mp4" else cv2.imread(str(path))
        if image is None:
            raise SystemExit(f"expected a picture, or a video in .mp4, found none at {path}")
        yield "/".join(path.parts[-2:]), np.asarray(image, np.uint8)


def shared_files() -> list[Path]:
    """List the pictures and videos of the shared folder."""
    data = SHARED / "data"
    kitchen = [data / f"rgbd/kitchen/frame-{index:06d}.color.jpg" for index in (0, 30)]
    return [*sorted(data.glob("davis/JPEGImages/*/00000.jpg")), *kitchen, *sorted(data.glob("video/*.mp4"))]


def converted(checkpoint: Path) -> tuple[YoloWorld, str]:
    """Convert the checkpoint; return our network and the letter of its scale."""
    with tempfile.TemporaryDirectory() as folder:
        model = convert_checkpoint(checkpoint, Path(folder)).eval()
    scales = [name for name, config in SCALES.items() if config == model.config]
    if not scales:
        raise SystemExit(
            f"expected a checkpoint of a public scale ({', '.join(SCALES)}), found {model.config}"
        )
    return model, scales[0]


Passes = list[tuple[float, float]]
"""Milliseconds of this package and of the public implementation, a pair for each run."""


def measure(
    ours: YoloWorld, theirs: Theirs, pixels: Tensor, text: Tensor, runs: int
) -> tuple[Difference, Passes]:
    """Run both networks on one picture; the first pass of each warms up and is compared, the others are timed."""
    with torch.inference_mode():
        passes = [(timed(ours, pixels, text), timed(theirs, pixels, text)) for _ in range(runs + 1)]
        detections = passes[0][0][1]
        raw = passes[0][1][1]
        chosen = select(detections.boxes[0], detections.scores[0], SCORE, iou=IOU, limit=LIMIT)
        kept = Kept(chosen.boxes, chosen.scores, chosen.classes)
        difference = compare(detections, theirs.detections(raw), kept, theirs.kept(raw))
    return difference, [(ours_ms, theirs_ms) for (ours_ms, _), (theirs_ms, _) in passes[1:]]


def report_times(pictures: list[Passes], figures: Figures) -> None:
    """Keep the figures of time."""
    runs = list(zip(*pictures, strict=True))
    ours_ms, theirs_ms = ([statistics.median(pair[i] for pair in run) for run in runs] for i in (0, 1))
    ratios = [theirs / ours for ours, theirs in zip(ours_ms, theirs_ms, strict=True)]
    figures.add("YOLO-World, speed relative to the public implementation", ratios, "x")
    figures.add("YOLO-World, time of a frame", ours_ms, "ms")
    figures.add("YOLO-World, time of a frame, public implementation", theirs_ms, "ms")


class Picture(NamedTuple):
    """Figures of one picture; `whole` are the differences of boxes and scores from frame to boxes."""

    difference: Difference
    whole: tuple[float, float]
    passes: Passes


def measure_picture(
    ours: YoloWorld, theirs: Theirs, named: tuple[str, Image], text: Tensor, args: argparse.Namespace
) -> Picture:
    """Compare both on a frame and print a line."""
    name, image = named
    pixels, _ = letterbox(image, args.size, resize="bilinear", stride=STRIDES[-1])
    difference, passes = measure(ours, theirs, pixels, text, args.runs)
    with torch.inference_mode():
        found = detect(ours, image, args.size, text)
        expected = theirs.detect(image, args.size, text)
    whole = compare_whole(found, expected)
    boxes, scores, kept_boxes, kept_scores, kept = difference
    print(
        f"{name:28s} {boxes:9.1e} {scores:9.1e} {kept_boxes:15.1e} {kept_scores:12.1e}  {kept:>7s}    "
        f"{whole[0]:9.1e} {whole[1]:9.1e}  {len(found.scores)}/{len(expected.scores)}"
    )
    return Picture(difference, whole, passes)


def report_differences(pictures: list[Picture], figures: Figures) -> None:
    """Keep the largest differences."""
    boxes = max(picture.difference.boxes for picture in pictures)
    scores = max(picture.difference.scores for picture in pictures)
    figures.add("YOLO-World, largest difference of boxes", boxes, "px", target="under 0.001")
    figures.add("YOLO-World, largest difference of scores", scores, "score", target="under 0.001")
    whole_boxes, whole_scores = (max(picture.whole[i] for picture in pictures) for i in (0, 1))
    figures.add("YOLO-World, from frame to boxes: boxes", whole_boxes, "px", target="under 0.5")
    figures.add("YOLO-World, from frame to boxes: scores", whole_scores, "score", target="under 0.01")


def main() -> None:
    parser = make_parser(__doc__, RUNS)
    parser.add_argument("checkpoint", type=Path, help="checkpoint of a public YOLO-World")
    parser.add_argument(
        "files", type=Path, nargs="*", help="pictures and videos; default: the shared folder's"
    )
    vectors = SHARED / "weights/vocabulary/clip_vit_b32_104.json"
    parser.add_argument("--vocabulary", type=Path, default=vectors, help="phrases with vectors")
    parser.add_argument("--size", type=int, default=640, help="side of the network's input in pixels")
    args = parser.parse_args()
    figures = Figures("accuracy.yolo_parity")
    text = torch.from_numpy(read_source(args.vocabulary, CLIP).vectors.copy())
    ours, scale = converted(args.checkpoint)
    theirs = Theirs(args.checkpoint, scale, len(text))
    print(
        f"{'largest difference of':28s}  boxes px    scores   kept boxes px  kept scores  kept ours/theirs  "
        "frame to boxes px  scores"
    )
    sources: list[Path] = args.files or shared_files()
    pictures = [measure_picture(ours, theirs, named, text, args) for named in first_frames(sources)]
    report_times([picture.passes for picture in pictures], figures)
    report_differences(pictures, figures)
    figures.write(args.json)
    print(f"{len(text)} phrases, {args.size} px, {torch.get_num_threads()} threads")
    if not all(value <= TOLERANCE for picture in pictures for value in picture.difference[:4]):
        raise SystemExit(f"expected differences of at most {TOLERANCE:g}, found larger ones")
    if not all(px <= WHOLE_PX and score <= WHOLE_TOLERANCE for px, score in (p.whole for p in pictures)):
        raise SystemExit(
            f"expected the same detections within {WHOLE_PX} px and {WHOLE_TOLERANCE}, found others"
        )


if __name__ == "__main__":
    main()
