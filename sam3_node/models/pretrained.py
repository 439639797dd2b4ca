"""Weights in transformers' layout, from a folder or the hub, read without a word; what is wrong with them is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from ..errors import ModelError

FAST_TOKENIZER = "tokenizer.json"
PREPROCESSING = "preprocessor_config.json"


class Normalisation(NamedTuple):
    """Mean and standard deviation of red, green and blue in 0..1, that pixels are brought to 0 and 1 with."""

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
    """The model of the class for its `model_type`, ready to infer, and the names of the tensors it has no weights for.

    `name` is a folder or a hub repository; `configure` may change the configuration before the model is built. Raises
    ModelError where it is absent, damaged, or of another type.
    """
    _check_folder(name)
    with _reading(name, "config.json and safetensors"):
        kind = AutoConfig.from_pretrained(name).model_type
        if kind not in classes:
            raise ModelError(f"{name} holds a {kind} model; expected one of {', '.join(classes)}")
        config = configure(classes[kind].config_class.from_pretrained(name))
        model, found = classes[kind].from_pretrained(
            name, config=config, dtype=dtype, output_loading_info=True
        )
    if wrong := [str(item) for item in found["mismatched_keys"]]:
        raise ModelError(
            f"{name} has {len(wrong)} tensors of another shape, among them {', '.join(wrong[:3])}"
        )
    return model.eval(), sorted(found["missing_keys"])


def load_whole(name: str, classes: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """As `load_pretrained`; a ModelError names tensors that there are no weights for."""
    model, missing = load_pretrained(name, classes, dtype)
    if missing:
        raise ModelError(
            f"{name} lacks {len(missing)} tensors of a {type(model).__name__}, among them {', '.join(missing[:3])}"
        )
    return model


def load_tokenizer(name: str, kind: Any, tokens: int) -> Any:
    """The tokenizer of class `kind` that is kept with the weights of a model of so many `tokens`.

    Raises ModelError where its files are absent or damaged, or it has more tokens than the model.
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
    """What preprocessor_config.json beside the weights says, nothing where there is none; raises ModelError."""
    path = _find(name, PREPROCESSING)
    if path is None:
        return {}
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: expected JSON, found {error}") from error
    return found if isinstance(found, dict) else {}


def read_normalisation(name: str, otherwise: Normalisation) -> Normalisation:
    """The normalisation that `read_preprocessing` finds; `otherwise` where it finds none, or no three numbers each."""
    found = read_preprocessing(name)
    try:
        mean, std = ([float(value) for value in found[key]] for key in ("image_mean", "image_std"))
    except (KeyError, TypeError, ValueError):
        return otherwise
    return Normalisation(mean, std) if len(mean) == len(std) == 3 and all(std) else otherwise


def _check_folder(name: str) -> None:
    """Raise ModelError for what is meant as a folder and is none."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or os.path.isdir(os.path.dirname(name))
    if is_path and not os.path.isdir(name):
        raise ModelError(f"no folder {name}: expected a folder with config.json and weights, or a hub name")


@contextmanager
def _reading(name: str, files: str) -> Iterator[None]:
    """Let transformers read in silence; whatever goes wrong becomes a ModelError."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, SafetensorError, KeyError and more
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelError(
            f"cannot load {name}: expected a folder or hub repository with {files}; "
            f"found {type(error).__name__}: {first_line}"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


def _find(name: str, file: str) -> str | None:
    """Where a file of a folder or hub repository is, if it is."""
    return cached_file(
        name,
        file,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
