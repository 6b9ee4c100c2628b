"""The command line: `gdn-kernels COMMAND` or `python -m gdn_kernels COMMAND`.

Each command is one module of this package with two functions: `add_parser(subparsers)`, which declares its options, and
`run(args) -> int`, which returns the exit status. Only the module of the command that was asked for is imported.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module, metadata

# The one-line helps live here, so that `--help` lists every command without importing any.
COMMANDS = {
    "run": "decode the sample layer, or a layer of your own checkpoint, and compare every step with the reference",
    "step": "time one interpreted step at the size of a published model and report its error",
    "check": "run any NKI kernel file in the interpreter and report the hardware rules it breaks",
    "latency": "model what the block takes on a device, from published costs",
    "generate": "decode with a transformers model whose Gated DeltaNet layers are the block",
    "rollout": "decode thousands of tokens under a rounding policy or on a backend, and watch the error grow",
    "attribute": "rank the roundings of a policy by what each of them costs",
    "notebooks": "execute the notebooks from top to bottom and leave them as HTML",
    "doctor": "show what this machine has and which backend would be used",
}


class BadOption(Exception):
    """An option that argparse cannot check by itself."""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(installed_version())
        parser.exit()


def installed_version() -> str:
    """The version of the installed distribution; `not installed` when the package runs from its source tree alone."""
    try:
        return metadata.version("gdn-kernels")
    except metadata.PackageNotFoundError:
        return "not installed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; those of the process when None.

    Returns:
        The exit status of the command. Wrong usage exits with status 2, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="gdn-kernels", description="One fused Gated DeltaNet decode step for Trainium2."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the installed version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == chosen:
            import_module(f"gdn_kernels.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    args = parser.parse_args(words)
    status: int = import_module(f"gdn_kernels.cli.{args.command}").run(args)
    return status
