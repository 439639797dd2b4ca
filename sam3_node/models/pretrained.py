"""Read weights, tokenizers and preprocessing in transformers' layout, from a folder or the hub.

Transformers' progress bars and warnings are suppressed. Errors are raised as ModelError.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..errors import ModelError, did_you_mean
from .weight_files import CONFIG, check_weight_files

FAST_TOKENIZER = "tokenizer.json"
PREPROCESSING = "preprocessor_config.json"


KNOWN = (
    "nano",
    "facebook/sam3",
    *(f"facebook/sam2.1-hiera-{size}" for size in ("tiny", "small", "base-plus", "large")),
    "yonigozlan/EdgeTAM-hf",
)
"""Names of weights that an error message may suggest."""


class Normalisation(NamedTuple):
    """Mean and standard deviation of red, green and blue, for pixels in 0..1."""

    mean: list[float]
    std: list[float]


IMAGENET = Normalisation([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CENTRED = Normalisation([0.5] * 3, [0.5] * 3)


def load_pretrained(
    name: str,
    classes: Mapping[str, Any],
    dtype: torch.dtype = torch.float32,
    configure: Callable[[Any], Any] = lambda config: config,
) -> tuple[nn.Module, list[str]]:
    """Load a model of the class for its `model_type`, in inference mode; return it and the names of missing tensors.

    `name` is a folder or a hub repository. `configure` may change the configuration before the model is built. Raises
    ModelError if the files are missing, damaged, or of another type, or lie outside the folder. Only safetensors are
    loaded, and no code of the repository runs.
    """
    _check_folder(name)
    if os.path.isdir(name):
        check_weight_files(Path(name))
    with _reading(name, "config.json and safetensors"):
        kind = PreTrainedConfig.get_config_dict(name)[0].get("model_type")
        if kind is None:
            raise ValueError("config.json names no model_type")
        if kind not in classes:
            raise ModelError(f"{name} holds a {kind} model; expected one of {', '.join(classes)}")
        config = configure(classes[kind].config_class.from_pretrained(name))
        model, report = classes[kind].from_pretrained(
            name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    if not os.path.isdir(name) and (path := _find(name, CONFIG)):
        check_weight_files(Path(path).parent)
    if wrong := [str(item) for item in report["mismatched_keys"]]:
        raise ModelError(
            f"{name} has {len(wrong)} tensors of another shape, for example {', '.join(wrong[:3])}"
        )
    return model.eval(), sorted(report["missing_keys"])


def load_whole(name: str, classes: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Load a model as `load_pretrained` does. Raises ModelError if tensors are missing."""
    model, missing = load_pretrained(name, classes, dtype)
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} tensors of a {type(model).__name__}, for example {', '.join(missing[:3])}"
        )
    return model


def load_tokenizer(name: str, kind: Any, tokens: int) -> Any:
    """Load the tokenizer of class `kind` beside the weights of a model with `tokens` tokens.

    Raises ModelError if its files are missing or damaged, or if it has more tokens than the model.
    """
    slow = [file for file in kind.vocab_files_names.values() if file != FAST_TOKENIZER]
    if not (_find(name, FAST_TOKENIZER) or all(_find(name, file) for file in slow)):
        raise ModelError(
            f"{name} has no tokenizer: expected {FAST_TOKENIZER} (or {' and '.join(slow)}) beside the weights"
        )
    with _reading(name, FAST_TOKENIZER):
        tokenizer = kind.from_pretrained(name)
    if len(tokenizer) > tokens:
        raise ModelError(f"{name}: expected a tokenizer of at most {tokens} tokens, found {len(tokenizer)}")
    return tokenizer


def read_preprocessing(name: str) -> dict[str, Any]:
    """Read preprocessor_config.json beside the weights; return {} if there is none. Raises ModelError if unreadable."""
    path = _find(name, PREPROCESSING)
    if path is None:
        return {}
    try:
        config = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: expected JSON, found {error}") from error
    return config if isinstance(config, dict) else {}


def read_normalisation(name: str, default: Normalisation) -> Normalisation:
    """Return the normalisation in preprocessor_config.json, or `default` if it has none of three numbers each."""
    config = read_preprocessing(name)
    try:
        mean, std = ([float(value) for value in config[key]] for key in ("image_mean", "image_std"))
    except (KeyError, TypeError, ValueError):
        return default
    return Normalisation(mean, std) if len(mean) == len(std) == 3 and all(std) else default


def _check_folder(name: str) -> None:
    """Raise ModelError if the name looks like a folder and there is no such folder, or is no name of any weights."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(os.path.dirname(name))
    if is_path and not os.path.isdir(name):
        raise ModelError(f"no folder {name}: expected a folder with config.json and weights, or a hub name")
    if "/" not in name and not os.path.isdir(name):
        folders = [path.name for path in Path().glob("*/")]
        raise ModelError(
            f"no weights {name!r}: expected nano (bundled), a folder with config.json and weights, or a hub name such "
            f"as facebook/sam3{did_you_mean(name, [*folders, *KNOWN])}"
        )


@contextmanager
def _reading(name: str, files: str) -> Iterator[None]:
    """Suppress transformers' output in the block, and turn its errors into ModelError."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError and more
        first_line = str(error).strip().split("\n")[0][:300]
        explained = ModelError(
            f"cannot load {name}: expected a folder or hub repository with {files}; "
            f"found {type(error).__name__}: {first_line}"
        )
        explained.may_pass = "connect to" in first_line  # the hub cannot be reached now
        raise explained from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _find(name: str, file: str) -> str | None:
    """Return the path of a file of a folder or hub repository; None if there is none."""
    path: str | None = cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return path
