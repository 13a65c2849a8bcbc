"""Runs programs that train with FSDP2 on Flatshard, unchanged.

    python -m flatshard.as_fsdp2  [OPTIONS] COMMAND ...

For example:

    python -m flatshard.as_fsdp2  accelerate launch train.py
    python -m flatshard.as_fsdp2  torchrun --nproc-per-node 8 train.py
    python -m flatshard.as_fsdp2  --strategy zero2 axolotl train config.yml
    python -m flatshard.as_fsdp2  python lightning_program.py

In COMMAND and in all Python processes that it starts, fully_shard and the other public
names of torch.distributed.fsdp refer to Flatshard. At its end rank 0 prints a line to
stderr, such as

    flatshard.as_fsdp2: 7 units, zero3

or that fully_shard was never called. The exit status is the status of COMMAND. In a program, call
flatshard.as_fsdp2.install() before the library is imported.
"""

import argparse
import os
import shutil
import sys
from dataclasses import fields
from pathlib import Path

_FOLDER = str(Path(__file__).parent / "_as_fsdp2")


def install(**options: object) -> None:
    """Makes FSDP2's names in this process refer to Flatshard.

    Call it before anything imports a name of torch.distributed.fsdp, such as accelerate,
    and in every rank. The command `python -m flatshard.as_fsdp2` does it in all processes.

    Args:
        options: strategy, as in fully_shard. granularity, check_same_values, and
            int8_states, as in ShardOptions. cuda_graph=True: each module that contains no other unit is
            captured and replayed, as by ShardOptions(cuda_graph=True). copy_engines and
            prefetch, as in ModelOptions. They are defaults for every call of fully_shard.
            require=True: the program exits with 1 if it never called fully_shard.

    Raises:
        TypeError, ValueError: an option that Flatshard does not have, or its value.
        RuntimeError: modules have imported names before, listing them.
    """
    if _FOLDER not in sys.path:
        sys.path.append(_FOLDER)
    from flatshard_as_fsdp2 import start
    from flatshard_as_fsdp2.options import Options

    names = [field.name for field in fields(Options)]
    for name in options:
        if name not in names:
            raise TypeError(
                f"install() got an unexpected option {name!r}, expected one of "
                f"{', '.join(names)}"
            )
    found = Options(**options)
    found.check()
    start.install(found)


def _parser():
    from flatshard._fsdp.strategies import NAMES

    parser = argparse.ArgumentParser(
        prog="python -m flatshard.as_fsdp2",
        usage="%(prog)s [OPTIONS] COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--strategy", choices=NAMES, metavar="NAME", help=f"one of {', '.join(NAMES)}")
    add(
        "--granularity",
        choices=("dim0", "chunk", "tensor"),
        help="where parameters are sharded; chunk: where torch.chunk does",
    )
    add(
        "--check-same-values",
        choices=("on", "off"),
        help="off: ranks may start from different values, as some scripts do that set "
        "no seed; each rank keeps its rows",
    )
    add(
        "--int8-states",
        action="store_true",
        default=None,
        help="accept the padding that int8 states of flatshard.optim.AdamW need",
    )
    add(
        "--cuda-graph",
        action="store_true",
        help="replays the blocks of the model as CUDA graphs, with the same results",
    )
    add(
        "--copy-engines",
        choices=("auto", "all", "none"),
        help="copies between GPUs instead of collectives",
    )
    add("--prefetch", type=int, metavar="N", help="units that are unsharded ahead")
    add(
        "--require",
        action="store_true",
        help="exit with 1 if fully_shard was never called",
    )
    add("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _find(command, parser):
    """Returns the path of the program that `command` starts."""
    if not command:
        parser.error("expected a command, such as: accelerate launch train.py")
    name = command[0]
    beside_python = str(Path(sys.executable).parent)
    path = shutil.which(name) or shutil.which(name, path=beside_python)
    if path is None:
        hint = "check its spelling and PATH"
        if name.endswith(".py"):
            hint = f"write: python {name}"
        elif name.startswith("-"):
            hint = "it is not an option; --help lists them"
        parser.error(f"{name}: expected a program, found none: {hint}")
    if Path(name).name.startswith("python"):
        for word in command[1:]:
            if not word.startswith("-") or word in ("-c", "-m"):
                break
            if not word.startswith("--") and set(word) & set("IES"):
                parser.error(f"python {word} ignores PYTHONPATH, but it is needed here")
    return path


def main() -> None:
    sys.path.append(_FOLDER)
    from flatshard_as_fsdp2.options import Options, to_environment

    parser = _parser()
    arguments = vars(parser.parse_args())
    command = arguments.pop("command")
    same = arguments.pop("check_same_values")
    options = Options(
        check_same_values=None if same is None else same == "on", **arguments
    )
    try:
        options.check()
    except ValueError as error:
        parser.error(str(error))
    program = _find(command, parser)
    to_environment(options)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([_FOLDER, *([before] if before else [])])
    sys.stdout.flush()
    os.execv(program, command)


if __name__ == "__main__":
    main()
