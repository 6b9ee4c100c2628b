"""`gdn-kernels latency`: what the block takes, modelled from published costs, or measured where there is a device."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdn_kernels import MODELS
from gdn_kernels.cli import installed_version
from gdn_kernels.cli.step import random_arguments
from gdn_kernels.latency import compare, measure, rows
from gdn_kernels.latency.growth import over_batch, over_hidden
from gdn_kernels.latency.model import Modelled, model_block
from gdn_kernels.latency.modelled import modelled_rows
from gdn_kernels.latency.stages import savings, savings_table
from gdn_kernels.timeline.costs import COSTS, SIMPLIFICATIONS
from gdn_kernels.timeline.perfetto import write_trace
from gdn_kernels.timeline.report import gaps, path_by_line

DATA = Path("data/latency")
ACTIONS = {
    "table": "every model, fused against stage by stage, at B = 1 and 8",
    "save": "keep the modelled rows of every model, B = 1, 8, 32 and 64, one core and two",
    "measure": "time the block on this instance and keep the row",
    "compare": "modelled beside measured",
    "published": "the timeline beside profiles that the vendor published (20 s)",
    "sensitivity": "how the ratio moves if the device differs from the constants",
}


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser("latency", help="model the block's latency", description=__doc__)
    parser.add_argument("--model", default="Qwen3.5-35B-A3B", choices=MODELS, metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default 1)")
    parser.add_argument("--lnc", type=int, default=1, choices=(1, 2), help="cores (default 1)")
    parser.add_argument("--target", default="trn2", choices=("trn2", "trn3"), help="chip (default trn2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw every engine over time")
    parser.add_argument("--markdown", action="store_true", help="print a table as Markdown")
    parser.add_argument("--data", type=Path, default=DATA, metavar="DIR", help=f"where rows are kept (default {DATA})")
    parser.add_argument("--neff", type=Path, metavar="FILE", help="with --measure: time this compiled file under nrtpy")
    parser.add_argument("--warmup", type=int, default=20, metavar="N", help="untimed runs before (default 20)")
    parser.add_argument("--repeats", type=int, default=200, metavar="N", help="timed runs (default 200)")
    actions = parser.add_mutually_exclusive_group()
    for action, summary in ACTIONS.items():
        actions.add_argument(f"--{action}", dest="action", action="store_const", const=action, help=summary)
    actions.add_argument("--growth", type=Path, metavar="FILE", help="draw how the cost grows with B and with H")
    actions.add_argument("--compile", type=Path, metavar="FILE", help="compile the block to a NEFF, where nki is")


def run(args: argparse.Namespace) -> int:
    if args.compile:
        args.action = "compile"
    if args.growth:
        args.action = "growth"
    if args.action is None:
        return _model(args)
    try:
        _ACTIONS[args.action](args)
    except (rows.RowError, measure.CannotMeasure, OSError) as error:
        print(f"gdn-kernels latency: {error}", file=sys.stderr)
        return 2
    return 0


def _table(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    cases = savings((1, 8), args.lnc, COSTS[args.target])
    found = list(tqdm(cases, desc="modelling", unit="case", disable=None, leave=False))
    print(savings_table(found, args.lnc, args.target, args.markdown))


def _growth(args: argparse.Namespace) -> None:
    from gdn_kernels.plots import latency_growth

    dims, costs = MODELS[args.model].dims, COSTS[args.target]
    panels = {"B": over_batch(dims, args.lnc, costs), "H": over_hidden(dims, args.batch, args.lnc, costs)}
    latency_growth(panels, f"{args.model}, LNC {args.lnc}, {args.target}", args.growth)
    print(f"modelled, drawn in {args.growth}")


def _save(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    path = args.data / "modelled.jsonl"
    kept = [row for row in rows.read(path) if row.target != args.target]
    cases = modelled_rows(COSTS[args.target], installed_version())
    kept += tqdm(cases, desc="modelling", unit="row", disable=None, leave=False)
    rows.save(path, kept)
    print(f"{len(kept)} modelled rows in {path}")


def _compile(args: argparse.Namespace) -> None:
    case = measure.Case(args.model, args.batch, args.lnc)
    neff = measure.compile_neff(args.compile, case, random_arguments(case.model, case.B, 0))
    print(f"compiled {neff.path}; time it in the environment of nrtpy with --measure --neff {neff.path}")


def _measure(args: argparse.Namespace) -> None:
    if args.repeats < 1 or args.warmup < 0 or args.batch < 1:
        raise measure.CannotMeasure("--batch and --repeats must be at least 1, --warmup at least 0")
    path = args.data / "measured.jsonl"
    rows.read(path)  # a damaged file is noticed before the time is spent
    if args.neff:
        neff = measure.read_neff(args.neff)
        arguments = random_arguments(neff.case.model, neff.case.B, 0)
        row = measure.with_nrtpy(neff, arguments, args.warmup, args.repeats, installed_version())
    else:
        case = measure.Case(args.model, args.batch, args.lnc)
        arguments = random_arguments(case.model, case.B, 0)
        row = measure.with_torch(case, arguments, args.warmup, args.repeats, installed_version())
    rows.append(path, row)
    print(json.dumps(asdict(row)))


def _compare(args: argparse.Namespace) -> None:
    found = compare.compare(rows.read_folder(args.data))
    print(compare.comparison_table(found, args.markdown))


def _published(args: argparse.Namespace) -> None:
    from gdn_kernels.timeline.published.table import as_markdown, as_text, published_table

    print((as_markdown if args.markdown else as_text)(published_table()))


def _sensitivity(args: argparse.Namespace) -> None:
    from gdn_kernels.latency.sensitivity import sensitivity, sensitivity_table

    print(sensitivity_table(sensitivity(costs=COSTS[args.target]), markdown=args.markdown))


_ACTIONS = {
    "growth": _growth,
    "table": _table,
    "save": _save,
    "compile": _compile,
    "measure": _measure,
    "compare": _compare,
    "published": _published,
    "sensitivity": _sensitivity,
}


def _model(args: argparse.Namespace) -> int:
    modelled = model_block(MODELS[args.model].dims, args.batch, args.lnc, COSTS[args.target])
    if args.trace:
        write_trace(modelled.schedules, args.trace)
    if args.figure:
        from gdn_kernels.plots import gantt

        gantt(modelled.schedules, f"{args.model}, B = {args.batch}, LNC {args.lnc}, {args.target}", args.figure)
    print(json.dumps(modelled.row()) if args.json else as_text(modelled))
    return 0


def as_text(modelled: Modelled) -> str:
    """The report a person reads."""
    lines = ["modelled from published costs, not measured", ""]
    for name, value in modelled.row().items():
        text = ", ".join(f"{k} {v:.1%}" for k, v in value.items()) if isinstance(value, dict) else f"{value:,}"
        lines.append(f"{name:18s} {text}")
    slowest = max(modelled.schedules, key=lambda s: s.total)
    lines += ["", "critical path by source line"]
    lines += [f"  {ns / 1e3:8.2f} us  {count:5d} x  {line}" for line, ns, count in path_by_line(slowest)[:8]]
    lines += ["", "longest waits of a queue"]
    for gap in gaps(slowest, 8):
        waits = f"for {gap.cause}" if gap.cause else "to begin"
        lines.append(f"  {gap.length / 1e3:8.2f} us from {gap.start / 1e3:8.2f}  {gap.queue:7s} {waits}")
    return "\n".join([*lines, "", "simplifications", *(f"  - {text}" for text in SIMPLIFICATIONS)])
