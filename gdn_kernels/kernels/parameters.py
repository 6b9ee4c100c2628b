"""The constants and small parameters that every stage shares, loaded or built once."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.layout import view
from gdn_kernels.kernels.queues import load_aside


@dataclass
class Parameters(nl.NKIObject):
    """identity: [128, 128]. mask: [P, classes, n], which head of a tile, and which class of its lanes, a partition
    belongs to. ones, gain: columns [V, 1]. A_log, dt_bias: rows [1, Hv]. All fp32."""

    identity: nl.ndarray
    mask: nl.ndarray
    ones: nl.ndarray
    gain: nl.ndarray
    A_log: nl.ndarray
    dt_bias: nl.ndarray


def load_parameters(layout, A_log, dt_bias, norm_weight):
    V = norm_weight.shape[0]
    rows = (_row(A_log), _row(dt_bias), _row(norm_weight))
    ones = nl.ndarray((V, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    identity = identity_matrix()
    return Parameters(identity, head_mask(identity, layout), ones, parameter_column(rows[2], 0, V), rows[0], rows[1])


def identity_matrix():
    """[128, 128] fp32, made on chip: a row of ones everywhere, kept where column - partition is 0."""
    ones = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    identity = nl.ndarray((128, 128), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=identity, pattern=[[1, 128]], channel_multiplier=-1, on_true_tile=ones, on_false_value=0.0, cmp_op=nl.equal
    )
    return identity


def head_mask(identity, layout):
    """[P, classes, n]: 1 where the partition is a lane of the class and the head, as a sum of identity columns."""
    n, lanes, m, P = layout.n, layout.lanes, layout.classes, layout.partitions()
    mask = nl.ndarray((P, m, n), dtype=nl.float32, buffer=nl.sbuf)
    columns = view(identity, P, 0, [[1, m], [lanes, n], [m, lanes // m]])
    nisa.tensor_reduce(dst=mask, op=nl.add, data=columns, axis=3)
    return mask


def parameter_column(row, first, count):
    """Elements [first, first + count) of a row [1, N] as a column [count, 1]: turned on PE, since a load by columns has
    runs of 4 bytes."""
    turned = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=row[:, first : first + count])
    column = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    clamp(column, turned, VALUE)
    return column


def _row(parameter):
    """A 1-D HBM parameter as a row [1, N]."""
    row = nl.ndarray((1, parameter.shape[0]), dtype=nl.float32, buffer=nl.sbuf)
    load_aside(row, parameter.reshape((1, parameter.shape[0])))
    return row
