"""gdn-kernels run: decode with the kernel, compare every step with the reference and with transformers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt

from gdn_kernels import backends, metrics, ops, plots, reference, sample
from gdn_kernels.cli import BadOption
from gdn_kernels.dtypes import is_bfloat16, to_float
from gdn_kernels.policy import UNROUNDED
from gdn_kernels.weights import BlockWeights, CheckpointError

Array = npt.NDArray[Any]

WARM_UP_STEPS = 8
"""Steps from a zero state before a checkpoint's decode is compared: every window column and head has seen input."""

TOLERANCES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    # One sum at a bf16 tie moves a window element by a whole bf16 step, and stays in the window for K_win steps, which
    # a reference that runs free sees and one of a single step does not; the fp32 form has no such ties. transformers'
    # bf16 model also rounds wherever policy.HF_BF16 says.
    "bf16": {"own window": (2e-4, 4e-3), "running free": (1e-3, 4e-3), "recorded": (8e-3, 2e-2)},
    "fp32": {"own window": (2e-6, 2e-6), "running free": (2e-6, 2e-6), "recorded": (2e-6, 2e-6)},
}


@dataclass
class Check:
    """One line of the table: an error at each step, what it may be, and how the steps make one figure."""

    stage: str
    tolerance: float
    summary: Callable[[list[float]], float] = max
    relative: bool = True  # a relative error, which the figure shows; else a count or a share
    errors: dict[int, float] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return float(self.summary(list(self.errors.values())))

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass
class Group:
    """Checks that are computed together, and the time that took."""

    title: str
    checks: list[Check]
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start


@dataclass(frozen=True)
class Decode:
    """What is decoded: a layer, the input of each step [steps, B, 1, H], and the states before the first.

    `recording` has what transformers gave for the same, if anything did.
    """

    form: str
    weights: BlockWeights
    hidden: Array
    conv_state: Array
    recurrent_state: Array
    recording: sample.Recording | None = None


Kernel = Callable[..., tuple[Array, Array, Array]]


def add_parser(subparsers: Any) -> None:
    """Add `run` to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="decode a layer with the kernel and compare every step",
        description="Decode 64 steps of the sample layer, or of a layer of your own Qwen3.5 checkpoint, with the "
        "kernel; compare every step with the float64 reference and, for the sample, with what transformers gave. "
        "Exit code 0: within tolerance; 1: a tolerance was missed; 2: could not run.",
    )
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="Qwen3.5 checkpoint folder (default: the sample)"
    )
    parser.add_argument("--layer", type=int, metavar="N", help="which layer of the checkpoint; counts from 0")
    parser.add_argument("--steps", type=int, default=64, help="decode steps (default 64; the sample has 64)")
    parser.add_argument("--backend", default="auto", choices=("auto", *backends.NAMES))
    parser.add_argument("--lnc", type=int, choices=(1, 2), help="cores a kernel runs on")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), metavar="DIR", help="where the figure goes (default build)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random input of a checkpoint's layer")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, 1 (a tolerance was missed), 2 (could not run) or 130 (interrupted)."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("gdn-kernels run: interrupted", file=sys.stderr)
        return 130
    except (BadOption, CheckpointError, backends.BackendUnavailable) as error:
        print(f"gdn-kernels run: {error}", file=sys.stderr)
        return 2


def _run(args: argparse.Namespace) -> int:
    backend = backends.choose(args.backend)
    _check_arguments(args)
    kernel = partial(ops.gdn_block_tkg, lnc=args.lnc, backend=backend)
    start = time.perf_counter()
    weights, source = _load(args)
    print(f"layer    {source}: {_describe(weights)}, loaded in {time.perf_counter() - start:.2f} s")
    print(f"backend  {backend}{'' if backend == 'trn2' else ': no device was used'}", flush=True)

    decodes = _of_checkpoint(weights, args, kernel) if args.checkpoint else _of_sample(weights, args.steps)
    results = {decode.form: follow(decode, kernel) for decode in decodes}
    print_table(results)
    _draw(results, f"{source}, backend {backend}", args.out / "decode_errors.png")
    missed = [check for groups in results.values() for group in groups for check in group.checks if not check.ok]
    total = sum(len(group.checks) for groups in results.values() for group in groups)
    print(f"{len(missed)} of {total} tolerances MISSED" if missed else f"all {total} within tolerance")
    return 1 if missed else 0


def _check_arguments(args: argparse.Namespace) -> None:
    if (args.layer is None) != (args.checkpoint is None):
        raise BadOption("--checkpoint and --layer: expected both or neither")
    if args.steps < 1:
        raise BadOption(f"--steps: expected 1 or more, got {args.steps}")
    if not args.checkpoint and args.steps > sample.DECODE_STEPS:
        raise BadOption(f"--steps: expected at most the {sample.DECODE_STEPS} of the sample, got {args.steps}")


def _load(args: argparse.Namespace) -> tuple[BlockWeights, str]:
    if args.checkpoint:
        return BlockWeights.from_checkpoint(args.checkpoint, args.layer), f"{args.checkpoint} layer {args.layer}"
    return sample.load_weights(), "sample"


def _describe(weights: BlockWeights) -> str:
    dims = weights.dims
    return ", ".join(f"{name} {getattr(dims, name)}" for name in ("H", "Hk", "Hv", "K", "V", "K_win"))


def _of_sample(weights: BlockWeights, steps: int) -> Iterator[Decode]:
    """The sample in both forms, from transformers' own states after its prefill."""
    for form, of_form in (("bf16", weights), ("fp32", weights.astype_fp32())):
        recording = sample.load_recording(form)
        start = recording.conv_state[0], recording.recurrent_state[0]
        yield Decode(form, of_form, recording.hidden[:steps], *start, recording)


def _of_checkpoint(weights: BlockWeights, args: argparse.Namespace, kernel: Kernel) -> Iterator[Decode]:
    """Random hidden states through a layer in the form of its weights, from where some steps from zero lead."""
    dims, dtype = weights.dims, weights.W_in_qkv.dtype
    generator = np.random.default_rng(args.seed)
    hidden = generator.standard_normal((WARM_UP_STEPS + args.steps, 1, 1, dims.H), np.float32).astype(dtype)
    conv_state = np.zeros((1, dims.conv_dim, dims.K_win), dtype)
    recurrent_state = np.zeros((1, dims.Hv, dims.K, dims.V), np.float32)
    decode = Decode("bf16" if is_bfloat16(dtype) else "fp32", weights, hidden, conv_state, recurrent_state)
    for step in range(WARM_UP_STEPS):
        _, conv_state, recurrent_state = _step(kernel, decode, hidden[step], conv_state, recurrent_state)
    hidden = hidden[WARM_UP_STEPS:]
    yield replace(decode, hidden=hidden, conv_state=conv_state, recurrent_state=recurrent_state)


def _step(kernel: Kernel, decode: Decode, hidden: Array, conv_state: Array, S: Array) -> tuple[Array, Array, Array]:
    weights = decode.weights
    arguments = weights.arguments()
    return kernel(hidden, **arguments, conv_state=conv_state, recurrent_state=S, norm_eps=weights.norm_eps)


def follow(decode: Decode, kernel: Kernel) -> list[Group]:
    """Decode with `kernel`, which carries its own states, and compare each step with everything there is."""
    from tqdm import tqdm

    steps = len(decode.hidden)
    kernel_time = Group(f"kernel, {decode.form} form, {steps} steps", [])
    comparisons: list[StepByStep | FreeRunning | Recorded] = [StepByStep(decode), FreeRunning(decode)]
    if decode.recording:
        comparisons.append(Recorded(decode))
    states = decode.conv_state, decode.recurrent_state
    for step, hidden in enumerate(tqdm(decode.hidden, desc=f"{decode.form} form", unit="step"), 1):
        with kernel_time.timed():
            core_out, *new_states = _step(kernel, decode, hidden, *states)
        for comparison in comparisons:
            with comparison.group.timed():
                comparison.compare(step, hidden, states, core_out, *new_states)
        states = new_states[0], new_states[1]
    return [kernel_time, *(comparison.group for comparison in comparisons)]


class StepByStep:
    """The float64 reference makes the same single step from the kernel's states: given the kernel's new window, so
    that what follows it is judged alone, and once more with the window it computes itself.
    """

    def __init__(self, decode: Decode) -> None:
        self.form, self.reference = decode.form, _reference(decode)
        self.W_in_qkv = to_float(decode.weights.W_in_qkv, np.float64)
        self.window = Check("window, wrong elements", 0, sum, relative=False)
        self.state = Check("state, given the window", 5e-7)
        self.head = Check("state, worst head", 1e-6)
        state, core_out = TOLERANCES[self.form]["own window"]
        self.state_own_window = Check("state, not given the window", state)
        self.output_own_window = Check("core_out, not given the window", core_out)
        if self.form == "bf16":
            self.output = [
                Check("core_out, share not equal", 1e-3, mean, relative=False),
                Check("core_out, furthest in bf16 steps", 1, relative=False),
            ]
        else:
            self.output = [Check("core_out, given the window", 1e-6)]
        title = "against the reference, step by step"
        not_given = [self.state_own_window, self.output_own_window]
        self.group = Group(title, [self.window, self.state, self.head, *self.output, *not_given])

    def compare(
        self, step: int, hidden: Array, states: tuple[Array, Array], core_out: Array, window: Array, S: Array
    ) -> None:
        slid = int((window[..., :-1] != states[0][..., 1:]).sum())
        _, wrong = metrics.projection_misses(window[..., -1], hidden[:, 0], self.W_in_qkv, self.form)
        self.window.errors[step] = slid + wrong
        exact_out, _, exact_S = self.reference(hidden, conv_state=states[0], recurrent_state=states[1], window=window)
        self.state.errors[step] = metrics.relative_error(S, exact_S)
        self.head.errors[step] = metrics.worst_head_error(S, exact_S)
        if self.form == "bf16":
            self.output[0].errors[step] = metrics.unequal_share(core_out, exact_out)
            self.output[1].errors[step] = float(metrics.bf16_steps(core_out, exact_out).max())
        else:
            self.output[0].errors[step] = metrics.relative_error(core_out, exact_out)
        exact_out, _, exact_S = self.reference(hidden, conv_state=states[0], recurrent_state=states[1])
        self.state_own_window.errors[step] = metrics.relative_error(S, exact_S)
        self.output_own_window.errors[step] = metrics.relative_error(core_out, exact_out)


class FreeRunning:
    """The float64 reference decodes on its own from the same start: what the kernel's errors add up to."""

    def __init__(self, decode: Decode) -> None:
        state, core_out = TOLERANCES[decode.form]["running free"]
        self.reference = _reference(decode)
        self.states: tuple[Array, Array] = (decode.conv_state, decode.recurrent_state)
        self.state = Check("state, drift", state)
        self.core_out = Check("core_out, drift", core_out)
        self.group = Group("against the reference, running free", [self.state, self.core_out])

    def compare(
        self, step: int, hidden: Array, states: tuple[Array, Array], core_out: Array, window: Array, S: Array
    ) -> None:
        exact_out, *new_states = self.reference(hidden, conv_state=self.states[0], recurrent_state=self.states[1])
        self.states = new_states[0], new_states[1]
        self.state.errors[step] = metrics.relative_error(S, self.states[1])
        self.core_out.errors[step] = metrics.relative_error(core_out, exact_out)


class Recorded:
    """What transformers' layer gave, decoding on its own in the same form."""

    def __init__(self, decode: Decode) -> None:
        assert decode.recording is not None
        state, core_out = TOLERANCES[decode.form]["recorded"]
        self.recording = decode.recording
        steps = [step for step in self.recording.recurrent_state if 0 < step <= len(decode.hidden)]
        self.state = Check(f"state after {', '.join(map(str, steps))}", state)
        self.core_out = Check("core_out (input of out_proj)", core_out)
        self.group = Group("against transformers' recording", [self.state, self.core_out])

    def compare(
        self, step: int, hidden: Array, states: tuple[Array, Array], core_out: Array, window: Array, S: Array
    ) -> None:
        if step in self.recording.recurrent_state:
            self.state.errors[step] = metrics.relative_error(S, self.recording.recurrent_state[step])
        self.core_out.errors[step] = metrics.relative_error(core_out, self.recording.core_out[step - 1])


def _reference(decode: Decode) -> Kernel:
    """The reference for this layer, its weights converted to float64 once; the results it returns are not rounded."""
    weights = {name: to_float(array, np.float64) for name, array in decode.weights.arguments().items()}
    return partial(reference.gdn_block_tkg, **weights, norm_eps=decode.weights.norm_eps, policy=UNROUNDED)


def print_table(results: Mapping[str, list[Group]]) -> None:
    """Stage, error, tolerance, time, verdict."""
    print(f"\n{'stage':44} {'error':>9} {'tolerance':>10} {'time':>9}")
    for groups in results.values():
        for group in groups:
            print(f"{group.title:44} {'':9} {'':10} {group.seconds:7.2f} s")
            for check in group.checks:
                verdict = "ok" if check.ok else "MISSED"
                print(f"  {check.stage:42} {check.error:9.2g} {check.tolerance:10.2g} {'':9}  {verdict}")
    print()


def _draw(results: Mapping[str, list[Group]], title: str, path: Path) -> None:
    panels = {
        f"{form} form": [
            plots.Curve(f"{check.stage} ({group.title.removeprefix('against ')})", check.errors, check.tolerance)
            for group in groups
            for check in group.checks
            if check.relative
        ]
        for form, groups in results.items()
    }
    try:
        plots.decode_errors(panels, title, path)
    except ImportError:
        print("no figure: it needs matplotlib (pip install matplotlib)")
    except OSError as error:
        print(f"no figure: {path}: {error.strerror}")
    else:
        print(f"figure   {path}")
