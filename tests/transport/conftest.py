"""Fixtures of the tests of sockets."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest

from sam3_node.transport.control_server import ControlServer
from tests.support.key_rig import Keys, serve
from tools.bench.processes import free_endpoints


@pytest.fixture(params=["tcp", "ipc"])
def new_endpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Return a function that gives another endpoint to bind at each call, of each scheme."""
    numbers = count()
    if request.param == "tcp":
        return lambda: free_endpoints(1)[0]
    return lambda: f"ipc://{tmp_path}/{next(numbers)}"


@pytest.fixture
def endpoint(new_endpoint: Callable[[], str]) -> str:
    return new_endpoint()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def control(keys: Keys, stack: ExitStack) -> ControlServer:
    """Return a server of requests that expects keys."""
    return serve(stack, keys.machine("node", "node"))
