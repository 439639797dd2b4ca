"""Rules, metrics and dashboard of launch/monitoring/, against a real node and a real Prometheus."""

import json
import re
import shutil
import subprocess
import threading
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import zmq

from sam3_node.node import monitoring
from sam3_node.node.monitoring import MetricsPage, NodeCollector
from sam3_node.settings import Settings
from tests.support.near_node import HealthyNode, ask
from tests.support.node_rig import until
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.transport_peer import open_peer

MONITORING = ROOT / "launch" / "monitoring"
LISTENING = re.compile(r'msg="Listening on" address=(\S+)')
CPU_NODES_LACK = {"sam3_node_gpu_memory_bytes"}
METRIC = re.compile(r"\b(?:sam3_node|process)_[a-z_]+")

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (Debian: prometheus)"
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HealthyNode]:
    """Return a node that has stepped frames, has tracks and has refused some input."""
    with HealthyNode(tmp_path_factory.mktemp("monitored"), deadline_s=600.0) as served:
        until(lambda: served.send_as() and ask(served.url, "/readyz")[0] == 200, "masks")
        served.client.call("add_object", points=[[30, 20]])
        until(lambda: served.send_as() and "state=" in ask(served.url, "/metrics")[1], "tracks")
        yield served


def promtool(*arguments: str, text: str | None = None) -> str:
    done = subprocess.run(
        ["promtool", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        cwd=MONITORING,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def list_queries() -> list[str]:
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def list_rules() -> list[str]:
    return re.findall(r"- alert: (\w+)", (MONITORING / "alerts.yml").read_text())


@pytest.mark.verifies(
    "monitoring",
    "Prometheus: alert rules and configuration",
    "own package",
    "promtool checks the rules, and plays their tests",
    "Alertmanager",
)
@needs_promtool
def test_the_rules_are_valid_and_fire_as_their_tests_say() -> None:
    assert f"{len(list_rules())} rules found" in promtool("check", "rules", "alerts.yml")
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yml")
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_the_metrics_follow_the_conventions(served: HealthyNode) -> None:
    assert promtool("check", "metrics", text=ask(served.url, "/metrics")[1]) == ""


def test_rules_and_dashboard_ask_for_metrics_that_exist(served: HealthyNode) -> None:
    text = ask(served.url, "/metrics")[1]
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    rules = (MONITORING / "alerts.yml").read_text()
    asked = {name for query in [*list_queries(), rules] for name in METRIC.findall(query)}
    assert asked - shown == CPU_NODES_LACK | {"sam3_node_recorded_bytes_total"}, "this node has no recorder"
    page = (ROOT / "docs" / "monitoring.md").read_text()
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE sam3_node")}
    assert {name for name in families if f"`{name.removesuffix('_total')}" not in page} == set(), (
        "metrics without a line in the docs"
    )


def test_metrics_count_what_the_node_does(served: HealthyNode) -> None:
    def value(line: str) -> float:
        (found,) = re.findall(rf"^{re.escape(line)} (\S+)$", ask(served.url, "/metrics")[1], re.MULTILINE)
        return float(found)

    stepped = 'sam3_node_frames_stepped_total{camera="cam1"}'
    steps = "sam3_node_step_seconds_count"
    before = value(stepped)
    steps_before = value(steps)
    until(lambda: served.send_as() and value(stepped) >= before + 3, "frames are counted")
    until(lambda: served.send_as() and value(steps) >= steps_before + 3, "steps are counted")
    for name in (
        'sam3_node_stage_seconds_count{stage="encode"}',
        'sam3_node_latency_seconds_count{camera="cam1"}',
        'sam3_node_bank_bytes{camera="cam1"}',
        "process_resident_memory_bytes",
        'sam3_node_setting_info{name="tracker.max_objects",value="16"}',
    ):
        assert value(name) >= 1, name
    assert (
        'sam3_node_info{detector="",device="cpu",dtype="float32",engine="torch",model="tiny"'
        in (ask(served.url, "/metrics")[1])
    )
    refused = value("sam3_node_requests_rejected_total")
    with open_peer(zmq.DEALER, served.control) as stranger:
        stranger.send(b"nonsense")
        until(lambda: value("sam3_node_requests_rejected_total") > refused, "a refused request is counted")
    assert "transport" not in ask(served.url, "/metrics")[1], "addresses may hold passwords"


def test_a_node_of_a_checkout_that_is_not_installed_has_no_version(
    served: HealthyNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    until(
        lambda: served.send_as() and "sam3_node_info" in ask(served.url, "/metrics")[1], "the node is known"
    )
    monkeypatch.setattr(metadata, "version", find)
    page = MetricsPage(served.node.readings, Settings()).render("")
    assert b'version="not installed"' in page.body


def test_many_who_ask_at_once_get_the_same_page(served: HealthyNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two Prometheus servers may ask in the same moment, and many must not slow the node down."""
    page = MetricsPage(served.node.readings, Settings())
    rendered = 0
    collect = NodeCollector.collect

    def count(collector: NodeCollector) -> Any:
        nonlocal rendered
        rendered += 1
        yield from collect(collector)

    monkeypatch.setattr(NodeCollector, "collect", count)
    monkeypatch.setattr(monitoring, "FRESH_S", 600.0)
    with ThreadPoolExecutor(16) as many:
        found = set(many.map(lambda _: page.render(""), range(50)))
    assert [one.status for one in found] == [200]
    assert rendered == 1


@contextmanager
def prometheus(target: str, folder: Path) -> Iterator[str]:
    """Run a Prometheus that scrapes `target` twice a second. Yield its address."""
    config = folder / "prometheus.yml"
    scrape = {"job_name": "sam3-node", "static_configs": [{"targets": [target]}]}
    times = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    config.write_text(json.dumps({"global": times, "scrape_configs": [scrape]}))  # JSON is YAML, too
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    with subprocess.Popen(
        [*command, "--web.listen-address=127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            address = next(found[1] for line in process.stderr if (found := LISTENING.search(line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            until(lambda: ask(f"http://{address}", "/-/ready")[0] == 200, "Prometheus is ready")
            yield f"http://{address}"
        finally:
            process.kill()


@pytest.mark.verifies(
    "monitoring",
    "Prometheus: `/metrics` and the queries of the dashboard",
    "own package",
    "Prometheus scrapes a node, and answers each query",
    "Grafana",
)
@needs_prometheus
def test_every_query_of_the_dashboard_is_answered(served: HealthyNode, tmp_path: Path) -> None:
    with prometheus(served.url.removeprefix("http://"), tmp_path) as url:

        def query(text: str) -> list[Any]:
            text = text.replace("$instance", ".*").replace("$__rate_interval", "1m")
            status, answer = ask(url, f"/api/v1/query?{urllib.parse.urlencode({'query': text})}")
            assert status == 200, answer
            found: list[Any] = json.loads(answer)["data"]["result"]
            return found

        def are_counted() -> bool:
            """Send frames until Prometheus has scraped their counts twice."""
            served.send_as()
            found = query("rate(sam3_node_frames_stepped_total[1m])")
            return bool(found) and float(found[0]["value"][1]) > 0

        until(are_counted, "two scrapes")
        for text in list_queries():
            name = METRIC.findall(text)[0]
            assert bool(query(text)) == (name not in CPU_NODES_LACK), text
            assert not [row for row in query(text) if row["value"][1] == "NaN"], text
