"""Latency rows: one schema for modelled and measured ones, kept as JSON lines. `data/README.md` describes the fields.

The kind decides which fields a row has, and a row of one kind with fields of the other can't be made: what a timeline
predicts has no spread, and what a device did has one, and the versions it was done with.
"""

import datetime
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gdn_kernels import atomic
from gdn_kernels.dims import MODELS, BlockDims

KINDS = ("modelled", "measured")
TARGETS = ("trn2", "trn3")
SPREAD = ("min", "p10", "p90", "max")
VERSIONS = ("nki", "neuronx-cc", "torch-neuronx", "nrtpy", "runtime")


class RowError(ValueError):
    """A row that breaks the schema, or a file that holds one. The message names the file and the line."""


@dataclass(frozen=True)
class Row:
    """One latency of one call of `gdn_block_tkg`, bf16 form.

    Attributes:
        kind: "modelled" or "measured".
        model: name of a preset, or None; dims: its dimensions, or those of the case without one.
        B: sequences. lnc: cores, 1 or 2. target: chip, "trn2" or "trn3".
        median_us: of the repeats; of a modelled row, the one figure there is.
        spread: us, the keys of SPREAD. None in a modelled row, as are repeats, warmup, versions and instance.
        repeats, warmup: timed calls, and calls before them.
        how: the way it was found, in words.
        versions: of the keys of VERSIONS; None for what the environment didn't have.
        instance: EC2 instance type, None where it isn't known.
        package: version of this package. date: ISO, UTC.

    Raises:
        RowError: naming the field that breaks a rule.
    """

    kind: str
    model: str | None
    dims: BlockDims
    B: int
    lnc: int
    target: str
    median_us: float
    spread: Mapping[str, float] | None
    repeats: int | None
    warmup: int | None
    how: str
    versions: Mapping[str, str | None] | None
    instance: str | None
    package: str
    date: str

    def __post_init__(self) -> None:
        _require("kind", self.kind, self.kind in KINDS, f"one of {', '.join(KINDS)}")
        _require("model", self.model, self.model is None or self.model in MODELS, "null or a published model")
        if self.model is not None:
            wanted = MODELS[self.model].dims
            _require("dims", asdict(self.dims), self.dims == wanted, f"{asdict(wanted)}, those of {self.model}")
        _require("B", self.B, _whole(self.B, 1), "a whole number of at least 1")
        _require("lnc", self.lnc, _whole(self.lnc, 1) and self.lnc <= 2, "1 or 2")
        _require("target", self.target, self.target in TARGETS, f"one of {', '.join(TARGETS)}")
        _require("median_us", self.median_us, _time(self.median_us), "a positive number of us")
        for name in ("how", "package"):
            _require(name, getattr(self, name), bool(getattr(self, name)), "text")
        _require("date", self.date, _is_date(self.date), "a date like 2026-09-30")
        if self.kind == "modelled":
            for name in ("spread", "repeats", "warmup", "versions", "instance"):
                _require(name, getattr(self, name), getattr(self, name) is None, "null in a modelled row")
            return
        _require("spread", self.spread, _is_spread(self.spread, self.median_us), f"{' <= '.join(SPREAD)}, in us")
        _require("repeats", self.repeats, _whole(self.repeats, 1), "a whole number of at least 1")
        _require("warmup", self.warmup, _whole(self.warmup, 0), "a whole number")
        named = self.versions is not None and set(self.versions) == set(VERSIONS)
        _require("versions", self.versions, named, f"the versions of {', '.join(VERSIONS)}")

    @property
    def case(self) -> tuple[BlockDims, int, int, str]:
        """What two rows must share to be about the same thing."""
        return self.dims, self.B, self.lnc, self.target


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def read(path: Path) -> list[Row]:
    """The rows of a file, none when there is no file.

    Raises:
        RowError: naming file and line, when a line isn't a row.
    """
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise RowError(f"{path}:1: not a file of latency rows: it isn't text") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(_from_json(line))
        except ValueError as error:
            raise RowError(f"{path}:{number}: not a latency row: {error}") from None
    return rows


def read_folder(folder: Path) -> list[Row]:
    """The rows of every .jsonl file in a folder."""
    return [row for path in sorted(folder.glob("*.jsonl")) for row in read(path)]


def append(path: Path, row: Row) -> None:
    """Add a row to a file, which is made if need be.

    The line is written in one piece, so that several measurements may append at once and a reader sees all of a row or
    nothing.

    Raises:
        RowError: when the file is damaged already; nothing is written then.
        OSError: when the line can't be written; the file is as before.
    """
    read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    line = _to_json(row).encode()
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":  # the last line was saved by an editor
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            os.ftruncate(descriptor, size)
            raise OSError(f"{path}: no room for another row")
    finally:
        os.close(descriptor)


def save(path: Path, rows: Iterable[Row]) -> None:
    """Replace a file by these rows, at once and as a whole. A row that says what it said before keeps its date."""
    before = {(row.model, row.case): row for row in read(path)}
    kept = []
    for row in rows:
        old = before.get((row.model, row.case))
        kept.append(old if old is not None and replace(old, date=row.date) == row else row)
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write(path, "".join(map(_to_json, kept)).encode())


def _to_json(row: Row) -> str:
    return json.dumps(asdict(row)) + "\n"


def _from_json(line: str) -> Row:
    try:
        values = json.loads(line)
    except json.JSONDecodeError:
        raise RowError(f"{line[:40]!r} isn't JSON") from None
    if not isinstance(values, dict):
        raise RowError(f"{line[:40]!r} isn't a JSON object")
    names = [field.name for field in fields(Row)]
    if missing := [name for name in names if name not in values]:
        raise RowError(f"{', '.join(missing)} missing")
    if unknown := [name for name in values if name not in names]:
        raise RowError(f"unknown field {', '.join(unknown)}")
    try:
        values["dims"] = BlockDims(**values["dims"])
    except TypeError:
        raise RowError(f"dims must be H, Hk, Hv, K, V and K_win, got {values['dims']!r}") from None
    try:
        return Row(**values)
    except TypeError:  # a list or an object where there should be a word or a number
        raise RowError("a field has a value of another type") from None


def _require(name: str, value: Any, holds: bool, expected: str) -> None:
    if not holds:
        raise RowError(f"{name} must be {expected}, got {value!r}")


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _is_spread(spread: Any, median: float) -> bool:
    if not isinstance(spread, Mapping) or set(spread) != set(SPREAD) or not all(map(_time, spread.values())):
        return False
    ordered = [spread["min"], spread["p10"], median, spread["p90"], spread["max"]]
    return ordered == sorted(ordered)


def _is_date(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(datetime.date.fromisoformat(value))
    except ValueError:
        return False
