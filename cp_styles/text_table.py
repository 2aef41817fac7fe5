"""Tables in plain text, for ``explain`` and ``verify``."""

from collections.abc import Iterator, Sequence


def format_table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table with its head, each column as wide as its widest cell; the first column is aligned left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()
