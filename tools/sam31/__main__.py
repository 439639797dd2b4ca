"""Convert SAM 3.1's checkpoint to safetensors, make a small one with random weights, or compare implementations.

    python -m tools.sam31 convert sam3.1_multiplex.pt OUT
    python -m tools.sam31 small OUT [--seed 0]
    python -m tools.sam31 parity --oracle CLONE

OUT is a folder, which load_tracker takes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from sam3_node.models.sam31.checkpoint import build_source, read_sizes
from sam3_node.models.sam31.loading import STEM, read_tensors
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes

from ..command import errors_in_one_line, new_parser
from .parity import build_pair, compare, record

LIMITS = {torch.float32: 1e-3, torch.float64: 1e-9}
"""Largest relative error of each dtype."""

CARD = """---
license: other
---
# SAM 3.1 tracker weights

{origin}. Tensors have the names of Meta's checkpoint; complex tables are pairs of real numbers.

Sizes: {sizes}

Load: `sam3_node.models.load_tracker("{folder}")`.
"""


def main() -> None:
    """Run the command."""
    parser = new_parser(__doc__, prog="python -m tools.sam31")
    commands = parser.add_subparsers(dest="command", required=True)
    convert = commands.add_parser("convert", help="write a checkpoint as safetensors")
    convert.add_argument("file", type=Path)
    convert.add_argument("out", type=Path)
    small = commands.add_parser("small", help="write a small model with random weights")
    small.add_argument("out", type=Path)
    small.add_argument("--image-size", type=int, default=112)
    parity = commands.add_parser("parity", help="compare with a clone of muggled_sam")
    parity.add_argument("--oracle", type=Path, required=True)
    parity.add_argument("--record", type=Path, help="also write some of the other's values, for a test")
    for command in (small, parity):
        command.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with errors_in_one_line():
        if options.command == "convert":
            write(options.out, dict(read_tensors(options.file)), f"Converted from {options.file.name}")
        elif options.command == "small":
            tensors = random_tensors(small_sizes(options.image_size), options.seed)
            write(options.out, tensors, f"Random weights of a small model, seed {options.seed}")
        else:
            show_parity(options)


def write(folder: Path, tensors: dict[str, Tensor], origin: str) -> None:
    """Write the tensors and a card, after they have been found complete."""
    plain = {
        key: (torch.view_as_real(value) if value.is_complex() else value).clone().contiguous()
        for key, value in tensors.items()
    }
    sizes = read_sizes(plain, origin)
    build_source(plain, sizes, origin)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(plain, folder / f"{STEM}.safetensors")
    (folder / "README.md").write_text(CARD.format(origin=origin, sizes=sizes, folder=folder.name))


def show_parity(options: argparse.Namespace) -> None:
    """Print every comparison; exit with an error if one is beyond its limit."""
    if options.record is not None:
        model, oracle = build_pair(options.oracle, torch.float32, options.seed)
        options.record.write_text(json.dumps(record(model, oracle)) + "\n")
    worst = 0.0
    for dtype, limit in LIMITS.items():
        for compared in compare(*build_pair(options.oracle, dtype, options.seed)):
            print(f"{dtype!s:14} {compared.error:9.1e}  {compared.what}")
            worst = max(worst, compared.error / limit)
    if worst >= 1:
        raise SystemExit("error: a stage differs by more than 1e-3 in float32, or 1e-9 in float64")


if __name__ == "__main__":
    main()
