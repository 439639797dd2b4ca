"""Public checkpoints become folders of ours; nothing in them is run, and what does not fit is told."""

import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sam3_node.cli.main import main
from sam3_node.detection.loading import load_detector
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import ModelError
from sam3_node.models.yolo.convert import convert_checkpoint, read_checkpoint
from sam3_node.models.yolo.network import SCALES, YoloWorld, load_yolo_world
from tests.support.paths import SHARED
from tests.support.public_yolo import PublicLayout
from tests.support.refuses import refuses
from tests.support.tables import each_row
from tests.support.tiny_yolo import TINY, phrases, tiny_yolo

REAL = SHARED / "weights/yolo-world/yolov8s-worldv2.pt"


def checkpoint(path: Path, model: YoloWorld | None = None) -> Path:
    layout = PublicLayout()
    return layout.save(path / "public.pt", model=layout.network(model or tiny_yolo()))


def changed(path: Path, change: Callable[[Any], object]) -> Path:
    """Write a checkpoint whose network was changed; `change` is called with its list of layers."""
    layout = PublicLayout()
    network = layout.network(tiny_yolo())
    change(network.model)
    return layout.save(path / "public.pt", model=network)


def weights_convert(*arguments: object) -> int:
    return main(["weights", "convert", *map(str, arguments)])


def assert_same(found: YoloWorld, wanted: YoloWorld) -> None:
    theirs = found.state_dict()
    mine = wanted.state_dict()
    assert theirs.keys() == mine.keys()
    assert [name for name in mine if not torch.equal(theirs[name], mine[name])] == []


def test_every_tensor_finds_its_place(tmp_path: Path) -> None:
    model = tiny_yolo()
    converted = convert_checkpoint(checkpoint(tmp_path, model), tmp_path / "folder")
    assert converted.config == TINY
    assert_same(converted, model)
    loaded = load_yolo_world(tmp_path / "folder")
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        mine = model(pixels, phrases(2))
        theirs = loaded(pixels, phrases(2))
    assert torch.equal(mine.scores, theirs.scores)
    assert torch.equal(mine.boxes, theirs.boxes)


def test_half_precision_becomes_float32(tmp_path: Path) -> None:
    converted = convert_checkpoint(checkpoint(tmp_path, tiny_yolo().half()), tmp_path / "folder")
    assert {value.dtype for value in converted.parameters()} == {torch.float32}
    assert_same(converted, tiny_yolo().half().float())


def test_averaged_weights_are_preferred(tmp_path: Path) -> None:
    layout = PublicLayout()
    networks = {name: layout.network(tiny_yolo(seed)) for name, seed in (("model", 1), ("ema", 2))}
    assert_same(convert_checkpoint(layout.save(tmp_path / "a.pt", **networks), tmp_path), tiny_yolo(2))


def test_a_scalar_may_be_a_vector_of_one_number(tmp_path: Path) -> None:
    def change(layers: Any) -> None:
        for contrast in layers[22].cv4:
            contrast.bias = nn.Parameter(contrast.bias[None].detach())

    assert_same(convert_checkpoint(changed(tmp_path, change), tmp_path / "folder"), tiny_yolo())


def test_nothing_foreign_is_imported(tmp_path: Path) -> None:
    convert_checkpoint(checkpoint(tmp_path), tmp_path / "folder")
    assert not [name for name in sys.modules if name.startswith("ultralytics")]


class Call:
    """Pickles as the call of a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.made


@pytest.mark.parametrize(
    ("function", "argument", "name"),
    [
        (os.system, "touch {}", f"{os.name}.system"),
        (eval, "open({!r}, 'w')", "builtins.eval"),
        (torch.hub.load_state_dict_from_url, "file://{}", "torch.hub.load_state_dict_from_url"),
    ],
)
def test_code_is_named_and_not_run(
    tmp_path: Path, function: Callable[..., object], argument: str, name: str
) -> None:
    layout = PublicLayout()
    trace = tmp_path / "trace"
    harm = Call(function, argument.format(str(trace)))
    file = layout.save(tmp_path / "harm.pt", model=layout.network(tiny_yolo()), updates=harm)
    with refuses(ModelError, field=("names", "harmful")) as caught:
        convert_checkpoint(file, tmp_path / "folder")
    assert f"{file} names {name}:" in str(caught.value)
    assert not trace.exists()
    assert not (tmp_path / "folder").exists()


def test_every_name_that_is_refused_is_told(tmp_path: Path) -> None:
    layout = PublicLayout()
    others = layout.make("ultralytics.hub", "Session")(), layout.make("somewhere", "Else")()
    file = layout.save(tmp_path / "odd.pt", model=layout.network(tiny_yolo()), updates=others)
    with refuses(ModelError, field=("somewhere.Else", "ultralytics.hub.Session")):
        read_checkpoint(file)


@each_row("kind", ["absent", "folder", "empty", "text", "cut", "archive", "pickle of nothing"])
def test_what_is_no_checkpoint_is_told(tmp_path: Path, kind: str) -> None:
    file = checkpoint(tmp_path)
    data = file.read_bytes()
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "archive":
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("data.txt", "text")
    elif kind == "pickle of nothing":
        torch.save({"epoch": 3}, file)
    elif kind != "absent":
        file.write_bytes({"empty": b"", "text": b"hello\n" * 99, "cut": data[: len(data) // 2]}[kind])
    with pytest.raises(ModelError) as caught:
        convert_checkpoint(file, tmp_path / "folder")
    told = str(caught.value)
    assert str(file) in told
    assert "expected a checkpoint as torch.save writes it" in told or "holds no YOLO-World" in told
    assert "\n" not in told


def test_networks_of_other_families_are_told(tmp_path: Path) -> None:
    layout = PublicLayout()
    plain = layout.save(tmp_path / "plain.pt", model=layout.public(tiny_yolo().backbone.stem))
    with refuses(ModelError, field=("YOLO-World", "MaxSigmoidAttnBlock")):
        read_checkpoint(plain)
    first = layout.network(tiny_yolo())
    first.image_pooling = layout.module("ImagePoolingAttn")
    with refuses(ModelError, field=("1", "2", "version")):
        read_checkpoint(layout.save(tmp_path / "first.pt", model=first))


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({}, "NoneType"),
        ({"model": [1, 2]}, ("root", "list")),
        ({"model": {"w": torch.zeros(2)}}, ("root", "dict")),
    ],
)
def test_another_thing_where_the_network_belongs_is_told(
    tmp_path: Path, entry: dict[str, object], told: str | tuple[str, ...]
) -> None:
    layout = PublicLayout()
    file = layout.save(tmp_path / "odd.pt", **entry, spare=layout.network(tiny_yolo()))
    with refuses(ModelError, field=told):
        read_checkpoint(file)


def test_odd_members_are_told(tmp_path: Path) -> None:
    with refuses(ModelError, field=("damaged", "model.0.conv.weight")):
        read_checkpoint(changed(tmp_path, lambda layers: layers[0].conv._parameters.update(weight="w")))
    with refuses(ModelError, field=("damaged", "model.0.conv")):
        read_checkpoint(changed(tmp_path, lambda layers: layers[0]._modules.update(conv=3)))


def remove_from(module: nn.Module, group: str, name: str) -> None:
    del getattr(module, group)[name]


def set_bias(value: torch.Tensor | None) -> Callable[[Any], object]:
    bias = None if value is None else nn.Parameter(value)
    return lambda layers: layers[12].attn._parameters.update(bias=bias)


@each_row(
    ("change", "told"),
    [
        (lambda layers: remove_from(layers[16], "_modules", "bn"), "neck.shrink.0.norm.bias"),
        (lambda layers: remove_from(layers[22].cv4[1], "_parameters", "bias"), "heads.1.contrast.bias"),
        (lambda layers: remove_from(layers[0], "_modules", "conv"), "stem.conv.weight missing"),
        (set_bias(None), "attention.bias missing"),
        (set_bias(torch.tensor(1.0)), "attention.bias missing"),
        (set_bias(torch.zeros(0)), "expected multiples of 32, twice attention_channels"),
        (lambda layers: remove_from(layers[12], "_modules", "m"), "neck_depth: "),
        (lambda layers: setattr(layers[12].attn, "gl", nn.Linear(13, 16)), "attention.guide.weight: "),
        (lambda layers: setattr(layers[22].cv4[0], "norm", nn.BatchNorm2d(13)), "norm.bias: "),
        (lambda layers: setattr(layers[22], "extra", nn.Linear(2, 2)), "model.22.extra."),
    ],
)
def test_what_is_missing_or_misshapen_is_told(
    tmp_path: Path, change: Callable[[Any], object], told: str
) -> None:
    file = changed(tmp_path, change)
    with pytest.raises(ModelError) as caught:
        convert_checkpoint(file, tmp_path / "folder")
    assert str(file) in str(caught.value)
    assert told in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_the_command_line_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint(tmp_path)
    folder = tmp_path / "new" / "folder"
    assert weights_convert(file, "-o", folder) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{folder}: YOLO-World, 0.1 M parameters, phrase vectors of 12\n"
    assert "no vocabulary was written: it has no text vectors with names" in printed.err
    assert load_yolo_world(folder).config == TINY
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "model.safetensors.sha256"]


def test_the_vocabulary_in_the_checkpoint_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = PublicLayout()
    names = {0: "red mug", 1: "table", 2: "knife"}
    network = layout.network(tiny_yolo())
    network.names = names
    network.txt_feats = phrases(3)[None]
    folder = tmp_path / "folder"
    assert weights_convert(layout.save(tmp_path / "public.pt", model=network), "-o", folder) == 0
    assert "vocabulary.safetensors: 3 phrases" in capsys.readouterr().out
    vocabulary = Vocabulary.load(folder / "vocabulary.safetensors")
    assert vocabulary.phrases == ("red mug", "table", "knife")
    torch.testing.assert_close(torch.from_numpy(vocabulary.encode(["knife"])[0].copy()), phrases(3)[2])
    assert load_detector("yolo-world", folder).prepare(["table"]).phrases == ("table",)


def test_the_command_line_tells_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm = tmp_path / "harm.pt"
    file = checkpoint(tmp_path)
    torch.save({"model": Call(os.system, "true")}, harm)
    assert weights_convert(harm, "-o", tmp_path / "folder") != 0
    assert f"{harm} names {os.name}.system" in one_line(capsys.readouterr().err)
    assert weights_convert(file, "-o", file) != 0
    assert f"cannot create the folder {file}" in one_line(capsys.readouterr().err)


def one_line(text: str) -> str:
    assert text.count("\n") == 1
    return text


@pytest.mark.skipif(not REAL.is_file(), reason="no real weights here")
def test_the_public_small_checkpoint_converts(tmp_path: Path) -> None:
    converted = convert_checkpoint(REAL, tmp_path)
    assert converted.config == SCALES["s"]
    assert all(value.isfinite().all() for value in converted.parameters())
    with refuses(ModelError, field=("pixels", "3")):
        load_yolo_world(tmp_path)(torch.zeros(1, 3, 32, 30), torch.zeros(1, 512))
