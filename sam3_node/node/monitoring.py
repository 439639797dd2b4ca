"""Serve probes over HTTP, and the node's figures in the format of Prometheus.

A thread answers GET and bounds connections, bytes and time. Each connection carries one request, and each answer is a
small text. A request for metrics makes them: the loop only counts.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..addresses import is_loopback, is_loopback_header
from ..errors import MissingExtraError, TransportError, find_version, require
from ..files import explain_os_error
from ..resources import Closeable
from ..settings import Settings, read_address
from .health import Health, Histogram, Verdict
from .saved_state import SnapshotFigures
from .spans import FrameSpans as FrameSpans
from .status import NodeStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""Connections that may be open. A further one closes the oldest."""
MAX_CONNECTION_S = 5.0
"""Seconds after which a connection is closed, so that a slow peer holds no thread."""
POLL_S = 0.2
"""Seconds between two looks at the age of connections. `close` takes as long."""
TEXT = "text/plain; charset=utf-8"
"""Content type of probes and errors."""
PREFIX = "sam3_node"
"""Beginning of the name of each metric."""
SHOWN_SECTIONS = ("model", "engine", "tracker", "detector", "health", "group")
"""Sections whose settings are shown. The others have addresses, which may hold passwords, and paths."""
MAX_LABEL_CHARACTERS = 200
"""Characters of the value of a label. The rest is cut off."""
FRESH_S = 0.2
"""Age in seconds up to which a page is sent again, so that many who ask at once cost the loop no more than one."""
CAMERA_REASONS = ("too_old", "clock_ahead", "withheld", "failed")
"""Counts of CameraStats that are reasons of frames_rejected."""


class CameraMetric(NamedTuple):
    """A metric of each camera."""

    kind: Literal["Counter", "Gauge", "Histogram"]
    name: str
    attribute: str
    """of CameraStatus"""
    text: str


CAMERA_METRICS = (
    CameraMetric(
        "Counter", "frames_received", "stats.received", "Frames that arrived or were skipped before."
    ),
    CameraMetric("Counter", "frames_stepped", "stats.stepped", "Frames that the model stepped."),
    CameraMetric(
        "Counter",
        "frames_skipped",
        "stats.skipped",
        "Frames skipped for newer ones, or because of their age.",
    ),
    CameraMetric(
        "Counter",
        "frames_over_budget",
        "stats.over_budget",
        "Stepped frames that took longer than deadline.budget_ms.",
    ),
    CameraMetric(
        "Counter", "objects_turned_away", "turned_away", "Detected objects that found no free slot."
    ),
    CameraMetric(
        "Counter", "objects_recalled", "recalled", "Objects that came back under their ids by their looks."
    ),
    CameraMetric(
        "Counter",
        "stage_failures",
        "stage_failures",
        "Stages beside the masks that failed, so that a frame went on without them.",
    ),
    CameraMetric(
        "Histogram", "frame_age_seconds", "stats.age", "Time from capture to the start of the step."
    ),
    CameraMetric("Histogram", "latency_seconds", "stats.latency", "Time from capture to publication."),
    CameraMetric(
        "Gauge",
        "shed_level",
        "stats.shed_level",
        "What is left out to keep deadline.budget_ms; 0: nothing.",
    ),
    CameraMetric("Gauge", "camera_silent_seconds", "stats.silent_s", "Time since the last frame came."),
    CameraMetric("Gauge", "bank_bytes", "bank_bytes", "Memory of the bank, allocated once."),
    CameraMetric("Gauge", "cache_bytes", "cached_bytes", "Features kept for prompts on past frames."),
)
"""Metrics that each camera has a value of."""


class Page(NamedTuple):
    """An answer: HTTP status, content type and body."""

    status: int
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[str], Page]]
"""Makes the page of each path. The argument is the request's Accept header."""


class HealthServer(Closeable):
    """Serves `pages` at `bind`, HOST:PORT. `url` has the port that was bound. A context manager.

    At MAX_CONNECTIONS a new connection closes the oldest, so that slow peers keep no probe out. Each connection lasts
    MAX_CONNECTION_S at most. Raises SettingsError for a malformed address, TransportError for one that is taken.
    """

    def __init__(self, bind: str, pages: Pages) -> None:
        address = read_address("health.bind", bind, "127.0.0.1:9464")
        remedy = "; stop the process that uses it, or set health.bind"
        with explain_os_error(TransportError, f"cannot bind the health endpoint to {bind}", remedy):
            self._server = _Server(address, pages)
        self.url = address.make_url("http", self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(POLL_S,), name="health", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Close the socket and all connections. Idempotent."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    """Accepts connections, and keeps a list of the open ones."""

    # a node that is started again finds connections of its last run on the port
    allow_reuse_address = True
    # neither the end of the process nor `close` waits for the thread of a slow peer
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], pages: Pages) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self.pages = pages
        # a server for other hosts cannot know by which names they reach it
        self.checks_host = is_loopback(address[0])
        self._opened_s: dict[socket.socket, float] = {}
        self._changing = threading.Lock()
        super().__init__(address, _Handler)

    def get_request(self) -> Any:
        """Accept a connection. Wait a moment if that fails, such as without free descriptors."""
        try:
            return super().get_request()
        except OSError:
            # the connection still waits, so the server's loop would try again at once
            time.sleep(POLL_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread; close the oldest connection if there are too many."""
        with self._changing:
            if len(self._opened_s) >= MAX_CONNECTIONS:
                # a dict keeps the order of insertion: the first is the oldest
                _hang_up(next(iter(self._opened_s)))
                del self._opened_s[next(iter(self._opened_s))]
            self._opened_s[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered."""
        with self._changing:
            # a connection that was hung up is gone from here already
            self._opened_s.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Hang up on connections that are too old. The server's loop calls this at least every POLL_S."""
        oldest_s = time.monotonic() - MAX_CONNECTION_S
        with self._changing:
            for request in [request for request, opened_s in self._opened_s.items() if opened_s < oldest_s]:
                _hang_up(request)
                del self._opened_s[request]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore peers that leave early."""


def _hang_up(request: socket.socket) -> None:
    """End a connection, and with it its thread."""
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    """Answers one GET or HEAD. On loopback it refuses requests for other hosts, which a foreign web page makes."""

    server: _Server
    server_version = "sam3-node"
    # the header Server need not tell every peer which Python runs
    sys_version = ""
    timeout = MAX_CONNECTION_S

    def do_GET(self) -> None:
        """Send a page."""
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        """Send a page's head."""
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: probes come every second."""

    def _answer(self, with_body: bool) -> None:
        page = self._make_page()
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        # an answer of a cache would tell of an earlier moment
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if with_body:
            self.wfile.write(page.body)

    def _make_page(self) -> Page:
        # a page of another site that resolves its name to this host sends that name
        hosts = self.headers.get_all("Host", [])
        # a probe of HTTP/1.0 sends none, but a browser always does
        if self.server.checks_host and hosts and not is_loopback_header(hosts):
            return Page(403, TEXT, b"expected a request for 127.0.0.1, found one for another host\n")
        make = self.server.pages.get(self.path.partition("?")[0])
        if make is None:
            return Page(404, TEXT, f"expected one of {', '.join(self.server.pages)}\n".encode())
        try:
            return make(self.headers.get("Accept", ""))
        except Exception:
            log.exception("health: %s failed", self.path)
            return Page(500, TEXT, b"this page failed in the node; see its log\n")


class Totals(NamedTuple):
    """Counts of the whole node since its start."""

    malformed: int
    """frame messages that were malformed, or of names that are not admitted"""
    not_served: int
    """frames of cameras beyond tracker.max_cameras"""
    requests_rejected: int
    peers_refused: int
    """peers that were refused because of their key"""
    gpu_bytes: int | None
    helpers_ended: int = 0
    """helpers of the node's group, such as a recorder, that have ended for good"""
    helper_restarts: int = 0
    """restarts of helpers that have failed"""
    recorded_bytes: int | None = None
    """bytes that recorders of the node's group have written; None without a recorder"""
    spans_lost: int = 0
    """spans that the collector of monitoring.otlp_endpoint has not taken"""


class Readings(NamedTuple):
    """What probes and metrics read of a node. Any thread may call these."""

    health: Health
    read_status: Callable[[], NodeStatus | None]
    """Returns the newest status; None before the model is loaded. `count_totals` and `read_snapshots` are called after
    that."""
    count_totals: Callable[[], Totals]
    read_snapshots: Callable[[], SnapshotFigures]


def make_pages(readings: Readings, settings: Settings) -> Pages:
    """Return /healthz, /readyz and /metrics of a node. The first two need no other package and take no lock."""
    health = readings.health
    metrics = MetricsPage(readings, settings)
    return {
        "/healthz": lambda _: _make_probe(health.check_alive()),
        "/readyz": lambda _: _make_probe(health.check_ready()),
        "/metrics": metrics.render,
    }


def _make_probe(verdict: Verdict) -> Page:
    body = f"{verdict.reason}\n".encode()
    return Page(200, TEXT, body) if verdict.ok else Page(503, TEXT, body)


class MetricsPage:
    """Renders the metrics of a node, once in FRESH_S for all who ask. It needs prometheus-client."""

    def __init__(self, readings: Readings, settings: Settings) -> None:
        self._collector = NodeCollector(readings, settings)
        self._rendering = threading.Lock()
        self._registry: Any = None
        self._rendered: dict[str, tuple[float, Page]] = {}  # by content type, with the monotonic time

    def render(self, accept: str) -> Page:
        """Return the page, for requests that come together the same. 503 without prometheus-client."""
        try:
            client = require("prometheus_client", "node")
        except MissingExtraError as error:
            return Page(503, TEXT, f"{error}\n".encode())
        encode, content_type = client.exposition.choose_encoder(accept)
        with self._rendering:
            made_s, page = self._rendered.get(content_type, (0.0, None))
            if page is None or time.monotonic() - made_s >= FRESH_S:
                # made here, because prometheus-client may be missing when the node starts
                if self._registry is None:
                    self._registry = client.CollectorRegistry()
                    client.ProcessCollector(registry=self._registry)
                    self._registry.register(self._collector)
                page = Page(200, content_type, encode(self._registry))
                self._rendered[content_type] = (time.monotonic(), page)
            return page


class NodeCollector:
    """Makes metric families of a node's health, status and totals."""

    def __init__(self, readings: Readings, settings: Settings) -> None:
        self._readings = readings
        self._settings = settings

    def describe(self) -> list[Metric]:
        """Return nothing: the registry need not collect when it is made."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield all families."""
        health = self._readings.health
        status = self._readings.read_status()
        yield _make("Gauge", "alive", "1 while the main loop turns.", health.check_alive().ok)
        ready = health.check_ready().ok
        yield _make("Gauge", "ready", "1 while masks were published within health.deadline_s.", ready)
        yield _make("Histogram", "step_seconds", "Duration of a step with publication.", health.step_times)
        text = "Duration of a stage of published frames."
        yield _make("Histogram", "stage_seconds", text, dict(health.stages), "stage")
        yield self._make_settings()
        if status is not None:
            yield _make_info(status.perception, self._settings)
            yield from _collect_totals(self._readings, status)
            for metric in CAMERA_METRICS:
                read = attrgetter(metric.attribute)
                values = {camera: read(of_camera) for camera, of_camera in status.cameras.items()}
                yield _make(metric.kind, metric.name, metric.text, values, "camera")
            tracks = {
                (name, state): count
                for name, camera in status.cameras.items()
                for state, count in camera.tracks.items()
            }
            yield _make("Gauge", "tracks", "Tracked objects by state.", tracks, "camera", "state")

    def _make_settings(self) -> Metric:
        values = {
            (f"{section}.{name}", str(value)[:MAX_LABEL_CHARACTERS]): 1.0
            for section in SHOWN_SECTIONS
            for name, value in getattr(self._settings, section).model_dump(mode="json").items()
            # the cameras of a group have sources, which may be paths or addresses
            if section != "group" or name != "cameras"
        }
        return _make("Gauge", "setting_info", "A setting of the node.", values, "name", "value")


def _make_info(perception: Mapping[str, Any], settings: Settings) -> Metric:
    names = ("node", "model", "detector", "device", "dtype")
    labels = {name: str(perception.get(name) or "")[:MAX_LABEL_CHARACTERS] for name in names}
    labels |= {"engine": settings.engine.kind, "version": find_version("sam3-node") or "not installed"}
    values = {tuple(labels.values()): 1.0}
    return _make("Gauge", "info", "The node, its model and its engine.", values, *labels)


def _collect_totals(readings: Readings, status: NodeStatus) -> Iterator[Metric]:
    totals = readings.count_totals()
    snapshots = readings.read_snapshots()
    rejected = {
        (name, reason): getattr(camera.stats, reason)
        for name, camera in status.cameras.items()
        for reason in CAMERA_REASONS
    }
    rejected |= {("", "malformed"): totals.malformed, ("", "not_served"): totals.not_served}
    text = "Frames that gave no masks, by reason."
    yield _make("Counter", "frames_rejected", text, rejected, "camera", "reason")
    yield _make("Counter", "requests_rejected", "Requests that were refused.", totals.requests_rejected)
    yield _make("Counter", "peers_refused", "Peers refused because of their key.", totals.peers_refused)
    yield _make("Counter", "spans_lost", "Spans that the collector has not taken.", totals.spans_lost)
    yield _make("Counter", "events", "Events that were published.", status.events)
    yield _make("Gauge", "paused", "1 while the node is paused.", status.perception["paused"])
    yield _make("Counter", "snapshots_written", "Snapshots of snapshot.path on disk.", snapshots.written)
    text = "Snapshots that could not be written."
    yield _make("Counter", "snapshots_failed", text, snapshots.failed, "reason")
    text = "Age of the last good snapshot; of the node, before the first."
    yield _make("Gauge", "snapshot_age_seconds", text, snapshots.age_s)
    text = "1 if the snapshot could not be used at the start, so that ids have begun again."
    yield _make("Gauge", "snapshot_refused", text, snapshots.is_refused)
    text = "Hand-overs to other nodes, by outcome."
    yield _make("Counter", "hand_overs", text, snapshots.hand_overs, "outcome")
    text = "1 while another node has this one's work and ids."
    yield _make("Gauge", "handed_over", text, snapshots.is_handed_over)
    text = "Helpers of the group, such as a recorder, that have ended for good."
    yield _make("Gauge", "helpers_ended", text, totals.helpers_ended)
    text = "Restarts of helpers of the group that have failed, such as a recorder on a full disk."
    yield _make("Counter", "helper_restarts", text, totals.helper_restarts)
    text = "Bytes that recorders of the group have written."
    if totals.recorded_bytes is not None:
        yield _make("Counter", "recorded_bytes", text, totals.recorded_bytes)
    if totals.gpu_bytes is not None:
        yield _make("Gauge", "gpu_memory_bytes", "GPU memory that torch holds.", totals.gpu_bytes)


def _make(kind: str, name: str, text: str, values: Any, *labels: str) -> Metric:
    """Return a family of a kind (Gauge, Counter, Histogram) with values by labels, or with one value.

    With several labels, the values have tuples of them as keys. Values None are left out.
    """
    # imported here, because probes have to work without it
    from prometheus_client import core

    family: Metric = getattr(core, f"{kind}MetricFamily")(f"{PREFIX}_{name}", text, labels=labels)
    by_labels = values if labels else {(): values}
    for key, value in by_labels.items():
        labelled = key if isinstance(key, tuple) else (key,)
        if isinstance(value, Histogram):
            family.add_metric(labelled, buckets=value.cumulative(), sum_value=value.sum_s)  # type: ignore[attr-defined]
        elif value is not None:
            family.add_metric(labelled, float(value))  # type: ignore[attr-defined]
    return family
