"""`gdn-kernels attribute`: a policy's roundings, ranked by what each costs alone and what is saved without it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, astuple, replace
from pathlib import Path
from typing import Any

import numpy as np

from gdn_kernels.cli.rollout import add_rollout_options, config_of, pair_of, strict_json, tell_if_slow
from gdn_kernels.drift.attribution import Cost, Errors, Variant, ranked, variants
from gdn_kernels.drift.attribution import run as run_variant
from gdn_kernels.drift.config import RolloutConfig
from gdn_kernels.policy import PRESETS
from gdn_kernels.weights import CheckpointError


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser("attribute", help="rank a policy's roundings", description=__doc__)
    parser.add_argument("--policy", default="nkilib", choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    add_rollout_options(parser)
    parser.add_argument("--tau", type=pair_of(float, ":"), metavar="LO:HI", help="memory lengths (default 1:1e6)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="medians over N seeds, from --seed on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the costs as bars")
    parser.set_defaults(tokens=1024)


def run(args: argparse.Namespace) -> int:
    """Exit status 0, or 2 if it could not run."""
    try:
        together, costs = _measure(args)
    except KeyboardInterrupt:
        print("gdn-kernels attribute: interrupted", file=sys.stderr)
        return 130
    except (CheckpointError, ImportError, OSError, ValueError) as error:
        print(f"gdn-kernels attribute: {error}", file=sys.stderr)
        return 2
    if args.json:
        row = {"policy": args.policy, "tokens": args.tokens, "seeds": args.seeds, "stream": args.stream}
        print(strict_json({**row, "together": asdict(together), "ranked": [asdict(cost) for cost in costs]}))
    else:
        print(as_text(args.policy, together, costs))
    if args.figure:
        _draw(args, together, costs)
    return 0


def _measure(args: argparse.Namespace) -> tuple[Errors, list[Cost]]:
    from tqdm import tqdm

    if args.seeds < 1:
        raise ValueError(f"--seeds: expected 1 or more, got {args.seeds}")
    tau = args.tau or (None if args.checkpoint else (1.0, 1e6))
    config = config_of(args, policy=args.policy, tau=tau)
    seeds = range(args.seed, args.seed + args.seeds)
    tell_if_slow()
    bar = tqdm(variants(PRESETS[args.policy]), desc=args.policy, unit="rounding")
    results = [(variant, over_seeds(config, variant, seeds)) for variant in bar]
    return results[0][1], ranked(results)


def over_seeds(config: RolloutConfig, variant: Variant, seeds: Sequence[int]) -> Errors:
    """The medians over rollouts with these seeds."""
    errors = [astuple(run_variant(replace(config, seed=seed), variant)) for seed in seeds]
    return Errors(*np.median(errors, axis=0).tolist())


def as_text(policy: str, together: Errors, costs: Sequence[Cost]) -> str:
    """The ranked table a person reads."""
    columns = f"{'alone':>9} {'without':>9} {'share':>7}"
    lines = [
        f"{'':3} {'':11} {'':8} {'state error':^27}  {'output error':^27}",
        f"{'':3} {'site':11} {'format':8} {columns}  {columns}",
    ]
    for rank, cost in enumerate(costs, 1):
        state = f"{cost.alone.state:9.2e} {cost.without.state:9.2e} {cost.share:7.1%}"
        output = f"{cost.alone.output:9.2e} {cost.without.output:9.2e} {cost.output_share:7.1%}"
        lines.append(f"{rank:3} {cost.site:11} {cost.format:8} {state}  {output}")
    all_state, all_output = f"{together.state:9.2e}", f"{together.output:9.2e}"
    lines.append(f"{'':3} {'all':11} {'':8} {all_state} {'':17}  {all_output}")
    return "\n".join(
        [
            f"policy {policy}: medians over heads and the last nine tenths of the tokens",
            "alone: with this rounding only; without: with all the others; share: of the squared errors alone",
            "",
            *lines,
        ]
    )


def _draw(args: argparse.Namespace, together: Errors, costs: Sequence[Cost]) -> None:
    from gdn_kernels import plots

    panels = {
        what: plots.Costs(
            np.array([getattr(cost.alone, what) for cost in costs]),
            np.array([getattr(cost.without, what) for cost in costs]),
            getattr(together, what),
        )
        for what in ("state", "output")
    }
    try:
        plots.attribution_bars(
            [cost.site for cost in costs], panels, f"{args.policy}, {args.stream} tokens", args.figure
        )
    except ImportError:
        print("no figure: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
    except OSError as error:
        print(f"no figure: {error}", file=sys.stderr)
