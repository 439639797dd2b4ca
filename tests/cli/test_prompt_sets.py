"""Sets of prompts: kept from a node, listed, and used again, through a real control socket."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sam3_node.cli.main import main
from sam3_node.transport.control_server import ControlServer
from sam3_node.wire import Reply, Request
from tests.support.refuses import mentions

LIMITS = {"scores": {"red mug": 0.3}, "most": {"red mug": 1}, "priorities": {"Süßkartoffel": "low"}}
STATUS = {"prompts": ["red mug", "Süßkartoffel"], "prompt_limits": LIMITS}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The control socket of a node that has prompts; -> endpoint, arguments of set_prompts."""
    endpoint = f"ipc://{tmp_path}/control"
    given: list[dict[str, Any]] = []

    def reply(request: Request) -> Reply:
        given.extend([dict(request.args)] if request.op == "set_prompts" else [])
        return Reply(request.id, STATUS if request.op == "status" else {})

    with ControlServer(endpoint, reply, "node"):
        yield endpoint, given


def test_a_set_is_saved_listed_and_loaded(
    node: tuple[str, list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint, given = node
    folder = str(tmp_path / "sets")
    connection = ("--transport.control", endpoint, "--timeout", "60")
    assert main(["prompts", "save", "kitchen", "--folder", folder, *connection]) == 0
    saved = json.loads((tmp_path / "sets/kitchen.json").read_text())
    assert saved == {"prompts": STATUS["prompts"], **LIMITS}
    assert main(["prompts", "list", "--folder", folder]) == 0
    assert "kitchen" in capsys.readouterr().out
    assert main(["prompts", "load", "kitchen", "--folder", folder, *connection]) == 0
    assert given == [{"prompts": STATUS["prompts"], **LIMITS}]


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b'{"prompts": 1}', b'{"prompts": [], "more": 1}', b"[" * 10**6, b"\xff"]
)
def test_a_damaged_set_is_refused(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert main(["prompts", "load", "a", "--folder", str(tmp_path)]) == 2
    assert mentions(capsys.readouterr().err, "JSON", '{"prompts"')
    (tmp_path / "b.json").write_text('{"prompts": ["mug"]}')
    assert main(["prompts", "list", "--folder", str(tmp_path)]) == 0
    damaged, good = capsys.readouterr().out.splitlines()
    assert mentions(damaged, "cannot")
    assert good.split() == ["b", "mug"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kitchem", r"did you mean kitchen"),
        ("../a", "name: expected letters"),
        ("x" * 300, "File name too long"),
    ],
)
def test_a_set_that_is_not_there_is_told(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kitchen.json").write_text('{"prompts": ["mug"]}')
    assert main(["prompts", "load", name, "--folder", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
