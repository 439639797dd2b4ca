"""Seconds until a model is ready: as it is, compiled with nothing kept from before, with what that start has kept.

    python tools/bench/start.py
    python tools/bench/start.py --engine inductor               and as packages that were compiled ahead of time
    python tools/bench/start.py --model facebook/sam3 --objects 16

Each start is a process of its own that loads the model and tracks blank frames until every number of objects has been
compiled, as the node does; importing torch is not counted. CPU seconds are those of all its threads and of compilers
that it has run. The first start from packages is with the gate, which passes them then.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

EAGER, COMPILED, BUILD, PACKAGES = "eager", "compiled", "build", "packages"
STARTS = (("not compiled", EAGER), ("compiled, cold", COMPILED), ("compiled, warm", COMPILED))
INDUCTOR = (("packages, build", BUILD), ("packages, with gate", PACKAGES), ("packages", PACKAGES))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--objects", type=int, default=4, help="as tracker.max_objects")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    parser.add_argument("--engine", choices=("torch", "inductor"), default="torch")
    parser.add_argument("--once", type=Path, metavar="FOLDER", help="start here, with what FOLDER keeps")
    parser.add_argument("--how", default=COMPILED, help=argparse.SUPPRESS)
    return parser.parse_args()


def start(args: argparse.Namespace) -> str:
    """Do in this process what `args.how` says; seconds and CPU seconds that it took."""
    import torch

    from sam3_node.engines.build import build_engines
    from sam3_node.perception.loading import load_model, warm_up
    from sam3_node.settings import Settings

    kind = "inductor" if args.how in (BUILD, PACKAGES) else "torch"
    precision = "bfloat16" if torch.cuda.is_available() and args.device != "cpu" else "float32"
    chosen = {"name": args.model, "device": args.device, "threads": args.threads}
    settings = Settings.model_validate(
        {
            "model": chosen | {"compile": args.how == COMPILED},
            "tracker": {"max_objects": args.objects},
            "engine": {"kind": kind, "precision": precision, "folder": args.once, "fallback": False},
        }
    )
    begin, spent = time.perf_counter(), cpu_s()
    if args.how == BUILD:
        build_engines(settings)
    else:
        model = load_model(settings.model, settings.tracker, settings.engine)
        if args.how != COMPILED:  # which is warm already
            warm_up(model, settings, model.stages)
    return f"{time.perf_counter() - begin:8.1f} {cpu_s() - spent:12.1f}"


def cpu_s() -> float:
    """CPU seconds of this process and of children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    args = arguments()
    if args.once:
        print(start(args))
        return
    print(f"{args.model}, up to {args.objects} objects\n{'start':20s}  seconds  CPU seconds   kept, MB")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        for name, how in STARTS + (INDUCTOR if args.engine == "inductor" else ()):
            command = [sys.executable, *sys.argv, "--once", folder, "--how", how]
            found = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            kept = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            print(f"{name:20s} {found.stdout.split(chr(10))[-2]} {kept / 1e6:10.1f}", flush=True)


if __name__ == "__main__":
    main()
