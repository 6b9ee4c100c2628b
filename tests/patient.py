"""Bounds on seconds, for machines that others use too."""

from collections.abc import Callable


def best(measure: Callable[[], float], limit: float, tries: int = 10) -> float:
    """The least of up to `tries` measurements; stops at the first below `limit`. A neighbour's load can make any one of
    them slow, but none of them fast."""
    least = measure()
    for _ in range(tries - 1):
        if least < limit:
            break
        least = min(least, measure())
    return least
