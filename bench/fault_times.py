#!/usr/bin/env python3
"""Seconds from a fault until the surviving ranks have ended with its report.

Starts the ranks of one training run on this machine by environment variables
(no launcher, which would end them itself), lets them train, and kills or stops
one of them.

usage: fault_times.py PROGRAM [--ranks N] [--timeout-s S ...] [--device cuda]
                      [--set KEY=VALUE ...]

With --device cuda each rank has a GPU of its own; graphs are replayed when the fault
comes with e.g. --set cuda_graph.impl=unit.
"""

import argparse
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

CONFIG = """
[run]
output_dir = "{output}"
save_weights = false
[model]
dim = 64
layers = 4
heads = 4
ffn_dim = 128
vocab_size = 257
[data]
train = "random"
[training]
steps = 1000000
seq_len = 64
[precision]
compute = "float32"
[metrics]
log_freq = 1
[comm]
timeout_s = {timeout}
"""


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(options, timeout, number, culprit):
    """Seconds until the survivors ended, and what rank `witness` said."""
    ranks = options.ranks
    settings = [word for text in options.set for word in ("--set", text)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.toml"
        config.write_text(CONFIG.format(output=folder / "run", timeout=timeout))
        environment = dict(
            os.environ,
            WORLD_SIZE=str(ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free_port()),
            OMP_NUM_THREADS="1",
        )
        logs = [folder / f"rank_{rank}.log" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [
                    options.program,
                    "train",
                    str(config),
                    f"--device={options.device}",
                    *settings,
                ],
                env=dict(environment, RANK=str(rank), LOCAL_RANK=str(rank)),
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            while "step: 100/" not in logs[0].read_text():
                assert processes[0].poll() is None, logs[0].read_text()
                time.sleep(0.01)
            processes[culprit].send_signal(number)
            begin = time.monotonic()
            for rank, process in enumerate(processes):
                if rank != culprit:
                    process.wait(timeout=10 * timeout + 60)
            seconds = time.monotonic() - begin
        finally:
            for process in processes:
                process.kill()
                process.wait()
        witness = logs[1 if culprit == 0 else 0].read_text()
        named = all(
            f"rank {culprit} of {ranks} is missing" in log.read_text()
            for rank, log in enumerate(logs)
            if rank != culprit
        )
        report = witness[witness.rfind("error: ") :].strip()
        return seconds, named, report


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, nargs="*", default=[5, 20])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", nargs="*", default=[], help="for the config")
    parser.add_argument("--show", action="store_true", help="print the reports")
    arguments = parser.parse_args()
    print(f"{'fault':<10}{'rank':<6}{'timeout_s':<11}{'seconds':<9}named")
    for timeout in arguments.timeout_s:
        for fault in ("SIGKILL", "SIGSTOP"):
            for culprit in (arguments.ranks - 1, 0):
                seconds, named, report = run(
                    arguments,
                    timeout,
                    getattr(signal, fault),
                    culprit,
                )
                print(
                    f"{fault:<10}{culprit:<6}{timeout:<11}{seconds:<9.1f}"
                    f"{'by every rank' if named else 'NOT by every rank'}",
                    flush=True,
                )
                if arguments.show:
                    print(report)


if __name__ == "__main__":
    main()
