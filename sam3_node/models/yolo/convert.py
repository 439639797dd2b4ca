"""Convert checkpoints of public YOLO-World weights, without the package that wrote them.

Such a file is a pickle of whole modules. Torch's weights-only unpickler reads it. It calls only torch's own functions,
which rebuild tensors and plain containers. Inert placeholder classes replace the classes of the modules and keep their
stored attributes. A file that names any other class or function is refused before it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from ...errors import ModelError, summarize_error
from ...settings import describe_faults
from ..torch_files import check_growth, check_torch_file
from .network import YoloWorld, YoloWorldConfig, build, save_yolo_world

# classes of modules, the trainer's options, and the numbers that interrupted training leaves in the file
INERT = re.compile(
    r"ultralytics\.nn\.\w+(\.\w+)+|ultralytics\.utils\.IterableSimpleNamespace|torch\.nn\.modules\.\w+\.\w+"
    r"|numpy\._?core\.multiarray\.scalar|numpy\.dtype"
)
BYTES = "_codecs.encode"  # of which torch makes the bytes of numpy's numbers
FAMILY = "MaxSigmoidAttnBlock"  # a class of module that occurs only in this architecture
TEXT_VECTORS = "txt_feats"
FIRST_VERSION = "ImagePoolingAttn"

RENAMED = tuple(
    (re.compile(pattern), new)
    for pattern, new in (
        (r"^model\.0\.", "backbone.stem."),
        *((rf"^model\.{i + 1}\.", f"backbone.stages.{i // 2}.{i % 2}.") for i in range(8)),
        (r"^model\.9\.", "backbone.pooling."),
        (r"^model\.12\.", "neck.top_down.0."),
        (r"^model\.15\.", "neck.top_down.1."),
        (r"^model\.16\.", "neck.shrink.0."),
        (r"^model\.18\.", "neck.bottom_up.0."),
        (r"^model\.19\.", "neck.shrink.1."),
        (r"^model\.21\.", "neck.bottom_up.1."),
        (r"^model\.22\.cv2\.(\d+)\.", r"heads.\1.boxes."),
        (r"^model\.22\.cv3\.(\d+)\.", r"heads.\1.embeddings."),
        (r"^model\.22\.cv4\.(\d+)\.", r"heads.\1.contrast."),
        # before the general patterns of cv1 and cv2, which would also match these names
        (r"\.m\.(\d+)\.cv1\.", r".blocks.\1.first."),
        (r"\.m\.(\d+)\.cv2\.", r".blocks.\1.second."),
        (r"\.cv1\.", ".enter."),
        (r"\.cv2\.", ".leave."),
        (r"\.attn\.gl\.", ".attention.guide."),
        (r"\.attn\.proj_conv\.", ".attention.project."),
        (r"\.attn\.", ".attention."),
        (r"\.bn\.", ".norm."),
    )
)
CONSTANT = re.compile(r"^model\.22\.dfl\.")  # 0, 1, 2, …: the distances of the bins
SCALAR = re.compile(r"heads\.\d\.contrast\.(bias|logit_scale)")  # in some files a vector with one number


def convert_checkpoint(source: Path, folder: Path) -> YoloWorld:
    """Write a checkpoint's network as a float32 folder that `load_yolo_world` reads, and return the network.

    The text vectors are an input of the network; `read_phrase_vectors` reads them. Raises ModelError for a file that is
    damaged, names an unexpected class or function, or has no YOLO-World of version 2. Raises OutputError if `folder`
    cannot be written.
    """
    tensors = read_checkpoint(source)
    state = dict(_rename_tensor(name, value) for name, value in tensors.items() if not CONSTANT.match(name))
    try:
        config = _infer_config(state)
    except (ModelError, ValidationError) as error:
        raise ModelError(f"{source}: {describe_faults(error)}") from error
    model = build(config, state, origin=str(source))
    save_yolo_world(model, folder)
    return model


def read_phrase_vectors(path: Path) -> tuple[tuple[str, ...], Tensor] | None:
    """Read the names of a checkpoint's classes and their text vectors [N, D]; None if it has none that match.

    Call it after `convert_checkpoint`, which checks the file. No code of the checkpoint is run.
    """
    root = _load_root(path, _foreign_names(path))
    stored = root.stored if isinstance(root, _Inert) else {}
    names = stored.get("names")
    vectors = stored.get(TEXT_VECTORS)
    # some files hold a list, others a map by index
    if isinstance(names, dict):
        names = [names.get(index) for index in range(len(names))]
    if not isinstance(names, list) or not isinstance(vectors, Tensor) or vectors.ndim != 3:
        return None
    rows = vectors[0].detach().float()
    return (tuple(map(str, names)), rows) if len(names) == len(rows) > 0 else None


def read_checkpoint(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint's modules, preferably the averaged ones. No code of the checkpoint is run."""
    check_torch_file(path, lambda name: INERT.fullmatch(name) or name == BYTES)
    names = _foreign_names(path)
    kinds = {name.rpartition(".")[2] for name in names}
    if FIRST_VERSION in kinds:
        raise ModelError(
            f"{path} holds a YOLO-World of version 1; expected version 2, such as yolov8s-worldv2.pt"
        )
    if FAMILY not in kinds:
        raise ModelError(
            f"{path} holds no YOLO-World: expected a module {FAMILY}, found {', '.join(sorted(kinds)[:5]) or 'none'}"
        )
    root = _load_root(path, names)
    try:
        tensors = dict(_iterate_tensors(root))
    except ModelError as error:
        raise ModelError(f"{path} is damaged: {error}") from error
    check_growth(tensors.values(), path)
    return tensors


def _load_root(path: Path, names: list[str]) -> object:
    """Load the network in a checkpoint, with placeholders for the classes with these names."""
    try:
        with safe_globals([(type("Inert", (_Inert,), {}), name) for name in names]):
            checkpoint: object = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any error that a hostile pickle causes in torch's unpickler
        raise ModelError(f"cannot read {path}: {summarize_error(error)}") from error
    if not isinstance(checkpoint, dict):
        raise ModelError(f"{path}: expected a map with 'model' or 'ema', found {type(checkpoint).__name__}")
    averaged: object = checkpoint.get("ema")
    return checkpoint["model"] if averaged is None and "model" in checkpoint else averaged


class _Inert:
    """A placeholder for a class that must not be imported. It keeps the stored attributes and does nothing."""

    stored: dict[str, object]

    # the unpickler passes what the original class would take
    def __new__(cls, *_: object) -> _Inert:
        self = super().__new__(cls)
        self.stored = {}
        return self

    def __setstate__(self, state: object) -> None:
        # a hostile file may give any state
        self.stored = state if isinstance(state, dict) else {}

    def members(self, group: str) -> dict[str, object]:
        """Return a module's members in _parameters, _buffers or _modules."""
        members = self.stored.get(group)
        return {str(name): value for name, value in members.items()} if isinstance(members, dict) else {}


def _foreign_names(path: Path) -> list[str]:
    """Return the classes and functions in the pickle, except what torch itself needs for tensors."""
    try:
        return get_unsafe_globals_in_checkpoint(path)
    except (
        Exception
    ) as error:  # OSError, ValueError, RuntimeError of the zip reader, EOFError, UnpicklingError, …
        raise ModelError(
            f"cannot read {path}: expected a checkpoint as torch.save writes it; found {summarize_error(error)}"
        ) from error


def _iterate_tensors(root: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of placeholders with their full names. A shared module is visited once."""
    waiting: list[tuple[str, object]] = [("", root)]
    seen: set[int] = set()
    while waiting:
        prefix, module = waiting.pop()
        # a module may hold None in a child's place, but a root of None is a damaged file
        if id(module) in seen or (module is None and prefix):
            continue
        seen.add(id(module))
        if not isinstance(module, _Inert):
            raise ModelError(f"expected a module at {prefix or 'the root'}, found {type(module).__name__}")
        for name, value in (module.members("_parameters") | module.members("_buffers")).items():
            if value is None:
                continue
            if not isinstance(value, Tensor):
                raise ModelError(f"expected a tensor at {prefix}{name}, found {type(value).__name__}")
            yield prefix + name, value.detach()
        waiting += [(f"{prefix}{name}.", child) for name, child in module.members("_modules").items()]


def _rename_tensor(name: str, value: Tensor) -> tuple[str, Tensor]:
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name, value.squeeze() if SCALAR.fullmatch(name) else value


def _infer_config(state: dict[str, Tensor]) -> YoloWorldConfig:
    """Infer the configuration from the shapes of the tensors."""

    def depth(layer: str) -> int:
        return len(
            {name.split(".blocks.")[1].split(".")[0] for name in state if name.startswith(f"{layer}.blocks.")}
        )

    def size(name: str, axis: int = 0) -> int:
        shape = list(state[name].shape) if name in state else []
        if len(shape) <= axis:
            raise ModelError(
                f"expected a YOLO-World of version 2, not fused, found {name} {shape or 'missing'}"
            )
        return shape[axis]

    def out(name: str) -> int:
        return size(f"{name}.weight")

    stages = [f"backbone.stages.{index}" for index in range(4)]
    attention = "neck.top_down.0.attention"
    return YoloWorldConfig(
        channels=(out("backbone.stem.conv"), *(out(f"{stage}.0.conv") for stage in stages)),
        depths=tuple(depth(f"{stage}.1") for stage in stages),
        neck_depth=depth("neck.top_down.0"),
        box_channels=out("heads.0.boxes.0.conv"),
        embedding_channels=out("heads.0.embeddings.0.conv"),
        text_channels=size(f"{attention}.guide.weight", 1),
        # the attention has one bias for each head
        attention_channels=out(f"{attention}.guide") // max(1, size(f"{attention}.bias")),
        # the layer gives `bins` numbers for each of four sides
        bins=out("heads.0.boxes.2") // 4,
    )
