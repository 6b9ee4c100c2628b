"""Single tensors out of a safetensors file: its header first, then nothing but the bytes of the tensor asked for.

The safetensors package gives NumPy no FP8 tensors, which these checkpoints hold, so the format is read here: eight
bytes with the header's length (little endian), the header (JSON: name -> dtype, shape, begin and end of its data, in
bytes from the header's end), the data.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.dtypes import Array, bfloat16

LONGEST_HEADER = 100_000_000  # bytes; the format's own limit
_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
_SIZES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


class DamagedFile(ValueError):
    """Not a whole safetensors file."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the header; begin and end in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the file, by name. DamagedFile when it is cut short, or no safetensors file; OSError as open."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(LONGEST_HEADER, size - 8):
            raise DamagedFile(f"its header would end after {8 + length} bytes, the file after {size}")
        text = file.read(length)
    try:
        header = json.loads(text)
        entries = {name: _entry(value, 8 + length) for name, value in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedFile(f"no header of a safetensors file ({error})") from error
    for name, entry in entries.items():
        if not 8 + length <= entry.begin <= entry.end <= size:
            raise DamagedFile(f"{name} would end after {entry.end} bytes, the file after {size}")
        expected = math.prod(entry.shape) * _SIZES.get(entry.dtype, 0)
        if entry.dtype in _SIZES and entry.end - entry.begin != expected:
            raise DamagedFile(f"{name} would take {expected} bytes, its header gives it {entry.end - entry.begin}")
    return entries


def _entry(value: dict[str, Any], start: int) -> Entry:
    begin, end = value["data_offsets"]
    return Entry(str(value["dtype"]), tuple(map(int, value["shape"])), start + int(begin), start + int(end))


def read_tensor(path: Path, entry: Entry) -> Array:
    """The values of one tensor in F32, BF16 or F8_E4M3, in memory of their own."""
    with path.open("rb") as file:
        file.seek(entry.begin)
        raw = np.fromfile(file, np.uint8, entry.end - entry.begin)
    if raw.size != entry.end - entry.begin:
        raise DamagedFile(f"expected {entry.end - entry.begin} bytes at {entry.begin}, found {raw.size}")
    return raw.view(_numpy_dtype(entry.dtype)).reshape(entry.shape)


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name == "BF16":
        return bfloat16()
    if name == "F8_E4M3":  # the form without infinities, up to 448
        import ml_dtypes

        return np.dtype(ml_dtypes.float8_e4m3fn)
    return np.dtype("<f4")
