"""Parts that the commands of tools share: parser, errors in one line, threads and device, logs of JSON lines."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam3_node.errors import ModelError, Sam3NodeError

if TYPE_CHECKING:
    import torch


def new_parser(description: str | None, prog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser that prints a module's docstring as it is written."""
    return argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exit with "error: " and the message if the block raises an error of this package."""
    try:
        yield
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error


def add_compute_options(parser: argparse.ArgumentParser) -> None:
    """Add --device, --threads and --workers of a training."""
    parser.add_argument("--device", help="default: cuda if there is one")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw pictures")


def set_up_cpu(threads: int | None) -> None:
    """Flush denormals, without which first steps of a training take several times as long, and limit the threads."""
    import torch

    torch.set_flush_denormal(True)
    if threads:
        torch.set_num_threads(threads)


def choose_device(name: str | None) -> torch.device:
    """Return the named device, by default cuda if torch finds one. Raises ModelError for one that does not work."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        raise ModelError(f"--device {name}: expected cpu, or cuda where torch finds one: {error}") from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Read a log with a JSON object a line; lines that a kill has cut short are left out. An absent file has none."""
    lines = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines
