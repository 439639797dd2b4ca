"""Measure how long the import of the client takes, beside the packages that it needs, and the start of a node.

    python -m tools.bench.latency.imports

Each import is a process of its own; the start of the interpreter is not counted. The imports take turns, so that load
of the machine meets all alike. CPU time is of this process alone. "with pixels" also makes the first mask, which
imports numpy. The start of a node of nano ends when its weights and its detector are loaded; sockets take no time.
"""

import os
import subprocess
import sys

from tools.bench.common import Figures, make_parser

TARGET_MS = 60
TARGET_NODE_MS = 2500
NODE = "sam3_node.node, and nano's weights"
CASES = {
    "sam3_node.client": "import sam3_node.client",
    "sam3_node.client with pixels": "import sam3_node.client, sam3_node.types as t; t.Mask.empty((4, 4)).full()",
    "sam3_node.client with AsyncPerceptionClient": "from sam3_node.client import AsyncPerceptionClient",
    NODE: (
        "from sam3_node.cli.environment import prepare_torch; prepare_torch()\n"
        "from sam3_node.settings import Settings; import sam3_node.node.node as n\n"
        "n.Perception.load(Settings())"
    ),
    "zmq": "import zmq",
    "zmq.asyncio": "import zmq.asyncio",
    "numpy": "import numpy",
}


def measure(code: str) -> tuple[float, float]:
    """Return the milliseconds that an import takes, of time and of the processor."""
    program = (
        "import time\nwall, cpu = time.perf_counter(), time.process_time()\n"
        f"{code}\nprint(1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu))"
    )
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}  # installed packages are compiled
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    wall_ms, cpu_ms = map(float, done.stdout.split())
    return wall_ms, cpu_ms


def main() -> None:
    args = make_parser(__doc__, runs=15).parse_args()
    for code in CASES.values():  # once, to have the files in memory and compiled
        measure(code)
    runs = [{name: measure(code) for name, code in CASES.items()} for _ in range(args.runs)]
    figures = Figures("latency.imports")
    for name in CASES:
        target = f"under {TARGET_MS}" if name == "sam3_node.client" else ""
        figures.add(f"import of {name}", [run[name][0] for run in runs], "ms", target)
    ratio = [run["sam3_node.client"][1] / run["numpy"][1] for run in runs]
    figures.add("import of sam3_node.client / of numpy, CPU", ratio, "x")
    cpu_ms = [run[NODE][1] for run in runs]
    figures.add("start of a node of nano, CPU", cpu_ms, "ms", f"at most {TARGET_NODE_MS}")
    figures.write(args.json)


if __name__ == "__main__":
    main()
