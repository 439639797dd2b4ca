"""Checks the documentation: commands parse, examples run, links resolve, generated parts equal the code."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgpack
import numpy as np
import pytest

from sam3_node.bags import RecordingReader, RecordingWriter
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.errors import NodeRestarted
from sam3_node.processes import supervisor
from sam3_node.schema.operations import OPERATIONS
from sam3_node.settings import Settings, load_settings
from sam3_node.types import Instance, MaskFrame
from sam3_node.wire import decode_mask, pack_masks
from sam3_node.wire.messages import MASKS
from tests.support.command_line import command_parser
from tests.support.node_rig import Rig
from tests.support.pages import Code, block_with, blocks, shown
from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.processes import ForkedProcess
from tests.support.tables import each_row
from tests.support.wire_examples import golden
from tools.docs.command_line import commands
from tools.docs.errors import ADVICE, error_classes
from tools.docs.fields import list_members
from tools.docs.operations import WORDS
from tools.docs.pages import PARTS, generated_names, outdated
from tools.docs.wire import MASKS_WORDS

MAX_README_LINES = 120
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
MANUAL = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
"""The pages that are checked in full; of the others only links and paths are."""
ALL = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") or part in ("out", "build") for part in path.relative_to(ROOT).parts)
]
COMMANDS = [words[1:] for words, _ in commands(command_parser())]
SETTINGS_SECTIONS = tuple(Settings.model_fields)
FOLDERS = "calibration|docs|examples|launch|sam3_node|tests|tools|training"
EXAMPLES = {
    "README.md": {"calibration/wrist.toml"},
    "three-d.md": {"calibration/overhead.toml", "calibration/wrist.toml"},
}
"""Paths that a page names though they do not exist: files to write."""


def python_blocks() -> list[Code]:
    return [block for path in ALL for block in blocks(path) if block.language == "python"]


def command_lines() -> list[tuple[str, str]]:
    """Return (page, line) of each command in blocks, and of each that is inline code."""
    names = re.compile(r"^(?:sam3-node|launch/start|make|python -m|pytest|\.venv/bin/sam3-node)(?: |$)")
    lines = []
    for path in MANUAL:
        for block in blocks(path):
            if block.language in ("", "sh"):
                lines += [(path.name, line) for line in block.text.replace("\\\n", " ").splitlines()]
        prose = re.sub(r"```.*?```", "", shown(path), flags=re.DOTALL)
        lines += [(path.name, " ".join(code.split())) for code in re.findall(r"`([^`]+)`", prose)]
    return sorted({(page, line) for page, line in lines if names.match(line)})


def slugs(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def hex_digits(text: str) -> str:
    return re.sub(r"\s", "", text)


def run(code: str) -> str:
    """Run Python code in a process of its own; return what it prints."""
    process = ForkedProcess(execute, [code])
    with process.stdout:
        printed = process.stdout.read()
    assert process.wait(PATIENCE_S) == 0, printed
    return printed


def execute(code: str) -> None:
    """Run code as a program: the main function of a process."""
    exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@each_row(("page", "line"), command_lines())
def test_every_command_is_understood(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    check = {
        "launch/start": check_profile,
        "make": check_targets,
        "python": check_module,
        "pytest": check_tests,
    }.get(words[0], check_command)
    check(words[1:])


def check_command(words: list[str]) -> None:
    """Parse a command; of one that is only mentioned, check that it exists."""
    mentioned = [word for word in words if word not in ("--help", "COMMAND", "…")]
    if any(known[: len(mentioned)] == tuple(mentioned) for known in COMMANDS):
        return
    assert command_parser().parse_args([word for word in words if not word.startswith("FILE")]).run


def check_profile(words: list[str]) -> None:
    if not words:
        return
    profile = ROOT / words[0]
    assert supervisor.list_processes(load_settings(profile), profile)


def check_targets(words: list[str]) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {word for word in words if "=" not in word} <= targets


def check_module(words: list[str]) -> None:
    assert words[0] == "-m"
    found = importlib.util.find_spec(words[1])
    assert found is not None, words[1]
    if found.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{words[1]}.__main__") is not None


def check_tests(words: list[str]) -> None:
    named = [word for word in words if word.startswith(("tests/", "training/"))]
    assert named
    assert not [word for word in named if not (ROOT / word).exists()]


@each_row("path", ALL, ids=str)
def test_links_lead_somewhere(path: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", shown(path)):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.exists() or (anchor and anchor not in slugs(page)):
            broken.append(target)
    assert not broken


@each_row("path", ALL, ids=str)
def test_every_path_exists(path: Path) -> None:
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "", shown(path))
    named = set(re.findall(rf"(?<![\w/.-])(?:{FOLDERS})/[\w./-]*\w", text))
    places = (ROOT, path.parent, ROOT / "sam3_node")
    assert not [
        name
        for name in sorted(named)
        if "NAME" not in name and name not in EXAMPLES.get(path.name, ())
        if not any((place / name).exists() for place in places)
    ]


def test_modules_in_the_design_exist() -> None:
    """Names such as `perception.pipeline`, and names in a table row that continue the first, such as `.registry`."""
    text = shown(ROOT / "docs" / "design.md")
    missing = []
    for row in text.splitlines():
        package = ""
        for name in re.findall(r"`((?:[a-z]\w*)?(?:\.[a-z]\w*)+)`", row):
            places = [ROOT / "sam3_node" / part.replace(".", "/") for part in (name, f"{package}{name}")]
            if name.split(".")[0] in SETTINGS_SECTIONS or name.endswith(".json"):
                continue
            if not any(place.is_dir() or place.with_suffix(".py").exists() for place in places):
                missing.append(name)
            package = name.split(".")[0] or package
    assert not missing


TOUR = re.findall(r"`([\w/]+\.py)::([\w.]+)`", shown(ROOT / "docs" / "tour.md"))


@each_row(("path", "name"), TOUR)
def test_a_stop_of_the_tour_exists(path: str, name: str) -> None:
    body = ast.parse((ROOT / path).read_text()).body
    for part in name.split("."):
        defined = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert part in defined, f"{path} does not define {name}"
        body = defined[part].body


def test_the_tour_has_twelve_stops() -> None:
    stops = re.findall(r"^## (\d+)\.", shown(ROOT / "docs" / "tour.md"), flags=re.MULTILINE)
    assert stops == [str(number) for number in range(1, 13)]


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_the_site_leads_to_every_page() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (*MANUAL, ROOT / "SECURITY.md")}
    assert set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) == pages


def test_the_pictures_are_small() -> None:
    sizes = {path: path.stat().st_size for path in (ROOT / "docs" / "images").iterdir() if path.is_file()}
    assert sizes
    assert not [
        path for path, size in sizes.items() if size > (1_500_000 if path.suffix == ".gif" else 150_000)
    ]


def test_generated_parts_are_up_to_date() -> None:
    assert not [path.name for path in outdated()], "run python -m tools.docs"


def test_every_generator_has_its_place() -> None:
    names = [name for path in PAGES for name in generated_names(path.read_text(encoding="utf-8"))]
    assert sorted(names) == sorted(PARTS)


def test_every_operation_and_every_error_is_described() -> None:
    assert WORDS.keys() <= OPERATIONS.keys()
    assert all(kind.__doc__ for kind in OPERATIONS.values())
    assert set(ADVICE) == {kind.__name__ for kind in error_classes()}


def test_the_hex_is_that_of_the_golden_files() -> None:
    page = shown(ROOT / "docs" / "wire-v1.md")
    text = hex_digits(page)
    bits, rle = (msgpack.unpackb(golden(f"masks-{name}")[1])["instances"] for name in ("bits", "rle"))
    lines = re.findall(r"^    ([0-9a-f]{2}(?: [0-9a-f]{2})*)    ", page, flags=re.MULTILINE)
    assert bits[0]["mask"]["data"].hex() in hex_digits("".join(lines))
    for data in (rle[0]["mask"]["data"], rle[2]["mask"]["data"], golden("request-status")[0]):
        assert data.hex() in text
    start = "8aa17601a46b696e64a56672616d65"
    assert start in text
    assert golden("frame-jpeg")[1].hex().startswith(start)


@each_row("block", python_blocks(), ids=str)
def test_python_examples_compile(block: Code) -> None:
    assert ast.parse(block.text).body


def test_the_reader_without_this_package_decodes_the_golden_masks() -> None:
    names: dict[str, Any] = {}
    exec(block_with("docs/wire-v1.md", "def decode_bits"), names)
    for instance in msgpack.unpackb(golden("masks-bits")[1])["instances"]:
        assert np.array_equal(names["decode_bits"](instance["mask"]), decode_mask(instance["mask"]).full())


def test_the_tracker_example_runs() -> None:
    assert run(block_with("docs/python-api.md", "load_tracker(")).startswith("[1] (1, 64, 64)")


def test_the_recording_example_runs() -> None:
    pytest.importorskip("mcap")
    bag, clip = run(block_with("docs/python-api.md", "LabelledClip.load(")).splitlines()
    assert bag == "('tabletop',) 224 640 jpeg None"
    assert clip.startswith("225 15.0")


def test_the_example_of_a_recording_with_masks_runs(tmp_path: Path) -> None:
    pytest.importorskip("mcap")
    reader = RecordingReader([TABLETOP])
    with RecordingWriter(tmp_path / "pick.mcap") as writer:
        # the node skipped the last frame
        for frame, masks in zip(islice(reader.frames(), 3), [*islice(reader.truth(), 2), None], strict=True):
            writer.write_frame(frame, frame.capture_ns)
            if masks is not None:
                writer.write_masks(pack_masks(masks, "rle")[1], masks, frame.capture_ns)
    example = block_with("docs/python-api.md", "read_masks(").replace(
        '"pick.mcap"', repr(f"{tmp_path}/pick.mcap")
    )
    lines = run(example).splitlines()
    assert len(lines) == 10
    assert re.fullmatch(r"0 1 red mug \[.*\] \d\.\d\d m", lines[0])


def test_every_field_of_masks_is_in_the_tables() -> None:
    page = shown(ROOT / "docs" / "python-api.md")
    for kind in (MaskFrame, Instance):
        assert {member.name for member in list_members(kind)} >= {part.name for part in fields(kind)}
        assert not [part.name for part in fields(kind) if f"| `{part.name}` |" not in page]
    assert set(MASKS.names) >= MASKS_WORDS.keys()


def test_the_restart_example_adds_its_object_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Node:
        """A node that restarts once, and then ends."""

        added: ClassVar[list[int]] = []

        def add_object(self, box: Any, label: str) -> Any:
            self.added.append(len(self.added) + 1)
            return SimpleNamespace(id=self.added[-1])

        def __iter__(self) -> Iterator[Any]:
            instance = SimpleNamespace(id=self.added[-1], box=(1, 2, 3, 4))
            yield SimpleNamespace(seq=7, instances=[instance])
            if len(self.added) == 2:
                raise KeyboardInterrupt
            raise NodeRestarted("", camera="cam0")

    space: dict[str, Any] = {}
    exec(block_with("docs/python-api.md", "NodeRestarted as"), space)
    with pytest.raises(KeyboardInterrupt):
        space["follow"](Node(), (0, 0, 9, 9))
    masks = "7 [(1, 2, 3, 4)]"
    assert capsys.readouterr().out.splitlines() == [masks, "ids of cam0 are void", masks]


def test_the_calibration_examples_run() -> None:
    printed = run(block_with("docs/calibration.md", "load_calibration("))
    assert printed == "gripper (4, 4) brown_conrady\n"
    run(block_with("docs/calibration.md", "PosePublisher("))


def test_a_policy_and_a_reader_without_this_package_run(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        # the examples wait for sure masks, and random weights give few
        rig.node(TRACKER__MIN_CONFIDENCE="0")
        rig.camera()
        with rig.client() as client:
            assert client.latest(timeout_ms=PATIENCE_MS) is not None
        policy = block_with("README.md", "PerceptionClient(")
        for written, used in (
            ("PerceptionClient(", f"PerceptionClient({rig.masks!r}, {rig.control!r}, "),
            ("(200, 275, 350, 435)", "(100, 100, 200, 200)"),  # on the rig's smaller frames
            ("masks.seq > 10_000", "'inside' in globals()"),
        ):
            assert written in policy
            policy = policy.replace(written, used)
        run(policy)
        examples = [
            block_with("docs/python-api.md", text)
            for text in ("wait_for(", "node.where(", "on_masks(", "async for")
        ]
        client = f"PerceptionClient({rig.masks!r}, {rig.control!r})"
        # the object of the policy has the same name
        code = "\n".join(examples).replace("PerceptionClient()", client).replace("most=1", "most=2")
        printed = run(code)
        places = r"(red mug \w+ (True|False) .*\n(\d+ bytes\n)?)+"
        shown_lines = r"red mug: \d+ pixels, \d+ ms old\n(hold still\n)?"
        expected = rf"{shown_lines}{places}True False\nthe mug is there\n"
        assert re.fullmatch(expected, printed)
        reader = block_with("docs/wire-v1.md", "def read_masks")
        run(f"{reader}\nseq, masks = next(read_masks({rig.masks!r}))\nassert masks[1].shape == (240, 320)")
