"""Export stages to ONNX files: typed as their specs, with one axis for any number of objects, attention unfused.

`BuildStep` measures and reports the steps of exports and builds.
"""

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import EngineError, require
from ..files import move_inside, remove_inside
from .oom import reraise_as_engine_error
from .specs import HEIGHT, IMAGES, MEMORIES, MIN_MEMORIES, OBJECTS, POINTS, WIDTH, StageSpec

ReportProgress = Callable[[str, float], None]
"""Called with the title of a build step and the fraction of it that is done, 0 to 1."""
MAX_FRACTION = 0.99
"""Fraction of a step that has not ended: a builder reports 1 before it returns, and estimates may be short."""
OPSET = 20
"""Operators of ONNX that exports use. Later ones are unknown to onnxruntime 1.20, which Triton 25.01 has."""
OPSET_BFLOAT16 = 22
"""The first with convolutions in bfloat16. It has no fused Attention yet."""
MAX_OBJECTS = 64
"""Objects, or images, of a call."""
MAX_POINTS = 64
"""Points of a prompt."""
MIN_SIDE = 2
"""Pixels of a side of an image."""
MAX_SIDE = 16384
"""Pixels of a side of an image."""
EXTRA = "onnx"
NOISY_LOGGERS = (
    "torch.onnx",
    "torch.export",
    "torch.compiler",
    "torch._dynamo",
    "torch._inductor",
    "onnxscript",
    "onnx_ir",
)


def export(stage: StageSpec, path: Path, *, external_data: bool = False) -> Path:
    """Write a stage to `path` as ONNX with the names, shapes and dtypes of its specs; return the path.

    If the stage varies, its axes `objects` and `images` take 1 to 64, and its axis `memories` 2 or more. Attention is
    written as separate steps with its softmax in float32, because engines gave wrong results for long sequences where
    it was fused in half precision. With `external_data`, and always above 1.5 GB, the weights go to a file beside it,
    PATH.data. An earlier file is replaced. The new one is written completely or not at all. Raises EngineError that
    names the stage where the export fails, MissingExtraError without the extra `onnx`.
    """
    # checked before the export, which takes time
    require("onnx", EXTRA)
    require("onnxscript", EXTRA)
    if not path.parent.is_dir():
        raise EngineError(
            f"{stage.name}: expected a folder to write {path.name} into, found no {path.parent}"
        )
    with reraise_as_engine_error(f"{stage.name}: cannot be exported"), silence_exporters():
        program = _make_program(stage)
        _remove_source_notes(program.model)
    with reraise_as_engine_error(f"{stage.name}: cannot be written to {path}"), silence_exporters():
        _write(program, path, external_data)
    return path


def _make_program(stage: StageSpec) -> Any:
    """Return the stage as the exporter's ONNXProgram, in memory."""
    with torch.no_grad():
        return torch.onnx.export(
            stage.module,
            stage.examples(),
            input_names=[spec.name for spec in stage.inputs],
            output_names=[spec.name for spec in stage.outputs],
            dynamic_shapes=dynamic_axes(stage) if stage.varies else None,
            custom_translation_table=TRANSLATIONS,
            opset_version=choose_opset(stage),
            dynamo=True,
            verbose=False,
        )


def choose_opset(stage: StageSpec) -> int:
    """Return the oldest operators of ONNX that a stage can be written in."""
    computes_in_bfloat16 = any(weight.dtype == torch.bfloat16 for weight in stage.module.parameters())
    return OPSET_BFLOAT16 if computes_in_bfloat16 else OPSET


def dynamic_axes(stage: StageSpec) -> tuple[dict[int, torch.export.Dim], ...]:
    """Return for each input the axes that vary, with their limits."""
    limits = {
        OBJECTS: (1, MAX_OBJECTS),
        # a stage without memories has a maximum of 0, which lies below the least number
        MEMORIES: (MIN_MEMORIES, stage.max_memories or MAX_OBJECTS),
        IMAGES: (1, MAX_OBJECTS),
        POINTS: (1, MAX_POINTS),
        HEIGHT: (MIN_SIDE, MAX_SIDE),
        WIDTH: (MIN_SIDE, MAX_SIDE),
    }
    dims = {name: torch.export.Dim(name, min=least, max=most) for name, (least, most) in limits.items()}

    def find(side: int | str) -> torch.export.Dim:
        # a side may be a sum, as in "memories + 16"
        name, _, more = str(side).partition(" + ")
        return dims[name] + int(more) if more else dims[name]

    return tuple(
        {axis: find(side) for axis, side in enumerate(spec.shape) if isinstance(side, str)}
        for spec in stage.inputs
    )


def _translate_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Translate `scaled_dot_product_attention` of [N, heads, L, D] to [N, heads, T, D]; the mask is bool."""
    op = require("onnxscript", EXTRA).opset20
    types = require("onnx", EXTRA).TensorProto
    if dropout_p or is_causal or enable_gqa:
        raise ValueError("expected plain attention, found dropout, a causal mask or grouped heads")
    factor = op.CastLike(query.shape[-1] ** -0.5 if scale is None else scale, query)
    scores = op.MatMul(op.Mul(query, factor), op.Transpose(key, perm=[0, 1, 3, 2]))
    scores = op.Cast(scores, to=types.FLOAT)
    if attn_mask is not None:
        # with -inf instead, the softmax of a row without a valid key would be NaN
        scores = op.Where(attn_mask, scores, torch.finfo(torch.float32).min)
    return op.MatMul(op.CastLike(op.Softmax(scores, axis=-1), value), value)


def _translate_convolution(
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
    """Translate a transposed convolution [C, O, k, k] of stride k to a 1x1 convolution and a depth-to-space step.

    TensorRT has no transposed convolution in bfloat16.
    """
    op = require("onnxscript", EXTRA).opset20
    channels, out, kernel, _ = weight.shape
    if (
        not transposed
        or list(stride) != [kernel, kernel]
        or any(padding)
        or any(output_padding)
        or groups > 1
    ):
        raise ValueError("expected a transposed convolution whose stride is its kernel, found another")
    # each of the k x k pixels below an input pixel is a 1x1 convolution with output channels of its own;
    # DepthToSpace expects the pixels first and the channels last
    pointwise = op.Reshape(op.Transpose(weight, perm=[2, 3, 1, 0]), [kernel * kernel * out, channels, 1, 1])
    moved = op.DepthToSpace(op.Conv(x, pointwise), blocksize=kernel)
    return moved if bias is None else op.Add(moved, op.Reshape(bias, [1, out, 1, 1]))


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.scaled_dot_product_attention.default: _translate_attention,
    torch.ops.aten.convolution.default: _translate_convolution,  # others stay conv2d
}


def _remove_source_notes(model: Any) -> None:
    """Remove the notes of source file and line from each node; keep the name of its module."""
    for node in model.graph.all_nodes():
        for note in [key for key in node.metadata_props if key != "namespace"]:
            del node.metadata_props[note]


def _write(program: Any, path: Path, external_data: bool) -> None:
    """Save beside the target, check, then move: the weights first, so that no model lies beside foreign weights."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        model = Path(folder) / path.name
        program.save(model, external_data=external_data)
        # a file that ONNX refuses must not replace an earlier one
        require("onnx", EXTRA).checker.check_model(str(model))
        remove_inside(path.parent, path)
        for part in sorted(Path(folder).iterdir(), key=lambda part: part == model):
            move_inside(path.parent, part, path.parent / part.name)


@contextmanager
def silence_exporters() -> Iterator[None]:
    """Suppress the warnings and log lines of exporters."""
    loggers = [logging.getLogger(name) for name in NOISY_LOGGERS]
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


def ignore_progress(title: str, fraction: float) -> None:
    """Do nothing: the default of callers that show no progress."""


class BuildStep:
    """A step of a build: it measures how long the step takes, and reports which fraction is done.

    expected_s: how long the same step took before, in seconds. It is a better estimate than the builder's own fraction,
    so the reported fraction is of that time where it is known.
    """

    def __init__(
        self,
        title: str,
        report: ReportProgress,
        expected_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._report = report
        self._expected_s = expected_s
        self._clock = clock
        self._start_s = clock()
        report(title, 0.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._start_s

    def update(self, fraction: float) -> None:
        """Report progress; `fraction`, 0 to 1, is the builder's."""
        if self._expected_s:
            fraction = self.elapsed_s / self._expected_s
        self._report(self._title, min(fraction, MAX_FRACTION))

    def finish(self) -> float:
        """Report the end of the step; return the seconds that it took, rounded to 0.1."""
        elapsed_s = self.elapsed_s
        self._report(self._title, 1.0)
        return round(elapsed_s, 1)
