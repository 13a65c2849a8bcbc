#!/usr/bin/env python3
"""torchrun's elastic restarts: killed ranks cost steps, and nothing else.

`flatshard train --resume` runs under `torchrun --max-restarts 2` on two ranks of this
machine. SIGKILL ends rank 1 in mid-run, and rank 0 in the run that torchrun starts
again. Each time the other rank has to name the lost one. The next run has to continue
from the last complete checkpoint. At the end the weights have to equal, bit for bit,
the weights of two undisturbed ranks.

Tried with both ways in which torchrun brings its ranks together: a fixed port
(static) and --standalone (c10d). Exits with 77 (skipped) where PYTHON has no
torch.

usage: elastic_restart.py PROGRAM PYTHON [static|standalone ...]
"""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_run import CONFIG, Failure, prepare_corpus

SKIPPED = 77
STEPS = 60
INTERVAL = 5
# A rank is killed when its attempt has a complete checkpoint of this many more steps.
AHEAD = 2 * INTERVAL
# Checkpoints have two buffers: up to two are written during later steps.
BEING_WRITTEN = 2
# Killed in this order, one per attempt.
CULPRITS = [1, 0]
TIMEOUT_S = 10
# Launchers that do not end are a failure.
LIMIT_S = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def clean_environment():
    """Ours, without what another launcher may have left in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    }
    return {**kept, "OMP_NUM_THREADS": "1"}


def ranks_of(launcher):
    """{rank: process id} of the ranks that run below `launcher` now."""
    ranks = {}
    for path in Path(f"/proc/{launcher}/task").glob("*/children"):
        try:
            for pid in path.read_text().split():
                variables = Path(f"/proc/{pid}/environ").read_bytes()
                found = re.search(rb"(?:^|\0)RANK=(\d+)\0", variables)
                if found:
                    ranks[int(found.group(1))] = int(pid)
        except OSError:
            pass  # it ended meanwhile
    return ranks


def finish(process, log):
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        raise Failure(f"it hung:\n{log.read_text()[-3000:]}") from None
    if code != 0:
        raise Failure(f"exit {code}:\n{log.read_text()[-3000:]}")


class Job:
    """One run below a launcher."""

    def __init__(self, folder, corpus, name, launcher, program):
        self.output = folder / name
        self.log = folder / f"{name}.log"
        config = folder / f"{name}.toml"
        config.write_text(
            CONFIG.format(
                output=self.output,
                corpus=corpus,
                steps=STEPS,
                batch=4,
                warmup=0,
                interval=INTERVAL,
                keep=2,
                timeout=TIMEOUT_S,
            )
        )
        self.command = [*launcher, program, "train", str(config), "--resume"]
        self.command += ["--device", "cpu"]

    def start(self, *more):
        with self.log.open("w") as log:
            return subprocess.Popen(
                [*self.command, *more],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=clean_environment(),
                start_new_session=True,
            )

    def text(self):
        return self.log.read_text(errors="replace")

    def steps(self):
        """The steps that each attempt logged, in order."""
        attempts = []
        for line in self.text().splitlines():
            if line.startswith("model: "):
                attempts.append([])
            elif line.startswith("step: "):
                attempts[-1].append(int(line.split()[1].split("/")[0]))
        return attempts

    def checkpoint(self):
        """Returns the step of the last complete checkpoint, or 0."""
        try:
            latest = (self.output / "checkpoints" / "latest").read_text()
        except FileNotFoundError:
            return 0
        return int(latest.removeprefix("step-"))

    def weights(self):
        return (self.output / "model.safetensors").read_bytes()


def wait_for_attempt(job, process, number):
    """Waits until attempt `number` (from 0) has AHEAD steps on disk.

    The line of a step proves no save: checkpoints are written during the steps that
    follow.
    """
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        attempts = job.steps()
        if len(attempts) > number and attempts[number]:
            before = attempts[number][0] - 1
            if job.checkpoint() >= before + AHEAD:
                return
        if process.poll() is not None:
            raise Failure(f"ended with {process.returncode}:\n{job.text()[-3000:]}")
        time.sleep(0.01)
    raise Failure(f"attempt {number + 1} saves nothing:\n{job.text()[-3000:]}")


def kill_rank(job, process, culprit):
    """Kills a rank.

    Returns after how many seconds the other one had ended, and the step of the
    checkpoint that they left.
    """
    ranks = ranks_of(process.pid)
    begin = time.monotonic()
    os.kill(ranks[culprit], signal.SIGKILL)
    survivor = Path(f"/proc/{ranks[1 - culprit]}")
    while survivor.exists():
        if time.monotonic() - begin > TIMEOUT_S:
            raise Failure(
                f"rank {1 - culprit} goes on without {culprit}:\n{job.text()[-3000:]}"
            )
        time.sleep(0.01)
    # torchrun starts the next ones, and those train INTERVAL steps before they save.
    return time.monotonic() - begin, job.checkpoint()


def end_all(process):
    """The launcher and its ranks."""
    for pid in [*ranks_of(process.pid).values(), process.pid]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def check_messages(job):
    # torchrun names a rank too, whichever it sees to be gone first.
    text = job.text()
    for culprit in CULPRITS:
        other = 1 - culprit
        if not re.search(
            rf"^\[rank {other}/2\] error: .*: rank {culprit} of 2 is missing: ",
            text,
            re.M,
        ):
            raise Failure(f"rank {other} does not name rank {culprit}:\n{text[-6000:]}")


def check_steps(job, left):
    """`left`: the checkpoints that the killed attempts left; the steps lost."""
    attempts = job.steps()
    if len(attempts) != len(CULPRITS) + 1:
        raise Failure(f"{len(attempts)} attempts, expected {len(CULPRITS) + 1}")
    lost = []
    for before, after, checkpoint in zip(attempts, attempts[1:], left):
        again = before[-1] + 1 - after[0]
        if after[0] != checkpoint + 1:
            raise Failure(
                f"after step {before[-1]} it went on with {after[0]}, not from the "
                f"checkpoint of step {checkpoint}"
            )
        # The steps after the last save, and the steps of the incomplete saves.
        most = (1 + BEING_WRITTEN) * INTERVAL
        if checkpoint % INTERVAL != 0 or not 0 <= again <= most:
            raise Failure(
                f"after step {before[-1]} the checkpoint of step {checkpoint} was "
                "the last one"
            )
        lost.append(again)
    if attempts[-1][-1] != STEPS:
        raise Failure(f"it ended with step {attempts[-1][-1]}")
    return lost


def check(folder, corpus, program, python, rendezvous, alone):
    launcher = [python, "-m", "torch.distributed.run", "--no-python"]
    launcher += ["--nproc-per-node=2", f"--max-restarts={len(CULPRITS)}"]
    if rendezvous == "standalone":
        launcher += ["--standalone"]
    else:
        launcher += [f"--master-port={free_port()}"]
    job = Job(folder, corpus, rendezvous, launcher, program)
    begin = time.monotonic()
    process = job.start()
    seconds, left = [], []
    try:
        for number, culprit in enumerate(CULPRITS):
            wait_for_attempt(job, process, number)
            took, checkpoint = kill_rank(job, process, culprit)
            seconds.append(f"{took:.1f}")
            left.append(checkpoint)
        finish(process, job.log)
    finally:
        end_all(process)
    check_messages(job)
    lost = check_steps(job, left)
    if job.weights() != alone.weights():
        raise Failure("the weights are not those of the run left alone")
    print(
        f"{rendezvous}: the other rank ended {' and '.join(seconds)} s after the "
        f"kill; {' and '.join(map(str, lost))} of {STEPS} steps were trained "
        f"again; the same weights; {time.monotonic() - begin:.1f} s"
    )


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    program, python = str(Path(sys.argv[1]).resolve()), sys.argv[2]
    find_torch = "import importlib.util as i; exit(i.find_spec('torch') is None)"
    if subprocess.run([python, "-c", find_torch], check=False).returncode != 0:
        print(f"SKIPPED elastic_restart: {python} has no torch")
        sys.exit(SKIPPED)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = prepare_corpus(program, folder)
        alone = Job(folder, corpus, "alone", [], program)
        process = alone.start("--nproc", "2")
        try:
            finish(process, alone.log)
        finally:
            end_all(process)
        for rendezvous in sys.argv[3:] or ["static", "standalone"]:
            check(folder, corpus, program, python, rendezvous, alone)


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        print(f"FAILED elastic_restart: {failure}")
        sys.exit(1)
