"""Prints how large package, tests, tools, training and pages are: `python -m tools.docs.size`.

Nothing is asserted: a size is a question to ask, never a reason to write less clearly. Code lines have no docstrings,
comments and blank lines.
"""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("sam3_node", "tests", "tools", "training")
LONG_PAGE = 2_500  # words; a longer page is named
NO_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)
BLOCKS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code_lines(text: str) -> int:
    """Return the number of lines of a program without docstrings, comments and blank lines."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        for child in node.body if isinstance(node, BLOCKS) else ():
            if not (isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)):
                continue
            if isinstance(child.value.value, str):
                lines.difference_update(range(child.lineno, (child.end_lineno or 0) + 1))
    return len(lines)


def count_comments(text: str) -> int:
    """Return the number of comments of a program."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT for token in tokens)


def main() -> None:
    """Print code lines by package, lines by folder, and the pages that are long."""
    for folder in FOLDERS:
        by_package: Counter[str] = Counter()
        lines = 0
        comments = 0
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            parts = path.relative_to(ROOT / folder).parts
            by_package[parts[0]] += count_code_lines(text)
            lines += text.count("\n")
            comments += count_comments(text)
        print(f"{folder}: {by_package.total()} code lines, {lines} lines, {comments} comments")
        for name, count in by_package.most_common():
            print(f"  {count:6} {name}")
    words = {
        path.name: len(path.read_text(encoding="utf-8").split()) for path in (ROOT / "docs").glob("*.md")
    }
    print(f"docs: {sum(words.values())} words in {len(words)} pages; over {LONG_PAGE} words:")
    for name, count in sorted(words.items(), key=lambda page: -page[1]):
        if count > LONG_PAGE:
            print(f"  {count:6} {name}")


if __name__ == "__main__":
    main()
