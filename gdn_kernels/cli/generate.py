"""gdn-kernels generate: decode with a transformers model whose Gated DeltaNet layers are the block."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdn_kernels import backends
from gdn_kernels.cli import BadOption

DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32"}
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def add_parser(subparsers: Any) -> None:
    """Add `generate` to the command line."""
    parser = subparsers.add_parser(
        "generate",
        help="decode with a transformers model on the block",
        description="Load a Qwen3.5 or Qwen3-Next checkpoint with transformers, patch its Gated DeltaNet layers, "
        "decode greedily and show the tokens as they come. Exit code 0: done; 2: could not run; 130: interrupted, "
        "after showing what there was.",
    )
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="folder with config.json")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="for the folder's tokenizer; without one, its bytes are tokens"
    )
    prompt.add_argument("--prompt-ids", metavar="IDS", help="token numbers, such as 1,2,3")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="at most so many (default 64)")
    parser.add_argument("--backend", default="auto", choices=("auto", "torch", *backends.NAMES))
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the model (default: the checkpoint's own)")
    parser.add_argument("--compare", action="store_true", help="decode once more without the block, and compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, nothing before")


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 0, 2 (could not run) or 130 (interrupted)."""
    try:
        return _run(args)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        print(f"gdn-kernels generate: {error.name} is missing: pip install 'gdn-kernels[hf]'", file=sys.stderr)
    except (BadOption, backends.BackendUnavailable) as error:
        print(f"gdn-kernels generate: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("gdn-kernels generate: interrupted", file=sys.stderr)
        return 130
    return 2


def _run(args: argparse.Namespace) -> int:
    import torch

    from gdn_kernels import hf
    from gdn_kernels.agreement import Greedy, agreement, greedy
    from gdn_kernels.routing import first_flips, recorded

    if args.tokens < 1:
        raise BadOption(f"--tokens: expected 1 or more, got {args.tokens}")
    backend = hf.choose(args.backend)
    model, tokenizer = _load(args)
    prompt = _prompt(args, tokenizer, model.config)
    try:
        hf.patch(model, backend=backend)
    except ValueError as error:
        raise BadOption(str(error)) from error
    report = {
        "checkpoint": str(args.checkpoint),
        "model": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "backend": backend,
        "patched_layers": len(hf.patched_layers(model)),
        "prompt_ids": prompt,
    }
    say: Callable[..., None] = (lambda *_, **__: None) if args.json else print
    say("model    {checkpoint}: {model}, {dtype}, {patched_layers} Gated DeltaNet layers patched".format(**report))
    say(f"backend  {backend}{'' if backend == 'trn2' else ': no device was used'}", flush=True)

    ids, run, reference, start = torch.tensor([prompt]), Greedy(), Greedy(), time.perf_counter()
    shown = _Shown(say, tokenizer, run)
    with ExitStack() as until_done:
        routing = until_done.enter_context(recorded(model)) if args.compare else {}
        finished = _finished(lambda: greedy(model, ids, tokens=args.tokens, into=run, show=shown))
    seconds = time.perf_counter() - start
    say(f"\n{len(run.tokens)} tokens in {seconds:.1f} s{'' if finished else ', interrupted'}")
    if args.compare and finished:
        with recorded(model) as own_routing:
            finished = _finished(lambda: greedy(hf.unpatch(model), ids, tokens=len(run.tokens), into=reference))
    rows = agreement(run, reference)
    compare = _compared(say, rows[0], first_flips(routing, own_routing, rows)[0], bool(routing)) if rows else None
    if args.json:
        text = None if tokenizer is None else tokenizer.decode(run.row())
        report |= {"tokens": run.row(), "text": text, "seconds": round(seconds, 3), "interrupted": not finished}
        print(json.dumps({**report, "compare": compare}))
    return 0 if finished else 130


def _finished(call: Callable[[], object]) -> bool:
    """Whether the call came to its end, not interrupted."""
    try:
        call()
    except KeyboardInterrupt:
        return False
    return True


def _load(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model and, where the folder has one, its tokenizer."""
    import transformers

    if not (args.checkpoint / "config.json").is_file():
        raise BadOption(f"--checkpoint: expected a folder with config.json, got {args.checkpoint}")
    options = {"local_files_only": True}
    try:
        load = transformers.AutoModelForCausalLM.from_pretrained
        model = load(args.checkpoint, dtype=DTYPES[args.dtype], **options)
        has_tokenizer = any((args.checkpoint / name).is_file() for name in TOKENIZERS)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.checkpoint, **options) if has_tokenizer else None
    except (OSError, ValueError, ImportError) as error:
        raise BadOption(f"--checkpoint: transformers could not load {args.checkpoint}: {error}") from error
    return model.eval(), tokenizer


def _prompt(args: argparse.Namespace, tokenizer: Any, config: Any) -> list[int]:
    if args.prompt is None:
        try:
            ids = [int(number) for number in args.prompt_ids.split(",")]
        except ValueError:
            raise BadOption(f"--prompt-ids: expected numbers such as 1,2,3, got {args.prompt_ids!r}") from None
    else:
        ids = list(args.prompt.encode()) if tokenizer is None else tokenizer(args.prompt)["input_ids"]
    size = config.get_text_config().vocab_size
    if not ids:
        raise BadOption("--prompt: expected at least one token, got none")
    if not 0 <= min(ids) <= max(ids) < size:
        raise BadOption(f"--prompt: expected tokens from 0 to {size - 1}, got {min(ids)} to {max(ids)}")
    return ids


class _Shown:
    """Prints what every new token adds to the text; the token's number where there is no tokenizer."""

    def __init__(self, say: Callable[..., None], tokenizer: Any, run: Any) -> None:
        self.say, self.tokenizer, self.run = say, tokenizer, run
        self.length = 0

    def __call__(self, tokens: Any) -> None:
        if self.tokenizer is None:
            self.say(int(tokens[0]), end=" ", flush=True)
            return
        text = self.tokenizer.decode(self.run.row())
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character of several tokens is shown when it is whole
            self.say(text[self.length :], end="", flush=True)
            self.length = len(text)


def _compared(say: Callable[..., None], found: Any, flip: Any, has_experts: bool) -> dict[str, Any]:
    """Say how far the texts agree; the same as a dictionary."""
    say(_sentence(found))
    if has_experts:
        say(_router_sentence(flip))
    return {**asdict(found), "flip": None if flip is None else asdict(flip)}


def _sentence(found: Any) -> str:
    equal = f"compare  {found.equal} of {found.tokens} tokens equal to transformers' own"
    if found.first is None:
        return equal
    return (
        f"{equal}; the first other one is number {found.first + 1}, where its two best were {found.margin:.3g} "
        f"apart, {found.steps:.3g} bf16 steps"
    )


def _router_sentence(flip: Any) -> str:
    if flip is None:
        return "routers  chose the same experts as long as the text was the same"
    return (
        f"routers  first chose other experts for token number {flip.token + 1}, in {flip.router}, where the last one "
        f"taken and the first one left out were {flip.margin:.3g} apart, as logits"
    )
