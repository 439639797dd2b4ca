"""Exported detectors: the boxes of plain arithmetic on onnxruntime's outputs, names of classes, and what is refused."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime as runtime

from sam3_node.detection import onnx_detector
from sam3_node.detection.detectors import find_known_names
from sam3_node.detection.loading import load_detector
from sam3_node.errors import MissingExtraError, ModelError, UnknownPhraseError
from sam3_node.perception.perception import compute_digest
from sam3_node.types import Detection
from tests.support.refuses import refuses
from tests.support.tiny_detectors import picture
from tests.support.tiny_onnx import CLASSES, OUTPUTS, SIDES, STRIDES, write_onnx

Array = npt.NDArray[np.float32]

HEIGHT, WIDTH = SIDES
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
ASKED = ("red mug", "Blue Box")
THRESHOLD = 0.3


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An export of each layout."""
    folder = tmp_path_factory.mktemp("exports")

    def find(layout: str) -> Path:
        path = folder / layout / "best.onnx"
        return path if path.exists() else write_onnx(path, layout)

    return find


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def fit(layout: str, image: npt.NDArray[np.uint8]) -> tuple[Array, float, float, float, float]:
    """Return the input, and scale and offset along x and y, by OpenCV and Pillow alone."""
    from PIL import Image

    rgb = image[..., ::-1]
    height, width = image.shape[:2]
    if layout in ("rf-detr", "detr", "rt-detr"):
        if layout == "rf-detr":
            small = cv2.resize(rgb.astype(np.float32), (WIDTH, HEIGHT)) / 255
        else:
            small = np.asarray(Image.fromarray(np.ascontiguousarray(rgb)).resize((WIDTH, HEIGHT), 2)) / 255
        return ((small - MEAN) / STD).transpose(2, 0, 1)[None], WIDTH / width, HEIGHT / height, 0, 0
    scale = min(WIDTH / width, HEIGHT / height)
    columns = round(width * scale)
    rows = round(height * scale)
    is_centred = not layout.startswith("yolox")
    left = (WIDTH - columns) // 2 if is_centred else 0
    top = (HEIGHT - rows) // 2 if is_centred else 0
    canvas = np.full((HEIGHT, WIDTH, 3), 114, np.float32)
    source = image if layout.startswith("yolox") else rgb
    canvas[top : top + rows, left : left + columns] = cv2.resize(source.astype(np.float32), (columns, rows))
    pixels = canvas.transpose(2, 0, 1)
    if not layout.startswith("yolox"):
        pixels = pixels / 255
    return (pixels if layout == "torchvision" else pixels[None]), columns / width, rows / height, left, top


def decode(layout: str, found: dict[str, Array]) -> tuple[Array, Array]:
    """Return corners [A, 4] in pixels of the input, and scores [A, C]."""
    if layout == "torchvision":
        scores = np.zeros((len(found["boxes"]), 3))
        scores[np.arange(len(scores)), found["labels"] - 1] = found["scores"]
        return found["boxes"], scores
    if layout == "yolo-end2end":
        rows = found["output0"][0]
        scores = np.zeros((len(rows), 3))
        scores[np.arange(len(rows)), rows[:, 5].astype(int)] = rows[:, 4]
        return rows[:, :4], scores
    if layout in ("rf-detr", "detr", "rt-detr"):
        centres = found.get("dets", found.get("pred_boxes"))[0] * [WIDTH, HEIGHT, WIDTH, HEIGHT]
        logits = found.get("labels", found.get("logits"))[0]
        powers = np.exp(logits)
        scores = powers / powers.sum(1, keepdims=True) if layout == "detr" else sigmoid(logits)
    elif layout.startswith("yolov8"):
        table = found["output0"][0].T
        centres = table[:, :4]
        scores = table[:, 4:7]
    else:
        table = found["output"][0].copy()
        if layout == "yolox":
            row = 0
            for stride in STRIDES:
                for y in range(HEIGHT // stride):
                    for x in range(WIDTH // stride):
                        table[row, :2] = (table[row, :2] + (x, y)) * stride
                        table[row, 2:4] = np.exp(table[row, 2:4]) * stride
                        row += 1
        centres = table[:, :4]
        scores = table[:, 4:5] * table[:, 5:]
    half = centres[:, 2:] / 2
    return np.concatenate([centres[:, :2] - half, centres[:, :2] + half], 1), scores[:, :3]


def overlap(a: Array, b: Array) -> float:
    sides = np.clip(np.minimum(a[2:], b[2:]) - np.maximum(a[:2], b[:2]), 0, None)
    common = sides.prod()
    return float(common / ((a[2:] - a[:2]).prod() + (b[2:] - b[:2]).prod() - common))


def detect_plainly(path: Path, layout: str, image: npt.NDArray[np.uint8]) -> list[Detection]:
    """Return the detections of an export by plain arithmetic on the runtime's outputs."""
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    pixels, scale_x, scale_y, left, top = fit(layout, image)
    values = session.run(OUTPUTS[layout], {"images": pixels.astype(np.float32)})
    boxes, scores = decode(layout, dict(zip(OUTPUTS[layout], values, strict=True)))
    kept: list[tuple[int, float, Array]] = []
    for row in np.argsort(-scores.max(1), kind="stable"):
        index = int(scores[row].argmax())
        score = float(scores[row, index])
        rivals = [box for other, _, box in kept if other == index]
        if score > THRESHOLD and index in (0, 2) and all(overlap(boxes[row], box) <= 0.7 for box in rivals):
            kept.append((index, score, boxes[row]))
    found = []
    edge = [image.shape[1], image.shape[0]] * 2
    for index, score, box in kept[:100]:
        corners = np.clip((box - [left, top] * 2) / ([scale_x, scale_y] * 2), 0, edge)
        if (corners[2:] > corners[:2]).all():
            found.append(Detection(ASKED[index // 2], score, tuple(corners)))
    return found


@pytest.mark.parametrize("layout", OUTPUTS)
def test_boxes_are_those_of_plain_arithmetic(files: Callable[[str], Path], layout: str) -> None:
    image = cv2.resize(picture(12, 16), (310, 250), interpolation=cv2.INTER_CUBIC)
    mine = load_detector("onnx", files(layout))
    found = mine.detect(image, mine.prepare(ASKED), THRESHOLD)
    wanted = detect_plainly(files(layout), layout, image)
    assert len(wanted) > 2
    assert len(found) == len(wanted)
    # boxes of nearly equal scores may be in another order
    for one in wanted:
        apart = [np.abs(np.subtract(other.box, one.box)).max() for other in found if other.label == one.label]
        assert min(apart) < 1
    scores = [sorted(one.score for one in each) for each in (found, wanted)]
    np.testing.assert_allclose(*scores, atol=0.01)


def names_of(path: Path) -> tuple[str, ...]:
    return load_detector("onnx", path).detector.classes


def test_names_come_from_the_toml_the_file_or_a_file_beside_it(
    files: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "best.onnx"
    path.write_bytes(files("yolov8").read_bytes())
    with refuses(ModelError, field=("classes.txt", "best.toml")):
        load_detector("onnx", path)
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"1": "b", "0": "a", "2": "c"}}))
    assert names_of(path) == ("a", "b", "c")
    # as the output `yolo` of a replay writes it
    (tmp_path / "data.yaml").write_text('train: images/train\nnc: 3\nnames: ["d", "e", "f"]\n')
    assert names_of(path) == ("d", "e", "f")
    (tmp_path / "classes.txt").write_text("g\nh\n\ni\n")
    assert names_of(path) == ("g", "h", "i")
    (tmp_path / "best.txt").write_text("j\nk\nl")
    assert names_of(path) == ("j", "k", "l")
    write_onnx(path, "yolov8", metadata={"names": "{0: 'm', 1: \"o's\", 2: 'n'}", "task": "detect"})
    assert names_of(path) == ("m", "o's", "n")
    (tmp_path / "best.toml").write_text('classes = ["x", "y", "z"]')
    assert names_of(path) == ("x", "y", "z")
    (tmp_path / "best.toml").write_text('classes = ["x", "y"]')
    with refuses(ModelError, field=("2", "3", "classes")):
        load_detector("onnx", path)
    (tmp_path / "best.toml").write_text('classs = ["x", "y"]')
    with refuses(ModelError, field=("classs", "best.toml")):
        load_detector("onnx", path)


def test_other_names_than_the_classes_are_answered_with_the_nearest(files: Callable[[str], Path]) -> None:
    mine = load_detector("onnx", files("yolov8"))
    assert mine.name == "best.onnx"
    assert find_known_names(mine) == (tuple(CLASSES), False)
    with refuses(UnknownPhraseError, field=("red mugs", CLASSES[0], "3")):
        mine.prepare(["green bottle", "red mugs"])


def test_what_is_not_recognised_is_described_and_can_be_named(
    files: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_onnx(tmp_path / "best.onnx", "detr", outputs=["classes", "where"])
    with refuses(ModelError, field=("rf-detr", "yolox", "where float32 [1, 252, 4]", "best.toml")):
        load_detector("onnx", path)
    notes = tmp_path / "best.toml"
    notes.write_text('layout = "detr"\noutputs = ["where", "classes"]\nmean = [0.4, 0.4, 0.4]\n')
    mine = load_detector("onnx", path)
    assert mine.detect(picture(), mine.prepare(["red mug"]), 0.01)
    notes.write_text('layout = "yolox"\noutputs = ["where"]\n')
    with refuses(ModelError, field="where float32 [1, 252, 4]"):
        load_detector("onnx", path)
    # Ultralytics' other tasks have outputs of the same shapes
    path = write_onnx(tmp_path / "b/best.onnx", "yolov8", metadata={"names": str(CLASSES), "task": "obb"})
    with refuses(ModelError, field="obb"):
        load_detector("onnx", path)


def test_an_input_whose_size_is_free_takes_that_of_the_toml(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "best.onnx", "yolov8")
    model = onnx.load(path)
    for axis in model.graph.input[0].type.tensor_type.shape.dim[2:]:
        axis.dim_param = "side"
    onnx.save(model, path)
    # this network runs with one size alone
    with refuses(ModelError, field="network"):
        load_detector("onnx", path)
    (tmp_path / "best.toml").write_text(f"size = {list(SIDES)}")
    load_detector("onnx", path)


@pytest.mark.parametrize("content", [b"", b"nothing", b"\x08" * 5000])
def test_damaged_files_are_clear_errors(files: Callable[[str], Path], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "best.onnx"
    path.write_bytes(content)
    with refuses(ModelError, field=str(path)):
        load_detector("onnx", path)
    whole = files("rf-detr").read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with refuses(ModelError, field=str(path)):
        load_detector("onnx", path)
    with refuses(ModelError, field="best.onnx"):
        load_detector("onnx", tmp_path / "bst.onnx")
    with refuses(ModelError, field="detector.name"):
        load_detector("onnx")
    path.unlink()
    os.mkfifo(path)
    with refuses(ModelError, field=str(path)):
        load_detector("onnx", path)


def test_weights_beside_the_file_are_read_and_others_are_not(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    path = write_onnx(inside / "best.onnx", "rf-detr")
    model = onnx.load(path)
    onnx.save(model, path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    load_detector("onnx", path)
    (inside / "weights.bin").rename(tmp_path / "weights.bin")
    with refuses(ModelError, field=str(path)):
        load_detector("onnx", path)
    (inside / "weights.bin").symlink_to(tmp_path / "weights.bin")
    with refuses(ModelError, field=str(path)):
        load_detector("onnx", path)


def test_a_network_that_gives_no_numbers_costs_the_detections(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "best.onnx", "yolov8")
    model = onnx.load(path)
    # the root of what is below 0, which is only so for bright pictures
    (output,) = model.graph.output
    model.graph.node.append(onnx.helper.make_node("Sub", ["limit", "brightest"], ["rest"]))
    model.graph.node.append(onnx.helper.make_node("ReduceMax", ["images"], ["brightest"], keepdims=0))
    model.graph.node.append(onnx.helper.make_node("Sqrt", ["rest"], ["root"]))
    model.graph.node.append(onnx.helper.make_node("Add", ["output0", "root"], ["output1"]))
    model.graph.initializer.append(onnx.helper.make_tensor("limit", 1, [], [0.5]))
    output.name = "output1"
    nodes = {node.output[0]: node for node in model.graph.node}
    order = [node for name, node in nodes.items() if name not in ("rest", "root", "output1")]
    del model.graph.node[:]
    model.graph.node.extend([*order, nodes["rest"], nodes["root"], nodes["output1"]])
    onnx.save(model, path)
    mine = load_detector("onnx", path)
    query = mine.prepare(["red mug"])
    with refuses(ModelError, field="finite"):
        mine.detect(np.full((48, 64, 3), 255, np.uint8), query, 0.1)
    mine.detect(np.zeros((48, 64, 3), np.uint8), query, 0.1)


def test_no_runtime_and_an_old_one_name_the_extra(
    files: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "__version__", "1.23.2")
    with refuses(MissingExtraError, field=("1.24", "onnxruntime")):
        load_detector("onnx", files("detr"))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with refuses(MissingExtraError, field="onnxruntime"):
        onnx_detector._require_runtime()


def test_mean_and_deviation_of_the_toml_are_of_red_green_and_blue(
    files: Callable[[str], Path], tmp_path: Path
) -> None:
    red = np.zeros((48, 64, 3), np.uint8)
    red[..., 2] = 255
    for layout, place in (("yolov8", 0), ("yolox", 2)):
        path = tmp_path / layout / "best.onnx"
        path.parent.mkdir()
        path.write_bytes(files(layout).read_bytes())
        path.with_suffix(".toml").write_text(
            f"classes = {list(CLASSES)}\nmean = [0.25, 0, 0]\nstd = [0.5, 1, 1]"
        )
        pixels, _ = load_detector("onnx", path).detector._fit(red)
        assert pixels[0, :, 40, 40].tolist() == [1.5 if channel == place else 0 for channel in range(3)]
        path.with_suffix(".toml").write_text("std = [0, 1, 1]")
        with refuses(ModelError, field=("best.toml", "std")):
            load_detector("onnx", path)


def test_the_file_has_a_digest(files: Callable[[str], Path]) -> None:
    assert len(compute_digest(str(files("detr")))) == 64


def test_torchvisions_background_is_no_class(files: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "best.onnx"
    path.write_bytes(files("torchvision").read_bytes())
    (tmp_path / "classes.txt").write_text("\n".join(["__background__", *CLASSES]))
    assert names_of(path) == CLASSES
