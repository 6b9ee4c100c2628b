"""Buffers that are used in turn, so that loads run ahead of the work on what they load.

Such a buffer is allocated once. A load into it waits for the last use of what it held, a ring's length ago, and for
nothing else.
"""

from dataclasses import dataclass

import nki.language as nl


@dataclass
class Ring(nl.NKIObject):
    """`used`: how many buffers were handed out so far."""

    buffers: list
    used: int

    def next(self):
        buffer = self.buffers[self.used % len(self.buffers)]
        self.used = self.used + 1
        return buffer


def ring(count, shape, dtype, name):
    """A ring of `count` SBUF tiles."""
    buffers = []
    for index in range(count):
        buffers.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf, name=f"{name}{index}"))
    return Ring(buffers, 0)
