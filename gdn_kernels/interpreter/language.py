"""What `import nki.language as nl` means under the interpreter: memories, dtypes, ops, allocation, the grid."""

from typing import Any

import ml_dtypes
import numpy as np

from gdn_kernels.interpreter import hardware, machine
from gdn_kernels.interpreter.alu import OPS
from gdn_kernels.interpreter.memory import PRIVATE_HBM, PSUM, SBUF, SHARED_HBM, Buffer
from gdn_kernels.interpreter.rules import NkiRuleError, refuse
from gdn_kernels.interpreter.tensor import NkiTensor

sbuf, psum, hbm, private_hbm, shared_hbm = SBUF, PSUM, PRIVATE_HBM, PRIVATE_HBM, SHARED_HBM

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int8, int16, int32 = np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)
uint8, uint16, uint32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
bool_ = np.dtype(np.bool_)

affine_range = sequential_range = static_range = range


class NKIObject:
    """The base class of a kernel's own classes."""


class tile_size:
    """Limits a kernel may ask for."""

    pmax = hardware.PARTITIONS
    gemm_stationary_fmax = hardware.MATMUL_STATIONARY_FREE
    gemm_moving_fmax = 512
    psum_bank_fmax = hardware.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = hardware.PSUM_BANK_BYTES
    psum_num_banks = hardware.PSUM_BANKS


def ndarray(shape: Any, dtype: Any, buffer: Any = SBUF, name: str = "") -> NkiTensor:
    """Uninitialised memory of a shape and dtype in one of the memories."""
    if not isinstance(buffer, Buffer):
        refuse("objects-not-strings", f"{buffer!r}, expected a memory such as nl.sbuf", "ndarray", "buffer")
    if isinstance(dtype, str):
        refuse("objects-not-strings", f"{dtype!r}, expected a dtype such as nl.float32", "ndarray", "dtype")
    return machine.current().allocate(tuple(int(size) for size in shape), np.dtype(dtype), buffer, name)


def shared_identity_matrix(n: int, dtype: Any = uint8) -> NkiTensor:
    """An identity matrix [n, n] in SBUF, ready to use."""
    tile = machine.current().allocate((n, n), np.dtype(dtype), SBUF, "identity")
    tile.array[...] = np.eye(n)
    tile.mark_written()
    return tile


def program_id(axis: int = 0) -> int:
    """The core this program runs on."""
    return machine.current().core


def num_programs(axes: int = 0) -> int:
    return machine.current().launch.cores


def program_ndim() -> int:
    return 1 if machine.current().launch.cores > 1 else 0


def __getattr__(name: str) -> Any:
    if name in OPS:
        return OPS[name]
    if name.startswith("__"):
        raise AttributeError(name)
    raise NkiRuleError("unknown-instruction", f"nki.language.{name} isn't known to the interpreter", name)
