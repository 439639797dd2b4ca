"""Markdown tables, and the table of replay outputs."""

from collections.abc import Iterable, Sequence

from sam3_node.replay.outputs import OUTPUTS, find_output


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table; pipes in cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(_cell(cell) for cell in line) + "|" for line in lines)


def code(text: str) -> str:
    """Return the text as inline code; empty text stays empty."""
    return f"`{text}`" if text else ""


def output_table() -> str:
    """Return the table of replay's `--outputs`."""
    return table(["`--outputs`", "file"], [[code(name), find_output(name).file] for name in OUTPUTS])


def _cell(text: str) -> str:
    escaped = text.replace("|", "\\|")
    return text if text == "---" else f" {escaped} ".replace("  ", " ")
