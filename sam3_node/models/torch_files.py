"""Check files in torch's format before torch expands anything: a zip archive of a pickle and of tensors.

torch.save compresses nothing, so a member takes the bytes in the file that it takes in memory. Of the pickle, the
weights-only unpickler calls what is on torch's own list, which includes functions that allocate as many bytes as the
file says. A checkpoint needs few of them.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import Tensor
from torch._weights_only_unpickler import get_globals_in_pkl

from ..errors import ModelError, summarize_error
from ..files import ANY_SIZE, open_regular

MAX_PICKLE_BYTES = 4 << 20
"""Size of the largest pickle in a file in torch's format. That of a YOLO-World of size s has 0.1 MiB."""
MAX_MEMBERS = 65_536
"""Members of a file in torch's format. A model has one for each tensor, and a few more."""
MAX_GROWTH = 4
"""Largest ratio of the bytes of all tensors to the file's. Tensors may share what is stored, up to this."""

_PICKLE = "/data.pkl"
"""How the name of the pickle ends in the archive."""
_PLAIN = re.compile(
    r"torch\._utils\._rebuild_(tensor_v2|tensor_v3|parameter|parameter_with_state)|torch\.\w*Storage"
    r"|torch\.(bfloat16|float\w+|u?int\d+|bool|complex\d+)|torch\.(Size|device)|collections\.OrderedDict"
    r"|torch\.serialization\._get_layout|builtins\.set|torch\.nn\.parameter\.Parameter"
)
"""Matches the classes and functions of which tensors and plain containers are made. None allocates by a number."""
_NEVER = "torch.storage.UntypedStorage"
"""A class that allocates by a number, though its name looks like those of storages that tensors are read from."""


def check_torch_file(path: Path, is_known: Callable[[str], object] = lambda name: False) -> None:
    """Raise ModelError for a file that is no archive of torch.save, or that grows when it is read.

    is_known: (name of a class or function) -> whether the pickle may name it, apart from what tensors need.
    """
    try:
        with open_regular(path, ANY_SIZE) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            _check_members(members, os.fstat(file.fileno()).st_size)
            pickles = [member for member in members if f"/{member.filename}".endswith(_PICKLE)]
            # bounded above by the size of the archive, here by what unpickling makes of each byte
            if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE_BYTES:
                sizes = [pickle.file_size for pickle in pickles]
                raise ValueError(f"pickles of {sizes} bytes instead of one of at most {MAX_PICKLE_BYTES}")
            names = get_globals_in_pkl(io.BytesIO(archive.read(pickles[0])))
    except Exception as error:  # OSError, BadZipFile, ValueError, and what a hostile pickle causes
        raise ModelError(
            f"cannot read {path}: expected a checkpoint as torch.save writes it; found {summarize_error(error)}"
        ) from error
    if refused := sorted(name for name in names if not (is_known(name) or _is_plain(name))):
        raise ModelError(
            f"{path} names {', '.join(refused[:5])}: expected only tensors, plain containers and modules of a known "
            "model; the file was not read, and may be harmful"
        )


def _is_plain(name: str) -> bool:
    return name != _NEVER and _PLAIN.fullmatch(name) is not None


def _check_members(members: list[zipfile.ZipInfo], size: int) -> None:
    """Raise ValueError unless all members are stored as they are, and fit together into `size` bytes."""
    if len(members) > MAX_MEMBERS:
        raise ValueError(f"{len(members)} members instead of at most {MAX_MEMBERS}")
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise ValueError(
                f"a compressed member {member.filename!r:.80} of {member.file_size} bytes; save the weights again with "
                "torch.save"
            )
    total = sum(member.file_size for member in members)
    if total > size:
        raise ValueError(f"members of {total} bytes in a file of {size}")


def check_growth(tensors: Iterable[Tensor], path: Path) -> None:
    """Raise ModelError if tensors would take much more memory than their file, as those of repeated values do."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    size = path.stat().st_size
    if total > MAX_GROWTH * size:
        raise ModelError(
            f"{path}: expected tensors of at most {MAX_GROWTH} times the file's {size} bytes, found {total} bytes; "
            "take the original checkpoint"
        )
