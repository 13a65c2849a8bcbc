"""Runs cases on Gloo ranks, and keeps what they return.

usage: python -m tests.python.libraries.run_cases --to FOLDER [-k REGEX] MODULE ...

A case is a function case_NAME(folder) of a module in this folder. It returns a dict
of numbers, texts, lists and tensors, of which rank 0's is kept in FOLDER/NAME.pt. An
attribute `ranks` of the function is their number; without it there are 2. Libraries
are imported once, and the ranks are forked from there. Below `python -m flatshard.as_fsdp2`
the cases train on Flatshard.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

# Time limit of a case in seconds.
LIMIT_S = 240
# How long the other ranks may continue when one has failed.
GRACE_S = 10


def run_rank(case, rank, ranks, folder, log):
    """Runs `case` in this process, and writes what it returned or raised."""
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
    )
    import torch
    import torch.distributed as dist

    error = None
    try:
        # A store in a file: no port that another case could use.
        store = dist.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        found = case(f"{folder}/work")
        if rank == 0:
            torch.save(found, f"{folder}/result.pt")
    except BaseException as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    Path(f"{folder}/ended-{rank}.json").write_text(json.dumps(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def ended(folder, ranks):
    """Returns {rank: its error or None} of those that have ended."""
    found = {}
    for rank in range(ranks):
        path = Path(f"{folder}/ended-{rank}.json")
        if path.exists() and (text := path.read_text()):
            found[rank] = json.loads(text)
    return found


def run(name, case, to):
    """Returns the error of the case, or None."""
    ranks = getattr(case, "ranks", 2)
    folder = tempfile.mkdtemp(prefix="case-")
    os.mkdir(f"{folder}/work")
    pids = []
    with open(to / f"{name}.log", "w") as log:
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                run_rank(case, rank, ranks, folder, log)
            pids.append(pid)
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        found = ended(folder, ranks)
        if len(found) == ranks:
            break
        if any(found.values()):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        os.waitpid(pid, 0)
    found = ended(folder, ranks)
    errors = [f"rank {rank}: {error}" for rank, error in found.items() if error]
    if not errors and len(found) < ranks:
        errors = [f"ranks {sorted(set(range(ranks)) - set(found))} did not end"]
    if not errors:
        shutil.move(f"{folder}/result.pt", to / f"{name}.pt")
    shutil.rmtree(folder, ignore_errors=True)
    return errors[0] if errors else None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("-k", default="", help="only cases whose names have it")
    parser.add_argument("modules", nargs="+")
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    import torch

    torch.set_num_threads(1)
    for name in args.modules:
        module = importlib.import_module(f"{__package__}.{name}")
        for key, case in list(vars(module).items()):
            if not key.startswith("case_"):
                continue
            label = f"{name}.{key.removeprefix('case_')}"
            if not re.search(args.k, label):
                continue
            began = time.monotonic()
            error = run(label, case, args.to)
            seconds = round(time.monotonic() - began, 1)
            row = {"case": label, "error": error, "seconds": seconds}
            with open(args.to / "cases.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
