"""Help and `doctor` of an installation without the extra `cli`, which is the client for policies alone.

It needs the core of the package only: no pydantic, of which the settings are made.
"""

import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ..errors import Sam3NodeError, find_version, install_advice

CORE = ("pyzmq", "msgpack", "numpy", "zstandard")
"""Packages that the client needs."""
CLI = ("pydantic-settings", "opencv-python-headless", "packaging", "tqdm", "shtab")
"""Packages of the extra cli."""
NODE_TIMEOUT_MS = 1000
"""Longest time to wait for a node's answer."""


def run_light(arguments: Sequence[str]) -> int | None:
    """Carry out --version, --help or doctor, and return the exit code; None for what needs the extra cli."""
    if "--version" in arguments:
        print(f"sam3-node {find_version('sam3-node') or '(not installed)'}")
        return 0
    if not arguments:
        # as the whole command line does: the help, and the exit code of a wrong call
        print(_format_help(), file=sys.stderr)
        return 2
    if "-h" in arguments or "--help" in arguments:
        print(_format_help())
        return 0
    if arguments[0] == "doctor":
        return _run_doctor()
    return None


def _format_help() -> str:
    """Return the help: what works here, and the commands of the extra cli with an example each."""
    text = Path(__file__).with_name("examples.toml").read_text(encoding="utf-8")
    examples = tomllib.loads(text)["examples"]
    lines = "\n".join(f"  {lines[0]}" for lines in examples.values())
    return (
        "usage: sam3-node COMMAND\n\n"
        "This installation has the client for policies alone: from sam3_node.client import PerceptionClient.\n"
        f"Here work --help, --version and doctor. All other commands need {install_advice('cli')}:\n\n{lines}"
    )


def _run_doctor() -> int:
    """Print what the client needs and whether a node answers. Return 1 if a package of the core is missing."""
    absent = [name for name in CORE if find_version(name) is None]
    for name in CORE:
        status = "fix " if name in absent else "ok  "
        print(f"{status}  {name:<18}  {find_version(name) or 'not installed'}")
    lacking = [name for name in CLI if find_version(name) is None]
    print(
        f"warn  {'commands':<18}  {', '.join(lacking) or 'a package'} not installed  -> {install_advice('cli')}"
    )
    if absent:
        print(f"{len(absent)} to fix")
        return 1
    print(_ask_node())
    print("the client works")
    return 0


def _ask_node() -> str:
    """Return a line on the node at the endpoint of the environment, or at the default one."""
    from ..client.perception_client import CONTROL_ENDPOINT
    from ..transport import ControlClient
    from ..transport.security import find_endpoint

    endpoint = find_endpoint("CONTROL", CONTROL_ENDPOINT)
    try:
        with ControlClient(endpoint, NODE_TIMEOUT_MS) as client:
            status = client.call("status")
    except Sam3NodeError as error:
        return f"warn  {'node':<18}  {error}  -> no problem if none should run"
    cameras = ", ".join(status["cameras"]) or "none"
    return f"ok    {'node':<18}  {endpoint}: {status['model']}, cameras {cameras}"
