"""Real weights through the node's socket: a box around the ground truth in, a mask out, IoU per sequence.

    python tools/bench/segment.py [--weights FOLDER] [--davis FOLDER] [--out out/segment.png]

Each sequence's first frame is published over ZeroMQ to a node process, `segment` is asked on the control socket with
the tight box of the ground truth, and the answer is compared at the frame's own size. The contact sheet shows the
answers in colour and the ground truth as a white line.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from _common import Processes

from sam3_node.client import PerceptionClient, Segmentation
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.visualization import Image, contact_sheet, overlay, write_image

SHARED = Path(__file__).resolve().parents[3] / "shared"
ANSWER_MS = 120_000  # a CPU takes seconds to encode a frame


class Sequence(NamedTuple):
    """The first frame of a sequence: its JPEG bytes and its ground truth, bool [h, w]."""

    name: str
    jpeg: bytes
    truth: npt.NDArray[np.bool_]


class Result(NamedTuple):
    """What the node answered for a sequence."""

    name: str
    iou: float
    score: float
    encode_ms: float
    answer_ms: float
    picture: Image


def first_frames(davis: Path) -> list[Sequence]:
    folders = sorted((davis / "JPEGImages").iterdir())
    if not folders:
        raise SystemExit(f"expected sequences in {davis / 'JPEGImages'}, found none")
    return [_first_frame(davis, folder.name) for folder in folders]


def _first_frame(davis: Path, name: str) -> Sequence:
    truth = cv2.imread(str(davis / "Annotations" / name / "00000.png"), cv2.IMREAD_GRAYSCALE)
    jpeg = (davis / "JPEGImages" / name / "00000.jpg").read_bytes()
    return Sequence(name, jpeg, np.asarray(truth) > 127)


def ask(publisher: FramePublisher, client: PerceptionClient, seq: int, sequence: Sequence) -> Result:
    """Publish the frame, wait until the node has seen it, segment by the box of the truth."""
    height, width = sequence.truth.shape
    publisher.send(Frame("davis", seq, time.time_ns(), width, height, "jpeg", sequence.jpeg))
    masks = client.latest(ANSWER_MS)
    if masks is None or masks.seq != seq:
        raise SystemExit(f"the node did not process the frame of {sequence.name}")
    begin_s = time.perf_counter()
    found = client.segment(box=Mask.from_full(sequence.truth).box, seq=seq)
    answer_ms = 1e3 * (time.perf_counter() - begin_s)
    iou = intersection_over_union(found.mask.full(), sequence.truth)
    picture = draw(sequence, found)
    return Result(sequence.name, iou, found.score, masks.stages_us["encode"] / 1e3, answer_ms, picture)


def intersection_over_union(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> float:
    return float((a & b).sum() / (a | b).sum())


def draw(sequence: Sequence, found: Segmentation) -> Image:
    """The answer over the frame, the truth as a white line."""
    height, width = found.mask.size
    image = cv2.imdecode(np.frombuffer(sequence.jpeg, np.uint8), cv2.IMREAD_COLOR)
    instance = Instance(found.seq, sequence.name, found.score, "tracked", 1, 0, found.mask)
    canvas = overlay(
        np.asarray(image, np.uint8), MaskFrame("davis", found.seq, 0, width, height, instances=(instance,))
    )
    outlines, _ = cv2.findContours(sequence.truth.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(canvas, outlines, -1, (255, 255, 255), 1)
    return canvas


def measure(weights: Path, sequences: list[Sequence]) -> list[Result]:
    # lossless: each frame is processed, none is newer than the one that is asked about
    settings = {"SAM3_MODEL__NAME": str(weights), "SAM3_TRANSPORT__DELIVERY": "every"}
    with Processes(**settings) as processes, FramePublisher(processes.frames, "every") as publisher:
        processes.start("run")
        with PerceptionClient(
            processes.masks, processes.control, delivery="every", timeout_ms=ANSWER_MS
        ) as client:
            return [ask(publisher, client, seq, sequence) for seq, sequence in enumerate(sequences)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, default=SHARED / "weights/sam2-hiera-tiny")
    parser.add_argument("--davis", type=Path, default=SHARED / "data/davis")
    parser.add_argument("--out", type=Path, default=Path("out/segment.png"))
    args = parser.parse_args()
    for folder in (args.weights, args.davis):
        if not folder.is_dir():
            raise SystemExit(f"expected a folder at {folder}, found none; name one with --weights or --davis")
    results = measure(args.weights, first_frames(args.davis))
    print("sequence        IoU   score   encode ms   answer ms")
    for result in results:
        print(
            f"{result.name:12s} {result.iou:6.3f} {result.score:7.3f} {result.encode_ms:11.0f} {result.answer_ms:11.0f}"
        )
    print(f"{'mean':12s} {np.mean([result.iou for result in results]):6.3f}")
    captions = [f"{result.name}  IoU {result.iou:.3f}" for result in results]
    write_image(args.out, contact_sheet([result.picture for result in results], captions, columns=2))
    print(f"pictures in {args.out}")


if __name__ == "__main__":
    main()
