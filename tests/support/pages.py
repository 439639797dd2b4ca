"""The text of the documentation's pages, and the blocks of code in it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.paths import ROOT


class Code(NamedTuple):
    """One fenced or indented block of a page."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text[:40]!r}"


def shown(path: Path) -> str:
    """Return the text of a page without its comments."""
    return re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def blocks(path: Path) -> Iterator[Code]:
    """Yield the fenced blocks, and the indented ones as language ''."""
    text = shown(path)
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
    for block in fenced.finditer(text):
        yield Code(path, block[1], block[2])
    for block in re.finditer(r"(?:^ {4}.*\n)+", fenced.sub("", text), flags=re.MULTILINE):
        yield Code(path, "", re.sub(r"^ {4}", "", block[0], flags=re.MULTILINE))


def block_with(page: str, text: str) -> str:
    (block,) = [block for block in blocks(ROOT / page) if block.language == "python" and text in block.text]
    return block.text
