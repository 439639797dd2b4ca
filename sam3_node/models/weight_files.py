"""Check of a folder of weights before they are loaded: every file lies in the folder, so a digest of it sees all.

An index of shards may name files elsewhere, and links may lead there. The hub's cache consists of links, from
`snapshots/REVISION` to `blobs` beside it, and these are followed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ..errors import ModelError
from ..files import describe_stand_in

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
_READ = (".json", ".safetensors", ".txt", ".bin")


def list_weight_files(folder: Path) -> list[Path]:
    """Return the configuration and all files from which weights can be loaded, in a fixed order."""
    index = folder / INDEX
    return [folder / CONFIG, *([index] if index.is_file() else []), *sorted(folder.glob("*.safetensors"))]


def check_weight_files(folder: Path) -> None:
    """Raise ModelError if something that is loaded from a folder would come from elsewhere, or is a mere pointer."""
    for path in list_weight_files(folder):
        if (path.is_symlink() or path.is_file()) and (stand_in := describe_stand_in(path)):
            raise ModelError(f"expected weights at {path}, found {stand_in}")
    reasons = [*_check_links(folder), *_check_index(folder / INDEX), *_check_config(folder / CONFIG)]
    if (folder / ADAPTER).exists():
        reasons.append(f"{ADAPTER}, which names the weights of another model")
    if reasons:
        raise ModelError(
            f"{folder}: expected weights that lie in their folder, found {'; '.join(reasons[:3])}; copy them there"
        )


def _check_links(folder: Path) -> Iterator[str]:
    real = folder.resolve()
    roots = [real, real.parents[1] / "blobs"] if real.parent.name == "snapshots" else [real]
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and path.suffix in _READ:
            target = path.resolve()
            if not any(target.is_relative_to(root) for root in roots):
                yield f"a link from {path.name} to {target}"


def _check_index(path: Path) -> Iterator[str]:
    index = _read_json(path)
    shards = index.get("weight_map")
    names = set(shards.values()) if isinstance(shards, dict) else set()
    for name in sorted(map(str, names)):
        if name != Path(name).name or not name.endswith(".safetensors"):
            yield f"{name!r:.100} in {path.name}"


def _check_config(path: Path) -> Iterator[str]:
    if name := _read_json(path).get("transformers_weights"):
        yield f"{str(name)!r:.100} as transformers_weights in {path.name}"


def _read_json(path: Path) -> dict[str, object]:
    """Return the map in a file; an empty one for a file that is absent or damaged, which loading reports."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
