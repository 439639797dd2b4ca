"""Text of other processes, made safe for a terminal."""

from __future__ import annotations


def printable(text: str, line_feeds: bool = False) -> str:
    """Return the text with "?" for each control, invisible or direction-changing character.

    With `line_feeds`, line feeds stay.
    """
    kept = "\n" if line_feeds else ""
    return "".join(letter if letter.isprintable() or letter in kept else "?" for letter in text)
