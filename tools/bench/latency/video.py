"""Compare frames in H.264 with raw ones and JPEG: bytes, age, CPU time, and what masks lose.

    python -m tools.bench.latency.video [--seconds 20] [--rate 6]

One camera process sends the frames of the bundled recording, scaled, at 30 Hz in each encoding in turn, a second each,
so that other load on the machine slows all. A reader of each is a process of its own. The time runs from the capture
until the reader has the pixels; CPU time is that of both, for each frame. Then nano follows the recording's objects,
each shown by its true box, on the frames as they are and as the video at 640x480 has them.
"""

import argparse
import dataclasses
import multiprocessing
import tempfile
import threading
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import cv2

from sam3_node.bags.native.reader import TABLETOP, RecordingReader
from sam3_node.bags.native.writer import RecordingWriter
from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.live_source import Pacer
from sam3_node.cameras.publish import VideoStreams, frame_from
from sam3_node.cameras.video_encoder import VideoEncoder
from sam3_node.perception.loading import load_model
from sam3_node.settings import CameraSettings, ModelSettings, TrackerSettings
from sam3_node.transport import FramePublisher, FrameSubscriber
from sam3_node.types import Image
from sam3_node.wire import decode_image
from tools.bench.common import RATIO, RUNS, Figures, make_parser, percentile
from tools.bench.processes import free_endpoints, spawned
from tools.vos.evaluate import evaluate
from tools.vos.followers import Setting, parse_settings
from tools.vos.report import all_settings
from tools.vos.sequences import open_sequences

FPS = 30
BLOCK = 30  # frames before the camera turns to the other encoding
ENCODINGS = ("h264", "jpeg", "bgr8")
SIZES = ((640, 480), (1920, 1080))
PICTURES = 60
SETTLE_S = 6.0  # until all readers are connected, and the rate is that of the settings


class Times(NamedTuple):
    """What one process has measured since it was asked before."""

    ages_ms: list[float]
    cpu_s: float
    frames: int
    bytes_sent: int = 0


class Sender:
    """Sends pictures in one encoding."""

    def __init__(self, endpoint: str, encoding: str, rate_mbps: float) -> None:
        self._settings = CameraSettings.model_validate(
            {"name": "bench", "encoding": encoding, "bit_rate_mbps": rate_mbps}
        )
        self._publisher = FramePublisher(endpoint)
        self._videos = VideoStreams(self._publisher, self._settings) if encoding == "h264" else None
        self._seq = 0
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.cpu_s = 0.0
        self.frames = 0
        self.bytes_sent = 0

    def send(self, picture: Image) -> None:
        """Encode and send one picture."""
        start_s = time.process_time()
        image = CapturedImage(picture, time.time_ns())
        frame = frame_from(image, self._seq, self._settings, videos=self._videos)
        self._publisher.send(frame)
        self._seq += 1
        self.cpu_s += time.process_time() - start_s
        self.frames += 1
        self.bytes_sent += memoryview(frame.colour).nbytes


def read_pictures(size: tuple[int, int]) -> list[Image]:
    """Return the first pictures of the bundled recording, forward and backward, so that they can be repeated."""
    frames = list(RecordingReader([TABLETOP]).frames())[:PICTURES]
    pictures = [cv2.resize(decode_image(frame), size, interpolation=cv2.INTER_CUBIC) for frame in frames]
    return pictures + pictures[::-1]


def run_camera(endpoints: list[str], size: tuple[int, int], rate_mbps: float, asked: Connection) -> None:
    """Send pictures in each encoding in turn; answer with the CPU time, frames and bytes of each."""
    pictures = read_pictures(size)
    pacer = Pacer(FPS, threading.Event())
    senders = [
        Sender(endpoint, encoding, rate_mbps) for endpoint, encoding in zip(endpoints, ENCODINGS, strict=True)
    ]
    number = 0
    while True:
        sender = senders[number // BLOCK % len(senders)]
        for _ in range(BLOCK):
            pacer.wait()
            sender.send(pictures[number % len(pictures)])
            number += 1
        if asked.poll():
            asked.recv()
            asked.send([Times([], one.cpu_s, one.frames, one.bytes_sent) for one in senders])
            for one in senders:
                one.reset()


def run_reader(endpoint: str, asked: Connection) -> None:
    """Take and decode frames; answer with their ages and the CPU time."""
    with FrameSubscriber([endpoint]) as subscriber:
        ages_ms: list[float] = []
        start_s = time.process_time()
        while True:
            received = subscriber.take(100)
            if received is not None:
                decode_image(received.frame)
                ages_ms.append((time.time_ns() - received.frame.capture_ns) / 1e6)
            if asked.poll():
                asked.recv()
                asked.send(Times(ages_ms, time.process_time() - start_s, len(ages_ms)))
                ages_ms = []
                start_s = time.process_time()


class Run(NamedTuple):
    """The results of one run and one encoding."""

    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """of camera and reader, for each frame"""
    mbps: float


def measure(size: tuple[int, int], args: argparse.Namespace) -> list[dict[str, Run]]:
    """Start all processes, and return the results of each run by encoding."""
    endpoints = free_endpoints(len(ENCODINGS))
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as running:
        ends = []
        camera, theirs = spawn.Pipe()
        running.enter_context(spawned(run_camera, endpoints, size, args.rate, theirs))
        for endpoint in endpoints:
            ours, theirs = spawn.Pipe()
            running.enter_context(spawned(run_reader, endpoint, theirs))
            ends.append(ours)

        def collect() -> tuple[list[Times], list[Times]]:
            for end in (camera, *ends):
                end.send(True)
            return camera.recv(), [end.recv() for end in ends]

        collect()
        time.sleep(SETTLE_S)
        collect()
        results = []
        for _ in range(args.runs):
            time.sleep(args.seconds)
            results.append(dict(zip(ENCODINGS, map(summarise, *collect()), strict=True)))
        return results


def summarise(sent: Times, taken: Times) -> Run:
    """Return ages, CPU time of each frame, and the rate that the frames have at FPS."""
    # each by its own count: the camera answers between two blocks, a reader within one
    cpu_s = sum(times.cpu_s / max(1, times.frames) for times in (sent, taken))
    mbps = 8e-6 * FPS * sent.bytes_sent / max(1, sent.frames)
    return Run(percentile(taken.ages_ms, 0.5), percentile(taken.ages_ms, 0.99), 1e3 * cpu_s, mbps)


def report(results: list[dict[str, Run]], size: tuple[int, int], figures: Figures) -> None:
    """Keep the values of all encodings, and their ratios to JPEG."""
    what = f"{size[0]}x{size[1]} at {FPS} Hz"
    for name, text, unit in (
        ("mbps", "rate", "Mbit/s"),
        ("p50_ms", "capture to pixels, p50", "ms"),
        ("p99_ms", "capture to pixels, p99", "ms"),
        ("cpu_ms", "CPU time of camera and reader for each frame", "ms"),
    ):
        values = {way: [getattr(result[way], name) for result in results] for way in ENCODINGS}
        ratios = [ours / theirs for ours, theirs in zip(values["h264"], values["jpeg"], strict=True)]
        figures.add(f"{what}: {text}, h264 / jpeg", ratios, RATIO)
        for way, each in values.items():
            figures.add(f"{what}: {text}, {way}", each, unit)


def write_video(path: Path, rate_mbps: float) -> None:
    """Write the bundled recording with its colour as a video."""
    reader = RecordingReader([TABLETOP])
    with RecordingWriter(path) as writer:
        encoder: VideoEncoder | None = None
        for frame in reader.frames():
            encoder = encoder or VideoEncoder(frame.width, frame.height, 1e6 * rate_mbps, FPS)
            packet, _ = encoder.encode(decode_image(frame), frame.capture_ns, wants_key=False)
            writer.write_frame(dataclasses.replace(frame, encoding="h264", colour=packet), frame.capture_ns)
        for truth in reader.truth():
            writer.write_truth(truth)


def score(path: Path) -> float:
    """Return mean J of nano on a recording, each object shown by its true box."""
    settings = parse_settings("default", Setting(prompt="box"))
    models = {settings[0].model: load_model(ModelSettings(), TrackerSettings())}
    [sequence] = open_sequences(path, [], 0, 1)
    result = evaluate(sequence, settings, models, lambda *_: None)
    [means] = all_settings({settings[0].name: {sequence.name: result[0]}}).values()
    return float(means["J"])


def main() -> None:
    parser = make_parser(__doc__, RUNS, seconds=20.0)
    parser.add_argument("--rate", type=float, default=6.0, help="rate of the video in Mbit/s")
    args = parser.parse_args()
    figures = Figures("latency.video")
    for size in SIZES:
        report(measure(size, args), size, figures)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mcap"
        write_video(path, args.rate)
        for name, clip in (("as recorded", TABLETOP), ("as h264", path)):
            figures.add(f"bundled recording, nano by boxes, mean J, {name}", score(clip), "J")
    figures.write(args.json)


if __name__ == "__main__":
    main()
