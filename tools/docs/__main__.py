"""Command-line entry point: `python -m tools.docs` writes the generated parts, `--check` only compares them."""

from __future__ import annotations

import argparse
import sys

from .pages import ROOT, outdated


def main() -> int:
    """Refresh the pages, and print the name of each page that changed; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.docs", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for outdated pages")
    check = parser.parse_args().check
    changed = outdated()
    for path, text in changed.items():
        print("outdated:" if check else "wrote", path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
