"""What `import nki.language as nl` means under the interpreter: memories, dtypes, ops, allocation, loops, the grid.

Operations (`nl.add`) and the functions that allocate their result and issue the instructions for it (`nl.load`,
`nl.sum`, see `convenience`) are looked up by `__getattr__`: several have the names of Python's own functions.
"""

from typing import Any

from gdn_kernels.interpreter import convenience, hardware, machine
from gdn_kernels.interpreter.alu import OPS
from gdn_kernels.interpreter.creation import (
    empty_like,
    full,
    ndarray,
    ones,
    shared_constant,
    shared_identity_matrix,
    zeros,
    zeros_like,
)
from gdn_kernels.interpreter.dtypes import (
    bfloat16,
    bool_,
    float4_e2m1fn_x4,
    float8_e4m3,
    float8_e4m3fn,
    float8_e4m3fn_x4,
    float8_e5m2,
    float8_e5m2_x4,
    float8_e8m0fnu,
    float16,
    float32,
    int8,
    int16,
    int32,
    tfloat32,
    uint8,
    uint16,
    uint32,
)
from gdn_kernels.interpreter.loops import dynamic_range, fori_loop, if_else, no_reorder, while_loop
from gdn_kernels.interpreter.memory import PRIVATE_HBM, PSUM, SBUF, SHARED_HBM
from gdn_kernels.interpreter.memory import Buffer as MemoryRegion
from gdn_kernels.interpreter.objects import NKIObject
from gdn_kernels.interpreter.rules import UnknownName, refuse
from gdn_kernels.interpreter.tensor import NkiTensor
from gdn_kernels.interpreter.views import DynamicSlice as ds

__all__ = [
    "MemoryRegion",
    "NKIObject",
    "NkiTensor",
    "affine_range",
    "bfloat16",
    "bool_",
    "device_print",
    "ds",
    "dynamic_range",
    "empty_like",
    "float4_e2m1fn_x4",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e4m3fn_x4",
    "float8_e5m2",
    "float8_e5m2_x4",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "fori_loop",
    "full",
    "hbm",
    "if_else",
    "int8",
    "int16",
    "int32",
    "is_hbm",
    "is_on_chip",
    "is_psum",
    "is_sbuf",
    "ndarray",
    "no_reorder",
    "num_programs",
    "ones",
    "private_hbm",
    "program_id",
    "program_ndim",
    "psum",
    "sbuf",
    "sequential_range",
    "shared_constant",
    "shared_hbm",
    "shared_identity_matrix",
    "static_range",
    "tfloat32",
    "tile_size",
    "uint8",
    "uint16",
    "uint32",
    "while_loop",
    "zeros",
    "zeros_like",
]

sbuf, psum, hbm, private_hbm, shared_hbm = SBUF, PSUM, PRIVATE_HBM, PRIVATE_HBM, SHARED_HBM

# Deprecated names of the same thing: every one of these loops is unrolled.
affine_range = sequential_range = static_range = range


class _TileSize:
    """`nl.tile_size`: limits a kernel may ask for; those that depend on the target need a running kernel."""

    pmax = hardware.PARTITIONS
    gemm_stationary_fmax = hardware.MATMUL_STATIONARY_FREE
    gemm_moving_fmax = 512
    psum_bank_fmax = hardware.PSUM_BANK_BYTES // 4
    psum_bank_fmax_bytes = hardware.PSUM_BANK_BYTES
    psum_num_banks = hardware.PSUM_BANKS
    psum_fmax = psum_bank_fmax  # deprecated since 0.4
    bn_stats_fmax = hardware.BN_STATS_FREE
    psum_min_align = 4
    sbuf_min_align = 1

    @property
    def sbuf_fmax_bytes(self) -> int:
        """Bytes a partition. The NKI Library subtracts its own 16 KiB and more from this figure."""
        return machine.current().target.sbuf_bytes

    @property
    def sbuf_fmax(self) -> int:
        return self.sbuf_fmax_bytes // 4

    @property
    def sbuf_size_bytes(self) -> int:
        return self.sbuf_fmax_bytes * hardware.PARTITIONS

    @property
    def total_available_sbuf_size(self) -> int:
        """Deprecated since 0.4: despite the name, of one partition."""
        return self.sbuf_fmax_bytes

    def __getattr__(self, name: str) -> Any:
        raise UnknownName("unknown-instruction", f"nl.tile_size.{name} isn't documented", name)


tile_size = _TileSize()


def is_hbm(buffer: Any) -> bool:
    return buffer in (PRIVATE_HBM, SHARED_HBM)


def is_on_chip(buffer: Any) -> bool:
    return buffer in (SBUF, PSUM)


def is_psum(buffer: Any) -> bool:
    return buffer is PSUM


def is_sbuf(buffer: Any) -> bool:
    return buffer is SBUF


def program_id(axis: int = 0) -> int:
    """The core this program runs on."""
    _only_axis("program_id", axis)
    return machine.current().core


def num_programs(axes: int = 0) -> int:
    _only_axis("num_programs", axes)
    return machine.current().launch.cores


def program_ndim() -> int:
    return 1 if machine.current().launch.cores > 1 else 0


def _only_axis(op: str, axis: Any) -> None:
    if axis != 0:
        refuse("argument", f"axis {axis!r}; a grid has one axis, 0", op)


def device_print(print_prefix: str, tensor: NkiTensor) -> None:
    """Recorded, and nothing else: on the device it writes to a file."""
    if not isinstance(print_prefix, str) or not isinstance(tensor, NkiTensor):
        refuse("argument", f"({print_prefix!r}, {tensor!r}), expected a string and a tensor", "device_print")
    if tensor.buffer is PSUM:
        refuse("memory-space", f"{tensor!r}, expected SBUF or HBM", "device_print", "tensor")
    tensor.check_use("device_print", "tensor")
    machine.current().record("device_print", "sync", (tensor,), (), None, prefix=print_prefix)


def __getattr__(name: str) -> Any:
    found = OPS.get(name) or convenience.FUNCTIONS.get(name)
    if found is not None:
        return found
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownName("unknown-instruction", f"nki.language.{name} isn't known to the interpreter", name)
