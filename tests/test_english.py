"""Checks the English of code and documentation: how docstrings open, and a list of phrases that nobody understands."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.paths import ROOT

SOURCES = sorted([*(ROOT / "sam3_node").rglob("*.py"), *(ROOT / "tools").rglob("*.py")])
MANUAL = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(page for folder in ("docs", "launch", "calibration") for page in sorted((ROOT / folder).rglob("*.md"))),
]

OPENINGS = re.compile(r"(What|Whether|How|Where|Which|Who|Whose|When|Of)\b")
"""A docstring opens with a verb (functions) or a noun (types, modules), never with a relative clause."""

PHRASES = {
    r"from which on": "from",
    r"\bfor ever\b": "without limit",
    r"(?<!may)\bbe it\b": "whether … or …",
    r"\bgone on with\b": "continued",
    r"\b(is|are|be|was|were) told\b(?! (apart|by))": "name the actor: the message says, the node counts",
    r"\band told (?!apart|by)": "name the actor: the message says, the node counts",
    r"\btwin\b": "counterpart",
    r"\bwhat sees\b": "Perception",
    r"\bby heart\b": "a fixed table",
    r"\bof ours\b": "of this package",
    r"\b(the|a|its|one|only) door\b": "entry point",
    r"\bonly room\b": "only package",
    r"\bthe bill\b": "usage report",
    r"\b(every|after|at most|stop after|in) so many\b": "the number itself",
    r"\b(that|what) is there\b": "exists",
    r"\bwhat there is\b": "what exists",
    r"\(asked:": "target",
    r"has touched yet": "before …",
    r"whose presence says": "completion marker",
    r"it has come to": "its state",
    r"engines of a deployment must be of": "must match",
    r"^\W*(?-i:Which) of them are": "name them",
    r"^[ #\"]*The same by ": "repeat the subject",
    r"\bhas gone astray\b": "lost",
    r"\bsays that all is there\b": "completion marker",
}
"""Phrases, each with what to write instead."""


def list_openings(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, first words) of each docstring that opens with a relative clause."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            docstring = ast.get_docstring(node) or ""
            if OPENINGS.match(docstring):
                yield getattr(node, "lineno", 1), f"opens with {docstring.split(chr(10))[0][:60]!r}"


def list_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, advice) of each phrase of the list."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PHRASES.items():
            found = re.search(pattern, line, flags=re.IGNORECASE)
            if found:
                yield number, f"{found[0].strip()!r}, better: {instead}"


def list_hits(path: Path) -> list[str]:
    """Return what is wrong in a file, one line for each place."""
    text = path.read_text(encoding="utf-8")
    hits = [*list_phrases(text), *(list_openings(text) if path.suffix == ".py" else ())]
    return [f"{path.relative_to(ROOT)}:{number}: {hit}" for number, hit in sorted(hits)]


def test_plain_english() -> None:
    hits = [hit for path in [*SOURCES, *MANUAL] for hit in list_hits(path)]
    assert not hits, f"{len(hits)} places:\n" + "\n".join(hits)


def test_docstrings_of_the_tests() -> None:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    hits = [f"{path}:{line}: {hit}" for path in paths for line, hit in list_openings(path.read_text("utf-8"))]
    assert not hits, "\n".join(hits)


def test_the_list_finds_what_it_should() -> None:
    assert [line for line, _ in list_openings('"""What it is."""\ndef f():\n    """Whether so."""\n')] == [
        1,
        2,
    ]
    assert not list(list_openings('def f():\n    """Offer it."""\nclass A:\n    """Whole number."""\n'))
    assert (
        len(list(list_phrases("the door\na doorway\nkept for ever\nforever\nmaybe it\nbe it\nis told"))) == 4
    )
