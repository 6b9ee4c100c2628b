"""Bounds that keep every finite input finite.

Results are accurate for values up to 2**40; these bounds lie beyond, and keep a larger one from becoming an infinity
that meets a zero or an opposite infinity.
"""

import nki.isa as nisa
import nki.language as nl

__nki_wrapper__ = True  # traces and errors name the line that asked for the clamp

TAP = 2.0**60  # conv taps and window columns: a sum of 8 products stays below 2**123
KEY = 2.0**44  # q and k: 128 squares stay in the valid range of rsqrt, below 2**97
VALUE = 2.0**100  # memory reads, gates, gain
MEAN_SQUARE = 2.0**96  # the readout's mean square, within the valid range of rsqrt


def clamp(dst, data, bound):
    """dst = data, no larger than bound in size. It doubles as the eviction of a PSUM tile."""
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.minimum, operand0=bound, op1=nl.maximum, operand1=-bound)
