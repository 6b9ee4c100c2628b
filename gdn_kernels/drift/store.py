"""Results and checkpoints of rollouts on disk: one .npz a rollout, written whole or not at all, checked when read.

data/README.md documents the schema. A file holds no time of day and no duration, so that the same rollout on the same
machine gives the same bytes, however often it was interrupted.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels import atomic
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.dtypes import Array
from gdn_kernels.policy import PRESETS

SCHEMA = "gdn_kernels.drift 1"
RESULT, CHECKPOINT = "result", "checkpoint"
META = "meta"
VERSIONS_OF = ("gdn-kernels", "numpy", "ml_dtypes", "numba")


class DriftFileError(ValueError):
    """A file that is not what it should be. The message names the file and the reason."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True)
class Result:
    """A finished rollout.

    Attributes:
        config: the fields of its RolloutConfig, as plain JSON values.
        records: what `Rollout.records` held at the end; `tokens` are the recorded indices.
        made_by: versions, machine, and the roundings that the policy's name stood for, see `provenance`.
    """

    config: dict[str, Any]
    records: dict[str, Array]
    made_by: dict[str, Any]


def plain(config: RolloutConfig) -> dict[str, Any]:
    """The fields of `config` as JSON gives them back: tuples are lists, paths are text."""
    fields: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return fields


def file_name(config: RolloutConfig) -> str:
    """A name for the rollout's file: what it is for a reader, and a digest of every field, so that no two share one."""
    fields = plain(config)
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:8]
    words = [config.policy, config.backend, Path(config.stream).name, f"n{config.tokens}", f"s{config.seed}", digest]
    return re.sub(r"[^\w.+-]", "-", "_".join(word for word in words if word)) + ".npz"


def provenance(config: RolloutConfig) -> dict[str, Any]:
    """What a result depends on beside its config: versions, the machine, what its policy rounds."""
    return {
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONS_OF}},
        "policy": asdict(PRESETS[config.policy]),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
    }


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """In which fields two configs differ, in words; empty when they do not."""
    names = [name for name in (*there, *(here.keys() - there.keys())) if there.get(name) != here.get(name)]
    return ", ".join(f"{name} is {there.get(name)!r} there and {here.get(name)!r} here" for name in names)


def encode(result: Result) -> bytes:
    """The bytes of a result's file."""
    return _encode(RESULT, {"config": result.config, "made_by": result.made_by}, result.records)


def save(path: Path, result: Result) -> None:
    """Write a result, atomically.

    Raises:
        OSError: if that is impossible; what `path` held before is untouched then.
    """
    write(path, encode(result))


def load(path: Path) -> Result:
    """Read a result back.

    Raises:
        DriftFileError: if the file is damaged, cut short, or no result of a rollout.
        OSError: if it can't be read at all.
    """
    meta, records = _decode(path, RESULT)
    if "tokens" not in records:
        raise DriftFileError(path, "damaged: it has no record `tokens`")
    return Result(meta["config"], records, meta["made_by"])


def save_checkpoint(path: Path, config: RolloutConfig, token: int, seconds: float, arrays: Mapping[str, Array]) -> None:
    """Write a checkpoint, atomically.

    Args:
        token: how many tokens are done.
        seconds: the time they took.
        arrays: what `Rollout.to_arrays` returned.
    """
    write(path, _encode(CHECKPOINT, {"config": plain(config), "token": token, "seconds": seconds}, arrays))


def load_checkpoint(path: Path, config: RolloutConfig) -> tuple[int, float, dict[str, Array]]:
    """Read a checkpoint back: token, seconds, arrays, as they were given to `save_checkpoint`.

    Raises:
        DriftFileError: if the file is damaged, cut short, no checkpoint, or that of another rollout than `config`.
        OSError: if it can't be read at all.
    """
    meta, arrays = _decode(path, CHECKPOINT)
    if differ := differences(meta["config"], plain(config)):
        raise DriftFileError(path, f"is the checkpoint of another rollout: {differ}")
    return meta["token"], meta["seconds"], arrays


def write(path: Path, data: bytes) -> None:
    """`data` becomes the content of `path` as a whole, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, data)


def _encode(kind: str, meta: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    if META in arrays:
        raise ValueError(f"arrays must not be called {META!r}")
    contents = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
    text = json.dumps({"schema": SCHEMA, "kind": kind, **meta, "arrays": contents}, sort_keys=True)
    buffer = io.BytesIO()
    pack = np.savez_compressed if kind == RESULT else np.savez  # a checkpoint is large, random, and soon replaced
    members: dict[str, Any] = {META: np.array(text), **arrays}
    pack(buffer, **members)
    return buffer.getvalue()


def _decode(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """The metadata and arrays of a file of this kind."""
    data = path.read_bytes()
    if not data.startswith(b"PK"):
        raise DriftFileError(path, "is no .npz file")
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except zipfile.BadZipFile as error:
        raise DriftFileError(path, f"damaged or cut short: {error}") from error
    except Exception as error:  # a flipped bit in a header can surface as anything from an OSError to a MemoryError
        raise DriftFileError(path, f"damaged: {type(error).__name__}: {error}") from error
    meta = _meta(path, arrays.pop(META, None))
    if meta["kind"] != kind:
        raise DriftFileError(path, f"is a {meta['kind']} of a rollout, expected a {kind}")
    found = {name: [str(array.dtype), *array.shape] for name, array in arrays.items()}
    if wrong := sorted(
        name for name in found.keys() | meta["arrays"].keys() if found.get(name) != meta["arrays"].get(name)
    ):
        raise DriftFileError(path, f"damaged: arrays missing, added or of another shape: {', '.join(wrong)}")
    return meta, arrays


def _meta(path: Path, text: Array | None) -> dict[str, Any]:
    foreign = DriftFileError(path, f"was not written by this program: no {META} of schema {SCHEMA!r}")
    if text is None or text.dtype.kind != "U" or text.ndim:
        raise foreign
    try:
        meta = json.loads(text.item())
    except ValueError:
        raise foreign from None
    if not isinstance(meta, dict) or "schema" not in meta:
        raise foreign
    if meta["schema"] != SCHEMA:
        raise DriftFileError(path, f"has schema {meta['schema']!r}, this program reads {SCHEMA!r}")
    return meta


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name where Linux tells it: results that come out of a BLAS depend on it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown processor"
    found = re.search(r"^model name\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return found[1].strip() if found else "unknown processor"
