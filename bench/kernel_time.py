"""What benchmarks of single kernels share: times of calls on the first GPU, and the rows
that a program of this folder prints."""

import json
import statistics
import subprocess
import sys

import torch


def microseconds(function, sets, calls=20, rounds=7):
    """Of one call, the median over rounds of 20; a first round warms up and compiles.

    Args:
        sets: tuples of arguments, which the calls take by turns.
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


def rows_of(*command):
    """The lines of JSON that `command` prints; ends this program as it ended, if it
    failed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return [json.loads(line) for line in done.stdout.splitlines()]


def write_json(path, rows):
    """Nothing without a path."""
    if path:
        with open(path, "w") as file:
            json.dump(rows, file, indent=1)
