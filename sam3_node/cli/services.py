"""Commands that run until a signal: node, camera, watch, record, console, bridges, tools; also demo and doctor."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ..addresses import Address, split_address
from ..errors import CameraError, OutputError, require
from ..processes.logs import announce, log_subject, raise_descriptor_limit
from ..processes.notify import Watchdog
from ..processes.signals import WaitingNotice, print_notice, stop_on_signals
from ..settings import Settings
from .early_checks import check_named_files, check_tracing
from .environment import prepare_torch
from .parser import ANSWER_TIMEOUT_S, FAILED, Commands, parse_timeout
from .progress import printable

if TYPE_CHECKING:
    from ..bridges.viewer import Viewer
    from .doctor import NamedGpu

LIST_SOURCES = "list"
"""Source of the camera command that lists the sources."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    node = commands.add("run", run)
    node.add(
        "--restore-from FILE|ENDPOINT",
        "snapshot to continue from, or control endpoint of the node to take over from, such as tcp://old:5552",
    )
    _add_camera(commands)
    table = commands.add("watch", watch)
    table.add_path("--overlay OUT.mp4", "video file for the frames with their masks drawn")
    table.add("--frames N", "stop after N mask messages; 0 never stops", int, 0)
    _add_record(commands)
    _add_console(commands)
    _add_bridges(commands)
    _add_mcp(commands)
    show = commands.add("demo", demo)
    show.add_path("--out FOLDER", "folder for the results", default=Path("out/demo"))
    show.add("--seconds S", "duration; default: play the recording once", parse_timeout)
    checks = commands.add("doctor", doctor)
    text = (
        "also estimate the memory of this GPU, which need not be here: its name, or its memory, such as 24GB"
    )
    checks.add("--gpu NAME", text, _parse_gpu)


def run(args: Namespace, settings: Settings) -> None:
    """Run the node: track objects on camera frames and publish masks."""
    from ..transport.sockets import check_free

    # before torch is imported, which takes seconds: a second node, and what is not there, is refused at once
    for endpoint in (settings.transport.masks, settings.transport.control):
        check_free(endpoint)
    check_named_files(settings)
    check_tracing(settings)
    prepare_torch()
    with _begin_service(settings) as watchdog:
        require("torch", "node")
        if settings.model.device != "cpu":
            threading.Thread(target=_begin_cuda, args=(settings.model.device,), daemon=True).start()
        from ..node.node import Node

        with Node(settings, args.restore_from, watchdog) as node, _notify_about_frames("run", settings):
            # catch signals only when the node is ready: before, there is no frame to finish, and a signal ends the
            # process
            node.main_loop(stop_on_signals())


def _add_camera(commands: Commands) -> None:
    parser = commands.add("camera", camera)
    text = "source of the frames; list: print the cameras of this machine and the recordings of FOLDER"
    parser.add_setting("SOURCE", "camera.source", text)
    parser.add_path("folder FOLDER", "with list: folder of recordings [.]", nargs="?")
    text = "read another project's camera server at SOURCE: groot, lerobot, imagezmq, imagezmq-hub, jpeg"
    parser.add_setting("--dialect NAME", "camera.dialect", text)


def camera(args: Namespace, settings: Settings) -> None:
    """Publish frames of scene:tabletop, bag:FILE, realsense, webcam:0 ..., or list the sources."""
    if settings.camera.source == LIST_SOURCES:
        from ..cameras.sources import list_cameras

        for line in list_cameras(args.folder or Path()):
            print(printable(line))
        return
    if args.folder is not None:
        raise CameraError(f"expected one source, found {settings.camera.source!r} and {str(args.folder)!r}")
    from ..cameras.publish import run_camera

    with _begin_service(settings) as watchdog, log_subject(settings.camera.name):
        run_camera(settings, stop_on_signals(), watchdog)


def _begin_cuda(name: str) -> None:
    """Create the context of the GPU `name` (auto, cuda, cuda:N) while torch is imported.

    torch uses this context then. Where there is no GPU or driver, do nothing: torch says what lacks. Nor is there
    anything to do for a build of torch for CPUs.
    """
    with suppress(PackageNotFoundError):
        if version("torch").endswith("+cpu"):
            return
    with suppress(OSError, AttributeError):
        cuda = ctypes.CDLL("libcuda.so.1")  # a call by ctypes lets other threads run meanwhile
        number = int(name.partition(":")[2] or 0)
        device = ctypes.c_int()
        context = ctypes.c_void_p()
        if cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), number) == 0:
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def watch(args: Namespace, settings: Settings) -> None:
    """Show masks as a table in the terminal."""
    from .watch import run_watch

    run_watch(settings, args.overlay, args.frames, stop_on_signals())


def _add_record(commands: Commands) -> None:
    parser = commands.add("record", record)
    parser.add_setting("OUT", "record.out", "file NAME.mcap, or a folder for recordings")
    text = "keep the last S seconds in memory, and write them only at SIGUSR1 or Enter"
    parser.add_setting("--ring S", "record.ring_s", text)
    parser.add_setting(
        "--after S", "record.after_s", "with --ring: write S seconds after the trigger, too [10]"
    )
    text = "LeRobot dataset to which each episode is appended when it ends"
    parser.add_setting("--lerobot FOLDER", "lerobot.folder", text)
    text = "version of a new dataset: 3.0, or 2.1 for GR00T [3.0]"
    parser.add_setting("--lerobot-version V", "lerobot.version", text)
    parser.add_setting(
        "--fps N", "lerobot.fps", "with --lerobot: rows per second [those of the slowest camera]"
    )


def record(args: Namespace, settings: Settings) -> None:
    """Record frames, masks and events to MCAP files."""
    from ..recording.recorder import Trigger, run_record

    stop = stop_on_signals()
    trigger = Trigger()
    if settings.record.ring_s:
        trigger.listen(sys.stdin)
    with _begin_service(settings) as watchdog, _notify_about_frames("record", settings):
        run_record(settings, stop, trigger=trigger, watchdog=watchdog)


def _add_console(commands: Commands) -> None:
    parser = commands.add("console", console)
    parser.add_path("--recording FILE.mcap", "play a recording instead of the live node")
    text = "with --recording: a replay's folder or a file of masks, to see and correct instead of the recording's own"
    parser.add_path("--results FOLDER", text)
    text = "with --recording: another result of it to compare with, a file of masks or a replay's folder"
    parser.add_path("--against FILE.mcap", text)
    parser.add_path("--dataset FOLDER", "list and edit the episodes of a LeRobot dataset instead")


def console(args: Namespace, settings: Settings) -> None:
    """Serve a web page that shows masks live, and sends clicks and names."""
    # asked before anything is opened: the error names the extra to install
    for module in ("starlette", "uvicorn", "websockets"):
        require(module, "console")
    from ..console.serve import run_console

    with _begin_service(settings) as watchdog:
        run_console(
            settings,
            stop_on_signals(),
            args.recording,
            args.against,
            args.results,
            args.dataset,
            announce=lambda url: announce(f"console at {url}"),
            watchdog=watchdog,
        )


def _add_bridges(commands: Commands) -> None:
    group = commands.add_group("bridge", "show pictures and masks live in Foxglove or Rerun")
    foxglove = group.add("foxglove", bridge_foxglove)
    foxglove.add_setting("HOST:PORT", "bridge.bind", "address to listen on [127.0.0.1:8765]")
    rerun = group.add("rerun", bridge_rerun)
    text = "new file, or address of a viewer such as rerun+http://127.0.0.1:9876/proxy"
    rerun.add("target FILE.rrd|ADDRESS", text)


def bridge_foxglove(args: Namespace, settings: Settings) -> None:
    """Serve pictures, outlines and positions to Foxglove."""
    from ..bridges.foxglove_server import FoxgloveServer

    server = FoxgloveServer(settings)
    _run_bridge(settings, server, f"foxglove at {server.url}")


def bridge_rerun(args: Namespace, settings: Settings) -> None:
    """Send pictures, masks and positions to Rerun, or write its file."""
    from ..bridges.rerun import RerunStream

    stream = RerunStream(args.target)
    try:
        _run_bridge(settings, stream, f"rerun to {args.target}")
    except OutputError as error:
        print_notice(f"sam3-node: error: {printable(str(error), line_feeds=True)}")
        os._exit(FAILED)  # at its end, the SDK would wait without limit for the thread that wrote the file


def _run_bridge(settings: Settings, viewer: Viewer, place: str) -> None:
    from ..bridges.viewer import VIEWER_CLOSE_S, run_bridge

    stop = stop_on_signals()
    with _begin_service(settings) as watchdog, _notify_about_frames("bridge", settings):
        announce(f"bridge: {place}")
        outcome = run_bridge(settings, viewer, stop, watchdog)
    text = f"bridge: showed {outcome.shown} pictures"
    if outcome.skipped:
        text += f"; {outcome.skipped} were skipped for newer ones"
    if outcome.dropped:
        text += f"; {outcome.dropped} messages were dropped unread"
    announce(text)
    if not outcome.closed:
        print_notice(f"bridge: the viewer has taken nothing for {VIEWER_CLOSE_S:g} s, and is left")
        os._exit(0)  # its SDK would wait for it without limit


def _add_mcp(commands: Commands) -> None:
    parser = commands.add("mcp", mcp)
    text = "also offer the tools that change what is tracked: add, name, remove"
    parser.add_flag("--allow-edits", text)
    text = "serve over HTTP at an address of this machine alone, such as 127.0.0.1:8470, in place of stdin and stdout"
    parser.add("--http HOST:PORT", text, _parse_address)
    text = f"seconds that a tool waits for each answer of the node [{ANSWER_TIMEOUT_S:g}]"
    parser.add("--timeout S", text, parse_timeout, ANSWER_TIMEOUT_S)


def _parse_address(text: str) -> Address:
    """Parse HOST:PORT."""
    address = split_address(text)
    if address is None:
        raise ValueError(f"expected HOST:PORT such as 127.0.0.1:8470, found {text!r}")
    return address


def mcp(args: Namespace, settings: Settings) -> None:
    """Offer tools to an agent over the Model Context Protocol: find, look, points, where.

    stdout carries the protocol alone, and all else goes to stderr.
    """
    # asked before anything is opened: the error names the extra to install
    require("mcp", "mcp")
    from ..mcp.server import run_http, run_stdio
    from ..mcp.tools import AgentTools

    stop = stop_on_signals()
    with AgentTools(settings, args.allow_edits, round(1000 * args.timeout)) as tools:
        if args.http is None:
            run_stdio(tools, stop)
        else:
            run_http(tools, args.http, stop, lambda url: announce(f"mcp at {url}"))


def demo(args: Namespace, settings: Settings) -> None:
    """Run camera, node and watcher on this machine, on a recorded scene."""
    from .demo import run_demo

    run_demo(args.out, args.seconds, settings)


def doctor(args: Namespace, settings: Settings) -> int:
    """Check the installation and the GPU, and name what to fix.

    Return 0 if the core works.
    """
    from .doctor import run_doctor

    return run_doctor(settings, args.gpu)


def _parse_gpu(text: str) -> NamedGpu:
    from .doctor import parse_gpu

    return parse_gpu(text)


def _begin_service(settings: Settings) -> Watchdog:
    """Raise the limit of open files. Report to the supervisor of this process, if it has one, that it is alive."""
    raise_descriptor_limit()
    return Watchdog(settings.group.hang_s, os.environ)


@contextmanager
def _notify_about_frames(command: str, settings: Settings) -> Iterator[None]:
    """Say on stderr why the node gets no frames, until it processes some."""
    from .watch import NodeProbe

    if settings.transport.control.endswith("*"):  # the port is known to the node only
        yield
        return
    with (
        NodeProbe(settings) as probe,
        WaitingNotice(probe.explain_frames, lambda line: print_notice(f"{command}: {line}")),
    ):
        yield
