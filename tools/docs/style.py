"""Prints how squeezed the package's code is: `python -m tools.docs.style`.

    python -m tools.docs.style                        a table by package, large classes, import circles
    python -m tools.docs.style --places assignments   the places behind a column, as FILE:LINE

Nothing is asserted: each place is a question to a reader. Some assignments of two values are clearer than two lines.
"""

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from .size import ROOT, count_code_lines, count_comments

PACKAGE = ROOT / "sam3_node"
LARGE_CLASSES = 10
"""Number of classes that are listed."""
KINDS = {
    "assignments": "assignments of several values that neither unpack nor swap",
    "conditionals": "conditional expressions",
    "constants": "lines with several constants",
    "walruses": "walruses inside calls or conditional expressions",
}
"""What is counted, by the name that `--places` takes."""


class ClassSize(NamedTuple):
    """A class with its number of lines, decorators excluded, and of methods."""

    name: str
    lines: int
    methods: int


@dataclass
class Style:
    """What was found in one or several modules."""

    lines: int = 0
    code_lines: int = 0
    """without docstrings, comments and blank lines"""
    comments: int = 0
    places: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    """FILE:LINE of each place, by kind"""
    classes: list[ClassSize] = field(default_factory=list)

    def add(self, other: "Style") -> None:
        """Add what was found in further modules."""
        self.lines += other.lines
        self.code_lines += other.code_lines
        self.comments += other.comments
        for kind, found in other.places.items():
            self.places[kind] += found
        self.classes += other.classes

    def per_thousand(self, kind: str) -> float:
        """Return the number of places of a kind per 1,000 lines."""
        return 1000 * len(self.places[kind]) / max(1, self.lines)

    @property
    def comments_per_thousand(self) -> float:
        """The number of comments per 1,000 lines of code: docstrings must not dilute it."""
        return 1000 * self.comments / max(1, self.code_lines)


def measure(text: str, name: str = "") -> Style:
    """Measure the source text of a module, which places call `name`."""
    tree = ast.parse(text)
    style = Style(text.count("\n"), count_code_lines(text), count_comments(text))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and assigns_several(node):
            style.places["assignments"].append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.IfExp):
            style.places["conditionals"].append(f"{name}:{node.lineno}")
        elif isinstance(node, ast.ClassDef):
            style.classes.append(measure_class(node))
        if isinstance(node, ast.Module | ast.ClassDef):
            lines = lines_of_several_constants(node)
            style.places["constants"] += [f"{name}:{line}" for line in lines]
    style.places["walruses"] = [f"{name}:{line}" for line in sorted(find_walruses(tree, inside=False))]
    return style


def measure_class(node: ast.ClassDef) -> ClassSize:
    """Return the size of a class."""
    methods = sum(isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) for child in node.body)
    return ClassSize(node.name, (node.end_lineno or node.lineno) - node.lineno + 1, methods)


def assigns_several(node: ast.Assign) -> bool:
    """Return True for `a, b = x, y`, unless a value reads the target of another one, as a swap does."""
    target = node.targets[0]
    if not (isinstance(target, ast.Tuple | ast.List) and isinstance(node.value, ast.Tuple | ast.List)):
        return False
    if any(isinstance(each, ast.Starred) for each in (*target.elts, *node.value.elts)):
        return False
    written = [ast.unparse(each) for each in target.elts]
    for place, value in enumerate(node.value.elts):
        read = {ast.unparse(each) for each in ast.walk(value) if isinstance(each, ast.expr)}
        others = written[:place] + written[place + 1 :]
        if read.intersection(others):
            return False
    return True


def lines_of_several_constants(scope: ast.Module | ast.ClassDef) -> list[int]:
    """Return the lines of a module's or a class's body that assign several names in capitals."""
    lines: Counter[int] = Counter()
    for node in scope.body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and name.id.isupper():
                    lines[node.lineno] += 1
    return [line for line, count in lines.items() if count > 1]


def find_walruses(node: ast.AST, inside: bool) -> Iterator[int]:
    """Yield the line of each walrus in the arguments of a call, or in a conditional expression.

    A walrus in the condition of a comprehension is not counted: it has no other place.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.NamedExpr) and inside:
            yield child.lineno
        if isinstance(child, ast.comprehension | ast.Lambda):
            yield from find_walruses(child, inside=False)
        elif isinstance(child, ast.Call | ast.IfExp):
            yield from find_walruses(child, inside=True)
        else:
            yield from find_walruses(child, inside)


def list_modules(package: Path) -> dict[str, Path]:
    """Return the modules of a package by their full names."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        modules[name] = path
    return modules


def list_imports(name: str, path: Path, known: Iterable[str]) -> set[str]:
    """Return the known modules that a module names in imports: deferred ones and those for types, too."""
    base = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = base[: len(base) - node.level + 1] if node.level else []
            origin = ".".join([*start, *([node.module] if node.module else [])])
            # a name that is no module comes from the module that it is imported from
            found.update(
                f"{origin}.{alias.name}" if f"{origin}.{alias.name}" in known else origin
                for alias in node.names
            )
    return found.intersection(known) - {name}


def find_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other along imports."""
    reached = {name: _reach(name, imports) for name in imports}
    circles: list[list[str]] = []
    for name in sorted(imports):
        if name in reached[name] and not any(name in circle for circle in circles):
            circles.append(sorted(other for other in reached[name] if name in reached[other]))
    return circles


def _reach(name: str, imports: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(imports[name])
    while waiting:
        other = waiting.pop()
        if other not in reached:
            reached.add(other)
            waiting += imports[other]
    return reached


def list_circles(package: Path) -> dict[str, list[list[str]]]:
    """Return the import circles within each package below `package`, by its name."""
    modules = list_modules(package)
    units = {name.split(".")[1] for name in modules if name.count(".") > 1}
    circles = {}
    for unit in sorted(units):
        inside = {name: path for name, path in modules.items() if name.split(".")[1:2] == [unit]}
        found = find_circles({name: list_imports(name, path, inside) for name, path in inside.items()})
        if found:
            circles[unit] = found
    return circles


def measure_package(package: Path) -> dict[str, Style]:
    """Measure all modules of a package, by its sub-packages; loose modules are `(modules)`."""
    styles: dict[str, Style] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package)
        unit = inside.parts[0] if len(inside.parts) > 1 else "(modules)"
        style = measure(path.read_text(encoding="utf-8"), f"{package.name}/{inside.as_posix()}")
        styles.setdefault(unit, Style()).add(style)
    return styles


def describe(styles: Mapping[str, Style]) -> str:
    """Return the table of the figures, a package a row."""
    rows = [
        f"{'':15} {'lines':>6} {'several':>8} {'conditional':>12} {'comments':>9} {'constants':>10} {'walruses':>9}"
    ]
    for name, style in styles.items():
        several = style.per_thousand("assignments")
        conditional = style.per_thousand("conditionals")
        constants = len(style.places["constants"])
        walruses = len(style.places["walruses"])
        rows.append(
            f"{name:15} {style.lines:6} {several:8.1f} {conditional:12.1f} {style.comments_per_thousand:9.1f}"
            f" {constants:10} {walruses:9}"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.docs.style", description=__doc__)
    parser.add_argument("--places", choices=KINDS, help="print FILE:LINE of each of these, and nothing else")
    chosen = parser.parse_args().places

    styles = measure_package(PACKAGE)
    whole = Style()
    for style in styles.values():
        whole.add(style)
    if chosen:
        print("\n".join(whole.places[chosen]))
        return

    print(
        "per 1,000 lines: assignments of several values that neither unpack nor swap, conditional expressions;"
    )
    print("per 1,000 lines of code: comments;")
    print("numbers: lines with several constants, walruses inside calls or conditional expressions")
    print(describe({**styles, PACKAGE.name: whole}))

    print("\nlargest classes: lines, methods")
    for size in sorted(whole.classes, key=lambda size: -size.lines)[:LARGE_CLASSES]:
        print(f"{size.lines:6} {size.methods:4}  {size.name}")

    circles = list_circles(PACKAGE)
    print(
        "\nimport circles inside a package, with deferred imports and those for types:",
        len(circles) or "none",
    )
    for unit, found in circles.items():
        for circle in found:
            print(f"  {unit}: {', '.join(name.removeprefix(f'{PACKAGE.name}.') for name in circle)}")


if __name__ == "__main__":
    main()
