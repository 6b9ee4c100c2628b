"""`gdn-kernels rollout`: decode many tokens under a rounding policy or on a backend, beside a float64 oracle.

One rollout, or a sweep of them with --policies, --seeds or several --tau. Ctrl-C stops after the token at hand and
loses nothing; --resume goes on to the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

from gdn_kernels.backends import BackendUnavailable
from gdn_kernels.cli import BadOption
from gdn_kernels.drift import runs, store, sweep
from gdn_kernels.drift.config import BACKENDS, STREAMS, RolloutConfig
from gdn_kernels.drift.recurrence import hint
from gdn_kernels.drift.report import head_errors, lines_of, names_of, report_of, report_text, sweep_text
from gdn_kernels.policy import PRESETS
from gdn_kernels.weights import CheckpointError

FOLDER = Path("build/drift")
"""Of checkpoints and of a sweep's results, where --save names no other place."""


def add_parser(subparsers: Any) -> None:
    """Declare the command's options on the action that `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser("rollout", help="decode many tokens and watch the error", description=__doc__)
    what = parser.add_argument_group("what is decoded")
    add_rollout_options(what)
    what.add_argument("--policy", default="ours", choices=PRESETS, metavar="NAME", help=", ".join(PRESETS))
    what.add_argument(
        "--tau", type=pair_of(float, ":"), action="append", metavar="LO:HI",
        help="memory lengths of the heads in tokens, log-spaced (default 1:1e6); several make a sweep",
    )  # fmt: skip
    what.add_argument(
        "--backend", default="emulated", choices=("emulated", *BACKENDS), help="emulate the policy, or run the kernel"
    )
    several = parser.add_argument_group("several rollouts")
    several.add_argument("--policies", type=words, metavar="A,B,...", help="each of these policies")
    several.add_argument("--seeds", type=int, metavar="N", help="N seeds, from --seed on")
    several.add_argument("--workers", type=int, default=1, metavar="N", help="processes on this machine (default 1)")
    several.add_argument("--dask", metavar="ADDRESS", help="run on this Dask cluster, tcp://HOST:PORT")
    results = parser.add_argument_group("results")
    results.add_argument("--json", action="store_true", help="print one JSON object")
    results.add_argument("--save", type=Path, metavar="PATH", help="file of the result; folder of a sweep's results")
    results.add_argument("--figure", type=Path, metavar="FILE", help="draw the error against the token")
    results.add_argument("--heat-map", type=Path, metavar="FILE", help="draw the error over head memory and token")
    results.add_argument("--resume", action="store_true", help="go on where an earlier run of the same rollout stopped")
    results.add_argument(
        "--checkpoint-every", type=int, metavar="N", help="tokens between checkpoints (default: one a minute)"
    )


def add_rollout_options(group: Any) -> None:
    """The options that say what is decoded, shared with `attribute`."""
    group.add_argument("--tokens", type=int, default=4096, metavar="N", help="decode steps (default 4096)")
    group.add_argument(
        "--heads", type=pair_of(int, ","), default=(2, 8), metavar="HK,HV", help="key and value heads (default 2,8)"
    )
    group.add_argument(
        "--head-dims", type=pair_of(int, ","), default=(128, 128), metavar="K,V", help="their sizes (default 128,128)"
    )
    group.add_argument("--hidden", type=int, default=256, metavar="H", help="hidden size (default 256)")
    group.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default 1)")
    group.add_argument(
        "--stream", default="independent", metavar="NAME", help=f"{', '.join(STREAMS)}, ar1:RHO or file:PATH"
    )
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of weights, states, tokens, roundings")
    group.add_argument("--form", default="bf16", choices=("bf16", "fp32"), help="dtype of the activations")
    group.add_argument("--checkpoint", metavar="DIR", help="weights of a Qwen3.5 checkpoint folder")
    group.add_argument("--layer", type=int, default=0, metavar="N", help="which layer of the checkpoint (default 0)")


def tell_if_slow() -> None:
    """A line on standard error where numba is missing; it changes nothing but the time."""
    if hint():
        print(hint(), file=sys.stderr)


def pair_of(kind: type[int] | type[float], separator: str) -> Any:
    """An argparse type: two numbers with a separator between them, "2,8" -> (2, 8)."""

    def parse(text: str) -> tuple[Any, Any]:
        first, _, second = text.partition(separator)
        try:
            return kind(first), kind(second)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected two numbers as in 1{separator}8, got {text!r}") from None

    return parse


def words(text: str) -> list[str]:
    """An argparse type: names with commas between them."""
    return [word.strip() for word in text.split(",")]


def config_of(args: argparse.Namespace, **fields: Any) -> RolloutConfig:
    """The rollout that the options of `add_rollout_options` describe, with more fields."""
    (Hk, Hv), (K, V) = args.heads, args.head_dims
    return RolloutConfig(
        tokens=args.tokens, H=args.hidden, Hk=Hk, Hv=Hv, K=K, V=V, B=args.batch, stream=args.stream, seed=args.seed,
        form=args.form, checkpoint=args.checkpoint, layer=args.layer, **fields,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Exit status 0: all there; 1: some rollouts of a sweep failed; 2: could not run; 130: stopped by Ctrl-C."""
    try:
        return _run(args)
    except runs.Interrupted as stopped:
        print(f"gdn-kernels rollout: {stopped}; to go on:\n  {_again(args)}", file=sys.stderr)
        return 128 + stopped.signal
    except KeyboardInterrupt:
        print(f"gdn-kernels rollout: interrupted; to go on:\n  {_again(args)}", file=sys.stderr)
        return 130
    except (BadOption, BackendUnavailable, CheckpointError, ImportError, OSError, ValueError) as error:
        print(f"gdn-kernels rollout: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    taus = args.tau or [None if args.checkpoint else (1.0, 1e6)]
    for name in ("seeds", "workers", "checkpoint_every"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise BadOption(f"--{name.replace('_', '-')}: expected 1 or more, got {getattr(args, name)}")
    backend = None if args.backend == "emulated" else args.backend
    base = config_of(args, policy=args.policy, backend=backend, tau=taus[0])
    tell_if_slow()
    if args.policies or args.seeds or args.dask or len(taus) > 1:
        seeds = range(args.seed, args.seed + (args.seeds or 1))
        return _sweep(args, sweep.grid(base, args.policies or [args.policy], taus, seeds))
    return _single(args, base)


def _single(args: argparse.Namespace, config: RolloutConfig) -> int:
    path = args.save or FOLDER / store.file_name(config)
    checkpoint = sweep.checkpoint_of(path)
    if args.save and path.exists():
        sweep.check_config(path, config)  # rather than overwrite another rollout's
    if args.resume and not checkpoint.exists():
        print(f"no checkpoint {checkpoint}: starting at the first token", file=sys.stderr)
    finished = runs.run(config, checkpoint, every=args.checkpoint_every, resume=args.resume, progress=True)
    if args.save:
        store.save(path, finished.result)
    report: dict[str, Any] = report_of(finished.result)
    report["seconds"] = round(finished.seconds, 3)
    report["tokens_per_second"] = round(config.tokens / finished.seconds, 1)
    print(strict_json(report) if args.json else report_text(config, report))
    _draw(args, [finished.result])
    checkpoint.unlink(missing_ok=True)
    return 0


def _sweep(args: argparse.Namespace, configs: list[RolloutConfig]) -> int:
    folder = args.save or FOLDER
    outcome = sweep.sweep(configs, folder, workers=args.workers, dask=args.dask, progress=True)
    paths = [folder / store.file_name(config) for config in configs]
    results = {path: store.load(path) for path in paths if path not in outcome.failed}
    _draw(args, list(results.values()))
    if args.json:
        rows = [{**names_of(result), "file": str(path), **report_of(result)} for path, result in results.items()]
        print(strict_json({"rollouts": rows, "failed": {str(path): why for path, why in outcome.failed.items()}}))
    else:
        print(sweep_text(list(results.values())))
        print(f"{len(outcome.stored)} stored in {folder}, {len(outcome.skipped)} were there already")
    for path, reason in outcome.failed.items():
        print(f"gdn-kernels rollout: FAILED {path.name}: {reason}", file=sys.stderr)
    return 1 if outcome.failed else 0


def _draw(args: argparse.Namespace, results: list[store.Result]) -> None:
    from gdn_kernels import plots

    title = f"{args.stream} tokens"
    try:
        if args.figure and results:
            panels = {"state": lines_of(results, "state_error"), "output": lines_of(results, "output_error")}
            plots.drift_errors(panels, title, args.figure)
        if args.heat_map and results:
            plots.drift_heat_map(head_errors(results), title, args.heat_map)
    except ImportError:
        print("no figure: it needs matplotlib (pip install matplotlib)", file=sys.stderr)
    except OSError as error:
        print(f"no figure: {error}", file=sys.stderr)


def strict_json(report: dict[str, Any]) -> str:
    """JSON proper: an infinity or NaN, which it has no word for, is null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(item) for name, item in value.items()}
        if isinstance(value, list):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(report), allow_nan=False)


def _again(args: argparse.Namespace) -> str:
    """The command that goes on from here: the same words, and --resume for a single rollout."""
    words = ["python", "-m", "gdn_kernels", *sys.argv[1:]]
    return shlex.join([*words, *([] if "--resume" in words else ["--resume"])])
