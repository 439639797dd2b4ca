"""Tests of the measures of style, on a tiny package."""

from pathlib import Path

import pytest

from tests.support.tables import each_row
from tools.docs.style import PACKAGE, describe, find_circles, list_circles, main, measure, measure_package

SQUEEZED = '''\
"""A module."""

WIDTH, HEIGHT = 640, 480
FIRST, SECOND = divmod(7, 2)
DEPTH = 3


class Shape:
    """A shape."""

    ROUND, FLAT = range(2)

    def turn(self, x, y):
        x, y = y, x  # a swap
        self.x, self.y = x, y
        first, *rest = x, y
        return x if first else max(rest, key=(best := y))

    def sum(self, values):
        return sum(found for value in values if (found := value))
'''


def test_each_kind_of_squeezing_is_found_at_its_line() -> None:
    style = measure(SQUEEZED, "a.py")
    assert style.places == {
        "assignments": ["a.py:3", "a.py:15"],
        "conditionals": ["a.py:17"],
        "constants": ["a.py:3", "a.py:4", "a.py:11"],
        "walruses": ["a.py:17"],
    }
    assert (style.lines, style.code_lines, style.comments) == (20, 12, 1)
    assert style.classes == [("Shape", 13, 2)]


@each_row(
    ("line", "several"),
    [
        ("a, b = 1, 2", 1),
        ("[a, b] = x, y", 1),
        ("a, b = b, a + b", 0),  # the second value reads the first target
        ("a.x, b = 1, a.x", 0),
        ("a, b = a + 1, b + 1", 1),  # each reads its own target alone
        ("a, b = pair", 0),
        ("a = b = 1", 0),
        ("a = 1, 2", 0),
    ],
)
def test_an_assignment_of_several_values_neither_unpacks_nor_swaps(line: str, several: int) -> None:
    assert len(measure(line).places["assignments"]) == several


def test_circles_are_found_once() -> None:
    assert find_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_figures_and_circles_of_a_package(tmp_path: Path) -> None:
    package = tmp_path / "small"
    for name, text in {
        "__init__.py": "",
        "loose.py": "x = 1 if y else 2\n",
        "one/__init__.py": "from .a import A\n",
        "one/a.py": "def f():\n    from .b import B\n",
        "one/b.py": "if TYPE_CHECKING:\n    from small.one.a import A\n",
        "two/__init__.py": "",
        "two/c.py": "from small.one import a, A\nfrom . import d\n",
        "two/d.py": "import small.loose\n# why\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert list_circles(package) == {"one": [["small.one.a", "small.one.b"]]}
    styles = measure_package(package)
    assert styles["(modules)"].per_thousand("conditionals") == 1000
    assert styles["two"].comments_per_thousand == pytest.approx(1000 / 3)
    assert len(describe(styles).splitlines()) == 1 + len(styles)


def test_the_command_prints_every_package_and_places(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["style"])
    main()
    printed = capsys.readouterr().out.splitlines()
    units = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert units <= {line.split()[0] for line in printed if line}
    monkeypatch.setattr("sys.argv", ["style", "--places", "conditionals"])
    main()
    path, _, line = capsys.readouterr().out.split()[0].rpartition(":")
    assert " if " in (PACKAGE.parent / path).read_text().splitlines()[int(line) - 1]
