"""Measure the processor time of the bridges to Foxglove and Rerun.

    python -m tools.bench.latency.bridges [--seconds 20] [--fps 30]

A process publishes raw 1280x720 at --fps, and masks of five objects for each frame at once, in the place of a camera
and a node. The bridges are processes of their own, and run at the same time.

    idle      the Foxglove bridge without a client
    foxglove  the Foxglove bridge with a client that has subscribed to everything, and reads it
    rerun     the Rerun bridge into a file

Needs the extras foxglove and rerun, and websockets.
"""

import json
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from tools.bench.common import Figures, make_parser
from tools.bench.latency.console import SETTLE_S, publish
from tools.bench.processes import Processes, free_ports, spawned

PROTOCOL: Any = "foxglove.sdk.v1"


class Client:
    """A client that subscribes to every topic, and counts what it gets."""

    def __init__(self, url: str) -> None:
        self.messages = self.bytes = 0
        threading.Thread(target=self._read, args=(url,), daemon=True).start()

    def _read(self, url: str) -> None:
        from websockets.exceptions import ConnectionClosed
        from websockets.sync.client import connect

        opened = connect(url, subprotocols=[PROTOCOL], max_size=None)
        with suppress(ConnectionClosed), opened as connection:
            for data in connection:
                if isinstance(data, bytes):
                    self.messages += 1
                    self.bytes += len(data)
                    continue
                found = json.loads(data)
                wanted = [{"id": item["id"], "channelId": item["id"]} for item in found.get("channels", [])]
                if wanted:
                    connection.send(json.dumps({"op": "subscribe", "subscriptions": wanted}))


def measure(processes: dict[str, psutil.Process], seconds: float) -> dict[str, float]:
    """Return the processor time of each process in cores."""

    def read() -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: time.user + time.system for name, time in times.items()}

    before = read()
    begin_s = time.monotonic()
    time.sleep(seconds)
    after = read()
    passed_s = time.monotonic() - begin_s
    return {name: (after[name] - before[name]) / passed_s for name in processes}


def main() -> None:
    args = make_parser(__doc__, seconds=20.0, fps=30.0).parse_args()
    figures = Figures("latency.bridges")
    ports = free_ports(2)
    with (
        tempfile.TemporaryDirectory() as folder,
        Processes() as processes,
        spawned(publish, processes.frames, processes.masks, args.fps),
    ):
        file = Path(folder) / "bench.rrd"
        running = {
            "idle": processes.start("bridge", "foxglove", f"127.0.0.1:{ports[0]}"),
            "foxglove": processes.start("bridge", "foxglove", f"127.0.0.1:{ports[1]}"),
            "rerun": processes.start("bridge", "rerun", str(file)),
        }
        time.sleep(SETTLE_S)
        client = Client(f"ws://127.0.0.1:{ports[1]}")
        time.sleep(SETTLE_S)
        messages = client.messages
        size = file.stat().st_size
        cores = measure({name: psutil.Process(item.pid) for name, item in running.items()}, args.seconds)
        rate = (client.messages - messages) / args.seconds
        written = (file.stat().st_size - size) / args.seconds / 1e6
    for name, value in cores.items():
        figures.add(f"processor time, {name}", value, "cores")
    figures.add("messages of the Foxglove client", rate, "messages/s")
    figures.add("bytes of the Rerun file", written, "MB/s")
    figures.write(args.json)


if __name__ == "__main__":
    main()
