"""The readers in C++17 and Rust give what the golden files hold, and survive damaged messages."""

import shutil
import struct
import subprocess
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import encode_mask, pack_masks
from tests.support.paths import ROOT
from tests.support.tables import each_row
from tests.support.wire_examples import EXAMPLES, golden

DRIVERS = Path(__file__).parent
READERS = ROOT / "tools" / "readers"
LIBRARY = "-l:libzstd.so.1"
STRICT = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-O1"]
COMMANDS = {
    "c++": [*STRICT, f"-I{READERS}", str(DRIVERS / "driver.cpp")],
    "rust": ["rustc", "--edition", "2021", "-D", "warnings", "-O", str(DRIVERS / "driver.rs")],
}
READABLE = [name for name in EXAMPLES if name.startswith(("masks", "frame"))]


@pytest.fixture(scope="module", params=sorted(COMMANDS))
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    command = COMMANDS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    path = tmp_path_factory.mktemp(request.param.strip("+")) / "driver"
    library = ["-C", f"link-arg={LIBRARY}"] if request.param == "rust" else [LIBRARY]
    done = subprocess.run([*command, *library, "-o", str(path)], capture_output=True, text=True)
    if "libzstd.so.1" in done.stderr and "cannot find" in done.stderr:
        pytest.skip("libzstd is not here")
    assert done.returncode == 0, done.stderr
    return path


def read(reader: Path, messages: Iterable[Sequence[bytes]]) -> list[str]:
    """Return the lines that a reader prints for messages."""
    data = b"".join(
        struct.pack("<I", len(parts)) + b"".join(struct.pack("<I", len(part)) + bytes(part) for part in parts)
        for parts in messages
    )
    printed = subprocess.run([reader], input=data, capture_output=True, check=True).stdout
    return printed.decode(errors="replace").split("\n")[:-1]  # C++ has text unchecked


def expected(value: MaskFrame | Frame) -> list[str]:
    return _masks(value) if isinstance(value, MaskFrame) else _frame(value)


def _masks(value: MaskFrame) -> list[str]:
    epoch = -1 if value.epoch is None else value.epoch
    head = (
        f"masks {value.camera} {value.clock} {value.seq} {value.capture_ns} {value.received_ns} {value.published_ns} "
        f"{value.width}x{value.height} {value.skipped} {epoch} {value.model}"
    )
    return [head, *map(_instance, value.instances)]


def _instance(item: Instance) -> str:
    confidence = -1 if item.confidence is None else item.confidence
    crc = zlib.crc32(item.mask.full().astype(np.uint8).tobytes())
    return (
        f"instance {item.id} {item.label} {item.state} {item.score:.6f} {confidence:.6f} {int(item.doubtful)} "
        f"{item.area} {item.age} {item.frames_since_seen} [{' '.join(map(str, item.box))}] {crc:08x}"
    )


def _frame(value: Frame) -> list[str]:
    lines = [
        f"frame {value.camera} {value.clock} {value.seq} {value.capture_ns} {value.sent_ns} "
        f"{value.width}x{value.height} {value.encoding} {len(value.colour)}"
    ]
    if value.depth is not None:
        depth = value.depth
        lines.append(
            f"depth {depth.width}x{depth.height} {depth.encoding} {depth.scale_m:.6f} {int(depth.aligned)} "
            f"{len(depth.data)}"
        )
    return lines


@pytest.mark.verifies(
    "reader",
    "C++17 and Rust",
    "layout",
    "golden files of wire version 1",
    "big-endian machines",
)
@each_row("name", READABLE)
def test_golden_files_are_read(reader: Path, name: str) -> None:
    assert read(reader, [golden(name)]) == expected(EXAMPLES[name].value)


def shapes() -> list[Mask]:
    random = np.random.default_rng(0)
    full = np.zeros((97, 131), bool)
    full[11:80, 17:101] = random.random((69, 84)) < 0.5
    lone = np.zeros((97, 131), bool)
    lone[96, 130] = True
    return [
        Mask.from_full(pixels) for pixels in (full, lone, np.zeros((97, 131), bool), np.ones((97, 131), bool))
    ]


@pytest.mark.parametrize("encoding", ["bits+zstd", "rle"])
def test_masks_of_all_shapes_are_decoded_in_both_codecs(reader: Path, encoding: str) -> None:
    instances = tuple(
        Instance(number, "thing", 0.5, "tracked", 1, 0, mask) for number, mask in enumerate(shapes(), 1)
    )
    value = MaskFrame("cam0", 3, 4, 131, 97, instances=instances)
    assert read(reader, [pack_masks(value, encoding)]) == expected(value)
    assert encode_mask(instances[0].mask, encoding)["encoding"] == encoding


def test_damaged_messages_are_refused_and_the_next_is_read(reader: Path) -> None:
    whole = {name: golden(name) for name in READABLE}
    random = np.random.default_rng(1)
    messages = []
    for parts in whole.values():
        for _ in range(60):
            body = bytearray(parts[1])
            for place in random.integers(0, len(body), 3):
                body[place] = random.integers(0, 256)
            messages.append([parts[0], bytes(body), *parts[2:]])
        messages += [[parts[0], parts[1][:length], *parts[2:]] for length in range(0, len(parts[1]), 7)]
    lines = read(reader, [*messages, golden("masks-bits")])
    assert sum(line.startswith("error ") for line in lines) > len(messages) / 3
    last = expected(EXAMPLES["masks-bits"].value)
    assert lines[-len(last) :] == last
