"""Measure the seconds until a model is ready: not compiled, compiled with an empty cache, compiled with a full one.

    python -m tools.bench.latency.start
    python -m tools.bench.latency.start --engine inductor               also as packages compiled ahead of time
    python -m tools.bench.latency.start --model facebook/sam3 --objects 16

Each start is a process of its own. It loads the model and tracks blank frames until every number of objects has been
compiled, as the node does. The import of torch is not counted. CPU seconds include all threads and the compilers that
the process has run. The first start from packages runs the gate, which then accepts them for later starts.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tools.bench.common import Figures, make_parser, objects_text

MODULE = "tools.bench.latency.start"
EAGER = "eager"
COMPILED = "compiled"
BUILD_PACKAGES = "build"
PACKAGES = "packages"
STARTS = (("not compiled", EAGER), ("compiled, cold", COMPILED), ("compiled, warm", COMPILED))
INDUCTOR = (("packages, build", BUILD_PACKAGES), ("packages, with gate", PACKAGES), ("packages", PACKAGES))


def start(args: argparse.Namespace) -> str:
    """Start in this process as `args.how` names it; return the seconds and the CPU seconds as text."""
    import torch

    from sam3_node.engines.build import build_engines
    from sam3_node.perception.loading import load_model, warm_up
    from sam3_node.settings import Settings

    kind = "inductor" if args.how in (BUILD_PACKAGES, PACKAGES) else "torch"
    on_gpu = torch.cuda.is_available() and args.device != "cpu"
    precision, dtype = ("bfloat16", "bfloat16") if on_gpu else ("float32", "auto")
    chosen = {"name": args.model, "device": args.device, "threads": args.threads, "dtype": dtype}
    engine = {"kind": kind, "precision": precision, "folder": args.once, "fallback": False, "max_time": 0}
    engine |= {"read_kernel": "torch", "graphs": False}  # what is open would be timed before
    model_settings = chosen | {"compile": args.how == COMPILED}
    settings = Settings.model_validate(
        {"model": model_settings, "tracker": {"max_objects": args.objects}, "engine": engine}
    )
    begin_s = time.perf_counter()
    begin_cpu_s = cpu_s()
    if args.how == BUILD_PACKAGES:
        build_engines(settings)
    else:
        model = load_model(settings.model, settings.tracker, settings.engine)
        if args.how != COMPILED:  # a compiled model is warm already
            warm_up(model, settings, model.stages)
    return f"{time.perf_counter() - begin_s:8.1f} {cpu_s() - begin_cpu_s:12.1f}"


def cpu_s() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def main() -> None:
    parser = make_parser(__doc__, model="nano", objects=4, device="auto", threads=0)
    parser.add_argument("--engine", choices=("torch", "inductor"), default="torch")
    parser.add_argument("--once", type=Path, metavar="FOLDER", help="start in this process, caches in FOLDER")
    parser.add_argument("--how", default=COMPILED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        print(start(args))
        return
    figures = Figures("latency.start")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        for name, how in STARTS + (INDUCTOR if args.engine == "inductor" else ()):
            command = [sys.executable, "-m", MODULE, *sys.argv[1:], "--once", folder, "--how", how]
            ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            kept_mb = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file()) / 1e6
            seconds, cpu_seconds = map(float, ended.stdout.split()[-2:])
            what = f"start of {args.model}, {name}, up to {objects_text(args.objects)}"
            figures.add(what, seconds, "s")
            figures.add(f"{what}: CPU time", cpu_seconds, "s")
            figures.add(f"{what}: kept", kept_mb, "MB")
    figures.write(args.json)


if __name__ == "__main__":
    main()
