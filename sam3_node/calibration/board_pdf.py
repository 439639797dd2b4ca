"""Writes a board as a PDF page with true dimensions and a ruler, in vectors, which no printer driver resamples."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..errors import CalibrationError
from ..files import write_output
from .boards import Board

POINTS_PER_MM = 72 / 25.4
"""Points, the unit of PDF, in a millimetre."""
PAPERS_MM = {"a4": (210.0, 297.0), "a3": (297.0, 420.0), "a2": (420.0, 594.0), "letter": (215.9, 279.4)}
"""Width and height of the papers, upright."""

# least margin beside the pattern: printers leave some millimetres white
_MARGIN_MM = 12.0
# length of the ruler, and height of the space for it
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
    across, down = _measure(board)
    candidates = [paper]
    if paper == "auto":
        candidates = sorted(PAPERS_MM, key=lambda name: PAPERS_MM[name])
    # upright before landscape, the smallest paper first
    for name in candidates:
        width, height = PAPERS_MM[name]
        if across <= width and down <= height:
            return name, width, height
        if across <= height and down <= width:
            return f"{name} landscape", height, width
    raise CalibrationError(
        f"{board} needs {across:.0f} x {down:.0f} mm with margins and a ruler; it does not fit on "
        f"{', '.join(candidates)}: choose smaller squares or fewer of them"
    )


def _measure(board: Board) -> tuple[float, float]:
    """Return width and height in millimetres that the board needs, with its white margin and the ruler."""
    # detectors need white around the pattern, half a square wide
    quiet = board.pitch_m * 1e3 / 2
    margin = max(_MARGIN_MM, quiet)
    width_m, height_m = board.size_m
    width = width_m * 1e3 + 2 * margin
    height = height_m * 1e3 + 2 * margin
    return max(width, _RULER_MM + 2 * _MARGIN_MM), height + _RULER_SPACE_MM


def pattern(board: Board) -> Iterator[Rectangle]:
    """Yield the black rectangles of the board's pattern."""
    if board.kind != "apriltag":
        # a chessboard is described by the corners inside it
        extra = int(board.kind == "chessboard")
        square = board.pitch_m * 1e3
        for row in range(board.rows + extra):
            for column in range(row % 2, board.columns + extra, 2):
                yield column * square, row * square, square, square
    if board.kind == "chessboard":
        return

    # a marker row by row
    for corners, bits in board.markers():
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
    # the pattern in black, in the middle above the ruler; y is up in PDF
    width_m, height_m = board.size_m
    left = (width - width_m * 1e3) / 2
    top = (height - _RULER_SPACE_MM - height_m * 1e3) / 2
    lines = ["0 g"]
    for x, y, wide, high in pattern(board):
        lines.append(_rectangle(left + x, height - top - y - high, wide, high))

    # the ruler, with longer ticks for 5 and 10 mm
    ruler_left = (width - _RULER_MM) / 2
    ruler_y = _RULER_SPACE_MM - 4
    lines.append(_rectangle(ruler_left, ruler_y, _RULER_MM, 0.2))
    for tick in range(int(_RULER_MM) + 1):
        if tick % 10 == 0:
            length = 4.0
        elif tick % 5 == 0:
            length = 2.5
        else:
            length = 1.5
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

    # the objects, and then the table of their places
    data = b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(data)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    data += b"xref\n0 %d\n0000000000 65535 f \n%s" % (len(objects) + 1, table)
    return data + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
