"""Send spans of published frames and of control requests to an OpenTelemetry collector."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import require
from ..resources import Closeable
from ..transport import ReceivedFrame
from ..transport.control_server import AnsweredRequest
from ..types import MaskFrame

OTEL = "otel"
"""The extra of this package that installs the SDK."""
EXPORT_S = 2.0
"""Seconds after which an export ends without an answer of the collector, also the last one at the node's end."""
TRACES_PATH = "/v1/traces"
"""Path of traces at a collector, behind its base address."""
MAX_REQUESTS_PER_S = 100
"""Requests that get a span in a second. A flood of them would displace the spans of frames in the queue."""
MAX_REASON_CHARACTERS = 300
"""Characters of the exporter's words that reach the log."""

log = logging.getLogger(__name__)


class TracedSpan(NamedTuple):
    """A part of the time from a frame's capture to its publication."""

    name: str
    begin_ns: int
    """Unix time"""
    end_ns: int


class _CountedExporter:
    """An exporter that counts lost spans, and says once that the collector is away, and once that it is back.

    The exporter of OpenTelemetry logs each failed batch, one every few seconds. Its first line about a batch is the
    reason here.
    """

    def __init__(self, exporter: Any, url: str, logger: str) -> None:
        self.lost = 0
        self._exporter = exporter
        self._url = url
        self._is_away = False
        self._reason = ""
        self._logger = logging.getLogger(logger)
        self._logger.addFilter(self._keep_reason)

    def export(self, spans: Sequence[Any]) -> Any:
        """Send a batch."""
        self._reason = ""
        result = self._exporter.export(spans)
        if result.name == "SUCCESS":
            if self._is_away:
                log.info("the collector at %s takes spans again; %d were lost", self._url, self.lost)
            self._is_away = False
            return result
        self.lost += len(spans)
        if not self._is_away:
            log.warning(
                "the collector at %s takes no spans (%s): they are lost until it does; frames go on. Start it, or "
                "correct monitoring.otlp_endpoint",
                self._url,
                self._reason or "no reason given",
            )
        self._is_away = True
        return result

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing waits here."""
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self) -> None:
        """Close the exporter."""
        self._exporter.shutdown()

    def close(self) -> None:
        """Say how many spans were lost, if any, and let the exporter log again."""
        self._logger.removeFilter(self._keep_reason)
        if self.lost:
            log.warning(
                "%d spans were lost, because the collector at %s has not taken them", self.lost, self._url
            )

    def _keep_reason(self, record: logging.LogRecord) -> bool:
        """Keep the exporter's first line about a batch as the reason, and log none."""
        # it may quote the collector, and a terminal would obey some characters
        self._reason = self._reason or ascii(record.getMessage()[:MAX_REASON_CHARACTERS])[1:-1]
        return False


class FrameSpans(Closeable):
    """Sends a span of each published frame, with one of each stage in it, and of each control request to a collector.

    A thread sends them in batches over OTLP/HTTP. While the collector is away, spans wait in a bounded queue, and later
    ones are lost. The OTEL_* variables of the SDK apply, but for its credential providers. Raises MissingExtraError
    without the extra `otel`.
    """

    def __init__(self, endpoint: str, node: str) -> None:
        sdk = require("opentelemetry.sdk.trace", OTEL)
        export = require("opentelemetry.sdk.trace.export", OTEL)
        otlp = require("opentelemetry.exporter.otlp.proto.http.trace_exporter", OTEL)
        resources = require("opentelemetry.sdk.resources", OTEL)
        # what OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES name has precedence, as OpenTelemetry specifies
        named = resources.OTELResourceDetector().detect().attributes
        own = {"service.name": "sam3-node", "service.instance.id": node}
        about = resources.Resource.create({key: value for key, value in own.items() if key not in named})
        # `close` shuts it down, within a limit of time
        self._provider = sdk.TracerProvider(resource=about, shutdown_on_exit=False)
        # after `require`, because it imports what the exporter does
        from .collector import CollectorSession

        # the whole address, as some tools want it, is taken as it is
        url = endpoint.rstrip("/")
        if not url.endswith(TRACES_PATH):
            url += TRACES_PATH
        self._exporter = otlp.OTLPSpanExporter(url, timeout=EXPORT_S, session=CollectorSession(EXPORT_S))
        self._counted = _CountedExporter(self._exporter, url, otlp.__name__)
        self._provider.add_span_processor(export.BatchSpanProcessor(self._counted))
        self._tracer = self._provider.get_tracer("sam3_node")
        self._within = require("opentelemetry.trace", OTEL).set_span_in_context
        # requests are answered by two threads
        self._counting = threading.Lock()
        self._second = 0
        self._requests = 0  # in this second

    @property
    def lost(self) -> int:
        """Number of spans that the collector has not taken."""
        return self._counted.lost

    def record(self, masks: MaskFrame, received: ReceivedFrame) -> None:
        """Send the spans of published masks.

        The frame's span begins with its capture, or with its arrival if the camera's clock is not Unix time, or is
        ahead of the node's; then `clock_ahead_ms` says by how much at least. Stages have durations alone: their spans
        follow one another, and end where publication begins.
        """
        end_ns = time.time_ns()
        frame = received.frame
        attributes = {"camera": masks.camera, "seq": masks.seq, "epoch": masks.epoch}
        # the packing of a message is measured after it was sent: "pack" is that of the message before
        stages = [(name, 1000 * us) for name, us in masks.stages_us.items() if name != "pack"]
        begin_ns = masks.published_ns - sum(duration_ns for _, duration_ns in stages)
        spans = [TracedSpan("wait", received.received_ns, begin_ns)]
        about: dict[str, float] = {"objects": len(masks.instances), "skipped": received.skipped}
        ahead_ns = frame.capture_ns - received.received_ns
        if frame.clock == "system" and ahead_ns > 0:
            about["clock_ahead_ms"] = ahead_ns / 1e6
        elif frame.clock == "system":
            spans.insert(0, TracedSpan("receive", frame.capture_ns, received.received_ns))
        for name, duration_ns in stages:
            spans.append(TracedSpan(name, begin_ns, begin_ns + duration_ns))
            begin_ns += duration_ns
        spans.append(TracedSpan("publish", masks.published_ns, end_ns))
        whole = self._tracer.start_span("frame", start_time=spans[0].begin_ns, attributes=attributes | about)
        context = self._within(whole)
        for span in spans:
            begun = self._tracer.start_span(
                span.name, context, start_time=span.begin_ns, attributes=attributes
            )
            begun.end(span.end_ns)
        whole.end(end_ns)

    def record_request(self, answered: AnsweredRequest) -> None:
        """Send the span of a control request, from its arrival to its reply, without its arguments.

        Of more than MAX_REQUESTS_PER_S, the others get none. Any thread may call it.
        """
        end_ns = time.time_ns()
        now_s = time.monotonic()
        with self._counting:
            if int(now_s) != self._second:
                self._second = int(now_s)
                self._requests = 0
            self._requests += 1
            if self._requests > MAX_REQUESTS_PER_S:
                return
        attributes = {"op": answered.op, "code": answered.code}
        if answered.request_id is not None:
            attributes["request_id"] = answered.request_id
        begin_ns = end_ns - round(1e9 * (now_s - answered.arrived_s))
        self._tracer.start_span("control", start_time=begin_ns, attributes=attributes).end(end_ns)

    def close(self) -> None:
        """Send what waits, for EXPORT_S at most. Spans beyond that are lost."""
        # `shutdown` takes no limit of time, and a collector that is away must not delay the node's end
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(EXPORT_S)
        if ending.is_alive():
            # this ends the request in progress and refuses waiting ones, so the SDK's threads end at once
            self._exporter.shutdown()
            ending.join(EXPORT_S)
        self._counted.close()
