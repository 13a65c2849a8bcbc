#!/usr/bin/env python3
"""Two hosts on one machine: two network namespaces and a cable between them.

One rank of `flatshard train` runs on each, started by plain environment variables and
by torchrun. Training works. If both hosts share sequences, the losses are equal to one
rank. Then the cable is unplugged in mid-step, and both ranks have to end
with a message that names the other.

Each host has its own hostname and process table as well, so nothing but the
cable connects them. Needs root, or rights to make namespaces; exits with 77
(skipped) otherwise.

usage: two_hosts.py PROGRAM PYTHON [env|torchrun ...]
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SKIPPED = 77
# Ranks and launchers that do not end are a failure.
LIMIT_S = 120
TIMEOUT_S = 6

CONFIG = """
[run]
output_dir = "{output}"
save_weights = false
[model]
dim = 32
layers = 2
heads = 4
ffn_dim = 64
vocab_size = 257
[data]
train = "random"
[training]
steps = {steps}
seq_len = 32
local_batch_size = 2
[precision]
compute = "float32"
[metrics]
log_freq = 1
[comm]
timeout_s = {timeout}
"""


class Failure(Exception):
    pass


def skip(why):
    print(f"SKIPPED two_hosts: {why}")
    sys.exit(SKIPPED)


def ip(*arguments):
    return subprocess.run(
        ["ip", *arguments], capture_output=True, text=True, check=False
    )


class Hosts:
    """Two namespaces, removed at the end with all that runs in them."""

    def __init__(self):
        tag = os.getpid() % 100000
        self.names = [f"fs{tag}a", f"fs{tag}b"]
        self.hostnames = ["host-a", "host-b"]
        self.addresses = ["10.199.7.1", "10.199.7.2"]
        self.cables = [f"v{tag}a", f"v{tag}b"]
        self.processes = []

    def __enter__(self):
        for name in self.names:
            made = ip("netns", "add", name)
            if made.returncode != 0:
                self.__exit__()
                skip(
                    "network namespaces are not permitted here: " + made.stderr.strip()
                )
        made = ip(
            *["link", "add", self.cables[0], "netns", self.names[0]],
            *["type", "veth", "peer", self.cables[1], "netns", self.names[1]],
        )
        if made.returncode != 0:
            self.__exit__()
            skip("no virtual cable can be made: " + made.stderr.strip())
        self.connect()
        return self

    def connect(self):
        for name, cable, address in zip(self.names, self.cables, self.addresses):
            for command in (
                ["link", "set", "lo", "up"],
                ["address", "replace", f"{address}/24", "dev", cable],
                ["link", "set", cable, "up"],
            ):
                done = ip("-netns", name, *command)
                if "mount --make-rslave" in done.stderr:
                    self.__exit__()
                    skip("/ is no mount point, as in a chroot: " + done.stderr)
                if done.returncode != 0:
                    raise Failure(f"ip {command}: {done.stderr}")

    def cut(self):
        ip("-netns", self.names[0], "link", "set", self.cables[0], "down")

    def start(self, host, command, variables, log):
        # A separate process table and hostname. With --kill-child nothing of this host
        # outlives the test.
        line = f'hostname {self.hostnames[host]}; exec "$@"'
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
        }
        environment.update(variables)
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.names[host]]
            + ["unshare", "--uts", "--pid", "--fork", "--mount-proc"]
            + ["--kill-child", "sh", "-c", line, "sh", *command],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def end_all(self):
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.processes.clear()

    def __exit__(self, *_):
        self.end_all()
        for name in self.names:
            ip("netns", "delete", name)


def wait_until(what, condition):
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"{what}: not within {LIMIT_S} s")
        time.sleep(0.05)


class Job:
    """The two ranks of one training run."""

    def __init__(
        self, hosts, folder, program, python, launcher, steps, port, options=()
    ):
        folder.mkdir()
        config = folder / "run.toml"
        config.write_text(
            CONFIG.format(output=folder / "run", steps=steps, timeout=TIMEOUT_S)
        )
        train = [program, "train", str(config), "--device", "cpu"]
        for option in options:
            train += ["--set", option]
        self.logs = [folder / f"rank_{rank}.log" for rank in (0, 1)]
        self.processes = []
        address = hosts.addresses[0]
        for rank in (0, 1):
            variables = {"OMP_NUM_THREADS": "1"}
            if launcher == "torchrun":
                command = [python, "-m", "torch.distributed.run"]
                command += ["--nnodes=2", "--nproc-per-node=1", "--no-python"]
                command += [f"--node-rank={rank}", f"--master-addr={address}"]
                command += [f"--master-port={port}", *train]
            else:
                command = train
                variables.update(
                    RANK=str(rank),
                    WORLD_SIZE="2",
                    LOCAL_RANK="0",
                    LOCAL_WORLD_SIZE="1",
                    MASTER_ADDR=address,
                    MASTER_PORT=str(port),
                )
            self.processes.append(
                hosts.start(rank, command, variables, self.logs[rank])
            )

    def text(self, rank):
        return self.logs[rank].read_text(errors="replace")

    def show(self):
        for rank in (0, 1):
            print(f"--- rank {rank}\n{self.text(rank)}")

    def codes(self):
        return [process.poll() for process in self.processes]


def expect(job, rank, *parts):
    for part in parts:
        if part not in job.text(rank):
            raise Failure(f"rank {rank} does not say {part!r}")


def losses(text):
    return [
        float(line.split("loss:")[1].split()[0])
        for line in text.splitlines()
        if "step: " in line and "loss:" in line
    ]


# Printed digits may differ by one.
LOSS_TOLERANCE = 2e-4


def check_shared_sequences(hosts, folder, program, python, launcher, port):
    """The launcher counts one rank on each host, so heads are not exchanged."""
    batch = "training.global_batch_size=2"
    shared = [batch, "parallelism.context_parallel_degree=2"]
    shared += ["parallelism.context_parallel_method=a2a+all_gather"]
    job = Job(
        *[hosts, folder / "shared", program, python, launcher, 5, port],
        options=shared,
    )
    try:
        wait_until("the run of shared sequences", lambda: None not in job.codes())
        if job.codes() != [0, 0]:
            raise Failure(f"the run of shared sequences ended with {job.codes()}")
        expect(job, 0, "share their sequences (a2a over 1, all-gather over 2)")
    except Failure:
        job.show()
        raise
    config = folder / "shared" / "run.toml"
    one = subprocess.run(
        [program, "train", str(config), "--device", "cpu", "--set", batch]
        + ["--set", f"run.output_dir={folder / 'one'}"],
        capture_output=True,
        text=True,
        check=True,
    )
    want, got = losses(one.stdout + one.stderr), losses(job.text(0))
    if len(want) != 5 or len(got) != 5:
        raise Failure(f"expected 5 losses, got {want} and {got}")
    if any(abs(a - b) > LOSS_TOLERANCE for a, b in zip(want, got)):
        raise Failure(f"expected the losses of one rank, {want}, got {got}")
    print(f"{launcher}: two hosts that share sequences have the losses {got}")


def check(hosts, folder, program, python, launcher, port):
    job = Job(hosts, folder / "whole", program, python, launcher, 5, port)
    try:
        wait_until("the run", lambda: None not in job.codes())
        if job.codes() != [0, 0]:
            raise Failure(f"the run ended with {job.codes()}")
        expect(job, 0, "2 ranks of CPU", "step: 5/5  loss: ")

        job = Job(
            *[hosts, folder / "cut", program, python, launcher],
            *[10**6, port + 1],
        )
        wait_until(
            "three steps",
            lambda: "step: 3/" in job.text(0) or None not in job.codes(),
        )
        if job.codes() != [None, None]:
            raise Failure(f"the run ended early with {job.codes()}")
        begin = time.monotonic()
        hosts.cut()
        wait_until(
            "both ranks' messages",
            lambda: all("is missing" in job.text(rank) for rank in (0, 1)),
        )
        took = time.monotonic() - begin
        # torchrun's agents have their own timeouts, so only the ranks are checked.
        if launcher != "torchrun":
            wait_until("the ranks' end", lambda: None not in job.codes())
            if job.codes() != [1, 1]:
                raise Failure(f"expected exit codes 1, got {job.codes()}")
        expect(job, 0, "rank 1 of 2 is missing", "on host host-b", "step ")
        expect(job, 1, "rank 0 of 2 is missing", "on host host-a", "step ")
        print(f"{launcher}: both ranks named the other {took:.1f} s after the cut")
        for rank in (0, 1):
            for line in job.text(rank).splitlines():
                if "is missing" in line:
                    print(f"  {line}")
                    break
    except Failure:
        job.show()
        raise
    finally:
        hosts.end_all()
        hosts.connect()


def main():
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # where Debian has ip
    program, python = sys.argv[1:3]
    launchers = sys.argv[3:] or ["env", "torchrun"]
    if shutil.which("ip") is None:
        skip("the program ip is missing (Debian: apt-get install iproute2)")
    if shutil.which("unshare") is None:
        skip("the program unshare is missing (Debian: util-linux)")
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        for number, launcher in enumerate(launchers):
            top = Path(folder) / launcher
            top.mkdir()
            port = 29611 + 10 * number
            check_shared_sequences(hosts, top, program, python, launcher, port + 2)
            check(hosts, top, program, python, launcher, port)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"FAILED two_hosts: {failure}")
        sys.exit(1)
