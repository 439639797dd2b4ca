"""A job that Ray's own command submits to a cluster of two nodes, which are processes here, from and to S3."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cli.main import main
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.processes import until
from tests.support.refuses import mentions
from tests.support.repeats import if_whole
from tests.support.s3 import BUCKET, EXTRA, S3Server, serve_s3
from tools.bench.processes import free_ports

pytest.importorskip("ray", reason=EXTRA)
pytest.importorskip("aiohttp_cors", reason=f"{EXTRA}, or ray[default]")
pytestmark = [
    pytest.mark.timeout(1200),
    if_whole("a cluster of two nodes takes a minute"),
]

NAMES = ("a", "b")
"""The recordings, one for each node."""
HOSTS = ("127.0.0.2", "127.0.0.3")
"""Addresses of head and second node. Ray would replace 127.0.0.1 by the machine's own address."""
OPTIONS = ("--frames", "8", "--prompt", "box", "--outputs", "mcap,coco")
STOP_S = 60.0
"""Seconds that a node may take to end its processes after SIGTERM."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that takes jobs at a URL, from whoever has the token. environment: that of its client."""

    url: str
    token: str
    environment: dict[str, str]

    def ask(self, path: str, token: str) -> Any:
        """Return the JSON of a page that the head serves."""
        request = urllib.request.Request(f"{self.url}{path}")
        if token:
            request.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
            return json.load(reply)

    def list(self, kind: str) -> list[dict[str, Any]]:
        """Return the states of all nodes or actors, also of those that have ended."""
        page = self.ask(f"/api/v0/{kind}?detail=true", self.token)
        states: list[dict[str, Any]] = page["data"]["result"]["result"]
        return states


@contextmanager
def running(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a node in the foreground. At the end, end it with all processes that it has started, and no others."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        family: list[psutil.Process] = []
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        for one in family:
            with suppress(psutil.Error):
                one.kill()
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with serve_s3() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a head and a second node with one CPU each, as launch/cloud/cluster.yaml does on machines."""
    logs = tmp_path_factory.mktemp("logs")
    # the entry points of the environment, whether it is activated or not, and this checkout
    for name, module in (("ray", "ray.scripts.scripts"), ("sam3-node", "sam3_node")):
        script = logs / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        script.chmod(0o755)
    port, jobs, client, *agents = free_ports(5)
    token = secrets.token_hex(32)
    url = f"http://127.0.0.1:{jobs}"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **server.environment,
        "PATH": f"{logs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "no_proxy": "127.0.0.1,127.0.0.2,127.0.0.3",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_ADDRESS": url,
    }
    # a socket's path has at most 107 bytes, so Ray's folder cannot be pytest's
    folder = tempfile.mkdtemp(prefix="ray-")
    ray = str(logs / "ray")
    head = [*start_command(ray, HOSTS[0], agents[0]), "--head", f"--port={port}", f"--temp-dir={folder}"]
    head += ["--dashboard-host=127.0.0.1", f"--dashboard-port={jobs}", f"--ray-client-server-port={client}"]
    second = [*start_command(ray, HOSTS[1], agents[1]), f"--address={HOSTS[0]}:{port}"]
    nodes_environment = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    found = Cluster(url, token, environment)
    try:
        with running(head, nodes_environment, logs / "head.log") as first:
            until(lambda: count_nodes(found, first), "the head")
            with running(second, nodes_environment, logs / "second.log") as other:
                until(lambda: count_nodes(found, other) == len(HOSTS), "the second node")
                yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_command(ray: str, host: str, agent: int) -> list[str]:
    """Return what starts a node with one CPU in the foreground. `agent` is the port of its agent."""
    bounds = ["--num-cpus=1", "--num-gpus=0", f"--object-store-memory={100 << 20}"]
    # any free ports: those of the default may be another program's
    ports = ["--min-worker-port=0", "--max-worker-port=0", f"--dashboard-agent-listen-port={agent}"]
    return [ray, "start", "--block", "--disable-usage-stats", f"--node-ip-address={host}", *bounds, *ports]


def count_nodes(cluster: Cluster, process: subprocess.Popen[bytes]) -> int:
    assert process.poll() is None, "the node has ended"
    with suppress(OSError):
        return len(cluster.list("nodes"))
    return 0


def test_a_submitted_job_replays_on_both_nodes(cluster: Cluster, server: S3Server, tmp_path: Path) -> None:
    import fsspec

    bags = fsspec.filesystem("s3", endpoint_url=server.endpoint, key="testing", secret="testing")
    paths = [tmp_path / f"{name}.mcap" for name in NAMES]
    for path in paths:
        shutil.copyfile(TABLETOP, path)
        bags.put_file(str(path), f"{BUCKET}/monday/{path.name}")
    urls = [f"s3://{BUCKET}/monday/{path.name}" for path in paths]
    command = [str(ROOT / "launch/cloud/submit"), *urls, "-o", f"s3://{BUCKET}/run1", *OPTIONS]
    command += ["--workers", "2", "--gpus-per-worker", "0", "--price-per-hour", "1.2"]
    done = subprocess.run(
        command, env=cluster.environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert mentions(done.stdout, *urls, "16", "succeeded")

    # each node had a worker
    workers = [actor for actor in cluster.list("actors") if actor["class_name"] == "Worker"]
    assert {worker["node_id"] for worker in workers} == {node["node_id"] for node in cluster.list("nodes")}
    results = server.read_all()
    bill = json.loads(results["run1/bill.json"])
    assert [bag["state"] for bag in bill["bags"]] == ["done", "done"]
    assert bill["frames"] == 16

    # a local run, without Ray and S3
    assert main(["replay", *map(str, paths), "-o", str(tmp_path / "out"), *OPTIONS]) == 0
    for name in NAMES:
        for output in ("masks.mcap", "masks.json"):
            assert results[f"run1/{name}/{output}"] == (tmp_path / "out" / name / output).read_bytes()


@pytest.mark.parametrize("token", ["", "0" * 64], ids=["none", "wrong"])
def test_a_job_without_the_token_is_refused(cluster: Cluster, token: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.ask("/api/jobs/", token)
    assert refused.value.code in (401, 403)
