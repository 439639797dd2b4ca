"""Writes a board as a PDF page with true dimensions and a ruler, in vectors, which no printer driver resamples."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import CalibrationError
from ..files import write_output
from .boards import Board

POINTS_PER_MM = 72 / 25.4
PAPERS_MM = {"a4": (210.0, 297.0), "a3": (297.0, 420.0), "a2": (420.0, 594.0), "letter": (215.9, 279.4)}
"""Width and height of the papers, upright."""

_MARGIN_MM = 12.0
_RULER_MM = 100.0
_RULER_SPACE_MM = 16.0

Rectangle = tuple[float, float, float, float]
"""Left, top, width and height in millimetres, from the top-left corner of the pattern."""


def write_board(path: Path, board: Board, paper: str = "auto") -> str:
    """Write the board as a PDF. Return the paper: the smallest of PAPERS_MM for "auto", turned if it must be.

    Raises CalibrationError if the board does not fit on the paper, OutputError if the file cannot be written.
    """
    name, width, height = _choose_paper(board, paper)
    write_output(path, make_pdf(_draw(board, width, height), width, height))
    return name


def _choose_paper(board: Board, paper: str) -> tuple[str, float, float]:
    if paper != "auto" and paper not in PAPERS_MM:
        raise CalibrationError(f"expected a paper of {', '.join(PAPERS_MM)} or auto, found {paper}")
    needed = _measure(board)
    candidates = [paper] if paper != "auto" else sorted(PAPERS_MM, key=lambda name: PAPERS_MM[name])
    for name in candidates:
        for suffix, (width, height) in (("", PAPERS_MM[name]), (" landscape", PAPERS_MM[name][::-1])):
            if needed[0] <= width and needed[1] <= height:
                return name + suffix, width, height
    raise CalibrationError(
        f"{board} needs {needed[0]:.0f} x {needed[1]:.0f} mm with margins and a ruler; it does not fit on "
        f"{', '.join(candidates)}: choose smaller squares or fewer of them"
    )


def _measure(board: Board) -> tuple[float, float]:
    quiet = board.pitch_m * 1e3 / 2
    width, height = (side * 1e3 + 2 * max(_MARGIN_MM, quiet) for side in board.size_m)
    return max(width, _RULER_MM + 2 * _MARGIN_MM), height + _RULER_SPACE_MM


def pattern(board: Board) -> Iterator[Rectangle]:
    """Yield the black rectangles of the board's pattern."""
    # the corners of a chessboard are inside it
    extra = int(board.kind == "chessboard")
    square = board.pitch_m * 1e3
    for row in range(board.rows + extra) if board.kind != "apriltag" else ():
        for column in range(row % 2, board.columns + extra, 2):
            yield column * square, row * square, square, square
    for corners, bits in board.markers() if board.kind != "chessboard" else ():
        left, top = corners.min(axis=0)[:2] * 1e3
        side = np.ptp(corners[:, 0]) * 1e3 / len(bits)
        for row, values in enumerate(bits):
            for start, length in _find_runs(values):
                yield left + start * side, top + row * side, length * side, side


def _find_runs(values: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield start and length of each run of black cells, so that no hairline separates neighbours."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], values, [0]]).astype(int)))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield int(start), int(end - start)


def _draw(board: Board, width: float, height: float) -> str:
    """Return the content of the page, in PDF operators."""
    across, down = (side * 1e3 for side in board.size_m)
    left = (width - across) / 2
    top = (height - _RULER_SPACE_MM - down) / 2
    lines = ["0 g"]
    for x, y, wide, high in pattern(board):
        lines.append(_rectangle(left + x, height - top - y - high, wide, high))
    ruler_left = (width - _RULER_MM) / 2
    ruler_y = _RULER_SPACE_MM - 4
    lines.append(_rectangle(ruler_left, ruler_y, _RULER_MM, 0.2))
    for tick in range(int(_RULER_MM) + 1):
        length = 4.0 if tick % 10 == 0 else 2.5 if tick % 5 == 0 else 1.5
        lines.append(_rectangle(ruler_left + tick - 0.1, ruler_y - length, 0.2, length))
    note = f"{board}   print at 100 %: this ruler is {_RULER_MM:.0f} mm long, ticks are 1 mm apart"
    place = (ruler_left * POINTS_PER_MM, 4 * POINTS_PER_MM)
    lines.append(f"BT /F1 7 Tf {place[0]:.3f} {place[1]:.3f} Td ({note}) Tj ET")
    return "\n".join(lines)


def _rectangle(left: float, bottom: float, width: float, height: float) -> str:
    numbers = " ".join(f"{value * POINTS_PER_MM:.4f}" for value in (left, bottom, width, height))
    return f"{numbers} re f"


def make_pdf(content: str, width_mm: float, height_mm: float) -> bytes:
    """Return a PDF of one page with this content."""
    stream = zlib.compress(content.encode("ascii"))
    box = f"[0 0 {width_mm * POINTS_PER_MM:.4f} {height_mm * POINTS_PER_MM:.4f}]"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R /ViewerPreferences << /PrintScaling /None >> >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"<< /Type /Page /Parent 2 0 R /MediaBox {box} /Contents 4 0 R "
        "/Resources << /Font << /F1 5 0 R >> >> >>".encode(),
        b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(stream), stream),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    data = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    return data + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
