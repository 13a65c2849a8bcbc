"""Runs the program `flatshard` in tests that are scripts."""

import os
import subprocess
import sys


def expect(ok, what):
    if not ok:
        sys.exit(f"FAILED {what}")


def run(program, *arguments):
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "FLATSHARD_PYTHON": sys.executable},
    )
    expect(done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr
