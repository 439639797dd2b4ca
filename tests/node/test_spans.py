"""Spans of frames, as an OpenTelemetry collector receives them from a node."""

import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sam3_node.errors import MissingExtraError, RequestError
from sam3_node.node import spans as spans_module
from sam3_node.node.spans import FrameSpans
from sam3_node.settings import MonitoringSettings
from sam3_node.transport.control_server import AnsweredRequest
from sam3_node.types import MaskFrame
from tests.support.near_node import NearNode
from tests.support.node_rig import picture, until
from tests.support.refuses import mentions, refuses

AWAY = "http://127.0.0.1:9"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """A collector that decodes by OpenTelemetry's own schema: its address, and the requests that came."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append(service.ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


@pytest.mark.verifies(
    "monitoring",
    "OpenTelemetry: traces over OTLP/HTTP",
    "own package",
    "opentelemetry-sdk sends, a server decodes by OpenTelemetry's schema",
    "a collector; OTLP over gRPC",
)
def test_a_collector_receives_the_stages_of_a_frame(tmp_path: Path, collector: tuple[str, list[Any]]) -> None:
    address, requests = collector
    with NearNode(tmp_path, monitoring=MonitoringSettings(otlp_endpoint=address)) as node:
        masks = node.send()
    parts = [part for request in requests for part in request.resource_spans]
    spans = [span for part in parts for span in part.scope_spans[0].spans]
    about = {x.key: x.value.string_value for x in parts[0].resource.attributes}
    assert (about["service.name"], about["service.instance.id"]) == ("sam3-node", masks.node)
    whole = next(span for span in spans if span.name == "frame" and read(span)["seq"] == masks.seq)
    assert read(whole).items() >= {"camera": masks.camera, "seq": masks.seq, "objects": 0}.items()
    stages = [span for span in spans if span.parent_span_id == whole.span_id]
    run = [name for name in masks.stages_us if name != "pack"]
    assert [span.name for span in stages] == ["receive", "wait", *run, "publish"]
    assert all(a.end_time_unix_nano == b.start_time_unix_nano for a, b in pairwise(stages))
    assert {(read(span)["seq"], span.trace_id) for span in stages} == {(masks.seq, whole.trace_id)}
    assert stages[0].start_time_unix_nano == whole.start_time_unix_nano == masks.capture_ns
    assert stages[-1].end_time_unix_nano == whole.end_time_unix_nano
    for span, name in zip(stages[2:], run, strict=False):
        assert span.end_time_unix_nano - span.start_time_unix_nano == 1000 * masks.stages_us[name]


@pytest.mark.verifies(
    "monitoring",
    "OpenTelemetry: `OTEL_SERVICE_NAME`, address with or without `/v1/traces`",
    "own package",
    "opentelemetry-sdk sends, a server decodes by OpenTelemetry's schema",
    "",
)
def test_the_name_and_the_address_are_as_opentelemetry_specifies(
    tmp_path: Path, collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, requests = collector
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cell-4")
    with NearNode(tmp_path, monitoring=MonitoringSettings(otlp_endpoint=f"{address}/v1/traces")) as node:
        node.send()
    about = {x.key: x.value.string_value for x in requests[0].resource_spans[0].resource.attributes}
    assert about["service.name"] == "cell-4"
    assert about["service.instance.id"]


def test_each_control_request_has_a_span_without_its_arguments(
    tmp_path: Path, collector: tuple[str, list[Any]]
) -> None:
    address, requests = collector
    with NearNode(tmp_path, monitoring=MonitoringSettings(otlp_endpoint=address)) as node:
        begin_ns = time.time_ns()
        node.send()
        node.client.call("status")
        node.client.call("pause")
        for op, args in (
            ("remove_object", {"id": 77}),
            ("add_objet", {}),
            ("segment", {"camera": "secret", "points": [[1, 1]]}),
        ):
            with pytest.raises(RequestError):
                node.client.call(op, **args)
    parts = [part for request in requests for part in request.resource_spans]
    spans = [span for part in parts for span in part.scope_spans[0].spans if span.name == "control"]
    codes = [(read(span)["op"], read(span)["code"]) for span in spans]
    for expected in (("status", "ok"), ("pause", "ok"), ("remove_object", "unknown_object")):
        assert expected in codes
    assert ("segment", "no_camera") in codes
    assert "add_objet" not in {op for op, _ in codes}
    assert "secret" not in str(requests)
    assert {key for span in spans for key in read(span)} <= {"op", "code", "request_id"}
    assert all(begin_ns < s.start_time_unix_nano <= s.end_time_unix_nano < time.time_ns() for s in spans)


def test_a_flood_of_requests_leaves_the_places_of_frames(
    tmp_path: Path, collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, requests = collector
    clock = SimpleNamespace(monotonic=lambda: 7.5, time_ns=time.time_ns)
    monkeypatch.setattr(spans_module, "time", clock)
    with FrameSpans(address, "node") as sender:
        for _ in range(5000):
            sender.record_request(AnsweredRequest("status", None, "ok", 7.0))
    parts = [part for request in requests for part in request.resource_spans]
    sent = [span for part in parts for span in part.scope_spans[0].spans]
    assert len(sent) == spans_module.MAX_REQUESTS_PER_S
    assert {span.end_time_unix_nano - span.start_time_unix_nano for span in sent} == {500_000_000}


def test_a_camera_whose_clock_is_ahead_has_no_span_of_negative_length(
    tmp_path: Path, collector: tuple[str, list[Any]]
) -> None:
    address, requests = collector
    with NearNode(tmp_path, monitoring=MonitoringSettings(otlp_endpoint=address)) as node:

        def find() -> MaskFrame | None:
            node.camera.send(replace(picture(0), capture_ns=time.time_ns() + 400_000_000))
            return node.masks.take(100)

        until(find, "masks")
    spans = [
        span
        for request in requests
        for part in request.resource_spans
        for span in part.scope_spans[0].spans
        if span.name != "control"
    ]
    assert spans
    assert all(span.start_time_unix_nano <= span.end_time_unix_nano for span in spans)
    assert "receive" not in {span.name for span in spans}
    assert all(0 < read(span)["clock_ahead_ms"] <= 400 for span in spans if span.name == "frame")


def read(span: Any) -> dict[str, Any]:
    return {x.key: getattr(x.value, x.value.WhichOneof("value")) for x in span.attributes}


def test_a_collector_that_is_away_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("opentelemetry.sdk")
    with NearNode(tmp_path, monitoring=MonitoringSettings(otlp_endpoint=AWAY)) as node:
        assert node.send().seq < node.send().seq
    # told once, with the reason, and counted at the end
    lines = [record for record in caplog.records if AWAY in record.getMessage()]
    assert [record.levelname for record in lines] == ["WARNING", "WARNING"]
    assert mentions(lines[0].getMessage(), "takes no spans", "monitoring.otlp_endpoint")
    assert mentions(lines[1].getMessage(), "spans were lost")
    assert not any(
        "opentelemetry" in record.name and record.levelname == "ERROR" for record in caplog.records
    )


def test_a_missing_exporter_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with refuses(MissingExtraError, field="otel"):
        FrameSpans(AWAY, "node")
