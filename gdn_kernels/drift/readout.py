"""A stand-in for a model's head: logits through a fixed random matrix, so that an error can be read in tokens."""

from __future__ import annotations

import numpy as np

from gdn_kernels.drift.noise import generator
from gdn_kernels.dtypes import Array

VOCABULARY = 512
SPREAD = 8.0  # of the logits, over core_out's root mean square: with some 0.35 of that, one token in ten is likely
READOUT = 6  # purpose of `noise.generator`; the seed is fixed, so that all rollouts of a size share one readout


def readout_matrix(value_dim: int) -> Array:
    """[value_dim, 512] float64."""
    return generator(0, READOUT).standard_normal((value_dim, VOCABULARY)) * (SPREAD / value_dim**0.5)


def logits(core_out: Array, matrix: Array) -> Array:
    """core_out [n, B, Hv, V] -> [n, B, 512] float64."""
    rows = core_out.reshape(*core_out.shape[:2], -1).astype(np.float64, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(rows @ matrix)
