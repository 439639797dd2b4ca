"""Segment real frames through the node's sockets by the boxes of the ground truth, and measure IoU and time.

    python -m tools.bench.latency.segment [--weights FOLDER] [--davis FOLDER] [--out out/segment.png]

The benchmark publishes the first frame of each sequence over ZeroMQ to a node process, and sends `segment` on the
control socket with the tight box of the ground truth. It compares the mask at the frame's own size. The contact sheet
shows the masks in colour and the ground truth as a white line.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.client import PerceptionClient, Segmentation
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Image, Instance, Mask, MaskFrame
from sam3_node.visualization import contact_sheet, overlay, write_image
from tools.bench.common import SHARED, Figures, make_parser
from tools.bench.processes import Processes
from tools.vos.metrics import region_similarity

TIMEOUT_MS = 120_000  # a CPU takes seconds to encode a frame


class FirstFrame(NamedTuple):
    """The first frame of a sequence: its JPEG bytes and its ground truth, bool [h, w]."""

    name: str
    jpeg: bytes
    truth: npt.NDArray[np.bool_]


class Result(NamedTuple):
    """The node's answer for one sequence: IoU, score, times in ms, and a picture."""

    name: str
    iou: float
    score: float
    encode_ms: float
    answer_ms: float
    picture: Image


def read_first_frames(davis: Path) -> list[FirstFrame]:
    """Read the first frame of each sequence of a folder in DAVIS' layout."""
    folders = sorted((davis / "JPEGImages").iterdir())
    if not folders:
        raise SystemExit(f"expected sequences in {davis / 'JPEGImages'}, found none")
    return [_read_first_frame(davis, folder.name) for folder in folders]


def _read_first_frame(davis: Path, name: str) -> FirstFrame:
    truth = cv2.imread(str(davis / "Annotations" / name / "00000.png"), cv2.IMREAD_GRAYSCALE)
    jpeg = (davis / "JPEGImages" / name / "00000.jpg").read_bytes()
    return FirstFrame(name, jpeg, np.asarray(truth) > 127)


def segment(publisher: FramePublisher, client: PerceptionClient, seq: int, frame: FirstFrame) -> Result:
    """Publish the frame, wait until the node has processed it, and segment by the box of the truth."""
    height, width = frame.truth.shape
    publisher.send(Frame("davis", seq, time.time_ns(), width, height, "jpeg", frame.jpeg))
    masks = client.latest(TIMEOUT_MS)
    if masks is None or masks.seq != seq:
        raise SystemExit(f"the node did not process the frame of {frame.name}")
    begin_s = time.perf_counter()
    segmentation = client.segment(box=Mask.from_full(frame.truth).box, seq=seq)
    answer_ms = 1e3 * (time.perf_counter() - begin_s)
    iou = region_similarity(segmentation.mask.full(), frame.truth)
    picture = draw(frame, segmentation)
    return Result(frame.name, iou, segmentation.score, masks.stages_us["encode"] / 1e3, answer_ms, picture)


def draw(frame: FirstFrame, segmentation: Segmentation) -> Image:
    """Draw the mask over the frame, and the truth as a white line."""
    height, width = segmentation.mask.size
    image = cv2.imdecode(np.frombuffer(frame.jpeg, np.uint8), cv2.IMREAD_COLOR)
    instance = Instance(segmentation.seq, frame.name, segmentation.score, "tracked", 1, 0, segmentation.mask)
    masks = MaskFrame("davis", segmentation.seq, 0, width, height, instances=(instance,))
    canvas = overlay(np.asarray(image, np.uint8), masks)
    outlines, _ = cv2.findContours(frame.truth.astype(np.uint8), cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
    cv2.drawContours(canvas, outlines, -1, (255, 255, 255), 1)
    return canvas


def measure(weights: Path, frames: list[FirstFrame]) -> list[Result]:
    """Segment one frame of each sequence by a node process."""
    # lossless delivery: the node must process every frame, although newer ones follow
    settings = {"SAM3_MODEL__NAME": str(weights), "SAM3_TRANSPORT__DELIVERY": "every"}
    with Processes(**settings) as processes, FramePublisher(processes.frames, "every") as publisher:
        processes.start("run")
        with PerceptionClient(
            processes.masks, processes.control, delivery="every", timeout_ms=TIMEOUT_MS
        ) as client:
            return [segment(publisher, client, seq, frame) for seq, frame in enumerate(frames)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--weights", type=Path, default=SHARED / "weights/sam2-hiera-tiny", help="as model.name"
    )
    parser.add_argument("--davis", type=Path, default=SHARED / "data/davis", help="sequences")
    parser.add_argument("--out", type=Path, default=Path("out/segment.png"), help="contact sheet")
    args, figures = parser.parse_args(), Figures("latency.segment")
    for folder in (args.weights, args.davis):
        if not folder.is_dir():
            raise SystemExit(f"expected a folder at {folder}, found none; name one with --weights or --davis")
    results = measure(args.weights, read_first_frames(args.davis))
    print("sequence        IoU   score   encode ms   answer ms")
    for result in results:
        print(
            f"{result.name:12s} {result.iou:6.3f} {result.score:7.3f} {result.encode_ms:11.0f} {result.answer_ms:11.0f}"
        )
    what = f"segment by a box, first frames of {len(results)} DAVIS sequences, {args.weights.name}"
    figures.add(f"{what}: mean IoU", float(np.mean([result.iou for result in results])), "IoU")
    figures.add(f"{what}: encoding a frame", [result.encode_ms for result in results], "ms")
    figures.add(f"{what}: request to answer", [result.answer_ms for result in results], "ms")
    figures.write(args.json)
    captions = [f"{result.name}  IoU {result.iou:.3f}" for result in results]
    write_image(args.out, contact_sheet([result.picture for result in results], captions, columns=2))
    print(f"pictures in {args.out}")


if __name__ == "__main__":
    main()
