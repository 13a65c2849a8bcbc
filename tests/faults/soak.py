#!/usr/bin/env python3
"""Kills a training run again and again, and compares it with an undisturbed one.

Two runs are disturbed, each until it has been started RESTARTS times:

  constant  two ranks, always: its weights have to equal, bit for bit, the weights of
            the undisturbed run
  changing  one, two or three ranks in turn: its losses have to agree within
            what float32 sums of another order differ by

A disturbance is a signal or a full disk. SIGKILL goes to a rank or to the launcher, and
SIGTERM to the launcher. SIGSTOP goes to a rank, with SIGCONT a little later or for good
(the others name it after comm.timeout_s). The checkpoints are on a small tmpfs. After
each disturbance every existing checkpoint is verified. Equal losses in every step prove
that no sample was lost or repeated. The loader's position at the end confirms it.

usage: soak.py PROGRAM [--restarts N] [--seed N] [--keep]
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from small_run import CONFIG, Failure, prepare_corpus

STEPS = 900
INTERVAL = 7
GLOBAL_BATCH = 6
# 900 steps of float32 in another order of summation; seen: 1e-6.
TOLERANCE = 1e-3
# Even a busy machine finishes in this time: a run that hangs fails.
LIMIT_S = 600


class Run:
    """One output folder, trained by one process after the other."""

    def __init__(self, program, folder, corpus, name):
        self.program = program
        self.output = folder / name
        self.config = folder / f"{name}.toml"
        self.log = folder / f"{name}.log"
        self.config.write_text(
            CONFIG.format(
                output=self.output,
                corpus=corpus,
                steps=STEPS,
                batch=GLOBAL_BATCH,
                warmup=20,
                interval=INTERVAL,
                keep=3,
                timeout=6,
            )
        )

    def start(self, ranks):
        command = [self.program, "train", str(self.config), "--resume"]
        command += ["--nproc", str(ranks), "--device", "cpu"]
        return subprocess.Popen(
            command,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def step(self):
        """The last step of this start, 0 before the first."""
        for line in reversed(self.log.read_text(errors="replace").split("\n")):
            if line.startswith("step: "):
                return int(line.split()[1].split("/")[0])
        return 0

    def wait(self, process):
        try:
            return process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise Failure(f"it hung:\n{self.log.read_text()[-3000:]}") from None

    def finish(self, ranks):
        code = self.wait(self.start(ranks))
        if code != 0:
            raise Failure(f"exit {code}:\n{self.log.read_text()[-3000:]}")

    def losses(self):
        """Returns the losses by step, the last one of a step that was trained again."""
        losses = {}
        for line in (self.output / "metrics.jsonl").read_text().split("\n"):
            # A killed process may leave half a line.
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if "loss" in row:
                losses[row["step"]] = row["loss"]
        return losses

    def weights(self):
        return (self.output / "model.safetensors").read_bytes()

    def checkpoints(self):
        # Not what a killed save left behind, step-N.partial-HEX.
        folders = (self.output / "checkpoints").glob("step-*")
        return sorted(f for f in folders if f.name[len("step-") :].isdigit())

    def verify(self):
        for folder in self.checkpoints():
            done = subprocess.run(
                [self.program, "checkpoint", "verify", folder, "--threads=1"],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 0:
                raise Failure(f"{folder}: {done.stderr}")

    def samples(self):
        manifest = self.checkpoints_by_step()[STEPS] / "manifest.json"
        state = json.loads(manifest.read_text())["state"]
        return json.loads(state["loader"])["samples_consumed"]

    def checkpoints_by_step(self):
        return {int(c.name.split("-")[1]): c for c in self.checkpoints()}


def children(pid):
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()]


def kill(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


class SmallDisk:
    """A tmpfs over a run's checkpoints with room for one file more, or none."""

    def __init__(self, run):
        self.path = run.output / "checkpoints"

    def fill(self):
        # Existing files move along, so that the run continues from them.
        kept = self.path.with_name("kept")
        self.path.mkdir(parents=True, exist_ok=True)
        shutil.copytree(self.path, kept)
        used = sum(f.stat().st_size for f in kept.rglob("*") if f.is_file())
        size = used + 300_000
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.path],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            shutil.copytree(kept, self.path, dirs_exist_ok=True)
        shutil.rmtree(kept)
        return done.returncode == 0

    def empty(self):
        kept = self.path.with_name("kept")
        shutil.copytree(
            self.path,
            kept,
            ignore=shutil.ignore_patterns("*.partial-*", "*.removed-*"),
        )
        subprocess.run(["umount", "-l", self.path], check=True)
        shutil.rmtree(self.path)
        kept.rename(self.path)


def disturb(run, ranks, what, chance):
    """Starts the run, lets it train a while, and does `what` to it."""
    disk = SmallDisk(run)
    full = what == "full disk" and disk.fill()
    process = run.start(ranks)
    ahead = chance.randint(1, 3 * INTERVAL)
    deadline = time.monotonic() + LIMIT_S
    first = None
    while process.poll() is None and time.monotonic() < deadline:
        step = run.step()
        first = first or step or None
        if first and step >= first + ahead:
            break
        time.sleep(0.01)
    ended = process.poll() is not None
    if not ended:
        pids = children(process.pid) or [process.pid]
        rank = chance.choice(pids)
        if what == "kill rank":
            kill(rank, signal.SIGKILL)
        elif what in ("kill launcher", "full disk"):
            kill(process.pid, signal.SIGKILL)
        elif what == "terminate":
            kill(process.pid, signal.SIGTERM)
        elif what == "pause":
            kill(rank, signal.SIGSTOP)
            time.sleep(1)
            kill(rank, signal.SIGCONT)
            time.sleep(0.5)
            kill(process.pid, signal.SIGKILL)
        elif what == "stop":
            kill(rank, signal.SIGSTOP)
    code = run.wait(process)
    # Ranks die with their launcher. The next start must not meet them.
    time.sleep(0.1)
    if full:
        disk.empty()
    if ended and code == 0:
        return None
    if what == "terminate" and code != 128 + signal.SIGTERM:
        raise Failure(f"SIGTERM: exit {code}:\n{run.log.read_text()[-3000:]}")
    return what


def soak(run, worlds, restarts, chance):
    counts = collections.Counter()
    kinds = ["kill rank", "kill launcher", "terminate", "pause", "full disk"]
    for number in range(restarts):
        # A stop costs its timeout each time.
        what = "stop" if number % 12 == 11 else chance.choice(kinds)
        ranks = chance.choice(worlds)
        if ranks == 1 and what == "stop":
            what = "kill rank"  # nobody would name it
        done = disturb(run, ranks, what, chance)
        run.verify()
        if done is None:
            break  # it reached its last step
        counts[done] += 1
        print(f"\r{number + 1} of {restarts}, step {run.step()} ", end="")
        sys.stdout.flush()
    run.finish(worlds[0] if len(worlds) == 1 else chance.choice(worlds))
    print("\r", end="")
    return counts


def compare(alone, run, bitwise):
    expected, found = alone.losses(), run.losses()
    if found.keys() != expected.keys():
        raise Failure(f"steps differ: {len(found)} of {len(expected)}")
    worst = max(abs(found[s] - expected[s]) for s in expected)
    if run.samples() != STEPS * GLOBAL_BATCH:
        raise Failure(f"{run.samples()} samples were consumed")
    if bitwise and (worst != 0 or run.weights() != alone.weights()):
        raise Failure(f"weights differ; losses differ by up to {worst}")
    if worst > TOLERANCE:
        raise Failure(f"losses differ by up to {worst}")
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="the folder")
    arguments = parser.parse_args()
    program = str(Path(arguments.program).resolve())
    folder = Path(tempfile.mkdtemp(prefix="flatshard-soak-"))
    begin = time.monotonic()
    try:
        corpus = prepare_corpus(program, folder)
        alone = Run(program, folder, corpus, "alone")
        alone.finish(2)
        for name, worlds in (("constant", [2]), ("changing", [1, 2, 3])):
            run = Run(program, folder, corpus, name)
            chance = random.Random(arguments.seed)
            counts = soak(run, worlds, arguments.restarts, chance)
            worst = compare(alone, run, bitwise=len(worlds) == 1)
            what = ", ".join(f"{n} x {k}" for k, n in sorted(counts.items()))
            print(
                f"{name}: {sum(counts.values())} restarts ({what}); "
                f"{STEPS} steps, largest difference of a loss {worst:.3g}"
            )
        print(f"{time.monotonic() - begin:.0f} s")
    except Failure as error:
        print(f"FAILED soak: {error}")
        return 1
    finally:
        if not arguments.keep:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
