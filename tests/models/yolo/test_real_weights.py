"""The public small YOLO-World, converted by the command line, names what is on real pictures."""

from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch

from sam3_node.cli.main import main
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.models.pixels import box_iou, letterbox, select
from sam3_node.models.yolo.network import YoloWorld, load_yolo_world
from tests.support.paths import SHARED

CHECKPOINT = SHARED / "weights/yolo-world/yolov8s-worldv2.pt"
VECTORS = SHARED / "weights/vocabulary/clip_vit_b32_104.json"
DATA = SHARED / "data"
# the first ones of the file; those after them overlap with these, such as "white chair" with "chair"
NAMES = 80
SURE = 0.4

pytestmark = pytest.mark.skipif(
    not (CHECKPOINT.is_file() and VECTORS.is_file() and DATA.is_dir()),
    reason="no real weights and pictures here",
)


class Finder(NamedTuple):
    """The network and its prompts."""

    model: YoloWorld
    phrases: tuple[str, ...]
    vectors: torch.Tensor

    def __call__(self, image: npt.NDArray[np.uint8]) -> tuple[list[str], torch.Tensor]:
        """Return the detections with a score of at least SURE: names, and boxes [n, 4] in pixels of the image."""
        pixels, frame = letterbox(image, 640, resize="bilinear", stride=32)
        with torch.inference_mode():
            boxes, scores = self.model(pixels, self.vectors)
        found = select(boxes[0], scores[0], SURE)
        return [self.phrases[index] for index in found.classes], frame.to_frame(found.boxes)


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> Finder:
    folder = tmp_path_factory.mktemp("yolo")
    file = folder / "names.safetensors"
    assert main(["weights", "convert", str(CHECKPOINT), "-o", str(folder)]) == 0
    source = ["--from", str(VECTORS), "--model", "openai/clip-vit-base-patch32"]
    assert main(["vocabulary", "build", *source, "-o", str(file)]) == 0
    vocabulary = Vocabulary.load(file)
    phrases = vocabulary.phrases[:NAMES]
    return Finder(load_yolo_world(folder), phrases, torch.from_numpy(vocabulary.encode(phrases)))


def read(path: Path) -> npt.NDArray[np.uint8]:
    """A picture, or the first frame of a video."""
    image = cv2.VideoCapture(str(path)).read()[1] if path.suffix == ".mp4" else cv2.imread(str(path))
    assert image is not None
    return np.asarray(image, np.uint8)


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("davis/JPEGImages/dog/00000.jpg", ["dog"]),
        ("davis/JPEGImages/car-shadow/00039.jpg", ["car", "car", "person", "person", "traffic light"]),
        ("rgbd/kitchen/frame-000040.color.jpg", ["chair", "chair", "cup", "dining table"]),
        ("video/04_coffee.mp4", ["cup", "dining table", "person"]),
    ],
)
def test_what_is_there_is_named(finder: Finder, file: str, names: list[str]) -> None:
    assert sorted(finder(read(DATA / file))[0]) == names


@pytest.mark.parametrize(("sequence", "name"), [("dog", "dog"), ("cows", "cow")])
def test_a_box_surrounds_what_it_names(finder: Finder, sequence: str, name: str) -> None:
    truth = cv2.imread(str(DATA / f"davis/Annotations/{sequence}/00000.png"), cv2.IMREAD_GRAYSCALE)
    x, y, width, height = cv2.boundingRect(truth)
    names, boxes = finder(read(DATA / f"davis/JPEGImages/{sequence}/00000.jpg"))
    assert names == [name]
    assert box_iou(boxes, torch.tensor([[x, y, x + width, y + height]])).item() > 0.9
