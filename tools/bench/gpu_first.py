"""Measure what decides what to do next in the first half hour on a GPU: one JSON line for each figure as it comes.

    python -m tools.bench.gpu_first --section kernels --out first.jsonl
    python -m tools.bench.gpu_first --section eager fast peer node --out first.jsonl --seconds 540
    python -m tools.bench.gpu_first --dry-run           all sections on a CPU with a tiny model, under a minute

kernels: copies, matrix products in bfloat16 and FP8, fused attention by backend, and the tests that need a GPU. eager:
the stages by number of objects, with dynamic and static shapes, their memory, the slowest kernels, and CUDA graphs.
fast: compiled stages in CUDA graphs. peer: transformers' streaming inference on the same weights. node: the pipeline on
1080p frames. SAM 3 at full size, random weights made on the device.

A figure that the file has is not measured again, so that a command that was stopped goes on where it was; delete a
line to measure its figure again. With --seconds, no figure begins after that time. A figure that fails is a line with
its error, and the others follow.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tools.bench.common import read_versions
from tools.bench.first import kernels, steps
from tools.bench.first.journal import Journal, OutOfTimeError, Scale

SECTIONS = {"kernels": kernels.run, **steps.SECTIONS}
UNTIMED = 1e9


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument(
        "--out", type=Path, help="file of JSON lines; by default, one in the temporary folder"
    )
    parser.add_argument("--seconds", type=float, default=UNTIMED, help="begin no figure after this time")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    return parser.parse_args(words)


def choose_scale(dry: bool) -> Scale:
    """Return the sizes. Exits with an error where there is no GPU for the real ones."""
    if dry:
        return Scale(torch.device("cpu"), "tiny", True, rows=64, counts=(1, 2), calls=2, frames=2)
    if not torch.cuda.is_available():
        sys.exit("expected a GPU, torch finds none; try --dry-run")
    return Scale(torch.device("cuda"), "full", False, rows=5184, counts=(1, 4, 16, 64), calls=30, frames=20)


def main(words: Sequence[str] | None = None) -> int:
    """Measure the sections; return 0 where all figures came, 1 where some failed, 3 where time ran out."""
    args = arguments(words)
    scale = choose_scale(args.dry_run)
    path = args.out or Path(tempfile.mkdtemp(prefix="gpu_first_")) / "first.jsonl"
    device = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    context = {"device": device, "versions": read_versions() | {"cuda": str(torch.version.cuda)}}
    errors, end_s = 0, time.monotonic() + args.seconds
    for section in args.section:
        journal = Journal(path, section, scale, end_s, context)
        try:
            SECTIONS[section](journal)
        except OutOfTimeError:
            print(f"time is over in {section}; the same command goes on there", file=sys.stderr)
            return 3
        finally:
            errors += journal.errors
    print(f"wrote {path}", file=sys.stderr)
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
