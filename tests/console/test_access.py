"""Tests of who may use the console: addresses, origins, tokens, and what a page without changes may do."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra console is not installed")
pytest.importorskip("uvicorn", reason="the extra console is not installed")

from sam3_node.console.app import AccessControl, read_binding
from sam3_node.console.controls import Controls
from sam3_node.errors import SettingsError
from sam3_node.settings import Settings
from sam3_node.transport import ControlClient
from sam3_node.types import Mask
from sam3_node.wire import encode_mask
from tests.support.console_rig import UPGRADE, ConsoleRig, ask
from tests.support.refuses import refuses


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleRig]:
    with ConsoleRig(tmp_path_factory.mktemp("access")) as found:
        yield found


@pytest.fixture(scope="module")
def certificate(rig: ConsoleRig) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    key = rig.folder / "key.pem"
    path = rig.folder / "certificate.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -keyout {key} -out {path}"
    try:
        subprocess.run(words.split(), check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return path, key


def test_other_hosts_and_origins_are_refused(rig: ConsoleRig) -> None:
    _, url = rig.console()
    assert ask(url, "/")[0] == 200
    for host in (
        "evil.example:80",
        "127.0.0.1:80@evil.example",
        "evil.example@127.0.0.1:80",
        "127.0.0.1 :80",
    ):
        assert ask(url, "/", Host=host)[0] == 403
        assert ask(url, "/views", **UPGRADE | {"Host": host, "Origin": f"http://{host}"})[0] == 403
    assert ask(url, "/api/pause", "POST", {}, Origin="http://evil.example")[0] == 403
    assert ask(url, "/api/pause", "POST", {}, Origin="")[0] == 403
    assert ask(url, "/views", **UPGRADE)[0] == 101
    assert ask(url, "/views", **UPGRADE | {"Origin": "http://evil.example"})[0] == 403


def test_every_answer_has_a_policy_without_inline_scripts(rig: ConsoleRig) -> None:
    _, url = rig.console()
    for path in ("/", "/static/main.js", "/nothing"):
        policy = ask(url, path)[1]["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy


def test_read_only_refuses_every_change(rig: ConsoleRig) -> None:
    _, url = rig.console(CONSOLE__READ_ONLY="true")
    for op in ("add_object", "reset", "pause", "record", "segment"):
        status, _, body = ask(url, f"/api/{op}", "POST", {})
        assert (status, json.loads(body)["error"]["code"]) == (403, "read_only")


def test_a_wrong_token_gives_nothing_and_the_right_one_a_cookie(
    rig: ConsoleRig, certificate: tuple[Path, Path]
) -> None:
    settings = {"CONSOLE__CERTIFICATE": str(certificate[0]), "CONSOLE__KEY": str(certificate[1])}
    _, printed = rig.console(CONSOLE__BIND="0.0.0.0:0", **settings)
    url, _, token = printed.partition("#token=")
    assert url.startswith("https://")
    assert len(token) >= 32
    for cookie in ("", f"sam3_console_{urlsplit(url).port}=guess"):
        assert ask(url, "/api/words", Cookie=cookie)[0] == 401
        assert ask(url, "/api/pause", "POST", {}, Cookie=cookie)[0] == 401
        assert ask(url, "/views", **UPGRADE, Cookie=cookie)[0] == 403
    assert ask(url, "/login", "POST", {"token": token[:-1]})[0] == 401
    assert ask(url, "/login", "POST", {})[0] == 401
    status, headers, _ = ask(url, "/login", "POST", {"token": token})
    cookie, _, rest = headers["set-cookie"].partition(";")
    assert status == 200
    assert {"HttpOnly", "Secure", "SameSite=Strict"} <= set(rest.replace(" ", "").split(";"))
    assert ask(url, "/api/words", Cookie=cookie)[0] == 200
    assert ask(url, "/views", **UPGRADE, Cookie=cookie)[0] == 101


def test_masks_are_no_way_to_upload(rig: ConsoleRig) -> None:
    _, url = rig.console()
    for body in ({"mask": {}}, {"points": [[1, 1]] * 100_000}, [1]):
        status, _, answer = ask(url, "/api/add_object", "POST", body)
        assert (status, json.loads(answer)["error"]["code"]) == (400, "bad_request")


def test_a_click_shows_the_masks_that_it_may_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = encode_mask(Mask.from_full(np.eye(8, dtype=np.bool_)))
    answer = {"seq": 1, "mask": mask, "score": 1.0, "masks": [{"mask": mask, "score": 1.0}]}
    monkeypatch.setattr(ControlClient, "call", lambda self, op, **args: sent.update(args) or answer)
    sent: dict[str, Any] = {}
    with Controls(Settings(), dict, lambda: None) as controls:
        shown = json.loads(json.dumps(controls.call("segment", {"points": [[1, 1]], "multimask": True})))
    assert sent == {"points": [[1, 1]], "multimask": True}
    assert (shown["masks"][0]["mask"], shown["mask"]["area"]) == (shown["mask"], 8)


@pytest.mark.parametrize(
    ("console", "reason"),
    [
        ({"bind": "0.0.0.0:8460"}, "console.certificate"),
        ({"bind": "8460"}, "HOST:PORT"),
        ({"certificate": "a.pem"}, "none"),
        ({"certificate": "a.pem", "key": "b.pem"}, "a.pem"),
    ],
)
def test_an_unsafe_address_is_refused(console: dict[str, str], reason: str) -> None:
    with refuses(SettingsError, field=reason):
        read_binding(Settings(console=console))  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost", "[::1]"])
def test_every_address_of_loopback_answers_to_its_own_name_without_a_certificate(host: str) -> None:
    binding = read_binding(Settings(console={"bind": f"{host}:8460"}))  # type: ignore[arg-type]
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    access = AccessControl(answer, binding)
    assert access.token is None
    for name in (f"{host}:8460", "evil.example"):
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", name.encode())]}
        asyncio.run(access(scope, None, send))  # type: ignore[arg-type]
    assert [message["status"] for message in sent if "status" in message] == [200, 403]
