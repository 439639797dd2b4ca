"""`sam3-node bridge`: show frames and masks live in Foxglove or Rerun."""

from __future__ import annotations

import argparse
import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from ..errors import OutputError
from ..processes.logs import announce, raise_descriptor_limit
from ..processes.signals import stop_on_signals
from ..settings import Settings
from .commands import AddCommand, notify_about_frames, watch_process
from .parser import FAILED, add_command_group
from .progress import printable

if TYPE_CHECKING:
    from ..bridges.live import Viewer


def add_bridge_commands(parsers: Any, add: AddCommand) -> None:
    """Add the commands of bridges."""
    group = add_command_group(parsers, "bridge", "show pictures and masks live in Foxglove or Rerun")
    foxglove = add(group, "foxglove", bridge_foxglove, "serve pictures, outlines and positions to Foxglove")
    foxglove.add_argument(
        "bridge.bind",
        metavar="HOST:PORT",
        nargs="?",
        default=argparse.SUPPRESS,
        help="address to listen on [127.0.0.1:8765]",
    )
    rerun = add(
        group, "rerun", bridge_rerun, "send pictures, masks and positions to Rerun, or write its file"
    )
    rerun.add_argument(
        "target",
        metavar="FILE.rrd|ADDRESS",
        help="new file, or address of a viewer such as rerun+http://127.0.0.1:9876/proxy",
    )


def bridge_foxglove(args: Namespace, settings: Settings) -> None:
    """Serve Foxglove until a signal."""
    from ..bridges.foxglove import FoxgloveServer

    server = FoxgloveServer(settings)
    _run(settings, server, f"foxglove at {server.url}")


def bridge_rerun(args: Namespace, settings: Settings) -> None:
    """Log to Rerun until a signal."""
    from ..bridges.rerun import RerunStream

    stream = RerunStream(args.target)
    try:
        _run(settings, stream, f"rerun to {args.target}")
    except OutputError as error:
        print("sam3-node: error:", printable(str(error), line_feeds=True), file=sys.stderr, flush=True)
        os._exit(FAILED)  # at its end, the SDK would wait without limit for the thread that wrote the file


def _run(settings: Settings, viewer: Viewer, place: str) -> None:
    from ..bridges.live import VIEWER_CLOSE_S, run_bridge

    raise_descriptor_limit()
    stop = stop_on_signals()
    with watch_process(settings) as watchdog, notify_about_frames("bridge", settings):
        announce(f"bridge: {place}")
        outcome = run_bridge(settings, viewer, stop, watchdog)
    skipped = f"; {outcome.skipped} were left out for newer ones" if outcome.skipped else ""
    dropped = f"; {outcome.dropped} messages were dropped unread" if outcome.dropped else ""
    announce(f"bridge: showed {outcome.shown} pictures{skipped}{dropped}")
    if not outcome.closed:
        print(
            f"bridge: the viewer has taken nothing for {VIEWER_CLOSE_S:g} s, and is left",
            file=sys.stderr,
            flush=True,
        )
        os._exit(0)  # its SDK would wait for it without limit
