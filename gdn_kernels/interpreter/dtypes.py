"""NKI's dtypes. Those that NumPy can hold are NumPy dtypes, which have NKI's names; the others are only named.

Float8 formats differ by target: Trn2's e4m3 has infinities and ends at 240; e4m3fn, e8m0fnu and the packed formats
belong to Trn3. There are no 64-bit types.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gdn_kernels.interpreter.hardware import Target
from gdn_kernels.interpreter.rules import refuse

bool_ = np.dtype(np.bool_)
int8, int16, int32 = np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)
uint8, uint16, uint32 = np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32)
float16, float32 = np.dtype(np.float16), np.dtype(np.float32)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)
float8_e8m0fnu = np.dtype(ml_dtypes.float8_e8m0fnu)


@dataclass(frozen=True)
class NamedOnly:
    """A dtype that kernels may name and compare; tensors of it are refused. `generation`: the first to have it."""

    name: str
    generation: int

    def __str__(self) -> str:
        return self.name


tfloat32 = NamedOnly("tfloat32", 2)
float4_e2m1fn_x4 = NamedOnly("float4_e2m1fn_x4", 4)
float8_e4m3fn_x4 = NamedOnly("float8_e4m3fn_x4", 4)
float8_e5m2_x4 = NamedOnly("float8_e5m2_x4", 4)

EVERYWHERE = frozenset(
    (bool_, int8, int16, int32, uint8, uint16, uint32, float16, bfloat16, float32, float8_e4m3, float8_e5m2)
)
FROM_TRN3 = frozenset((float8_e4m3fn, float8_e8m0fnu))


def storable(dtype: Any, op: str, operand: str = "dtype", target: Target | None = None) -> np.dtype:
    """The NumPy dtype of a tensor of `dtype` on `target`, that of the running kernel if None."""
    if isinstance(dtype, np.dtype) and dtype in EVERYWHERE:
        return dtype
    return _unusual(dtype, op, operand, target)


def _unusual(dtype: Any, op: str, operand: str, target: Target | None) -> np.dtype:
    if isinstance(dtype, str):
        refuse("objects-not-strings", f"{dtype!r}, expected a dtype such as nl.float32", op, operand)
    if target is None:
        from gdn_kernels.interpreter.machine import current

        target = current().target
    if isinstance(dtype, NamedOnly):
        if target.generation < dtype.generation:
            refuse("target", f"{dtype} on {target.name}, only Trn3 has it", op, operand)
        refuse("not-modelled", f"tensors of {dtype}", op, operand)
    try:
        found = np.dtype(dtype)
    except TypeError:
        refuse("objects-not-strings", f"{dtype!r}, expected a dtype such as nl.float32", op, operand)
    if found in FROM_TRN3 and target.generation < 4:
        refuse("target", f"{found} on {target.name}, only Trn3 has it", op, operand)
    if found not in EVERYWHERE | FROM_TRN3:
        refuse("dtype", f"{found}, which NKI doesn't have", op, operand)
    return found
