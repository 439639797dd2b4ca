"""Measure what an agent's tools cost the masks.

    python -m tools.bench.latency.agents [--seconds 15] [--runs 5] [--objects 4]

A camera plays the bundled recording faster than the node can step it, so that each processor second that another
process takes shows in the rate of the masks. Each of --runs runs has three times of --seconds, in turned order:

    quiet   no agent, and no `sam3-node mcp`
    agent   `sam3-node mcp`, whose agent calls find and look once a second
    flood   the same, whose agent calls them without a pause, four at once

The rate is that of another client. A ratio compares an agent's time with the quiet time of its run. On a machine that
does other work, too, rates vary by more than an agent costs. The share of all cores that `sam3-node mcp` takes varies
little: a node that uses all cores loses about as much.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil

from sam3_node.client import PerceptionClient
from tools.bench.common import RATIO, RUNS, Figures, count_cores, make_parser, percentile
from tools.bench.processes import Processes, add_points, drain, next_masks

CAMERA_HZ = 60.0
"""Rate of the camera. nano on two cores steps fewer."""
AGENT_S = 1.0
"""Time from one pair of calls of a sane agent to the next, in seconds."""
FLOODS = 4
"""Calls at once of an agent that floods."""
SETTLE_S = 3.0
"""Time between the start of an agent and the measurement, in seconds."""
TOOLS = ("find", "look")


class Block(NamedTuple):
    """What one stretch of time has shown."""

    rate_hz: float
    age_ms: float
    """median"""
    tools_cores: float
    """Processor time of `sam3-node mcp`"""


class Agent:
    """An agent in a thread, by the SDK's own client, and the server that it starts."""

    def __init__(self, environment: dict[str, str], pause_s: float, at_once: int) -> None:
        self.durations_ms: dict[str, list[float]] = {tool: [] for tool in TOOLS}
        self.errors = 0
        self._environment = environment
        self._pause_s = pause_s
        self._at_once = at_once
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """End the agent, and with it its server."""
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        from mcp import Client, StdioServerParameters

        arguments = ["-m", "sam3_node", "mcp"]
        parameters = StdioServerParameters(command=sys.executable, args=arguments, env=self._environment)
        async with Client(parameters) as client:
            await client.list_tools()
            self._ready.set()
            await asyncio.gather(*(self._call(client) for _ in range(self._at_once)))

    async def _call(self, client: Any) -> None:
        while not self._stop.is_set():
            for tool in TOOLS:
                begin_s = time.monotonic()
                result = await client.call_tool(tool, {})
                self.durations_ms[tool].append(1000 * (time.monotonic() - begin_s))
                self.errors += result.is_error
            await asyncio.sleep(self._pause_s)


@contextmanager
def running_agent(environment: dict[str, str], pause_s: float, at_once: int) -> Iterator[Agent]:
    """Run an agent until the block ends; it has settled when the block begins."""
    agent = Agent(environment, pause_s, at_once)
    try:
        time.sleep(SETTLE_S)
        yield agent
    finally:
        agent.close()


def find_server() -> psutil.Process:
    """Return the process of `sam3-node mcp`."""
    for process in psutil.Process().children(recursive=True):
        if process.cmdline()[-1:] == ["mcp"]:
            return process
    raise SystemExit("sam3-node mcp does not run")


def measure(client: PerceptionClient, seconds: float, agent: Agent | None = None) -> Block:
    """Return what some seconds of masks show, beside an agent if one runs."""
    server = None if agent is None else find_server()
    drain(client)
    ages_ms = []
    before_s = count_cpu_s(server)
    begin_s = time.monotonic()
    while time.monotonic() - begin_s < seconds:
        ages_ms.append(next_masks(client).age_ms)
    passed_s = time.monotonic() - begin_s
    used_s = count_cpu_s(server) - before_s
    # a tool that fails costs less than one that works
    if agent is not None and agent.errors:
        raise SystemExit(f"expected no errors of the tools, found {agent.errors}")
    return Block(len(ages_ms) / passed_s, percentile(ages_ms, 0.5), used_s / passed_s)


def count_cpu_s(process: psutil.Process | None) -> float:
    """Return the processor seconds of a process so far; 0 for none."""
    if process is None:
        return 0.0
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    args = make_parser(__doc__, runs=RUNS, seconds=15.0, objects=4).parse_args()
    figures = Figures("latency.agents")
    blocks: dict[str, list[Block]] = {"quiet": [], "agent": [], "flood": []}
    durations_ms: dict[str, list[float]] = {tool: [] for tool in TOOLS}
    with Processes() as processes, processes.client() as client:
        processes.start("run")
        processes.start_camera("scene:tabletop", CAMERA_HZ)
        add_points(client, args.objects)
        # the first seconds are slower: memory is allocated, and clocks of the processor rise
        measure(client, args.seconds)
        for run in range(args.runs):
            kinds = list(blocks)
            for kind in kinds[run % 3 :] + kinds[: run % 3]:
                if kind == "quiet":
                    blocks[kind].append(measure(client, args.seconds))
                    continue
                pause_s, at_once = (AGENT_S, 1) if kind == "agent" else (0.0, FLOODS)
                with running_agent(processes.environment, pause_s, at_once) as agent:
                    blocks[kind].append(measure(client, args.seconds, agent))
                if kind == "agent":
                    for tool in TOOLS:
                        durations_ms[tool] += agent.durations_ms[tool]
    figures.add("masks without an agent", [block.rate_hz for block in blocks["quiet"]], "masks/s")
    for kind in ("agent", "flood"):
        pairs = list(zip(blocks[kind], blocks["quiet"], strict=True))
        # the limit is that of an agent as people run it
        is_sane = kind == "agent"
        rates = [block.rate_hz / quiet.rate_hz for block, quiet in pairs]
        ages = [block.age_ms / quiet.age_ms for block, quiet in pairs]
        figures.add(f"{kind}: rate of masks / quiet rate", rates, RATIO, "at least 0.95" if is_sane else "")
        figures.add(f"{kind}: age of masks / quiet age, p50", ages, RATIO)
        shares = [100 * block.tools_cores / count_cores() for block in blocks[kind]]
        figures.add(
            f"{kind}: share of all cores of sam3-node mcp", shares, "%", "at most 5" if is_sane else ""
        )
    for tool in TOOLS:
        figures.add(f"agent: time of {tool}, p50", percentile(durations_ms[tool], 0.5), "ms")
    figures.write(args.json)


if __name__ == "__main__":
    main()
