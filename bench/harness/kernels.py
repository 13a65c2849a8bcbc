"""Kernels that a program of this folder measures, and PyTorch's on the same GPU."""

import statistics

import torch

from . import tables
from .command_line import Parser
from .programs import write_json

WORKING_SET = (
    1 << 30
)  # of arguments, so that none is still in a cache when its turn comes


def microseconds(function, sets, calls=20, rounds=7):
    """Returns what one call takes the first GPU: the median over rounds of 20 calls.

    A first round warms up and compiles.

    Args:
        sets: tuples of arguments, which alternate from call to call.
    """

    def once():
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for i in range(calls):
            function(*sets[i % len(sets)])
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3 / calls

    once()
    return statistics.median(once() for _ in range(rounds))


def compiled_microseconds(function, sets):
    torch._dynamo.reset()
    return microseconds(torch.compile(function, dynamic=False), sets)


def parse(doc, program, **options):
    parser = Parser(doc).options("json", tokens=8192, **options)
    parser.add_argument("program", help=f"build/{program}")
    return parser


def print_rows(rows, columns, path, left):
    """Prints a table, each row when `rows` has it, and writes all to `path` as JSON.

    Args:
        columns: {title: name of a text, or name and digits of a number}. A row may lack it.
    """

    def text(row, name, digits=None):
        found = row.get(name, "")
        return found if found == "" or digits is None else f"{found:.{digits}f}"

    tables.head(*columns, left=left)
    done = []
    for row in rows:
        names = [
            (name,) if isinstance(name, str) else name for name in columns.values()
        ]
        tables.row(*(text(row, *name) for name in names))
        done.append(row)
    write_json(path, done)
