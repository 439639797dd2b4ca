"""Table of formats and peers that tests verify, from the `verifies` markers of the tests.

A test carries `@pytest.mark.verifies(area, peer, how, by, missing)`, or its module has that marker in `pytestmark`:

- area: one of AREAS;
- peer: the name of the format or program, as the table shows it;
- how: one of METHODS, how independent of this package the other side of the comparison is;
- by: the other side, in a few words;
- missing: what no test shows, if there is something.

Markers of the same area and peer become one row. The tests are parsed, not imported, so that packages of peers need not
be installed. Arguments are literals.
"""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .tables import table

AREAS = {
    "recording": "recordings, read",
    "results": "recordings and results, written",
    "objects": "objects and masks, read",
    "robot": "descriptions of robots, read",
    "stream": "streams of cameras, in",
    "viewer": "viewers and robots, out",
    "policy": "policies",
    "reader": "readers of the wire",
    "monitoring": "monitoring",
    "network": "networks",
    "board": "calibration boards",
}
"""Areas in the order of the table, each with its name there."""

METHODS = ("own package", "other implementation", "real data", "layout")
"""The peer's own package, another implementation of the format, files that the peer made, or bytes from its layout."""

MARKER = "verifies"
_ROOT = Path(__file__).resolve().parents[2]
_FIELDS = ("area", "peer", "how", "by", "missing")


class Claim(NamedTuple):
    """One marker, and the path of its test from the root of the repository."""

    area: str
    peer: str
    how: str
    by: str
    missing: str
    test: str


def compatibility_table() -> str:
    """Return one row for each format or peer. Raises ValueError for a marker that says something else."""
    rows: dict[tuple[str, str], list[Claim]] = defaultdict(list)
    for claim in collect_claims(_ROOT):
        rows[claim.area, claim.peer].append(claim)
    order = list(AREAS)
    header = ["", "format or peer", "verified with", "in detail", "missing", "test"]
    lines = []
    shown = ""
    for area, peer in sorted(rows, key=lambda row: (order.index(row[0]), row[1].lower().lstrip("`"))):
        claims = rows[area, peer]
        name = "" if area == shown else f"**{AREAS[area]}**"
        methods = sorted({claim.how for claim in claims}, key=METHODS.index)
        tests = [f"[{Path(test).name}](../{test})" for test in _unique(claim.test for claim in claims)]
        details = (_unique(claim.by for claim in claims), _unique(claim.missing for claim in claims))
        lines.append([name, peer, ", ".join(methods), *map("; ".join, details), ", ".join(tests)])
        shown = area
    return table(header, lines)


def collect_claims(root: Path) -> Iterator[Claim]:
    """Yield the markers of all tests, in the order of files and lines; those of a plugin are in launch."""
    for path in sorted([*(root / "tests").rglob("test_*.py"), *(root / "launch").rglob("test_*.py")]):
        text = path.read_text(encoding="utf-8")
        if MARKER not in text:
            continue
        for call in _calls(ast.parse(text)):
            yield _claim(call, path.relative_to(root).as_posix())


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of the marker, in decorators and elsewhere, by line."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    marks = (call for call in calls if ast.unparse(call.func) == f"pytest.mark.{MARKER}")
    yield from sorted(marks, key=lambda call: call.lineno)


def _claim(call: ast.Call, test: str) -> Claim:
    place = f"{test}:{call.lineno}"
    try:
        values = dict(zip(_FIELDS, map(ast.literal_eval, call.args), strict=False))
        values |= {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        claim = Claim(**{"missing": "", **values}, test=test)
    except (ValueError, TypeError) as error:
        fields = ", ".join(_FIELDS)
        raise ValueError(f"{place}: expected literals for {fields}, found another marker") from error
    if len(call.args) > len(_FIELDS) or claim.area not in AREAS or claim.how not in METHODS:
        wanted = f"an area of {', '.join(AREAS)} and a method of {', '.join(METHODS)}"
        raise ValueError(f"{place}: expected {wanted}, found {claim.area!r} and {claim.how!r}")
    return claim


def _unique(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, texts)))
