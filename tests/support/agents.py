"""An agent: the SDK's own client of the protocol, called from plain functions."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import cv2
import numpy as np
import pytest

from sam3_node.types import Image
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

mcp = pytest.importorskip("mcp", reason="the extra mcp is not installed")


class ToolResult(NamedTuple):
    """What an agent got from a tool."""

    is_error: bool
    text: str
    facts: dict[str, Any]
    """the structured content"""
    picture: Image | None
    jpeg_bytes: int = 0


class Agent:
    """A client of one server, for one thread. `tools` are the listed ones, by name."""

    def __init__(self, portal: anyio.from_thread.BlockingPortal, client: Any) -> None:
        self._portal = portal
        self._client = client
        self.tools = {tool.name: tool for tool in portal.call(client.list_tools).tools}

    def call(self, tool: str, **arguments: Any) -> ToolResult:
        """Call a tool, whatever it answers."""
        return read_result(self._portal.call(self._client.call_tool, tool, arguments))

    def ask(self, tool: str, **arguments: Any) -> ToolResult:
        """Call a tool, which must not answer with an error."""
        result = self.call(tool, **arguments)
        assert not result.is_error, result.text
        return result

    def fail(self, tool: str, **arguments: Any) -> str:
        """Call a tool, which must answer with an error. Return its text."""
        result = self.call(tool, **arguments)
        assert result.is_error, result.text
        return result.text

    def flood(self, tool: str, count: int) -> list[ToolResult]:
        """Call a tool many times at once."""

        async def call_all() -> list[ToolResult]:
            results: list[ToolResult] = []

            async def call() -> None:
                results.append(read_result(await self._client.call_tool(tool, {})))

            async with anyio.create_task_group() as tasks:
                for _ in range(count):
                    tasks.start_soon(call)
            return results

        return self._portal.call(call_all)


def read_result(result: Any) -> ToolResult:
    """Return what a host would show of a result. Its text and its structured content must be the same."""
    text = "".join(part.text for part in result.content if part.type == "text")
    picture = None
    size = 0
    for part in result.content:
        if part.type == "image":
            assert part.mime_type == "image/jpeg"
            data = base64.b64decode(part.data, validate=True)
            size = len(data)
            picture = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
            assert picture is not None
    facts = result.structured_content or {}
    if not result.is_error:
        assert json.loads(text) == facts
    return ToolResult(result.is_error, text, facts, picture, size)


@contextmanager
def connect(server: Any) -> Iterator[Agent]:
    """Yield an agent of a server: of one in this process, a URL, or parameters of a process to start."""
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(mcp.Client(server, read_timeout_seconds=PATIENCE_S)) as client,
    ):
        yield Agent(portal, client)


@contextmanager
def start_agent(environment: Mapping[str, str], *arguments: str) -> Iterator[Agent]:
    """Start `sam3-node mcp` as a host of agents does, over stdio, and yield an agent of it."""
    parameters = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "sam3_node", "mcp", *arguments],
        env=os.environ | dict(environment),
        cwd=ROOT,
    )
    with connect(parameters) as agent:
        yield agent
