"""Load detectors and tokenizers by transformers, from a folder or the hub.

Transformers' progress bars and warnings are suppressed, and its errors become ModelError. Whoever imports this module
imports transformers, which takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from ..errors import ModelError
from ..files import check_weights_name
from ..models.torch_files import check_torch_file
from ..models.weight_files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    check_config,
    check_elements,
    check_weight_files,
    explain_loading,
    find_file,
)

TORCH_FILE = "pytorch_model.bin"
FAST_TOKENIZER = "tokenizer.json"


def load_whole(name: str, classes: Mapping[str, Any], dtype: torch.dtype, is_safe: bool = True) -> nn.Module:
    """Load a model of the class for its `model_type`, in inference mode.

    `name` is a folder or a hub repository. Raises ModelError if the files are missing, damaged, or of another type, lie
    outside the folder, or lack tensors. Only safetensors are loaded, unless `is_safe` is False: then torch's own files
    where there are no others, from which it reads tensors alone. No code of the repository runs.
    """
    check_weights_name(name)
    # before transformers opens a file of the folder
    if os.path.isdir(name):
        check_weight_files(Path(name))
    if not is_safe:
        _check_torch_files(name)
    kind, config = _read_config(name, classes)
    with _reading(name, "config.json and safetensors"):
        model, report = kind.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            # None takes safetensors first, then torch's own files
            use_safetensors=is_safe or None,
            weights_only=True,
            trust_remote_code=False,
        )
    # the cache has the files of a hub repository only now
    if not os.path.isdir(name) and (path := find_file(name, CONFIG)):
        check_weight_files(Path(path).parent)
    for key, fault in (
        ("mismatched_keys", "has {} tensors of another shape"),
        ("missing_keys", "lacks {} tensors"),
    ):
        if found := sorted(map(str, report[key])):
            raise ModelError(
                f"{name} {fault.format(len(found))} of a {kind.__name__}, for example {', '.join(found[:3])}"
            )
    loaded: nn.Module = model.eval()
    return loaded


def _read_config(name: str, classes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the class for the `model_type` of a folder or hub repository, and its configuration.

    Raises ModelError for a configuration that is damaged, of another type, or of a larger model than the files.
    """
    with _reading(name, "config.json and safetensors"):
        values = PreTrainedConfig.get_config_dict(name)[0]
        check_config(values, name)
        kind = str(values.get("model_type"))
        if kind not in classes:
            raise ModelError(f"{name} holds a {kind:.80} model; expected one of {', '.join(classes)}")
        config = classes[kind].config_class.from_pretrained(name)
        if os.path.isdir(name):
            with torch.device("meta"):
                check_elements(classes[kind](config), Path(name))
    return classes[kind], config


def _check_torch_files(name: str) -> None:
    """Raise ModelError if torch's own files, which are loaded where there are no safetensors, grow when they are read.

    An index of several such files is refused, because it may name others.
    """
    if find_file(name, WEIGHTS) or find_file(name, INDEX):
        return
    if find_file(name, f"{TORCH_FILE}.index.json"):
        raise ModelError(
            f"{name}: expected {WEIGHTS}, found several files {TORCH_FILE}; save them as safetensors"
        )
    if path := find_file(name, TORCH_FILE):
        check_torch_file(Path(path))


def load_tokenizer(name: str, kind: Any, tokens: int) -> Any:
    """Load the tokenizer of class `kind` beside the weights of a model with `tokens` tokens.

    Raises ModelError if its files are missing or damaged, or if it has more tokens than the model.
    """
    # a fast tokenizer is one file, a slow one needs all of its files
    slow = [file for file in kind.vocab_files_names.values() if file != FAST_TOKENIZER]
    if not (find_file(name, FAST_TOKENIZER) or all(find_file(name, file) for file in slow)):
        raise ModelError(
            f"{name} has no tokenizer: expected {FAST_TOKENIZER} (or {' and '.join(slow)}) beside the weights"
        )
    with _reading(name, FAST_TOKENIZER):
        tokenizer = kind.from_pretrained(name)
    if len(tokenizer) > tokens:
        raise ModelError(f"{name}: expected a tokenizer of at most {tokens} tokens, found {len(tokenizer)}")
    return tokenizer


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' warnings and progress bars in the block."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.enable_progress_bar()


@contextmanager
def _reading(name: str, files: str) -> Iterator[None]:
    """Suppress transformers' output in the block, and turn its errors into ModelError."""
    with explain_loading(name, files), quiet_transformers():
        yield
