"""`sam3-node snapshot` and `sam3-node prompts`: keep what a node tracks, and sets of prompts by name."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from ..errors import OutputError, SettingsError, did_you_mean
from ..files import make_folder, prepare_output, safe_file_name, write_atomically
from ..settings import Settings
from .commands import AddCommand, connect
from .parser import add_command_group, add_timeout
from .progress import printable

SETS_FOLDER = Path("prompts")
"""Folder of prompt sets, beside the profile or in the working directory."""
SUFFIX = ".json"
MAX_SET_BYTES = 1 << 20
LIMITS = ("scores", "most", "priorities")
"""Maps by prompt that a set may have, as `set_prompts` takes them."""


def add_snapshot_commands(parsers: Any, add: AddCommand) -> None:
    """Add the groups `snapshot` and `prompts`."""
    group = add_command_group(parsers, "snapshot", "keep and restore what a running node tracks")
    save = add(group, "save", snapshot_save, "write a snapshot in the node's folder of snapshot.path")
    restore = add(group, "restore", snapshot_restore, "track again what was saved; object ids begin again")
    for parser in (save, restore):
        parser.add_argument("name", metavar="NAME", help="name of the snapshot")
    fetch = add(group, "fetch", snapshot_fetch, "copy a snapshot to a file, for sam3-node run --restore-from")
    fetch.add_argument("out", type=Path, metavar="FILE", help="file to write")
    sets = add_command_group(parsers, "prompts", "keep and use sets of prompts by name")
    keep = add(sets, "save", prompts_save, "keep the prompts of the running node, with their limits")
    load = add(sets, "load", prompts_load, "look for the prompts of a set")
    listed = add(sets, "list", prompts_list, "list the sets")
    for parser in (keep, load):
        parser.add_argument("name", metavar="NAME", help="name of the set")
    for parser in (keep, load, listed):
        parser.add_argument(
            "--folder",
            type=Path,
            metavar="FOLDER",
            help=f"folder of the sets; default: {SETS_FOLDER}/ beside --profile, or in the working directory",
        )
    for parser in (save, restore, fetch, keep, load):
        add_timeout(parser)


def snapshot_save(args: Namespace, settings: Settings) -> None:
    """Let the node keep a snapshot, and print a line about it."""
    with connect(args, settings) as client:
        saved = client.snapshot(args.name)
    print(f"{args.name}: {saved.size} bytes, sha256 {saved.sha256}")


def snapshot_restore(args: Namespace, settings: Settings) -> None:
    """Let the node restore a snapshot."""
    with connect(args, settings) as client:
        client.restore(args.name)


def snapshot_fetch(args: Namespace, settings: Settings) -> None:
    """Copy a snapshot of the node to a file."""
    prepare_output(args.out)
    with connect(args, settings) as client:
        data = client.fetch_snapshot()
    _write(args.out, data)
    print(f"{args.out}: {len(data)} bytes")


def prompts_save(args: Namespace, settings: Settings) -> None:
    """Write the prompts of the node to a file."""
    with connect(args, settings) as client:
        status = client.status()
    content = {"prompts": status["prompts"], **status["prompt_limits"]}
    path = _path_of(args)
    make_folder(path.parent)
    _write(path, json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n")
    print(f"{path}: {_describe(content)}")


def prompts_load(args: Namespace, settings: Settings) -> None:
    """Let the node look for the prompts of a file."""
    content = _read(_path_of(args))
    with connect(args, settings) as client:
        client.set_prompts(**content)
    print(_describe(content))


def prompts_list(args: Namespace, settings: Settings) -> None:
    """Print one line for each set. A damaged one does not hide the others."""
    for path in _list(_folder(args)):
        try:
            found = _describe(_read(path))
        except SettingsError as error:
            found = f"cannot be used: {printable(str(error))}"
        print(f"{printable(path.stem):<24} {found}")


def _folder(args: Namespace) -> Path:
    beside = args.profile.parent if args.profile else Path()
    folder: Path = args.folder or beside / SETS_FOLDER
    return folder


def _path_of(args: Namespace) -> Path:
    if safe_file_name(args.name) != args.name:
        raise SettingsError(f"name: expected letters, digits, _ . and -, found {args.name!r:.80}")
    return _folder(args) / f"{args.name}{SUFFIX}"


def _list(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SET_BYTES + 1)
    except FileNotFoundError:
        names = [found.stem for found in _list(path.parent)]
        raise SettingsError(
            f"{path}: expected a set of prompts ({', '.join(names) or 'there are none'}), found none"
            f"{did_you_mean(path.stem, names)}; keep one with sam3-node prompts save"
        ) from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot read the set of prompts: {error.strerror}") from error
    try:
        if len(data) > MAX_SET_BYTES:
            raise ValueError(f"more than {MAX_SET_BYTES} bytes")
        content = {**{limit: {} for limit in LIMITS}, **json.loads(data)}
        if set(content) != {"prompts", *LIMITS} or not (
            isinstance(content["prompts"], list)
            and all(isinstance(name, str) for name in content["prompts"])
            and all(isinstance(content[limit], dict) for limit in LIMITS)
        ):
            raise ValueError(f"{content!r:.200}")
    except (ValueError, TypeError, RecursionError) as error:
        raise SettingsError(
            f'{path}: expected JSON such as {{"prompts": ["red mug"], "scores": {{"red mug": 0.3}}, "most": {{}}}}, '
            f"found {error}"
        ) from error
    return content


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomically(path, data)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; choose another file") from error


def _describe(content: dict[str, Any]) -> str:
    return ", ".join(map(printable, content["prompts"])) or "no prompts"
