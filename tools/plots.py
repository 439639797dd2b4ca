"""Draw pictures with matplotlib, without a display."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sam3_node.errors import require


@contextmanager
def draw(
    path: Path, rows: int = 1, columns: int = 1, size: tuple[float, float] = (6, 3.4), **options: Any
) -> Iterator[Any]:
    """Yield rows x columns axes (a single one as itself), and write them to a PNG file at the end of the block."""
    require("matplotlib", "scenes").use("Agg")
    pyplot = require("matplotlib.pyplot", "scenes")
    figure, axes = pyplot.subplots(rows, columns, figsize=size, **options)
    try:
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.tight_layout()
        figure.savefig(path, dpi=80)
    finally:
        pyplot.close(figure)
