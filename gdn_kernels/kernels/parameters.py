"""The constants and small parameters that every stage shares, loaded or built once."""

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from gdn_kernels.kernels.finite import VALUE, clamp
from gdn_kernels.kernels.layout import view


@dataclass
class Parameters(nl.NKIObject):
    """identity: [128, 128]. mask: [P, n], which head of a tile a partition belongs to. ones, gain: columns [V, 1].
    A_log, dt_bias: rows [1, Hv]. All fp32."""

    identity: nl.ndarray
    mask: nl.ndarray
    ones: nl.ndarray
    gain: nl.ndarray
    A_log: nl.ndarray
    dt_bias: nl.ndarray


def load_parameters(layout, A_log, dt_bias, norm_weight):
    V = norm_weight.shape[0]
    identity = nl.shared_identity_matrix(128, dtype=nl.float32)
    ones = nl.ndarray((V, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    gain = parameter_column(_row(norm_weight), 0, V)
    return Parameters(identity, head_mask(identity, layout), ones, gain, _row(A_log), _row(dt_bias))


def head_mask(identity, layout):
    """[P, n]: 1 where the partition is a lane of the head, as a sum of identity columns."""
    n, lanes, P = layout.n, layout.lanes, layout.partitions()
    mask = nl.ndarray((P, n), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=mask, op=nl.add, data=view(identity, P, 0, [[lanes, n], [1, lanes]]), axis=2)
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
    nisa.dma_copy(dst=row, src=parameter.reshape((1, parameter.shape[0])))
    return row
