"""Starts the ranks of a test run on this machine's CPUs, each a process.

Every rank needs torch, transformers and the compiler's Python, four seconds of imports.
So they are imported once, and the ranks are forked from there. On GPUs, and for what
must start as users start it, there is torchrun.

usage: python -m tests.python.world RANKS [pytest's arguments]
"""

import gc
import os
import signal
import socket
import sys
import tempfile
import time

# How long the other ranks may continue when one has died.
GRACE_S = 70
# Number of bytes of a failed rank's stderr below Python that are shown.
SHOWN_BYTES = 16000


def preload():
    """Imports modules that most tests import anyway, as long as they start no
    thread."""
    import pytest  # noqa: F401
    import torch._dynamo  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401
    import torch.distributed.checkpoint.state_dict  # noqa: F401
    import torch.distributed.fsdp  # noqa: F401
    import torch.distributed.tensor  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(
            f"expected no thread before the ranks are forked, got {len(threads) - 1}"
        )
    # The collector would go through their objects in each rank again and again.
    gc.collect()
    gc.freeze()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_rank(rank, world, port, stderr, arguments):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import pytest

    # pytest captures what Python writes. C++'s output has a file, since the last words
    # of a process that is aborted are lost with pytest's own.
    sys.stderr.flush()
    os.dup2(stderr.fileno(), 2)
    arguments = ["--capture=sys", *arguments]
    if rank != 0:  # one report of each run
        arguments = [a for a in arguments if not a.startswith("--junitxml")]
    return int(pytest.main(arguments))


def print_end(rank, stderr):
    end = stderr.seek(0, os.SEEK_END)
    stderr.seek(max(0, end - SHOWN_BYTES))
    text = stderr.read().decode(errors="replace").strip()
    if text:
        print(f"-- the end of rank {rank}'s stderr\n{text}\n--", flush=True)


def main():
    world, arguments = int(sys.argv[1]), sys.argv[2:]
    preload()
    port = free_port()
    ranks = {}
    stderrs = [tempfile.TemporaryFile() for _ in range(world)]
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = run_rank(rank, world, port, stderrs[rank], arguments)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        ranks[pid] = rank

    def end(number=signal.SIGKILL):
        for pid in ranks:
            os.kill(pid, number)

    def on_signal(number, frame):
        end(number)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    result, deadline = 0, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            if deadline and time.monotonic() > deadline:
                print(f"ranks {sorted(ranks.values())} do not end; killed")
                end()
                deadline = None
            time.sleep(0.02)
            continue
        code = os.waitstatus_to_exitcode(status)
        rank = ranks.pop(pid)
        if code < 0:
            print(f"rank {rank} was ended by signal {-code}")
        if code != 0:
            print_end(rank, stderrs[rank])
        if code != 0 and result == 0:
            result = code if code > 0 else 1
            deadline = time.monotonic() + GRACE_S
    return result


if __name__ == "__main__":
    sys.exit(main())
