"""Seconds until a compiled model is ready: nothing kept from before, then what the first start has kept.

    python tools/bench/start.py
    python tools/bench/start.py --model facebook/sam3 --objects 16

Each start is a process of its own that loads the model with model.compile and tracks blank frames until every number of
objects has been compiled, as the node does; importing torch is not counted. CPU seconds are those of all its threads.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--objects", type=int, default=4, help="as tracker.max_objects")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    parser.add_argument("--once", type=Path, metavar="FOLDER", help="start here, with what FOLDER keeps")
    parser.add_argument("--eager", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def start(args: argparse.Namespace) -> str:
    """Load the model in this process; seconds and CPU seconds that it took."""
    from sam3_node.loading import load_model
    from sam3_node.settings import EngineSettings, ModelSettings, TrackerSettings

    chosen = {"name": args.model, "device": args.device, "threads": args.threads, "compile": not args.eager}
    begin, spent = time.perf_counter(), time.process_time()
    model = ModelSettings.model_validate(chosen)
    load_model(model, TrackerSettings(max_objects=args.objects), EngineSettings(folder=args.once))
    return f"{time.perf_counter() - begin:8.1f} {time.process_time() - spent:12.1f}"


def main() -> None:
    args = arguments()
    if args.once:
        print(start(args))
        return
    print(f"{args.model}, up to {args.objects} objects\n{'start':20s}  seconds  CPU seconds   kept, MB")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    with tempfile.TemporaryDirectory() as folder:
        for name, more in (("not compiled", ["--eager"]), ("compiled, cold", []), ("compiled, warm", [])):
            command = [sys.executable, *sys.argv, "--once", folder, *more]
            found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            kept = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
            print(f"{name:20s} {found.stdout.rstrip()} {kept / 1e6:10.1f}", flush=True)


if __name__ == "__main__":
    main()
