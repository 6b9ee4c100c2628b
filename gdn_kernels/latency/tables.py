"""Tables of text, for a terminal or as Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], cells: Sequence[Sequence[str]], markdown: bool) -> str:
    """Rows of text under a header; the first column is left-aligned, the others are numbers."""
    if markdown:
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[i]) for line in (header, *cells)) for i in range(len(header))]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:], strict=True))])
        for line in (header, *cells)
    )
