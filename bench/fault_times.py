#!/usr/bin/env python3
"""Measures seconds from a fault until the surviving ranks have ended with its report.

bench/fault_times.py build/flatshard --ranks 3 --timeout-s 5 20

Starts the ranks of one training run on this machine through environment variables, lets
them train, and kills or stops one of them. No launcher is used, because it would end
the other ranks itself. With --device cuda, each rank has its own GPU. Set e.g. --set
cuda_graph.impl=unit to inject the fault while CUDA graphs are replayed.
"""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from harness.command_line import Parser
from harness.programs import BENCH, train_command

SETTINGS = [
    *(f"model.{size}" for size in ("dim=64", "layers=4", "heads=4", "ffn_dim=128")),
    "model.vocab_size=257",
    "training.steps=1000000",
    "training.seq_len=64",
    "precision.compute=float32",
    "metrics.log_freq=1",
]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(args, timeout, logs):
    """Starts one process per rank, with logs in `logs`, and returns the processes."""
    settings = [f"run.output_dir={args.out / 'run'}", f"comm.timeout_s={timeout}"]
    settings += [*SETTINGS, *args.set]
    device = f"--device={args.device}"
    command = train_command(args.program, BENCH / "random.toml", settings, device)
    environment = {
        **os.environ,
        "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]


def run(args, timeout, fault, culprit):
    """Returns seconds until the survivors ended, whether all of them named the culprit,
    and the report of one of them."""
    args.out.mkdir(parents=True, exist_ok=True)
    logs = [args.out / f"rank_{rank}.log" for rank in range(args.ranks)]
    processes = start(args, timeout, logs)
    try:
        while "step: 100/" not in logs[0].read_text():
            assert processes[0].poll() is None, logs[0].read_text()
            time.sleep(0.01)
        processes[culprit].send_signal(getattr(signal, fault))
        begin = time.monotonic()
        for rank, process in enumerate(processes):
            if rank != culprit:
                process.wait(timeout=10 * timeout + 60)
        seconds = time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [log.read_text() for rank, log in enumerate(logs) if rank != culprit]
    named = all(f"rank {culprit} of {args.ranks} is missing" in text for text in said)
    return seconds, named, said[0][said[0].rfind("error: ") :].strip()


def main():
    parser = Parser(__doc__).options("set", out=Path("outputs/fault_times"))
    parser.add_argument("program")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, nargs="*", default=[5, 20])
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of all"
    )
    parser.add_argument("--show", action="store_true", help="print the reports")
    args = parser.parse_args()
    print(f"{'fault':<10}{'rank':<6}{'timeout_s':<11}{'seconds':<9}named")
    for timeout in args.timeout_s:
        for fault in ("SIGKILL", "SIGSTOP"):
            for culprit in (args.ranks - 1, 0):
                seconds, named, report = run(args, timeout, fault, culprit)
                by = "by every rank" if named else "NOT by every rank"
                figures = f"{culprit:<6}{timeout:<11}{seconds:<9.1f}{by}"
                print(f"{fault:<10}{figures}", flush=True)
                if args.show:
                    print(report)


if __name__ == "__main__":
    main()
