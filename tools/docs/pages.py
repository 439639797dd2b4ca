"""Fill the generated parts of the pages: settings, layers, hex examples, and what the other generators make.

A part stands between `<!-- generated: NAME -->` and `<!-- /generated: NAME -->`.
"""

import ast
import json
import re
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgpack

from sam3_node.gpu_memory import estimate_gpu_gb, estimate_groups_gpu_gb
from sam3_node.settings import Option, Settings, options

from .bounds import bounds_table
from .command_line import command_reference
from .compatibility import compatibility_table
from .errors import error_table
from .fields import instance_table, mask_frame_table, wire_instance_table
from .operations import operation_table, place_table, reply_table
from .ros import left_out_table
from .tables import code, output_table, table
from .wire import masks_table

ROOT = Path(__file__).resolve().parents[2]
_TEST = ROOT / "tests" / "test_layers.py"
_GOLDEN = ROOT / "tests" / "data" / "wire"
_COLUMN = 32
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- /generated: \2 -->)", re.DOTALL)


def setting_table() -> str:
    """Return links to the sections of the settings, and a table for each: name, default and meaning."""
    parts = ["Sections: " + ", ".join(f"[{section}](#{section})" for section in Settings.model_fields) + "."]
    for section, fields in groupby(options(), lambda option: option.name.split(".")[0]):
        rows = [[code(field.name), code(field.default), _describe(field)] for field in fields]
        parts.append(f"## {section}\n\n" + table(["setting", "default", "meaning"], rows))
    return "\n\n".join(parts)


def _describe(option: Option) -> str:
    choices = ", ".join(map(code, option.choices))
    return f"{option.help} One of {choices}." if choices else option.help


GPUS = (
    ("T4", 16, "float16"),
    ("RTX 4070", 12, "bfloat16, FP8"),
    ("RTX 4090", 24, "bfloat16, FP8"),
    ("RTX 5090", 32, "bfloat16, FP8"),
    ("L4", 24, "bfloat16, FP8"),
    ("A10G", 24, "bfloat16"),
    ("A100", 40, "bfloat16"),
    ("H100", 80, "bfloat16, FP8"),
    ("Jetson AGX Orin", 64, "bfloat16; memory shared with the CPU"),
    ("Jetson Thor", 128, "bfloat16, FP8; memory shared with the CPU"),
)
"""Name, memory in GB, and arithmetic."""
USABLE = 0.85  # of a GPU's memory: gaps and other processes take the rest


def gpu_table(estimate: Callable[[int, int, int], float] = estimate_gpu_gb) -> str:
    """Return the estimated number of objects that SAM 3 tracks on each GPU, of 256 at most."""

    def count(memory_gb: int, cameras: int, bank_size: int) -> str:
        needed_gb = (estimate(objects, bank_size, cameras) for objects in range(1, 257))
        return str(sum(gb < USABLE * memory_gb for gb in needed_gb))

    cases = ((1, 7), (4, 7), (4, 60))
    header = (f"{cameras} x objects, bank_size {bank_size}" for cameras, bank_size in cases)
    rows = (
        (name, str(memory_gb), *(count(memory_gb, *case) for case in cases), arithmetic)
        for name, memory_gb, arithmetic in GPUS
    )
    return table(("GPU", "memory, GB", *header, "arithmetic"), rows)


def read_layers() -> tuple[frozenset[str], ...]:
    """Return the layers from the bottom up. Raises LookupError if the test has no LAYERS."""
    for node in ast.parse(_TEST.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return tuple(frozenset(units) for units in ast.literal_eval(node.value))
    raise LookupError(f"{_TEST}: expected LAYERS, found none")


def layer_diagram() -> str:
    """Return the layers as a text diagram, the highest first."""
    lines = ["   ".join(sorted(units)) for units in reversed(read_layers())]
    width = max(map(len, lines))
    rule = "+" + "-" * (width + 2) + "+"
    body = f"\n{rule}\n".join(f"| {line.center(width)} |" for line in lines)
    return f"```text\n{rule}\n{body}\n{rule}\n```"


def frame_hex() -> str:
    """Return the beginning of the shortest frame header, with its meaning."""
    header = _read_parts("frame-jpeg")[1]
    groups, meaning = _explain(header, 3)
    return f"    {groups}  …\n    {{{meaning}, …"


def bits_hex() -> str:
    """Return the bytes of the example mask in bits+zstd, with their meaning."""
    data = _read_mask("masks-bits")
    return _lines(
        (data[:4].hex(" "), "zstd's magic"),
        (data[4:6].hex(" "), f"one segment; its content is {data[5]} bytes"),
        (data[6:9].hex(" "), f"last block, stored as it is, {len(data) - 9} bytes"),
        (data[9:].hex(" "), "the bits"),
    )


def rle_hex() -> str:
    """Return the counts of the example mask in rle, their differences and their bytes."""
    data = _read_mask("masks-rle")
    numbers = _decode_numbers(data)
    counts: list[int] = []
    for index, number in enumerate(numbers):
        counts.append(number + counts[index - 2] if index > 2 else number)
    meaning = f"counts: {counts[0]} zeros, {counts[1]} one, …; the sum is {sum(counts)}"
    return _lines(
        (" ".join(map(str, counts)), meaning),
        (" ".join(map(str, numbers)), "from the fourth on: minus the count two before"),
        (data.hex(" "), json.dumps(data.decode())),
    )


def request_hex() -> str:
    """Return the bytes of the status request, with their meaning."""
    (request,) = _read_parts("request-status")
    groups, meaning = _explain(request)
    return f"    {groups}\n    {{{meaning}}}"


def _explain(data: bytes, count: int | None = None) -> tuple[str, str]:
    """Return the bytes of a map's first entries, key by key and value by value, and what they say."""
    items = list(msgpack.unpackb(data).items())[:count]
    groups = [data[:1], *(msgpack.packb(value) for item in items for value in item)]
    assert data.startswith(b"".join(groups))
    meaning = ", ".join(f"{key}: {json.dumps(value)}" for key, value in items)
    return " ".join(group.hex() for group in groups), meaning


def _read_parts(name: str) -> list[bytes]:
    parts = json.loads((_GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["parts"]
    return [bytes.fromhex(part) for part in parts]


def _read_mask(name: str) -> bytes:
    instance: dict[str, Any] = msgpack.unpackb(_read_parts(name)[1])["instances"][0]
    return bytes(instance["mask"]["data"])


def _decode_numbers(data: bytes) -> list[int]:
    numbers = []
    value = 0
    shift = 0
    for byte in data:
        group = byte - 48
        value |= (group & 0x1F) << shift
        shift += 5
        if not group & 0x20:
            numbers.append(value - (1 << shift) if group & 0x10 else value)
            value = 0
            shift = 0
    return numbers


def _lines(*rows: tuple[str, str]) -> str:
    return "\n".join(f"    {left.ljust(_COLUMN)}{right}" for left, right in rows)


PARTS: dict[str, Callable[[], str]] = {
    "settings": setting_table,
    "gpu-memory": gpu_table,
    "gpu-memory-groups": partial(gpu_table, estimate_groups_gpu_gb),
    "errors": error_table,
    "operations": operation_table,
    "places": place_table,
    "replies": reply_table,
    "outputs": output_table,
    "bounds": bounds_table,
    "masks-message": masks_table,
    "mask-frame": mask_frame_table,
    "instance": instance_table,
    "wire-instance": wire_instance_table,
    "layers": layer_diagram,
    "cli": command_reference,
    "compatibility": compatibility_table,
    "ros2-left-out": left_out_table,
    "hex-frame": frame_hex,
    "hex-bits": bits_hex,
    "hex-rle": rle_hex,
    "hex-request": request_hex,
}


def generated_names(text: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return [part[2] for part in _PART.finditer(text)]


def fill(text: str) -> str:
    """Return the page with its generated parts made anew. Raises KeyError for a part without a generator."""
    return _PART.sub(lambda part: f"{part[1]}{PARTS[part[2]]()}\n{part[4]}", text)


def outdated() -> dict[Path, str]:
    """Return the new text of each page of docs/ whose generated parts differ from the code."""
    pages = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
    filled = {path: fill(text) for path, text in pages.items()}
    return {path: text for path, text in filled.items() if text != pages[path]}
