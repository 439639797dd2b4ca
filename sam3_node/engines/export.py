"""Stages as ONNX files: typed as their ports are, one axis for any number of objects, attention in plain steps."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineError, require
from .oom import ROOM, first_line, out_of_memory, root_of
from .specs import OBJECTS, StageSpec

OPSET = 22  # has bfloat16 convolutions, and not yet a fused Attention
MAX_OBJECTS = 64
EXTRA = "onnx"
CHATTER = ("torch.onnx", "torch.export", "torch._dynamo", "torch._inductor", "onnxscript", "onnx_ir")


def export(stage: StageSpec, path: Path, *, external_data: bool = False) -> Path:
    """Write a stage to `path` as ONNX whose inputs and outputs have its ports' names, shapes and dtypes; -> the path.

    Where the stage varies, its axis `objects` takes 1 to 64. Attention is written in plain steps, its softmax in
    float32: fused in half precision, engines have made nonsense of long sequences. With `external_data`, and always
    above 1.5 GB, weights go to a file beside it, PATH.data. An earlier file is replaced; one is written whole or not
    at all. Raises EngineError naming the stage where it cannot be, MissingExtraError without the extra `onnx`.
    """
    require("onnx", EXTRA)
    require("onnxscript", EXTRA)
    if not path.parent.is_dir():
        raise EngineError(
            f"{stage.name}: expected a folder to write {path.name} into, found no {path.parent}"
        )
    with telling_failures(stage, "exported"), quiet():
        program = _program(stage)
        _forget_origin(program.model)
    with telling_failures(stage, f"written to {path}"), quiet():
        _write(program, path, external_data)
    return path


def _program(stage: StageSpec) -> Any:
    """The stage as the exporter's ONNXProgram, in memory."""
    with torch.no_grad():
        return torch.onnx.export(
            stage.module,
            stage.examples(),
            input_names=[port.name for port in stage.inputs],
            output_names=[port.name for port in stage.outputs],
            dynamic_shapes=dynamic_axes(stage) if stage.varies else None,
            custom_translation_table=TRANSLATIONS,
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )


def dynamic_axes(stage: StageSpec) -> tuple[dict[int, torch.export.Dim], ...]:
    """Of each input, which of its axes take 1 to 64 objects."""
    objects = torch.export.Dim(OBJECTS, min=1, max=MAX_OBJECTS)
    return tuple(
        {axis: objects for axis, side in enumerate(port.shape) if side == OBJECTS} for port in stage.inputs
    )


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What `scaled_dot_product_attention` of [N, heads, L, D] to [N, heads, T, D] becomes; the mask is bool."""
    op = require("onnxscript", EXTRA).opset22
    types = require("onnx", EXTRA).TensorProto
    if dropout_p or is_causal or enable_gqa:
        raise ValueError("expected plain attention, found dropout, a causal mask or grouped heads")
    factor = op.CastLike(query.shape[-1] ** -0.5 if scale is None else scale, query)
    scores = op.MatMul(op.Mul(query, factor), op.Transpose(key, perm=[0, 1, 3, 2]))
    scores = op.Cast(scores, to=types.FLOAT)
    if attn_mask is not None:
        scores = op.Where(attn_mask, scores, torch.finfo(torch.float32).min)
    return op.MatMul(op.CastLike(op.Softmax(scores, axis=-1), value), value)


def _transposed_convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Any:
    """A transposed convolution [C, O, k, k] of stride k as a 1x1 one, then moved: TensorRT has none in bfloat16."""
    op = require("onnxscript", EXTRA).opset22
    channels, out, kernel, _ = weight.shape
    if (
        not transposed
        or list(stride) != [kernel, kernel]
        or any(padding)
        or any(output_padding)
        or groups > 1
    ):
        raise ValueError("expected a transposed convolution whose stride is its kernel, found another")
    pointwise = op.Reshape(op.Transpose(weight, perm=[2, 3, 1, 0]), [kernel * kernel * out, channels, 1, 1])
    moved = op.DepthToSpace(op.Conv(x, pointwise), blocksize=kernel)
    return moved if bias is None else op.Add(moved, op.Reshape(bias, [1, out, 1, 1]))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.convolution.default: _transposed_convolution,  # others stay conv2d
}


def _forget_origin(model: Any) -> None:
    """Drop the notes on which line of which file each node came from; what module it is of stays."""
    for node in model.graph.all_nodes():
        for note in [key for key in node.metadata_props if key != "namespace"]:
            del node.metadata_props[note]


def _write(program: Any, path: Path, external_data: bool) -> None:
    """Save beside the target, check, and only then put in its place: the weights first, so that none fit a model."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        made = Path(folder) / path.name
        program.save(made, external_data=external_data)
        require("onnx", EXTRA).checker.check_model(str(made))
        path.unlink(missing_ok=True)
        for part in sorted(Path(folder).iterdir(), key=lambda part: part == made):
            os.replace(part, path.parent / part.name)


@contextmanager
def telling_failures(stage: StageSpec, verb: str) -> Iterator[None]:
    """Whatever an exporter or compiler raises, as an EngineError with the root of it."""
    try:
        yield
    except Exception as error:  # torch.onnx.OnnxExporterError, OSError, onnx.checker.ValidationError and more
        advice = f"; {ROOM}" if out_of_memory(error) else ""
        told = first_line(root_of(error))
        raise EngineError(f"{stage.name}: cannot be {verb}: {told}{advice}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Keep exporters' warnings and log lines off the terminal."""
    loggers = [logging.getLogger(name) for name in CHATTER]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
