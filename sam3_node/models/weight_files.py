"""Find weights and preprocessing in transformers' layout, in a folder or on the hub, and check the files.

Every file must lie in its folder, so that a digest of the folder covers all: an index of shards may name files
elsewhere, and links may lead there. The hub's cache consists of links, from `snapshots/REVISION` to `blobs` beside it,
and these are followed. The digest of FILE is in FILE.sha256 beside it, in the format of sha256sum.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import huggingface_hub
import msgspec
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from msgspec import Meta
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import ModelError, summarize_error
from ..files import (
    ANY_SIZE,
    check_regular,
    check_weights_name,
    describe_stand_in,
    explain_os_error,
    has_home,
    open_regular,
    read_json,
    read_regular,
    write_atomically,
)
from ..schema.fields import Share

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
ADAPTER = "adapter_config.json"
MAX_JSON_BYTES = 4 << 20
"""Size of the largest configuration or index beside weights. A larger one is refused, as a damaged one is."""
MAX_LAYERS = 256
"""Largest number of layers or blocks of one kind. SAM 3's encoder has 32."""
MAX_COUNT = 65_536
"""Largest number of anything else that a configuration counts, such as classes."""
MAX_CONFIG_NUMBER = 1 << 20
"""Largest whole number in a configuration. Vocabularies of words have up to 256,000."""
SPARE_ELEMENTS = 1 << 24
"""Elements that a model may have beyond the bytes of its files: modules that are not in the file."""
MAX_KIND = 80
"""Characters of the name of a kind of model."""
MAX_DIGEST_BYTES = 4096
"""Size of the largest file with a digest. A larger one is refused."""
_WEIGHTS = (".safetensors", ".bin")
_READ = (".json", *_WEIGHTS, ".txt")
_LAYERS = re.compile(r"layers?$|blocks|depth|levels$|stages$")
"""Matches keys of configurations that count layers or blocks."""


def list_weight_files(folder: Path) -> list[Path]:
    """Return the configuration and all files from which weights can be loaded, in a fixed order."""
    index = folder / INDEX
    return [folder / CONFIG, *([index] if index.is_file() else []), *sorted(folder.glob("*.safetensors"))]


def check_weight_files(folder: Path) -> None:
    """Raise ModelError if something that is loaded from a folder would come from elsewhere, or is a mere pointer."""
    for path in list_weight_files(folder):
        if (path.is_symlink() or path.is_file()) and (stand_in := describe_stand_in(path)):
            raise ModelError(f"expected weights at {path}, found {stand_in}")
        # a pipe would block the library that opens it
        if path.exists():
            with explain_os_error(ModelError, f"cannot read the weights {path}"):
                check_regular(path, ANY_SIZE)
    reasons = [*_check_links(folder), *_check_index(folder / INDEX), *_check_config(folder / CONFIG)]
    if (folder / ADAPTER).exists():
        reasons.append(f"{ADAPTER}, which names the weights of another model")
    if reasons:
        raise ModelError(
            f"{folder}: expected weights that lie in their folder, found {'; '.join(reasons[:3])}; copy them there"
        )


def is_logged_in() -> bool:
    """Return True if this user has a token of the hub."""
    return huggingface_hub.get_token() is not None


def is_cached(name: str, file: str = CONFIG) -> bool:
    """Return True if the hub's cache has this file of the weights with this name."""
    # in the cache alone, because a check must not download
    return find_file(name, file, fetch=False) is not None


def _check_links(folder: Path) -> Iterator[str]:
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.suffix in _READ and not has_home(folder, path):
            yield f"a link from {path.name} to {path.resolve()}"


def _check_index(path: Path) -> Iterator[str]:
    shards = _read_map(path).get("weight_map")
    # the index may hold anything that JSON can
    names = set(map(str, shards.values())) if isinstance(shards, dict) else set()
    for name in sorted(names):
        # a name with a folder in it would lead out of this one
        if name != Path(name).name or not name.endswith(".safetensors"):
            yield f"{name!r:.100} in {path.name}"


def _check_config(path: Path) -> Iterator[str]:
    if name := _read_map(path).get("transformers_weights"):
        yield f"{str(name)!r:.100} as transformers_weights in {path.name}"


def _read_map(path: Path) -> dict[str, Any]:
    """Return the map in a file; an empty one for a file that is absent. Raises ModelError for a damaged one."""
    try:
        return read_json(path, MAX_JSON_BYTES, ModelError, "a map in JSON")
    except FileNotFoundError:
        return {}


def check_config(config: Mapping[str, Any], name: str) -> None:
    """Raise ModelError if a configuration counts more than a model has, before anything is built from it."""
    waiting: list[tuple[str, object]] = list(config.items())
    for key, value in waiting:
        # the list grows while it is read
        if isinstance(value, Mapping):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((key, item) for item in value)
        elif isinstance(value, int | float) and value > (limit := _limit_of(key)):
            raise ModelError(
                f"{name}: {key} in {CONFIG}: expected at most {limit}, found {value!s:.20}; take the original files"
            )


def _limit_of(key: str) -> int:
    if _LAYERS.search(key):
        return MAX_LAYERS
    return MAX_COUNT if key.startswith("num_") else MAX_CONFIG_NUMBER


def check_elements(model: nn.Module, folder: Path) -> None:
    """Raise ModelError if a model on the meta device would take more memory than the weights in a folder explain."""
    elements = sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))
    # of one byte at least; a folder may also hold what the model does not use
    stored = sum(path.stat().st_size for path in folder.iterdir() if path.suffix in _WEIGHTS)
    if elements > stored + SPARE_ELEMENTS:
        raise ModelError(
            f"{folder}: expected the weights of a model of {elements:.3g} elements, as {CONFIG} says, found files of "
            f"{stored:.3g} bytes; take the original files"
        )


def read_kind(name: str) -> str:
    """Return the `model_type` of the weights in the folder or hub repository `name`. Raises ModelError."""
    check_weights_name(name)
    # before a file of the folder is opened
    if os.path.isdir(name):
        check_weight_files(Path(name))
    with explain_loading(name, "config.json and safetensors"):
        path = (
            Path(name) / CONFIG
            if os.path.isdir(name)
            else Path(huggingface_hub.hf_hub_download(name, CONFIG))
        )
        kind = _read_map(path).get("model_type")
        if kind is None:
            raise ValueError("config.json names no model_type")
    return str(kind)[:MAX_KIND]


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; "auto" is CUDA if available, else CPU. Raises ModelError if it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was requested, but torch finds no CUDA device; use --model.device cpu")
    if chosen.type == "cuda" and chosen.index is not None and chosen.index >= torch.cuda.device_count():
        raise ModelError(
            f"device {device}: expected one of the {torch.cuda.device_count()} CUDA devices that torch finds, counted "
            "from cuda:0; correct --model.device"
        )
    return chosen


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype with this name; None or "auto" is bfloat16 on CUDA, else float32. Raises ModelError."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    named = getattr(torch, str(dtype), None)
    if not isinstance(named, torch.dtype):
        raise ModelError(f"unknown dtype {dtype}; expected float32, bfloat16 or float16")
    return named


def digest_path(path: Path) -> Path:
    """Return the path of a file's digest."""
    return path.with_name(f"{path.name}.sha256")


def write_digest(path: Path) -> Path:
    """Write the digest of a file beside it, and return its path. Raises OSError if it cannot be written."""
    target = digest_path(path)
    write_atomically(target, f"{_compute_sha256(path)}  {path.name}\n".encode())
    return target


def check_digest(path: Path, hint: str | None = None) -> None:
    """Raise ModelError unless the file has its stored digest.

    hint: how to get the file again; by default, how to get the bundled weights again.
    """
    digest_file = digest_path(path)
    hint = hint or _reinstall_hint(path)
    with explain_os_error(ModelError, f"cannot check {path} against its digest", f"; {hint}"):
        # a damaged digest must cause the error below, not one of decoding
        line = read_regular(digest_file, MAX_DIGEST_BYTES).decode(errors="replace").strip()
        digest = _compute_sha256(path)
    # sha256sum marks a file that it read as binary with an asterisk
    if line not in (f"{digest}  {path.name}", f"{digest} *{path.name}"):
        raise ModelError(
            f"{path} is damaged or not the file of {digest_file}: expected its sha256 there, {digest}, as sha256sum "
            f"writes it, found {line!r:.160}; {hint}"
        )


def _compute_sha256(path: Path) -> str:
    with open_regular(path, ANY_SIZE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reinstall_hint(path: Path) -> str:
    return (
        f"install the package again (in a checkout: git checkout -- {path.parent}) "
        "or name other weights with --model.name"
    )


PREPROCESSING = "preprocessor_config.json"


Mean = Annotated[list[Share], Meta(min_length=3, max_length=3)]
Deviation = Annotated[list[Annotated[float, Meta(ge=1e-3, le=10)]], Meta(min_length=3, max_length=3)]


class Normalisation(NamedTuple):
    """Mean and standard deviation of red, green and blue, for pixels in 0..1."""

    mean: Mean
    std: Deviation

    def to_tensors(self, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both as tensors [1, 3, 1, 1]."""
        mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in self)
        return mean, std


IMAGENET = Normalisation([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
CENTRED = Normalisation([0.5] * 3, [0.5] * 3)


def name_weights(name: str) -> str:
    """Return the name of weights for status and messages: the last part of a folder's path, or the hub name itself."""
    return Path(name).name if os.path.isdir(name) else name


FREQUENCIES = ("inv_freq", "positional_embedding")
"""How the names of buffers end that hold frequencies."""


def cast_source(source: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move the model to device and dtype. Frequencies of positions stay float32.

    Rotary ones do so in the reference. Those of prompts and pixels are multiplied by whole turns: in bfloat16 a click
    would be rounded to a 256th of the image.
    """
    # cloned before the cast, which would round them
    exact = {name: buffer.clone() for name, buffer in source.named_buffers() if name.endswith(FREQUENCIES)}
    model: nn.Module = source.to(device=device, dtype=dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # out of the file's mapping, whose alignment changes the last bits
    for name, buffer in exact.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
    return model


def read_preprocessing(name: str) -> dict[str, Any]:
    """Read preprocessor_config.json beside the weights; return {} if there is none. Raises ModelError if unreadable."""
    path = find_file(name, PREPROCESSING)
    return {} if path is None else _read_map(Path(path))


def read_normalisation(name: str, default: Normalisation) -> Normalisation:
    """Return the normalisation in preprocessor_config.json, or `default` if it has none.

    Raises ModelError for any other values than those of `Normalisation`. Pixels are divided by the deviations.
    """
    config = read_preprocessing(name)
    given = {key: config.get(key) for key in ("image_mean", "image_std")}
    if all(value is None for value in given.values()):
        return default
    try:
        return msgspec.convert([given["image_mean"], given["image_std"]], Normalisation)
    except msgspec.ValidationError as error:
        raise ModelError(
            f"{name}: {PREPROCESSING}: expected three numbers each, image_mean in 0..1 and image_std in 0.001..10, "
            f"for pixels in 0..1; found {given!s:.200} ({error}); take the original file"
        ) from error


@contextmanager
def explain_sizes(what: str, advice: str = "take the whole checkpoint") -> Iterator[None]:
    """Raise ModelError, which begins with `what`, where tensors lack or sizes do not fit together in the block."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    # of tensors that lack, of other numbers of axes, and of sizes that do not divide each other
    except (LookupError, ValueError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"{what} {summarize_error(error)}; {advice}") from error


@contextmanager
def explain_loading(name: str, files: str) -> Iterator[None]:
    """Turn errors of libraries that read weights in the block into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # they raise OSError, ValueError, SafetensorError, KeyError and more
        found = summarize_error(error)
        explained = ModelError(
            f"cannot load {name}: expected a folder or hub repository with {files}; found {found}"
        )
        # the hub cannot be reached now
        explained.may_pass = "connect to" in found or isinstance(error, LocalEntryNotFoundError)
        raise explained from error


def find_file(name: str, file: str, fetch: bool = True) -> str | None:
    """Return the path of a file of a folder or hub repository; None if there is none, or the hub cannot be reached."""
    if os.path.isdir(name):
        path = os.path.join(name, file)
        return path if os.path.exists(path) else None
    try:
        return huggingface_hub.hf_hub_download(name, file, local_files_only=not fetch)
    # no such repository, file or access, no connection, or not the name of a repository
    except (OSError, ValueError):
        return None


def fetch_folder(name: str) -> Path:
    """Fetch configuration and safetensors of a hub repository, and return their folder in the cache. Raises OSError."""
    patterns = [CONFIG, PREPROCESSING, INDEX, "*.safetensors"]
    return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))


def read_state(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of a folder: of model.safetensors, or of the shards that its index lists.

    Raises OSError or SafetensorError for files that are missing or damaged.
    """
    index = folder / INDEX
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file() and index.is_file():
        # `check_weight_files` has seen that they are names of files
        names = sorted(set(_read_map(index)["weight_map"].values()))
    state: dict[str, Tensor] = {}
    for file in names:
        state |= load_file(folder / file)
    return state
