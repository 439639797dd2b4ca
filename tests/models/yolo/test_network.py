"""YOLO-World: shapes, what text does, and weights on disk."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sam3_node.errors import ModelError, OutputError
from sam3_node.models.weight_files import digest_path
from sam3_node.models.yolo import network
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny_yolo import TINY, phrases, tiny_yolo

CPU = torch.device("cpu")


def picture(height: int = 64, width: int = 96, count: int = 1) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(
    ("scale", "millions"), [("nano", 1.46), ("s", 12.8), ("m", 28.4), ("l", 46.8), ("x", 72.9)]
)
def test_every_scale_has_its_size_and_shapes(scale: network.Scale, millions: float) -> None:
    with torch.device("meta"):
        model = network.YoloWorld(network.SCALES[scale])
        found = model(torch.zeros(2, 3, 320, 640), torch.zeros(5, model.config.text_channels))
    assert found.boxes.shape == (2, 4200, 4)
    assert found.scores.shape == (2, 4200, 5)
    size = sum(parameter.numel() for parameter in model.parameters())
    assert size / 1e6 == pytest.approx(millions, abs=0.05)


def test_scores_are_probabilities_and_boxes_finite() -> None:
    with torch.inference_mode():
        boxes, scores = tiny_yolo()(picture(), phrases(3))
    assert boxes.isfinite().all()
    assert (boxes[..., 2:] >= boxes[..., :2]).all()
    assert ((scores > 0) & (scores < 1)).all()
    assert scores.std() > 0.01


@pytest.mark.parametrize(
    "order", [[3, 1, 5, 0, 2, 4], [0, 1, 2, 3, 4, 5, 1, 1]], ids=["permuted", "repeated"]
)
def test_permuted_and_repeated_phrases_permute_scores_alone(order: list[int]) -> None:
    model = tiny_yolo()
    text = phrases(6)
    with torch.inference_mode():
        first = model(picture(), text)
        second = model(picture(), text[order])
    torch.testing.assert_close(first.scores[..., order], second.scores)
    if len(order) == len(text):
        torch.testing.assert_close(first.boxes, second.boxes)


def test_images_of_a_batch_have_their_own_phrases() -> None:
    model = tiny_yolo()
    pixels = picture(count=2)
    text = torch.stack([phrases(3), phrases(3, seed=2)])
    with torch.inference_mode():
        both = model(pixels, text)
        for index in range(2):
            alone = model(pixels[index : index + 1], text[index])
            torch.testing.assert_close(both.scores[index], alone.scores[0], rtol=0, atol=1e-4)
            torch.testing.assert_close(both.boxes[index], alone.boxes[0], rtol=0, atol=1e-3)


def test_anchors_are_pixel_centres_level_by_level() -> None:
    centres, strides = network.anchors((32, 64), CPU)
    assert strides.tolist() == [8.0] * 32 + [16.0] * 8 + [32.0] * 2
    assert centres[:2].tolist() == [[4.0, 4.0], [12.0, 4.0]]
    assert centres[8].tolist() == [4.0, 12.0]
    assert centres[-2:].tolist() == [[16.0, 16.0], [48.0, 16.0]]


def test_a_box_lies_at_the_expected_distances() -> None:
    distributions = torch.full((1, 1, 4, 4), -100.0)
    for side, bin_ in enumerate((1, 2, 3, 0)):
        distributions[0, 0, side, bin_] = 100.0
    distributions[0, 0, 0, 2] = 100.0  # left: 1 or 2, both as likely
    made = network.Predictions(
        torch.zeros(1, 1, 1), distributions, torch.tensor([[20.0, 30.0]]), torch.tensor([8.0])
    )
    assert made.boxes().tolist() == [[[20 - 1.5 * 8, 30 - 2 * 8, 20 + 3 * 8, 30]]]


def test_gradients_reach_every_parameter() -> None:
    model = tiny_yolo().train()
    made = model.predict(picture(count=2), phrases(3))
    (made.logits.square().sum() + made.boxes().square().sum()).backward()
    without = [name for name, value in model.named_parameters() if value.grad is None]
    assert not without


def test_an_exported_graph_serves_other_phrases() -> None:
    model = tiny_yolo()
    exported = torch.export.export(model, (picture(), phrases(3))).module()
    with torch.inference_mode():
        mine = model(picture() ** 2, phrases(3, seed=5))
        theirs = exported(picture() ** 2, phrases(3, seed=5))
    torch.testing.assert_close(theirs[0], mine.boxes)
    torch.testing.assert_close(theirs[1], mine.scores)


@each_row(
    ("pixels", "text", "told"),
    [
        *((pixels, (3, 12), "multiples of 32") for pixels in ((1, 3, 64, 60), (3, 64, 64), (1, 1, 64, 64))),
        *(((1, 3, 64, 64), text, r"\[K, 12\]") for text in ((3, 13), (12,))),
        ((1, 3, 64, 64), (0, 12), "K of at least 1"),
        ((2, 3, 64, 64), (3, 1, 12), "for as many images"),
    ],
)
def test_other_shapes_are_told(pixels: tuple[int, ...], text: tuple[int, ...], told: str) -> None:
    with pytest.raises(ModelError, match=told):
        tiny_yolo()(torch.zeros(pixels), torch.zeros(text))


def test_weights_come_back_as_they_were(tmp_path: Path) -> None:
    model = tiny_yolo()
    network.save_yolo_world(model, tmp_path / "new" / "folder")
    loaded = network.load_yolo_world(tmp_path / "new" / "folder")
    assert loaded.config == TINY
    assert not loaded.training
    with torch.inference_mode():
        mine = model(picture(), phrases(2))
        theirs = loaded(picture(), phrases(2))
    assert torch.equal(mine.scores, theirs.scores)
    assert torch.equal(mine.boxes, theirs.boxes)


def test_weights_load_in_another_dtype(tmp_path: Path) -> None:
    network.save_yolo_world(tiny_yolo(), tmp_path)
    model = network.load_yolo_world(tmp_path, dtype="bfloat16")
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        found = model(picture(), phrases(2))
    assert {found.boxes.dtype, found.scores.dtype} == {torch.float32}


def test_float16_weights_load_as_float32(tmp_path: Path) -> None:
    network.save_yolo_world(tiny_yolo().half(), tmp_path)
    assert {value.dtype for value in network.load_yolo_world(tmp_path).parameters()} == {torch.float32}


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    network.save_yolo_world(tiny_yolo(), tmp_path)
    weights = tmp_path / "model.safetensors"
    digest_path(weights).unlink()
    state = load_file(weights)
    state["backbone.stem.conv.bias"] = torch.zeros(8)
    state["neck.shrink.0.conv.weight"] = torch.zeros(16, 16, 1, 1)
    del state["heads.1.contrast.bias"]
    save_file(state, weights)
    with refuses(ModelError, field="model.safetensors") as caught:
        network.load_yolo_world(tmp_path)
    told = str(caught.value)
    assert 'Missing key(s) in state_dict: "heads.1.contrast.bias"' in told
    assert 'Unexpected key(s) in state_dict: "backbone.stem.conv.bias"' in told
    assert all(part in told for part in ("neck.shrink.0.conv.weight: ", "[16, 16, 1, 1]", "[16, 16, 3, 3]"))


@pytest.mark.parametrize("damage", ["one bit", "cut", "garbage", "no weights", "no config", "no folder"])
def test_damaged_folders_are_clear_errors(tmp_path: Path, damage: str) -> None:
    network.save_yolo_world(tiny_yolo(), tmp_path)
    weights = tmp_path / "model.safetensors"
    config = tmp_path / "config.json"
    data = weights.read_bytes()
    if damage == "one bit":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "cut":
        digest_path(weights).unlink()
        weights.write_bytes(data[:-1])
    elif damage == "garbage":
        config.write_text("\x00{")
    elif damage == "no weights":
        digest_path(weights).unlink()
        weights.unlink()
    elif damage == "no config":
        config.unlink()
    folder = tmp_path / "absent" if damage == "no folder" else tmp_path
    with pytest.raises(ModelError, match=str(folder)):
        network.load_yolo_world(folder)


@each_row(
    ("change", "told"),
    [
        ({"model_type": "bert"}, ("model_type", "yolo_world")),
        ({"depth": 3}, "depth"),
        ({"channels": 5}, "channels"),
        ({"channels": [8, 8, 16, 16]}, ("5", "channels")),
        ({"channels": [8, 8, 16, 16, "16"]}, ("channels.4", "integer")),
        ({"depths": [1, 1, 1, -1]}, "depths.3"),
        ({"bins": 0}, "bins"),
        ({"bins": True}, "bins"),
        ({"resize": "nearest"}, "resize"),
        ({"channels": [8, 8, 16, 16, 24]}, ("16", "multiples")),
    ],
)
def test_a_wrong_configuration_is_told(
    tmp_path: Path, change: dict[str, object], told: str | tuple[str, ...]
) -> None:
    network.save_yolo_world(tiny_yolo(), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with refuses(ModelError, field=told) as caught:
        network.load_yolo_world(tmp_path)
    assert str(config) in str(caught.value)


def test_a_configuration_survives_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_yolo()
    read: list[network.YoloWorldConfig] = []
    network.save_yolo_world(tiny, tmp_path)
    with monkeypatch.context() as patch:  # the weights are those of a tiny network
        patch.setattr(network, "build", lambda config, *_, **__: read.append(config) or tiny)
        for config in network.SCALES.values():
            (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
            network.load_yolo_world(tmp_path)
    assert read == list(network.SCALES.values())
    (tmp_path / "config.json").write_text("[]")
    with refuses(ModelError, field="config.json"):
        network.load_yolo_world(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refuses(OutputError, field=("create", "folder")):
        network.save_yolo_world(tiny_yolo(), tmp_path / "file")
