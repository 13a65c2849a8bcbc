"""Runs of the trainer and of other programs, and what they leave on disk."""

import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[1]
# A component of a path has at most 255 bytes, and an extension is appended.
LONGEST_NAME = 200


class RunFailed(SystemExit):
    """A program failed. Where nothing catches it, the benchmark ends with its message."""


def run(command, log, check=True):
    """Returns the standard output of `command`. `log` stores stdout and stderr."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        done = subprocess.run(
            list(map(str, command)), stdout=subprocess.PIPE, stderr=file, text=True
        )
        file.write(done.stdout)
    if check and done.returncode != 0:
        raise RunFailed(f"{command[0]} ended with {done.returncode}; see {log}")
    return done.stdout


def file_name(*parts):
    """Returns the name of a file or folder without its extension, of texts and numbers.

    Other characters than letters, digits, and ._=+- become hyphens. A long name ends with
    a digest of all parts in place of its rest.
    """
    text = "-".join(map(str, parts))
    name = re.sub(r"[^A-Za-z0-9._=+]+", "-", text).strip("-")
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return f"{name[: LONGEST_NAME - 13]}-{digest}"


def torchrun(nproc, script, options, log):
    """Runs a script of this folder on `nproc` ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return run([*command, f"--nproc-per-node={nproc}", BENCH / script, *options], log)


def json_lines(text):
    """Returns the lines of `text` that are objects of JSON."""
    return [json.loads(line) for line in text.split("\n") if line.startswith('{"')]


def rows_of(*command):
    """Returns the lines of JSON that a program of this folder prints.

    Ends the benchmark with the status of the program when that fails.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    return json_lines(done.stdout)


def train_command(program, config, settings, *more):
    """Returns the command of a training run; `settings` are `section.key=value`."""
    sets = [word for setting in settings for word in ("--set", setting)]
    return [str(program), "train", str(config), *map(str, more), *sets]


def plan(program, config, *options):
    """Returns what `flatshard plan --json` prints. Ends the benchmark when it fails."""
    command = [program, "plan", str(config), "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout)


def train(program, config, folder, settings, *more):
    """Trains into `folder`, and returns all that the trainer printed."""
    settings = [f"run.output_dir={folder}", "metrics.log_freq=1", *settings]
    log = Path(f"{folder}.log")
    run(train_command(program, config, settings, *more), log)
    return log.read_text()


def metrics(folder):
    """Returns the rows of a run's metrics, or none without the file."""
    file = folder / "metrics.jsonl"
    return json_lines(file.read_text()) if file.exists() else []


def losses(folder):
    """Returns the loss of each step that a run's metrics have."""
    return [row["loss"] for row in steps_of(folder, 0) if "loss" in row]


def steps_of(folder, warmup):
    """Returns the metrics of the steps after the warm-up."""
    rows = metrics(folder)
    return [row for row in rows if "step_ms" in row and row["step"] > warmup]


def train_steps(args, seq, settings, folder):
    """Trains args.warmup + args.steps steps.

    Returns:
        a dict of the steps after the warm-up. It has the median `ms`, their `range`, and
        `peak_GiB` of allocated memory. `host_ms` and `exposed_ms` are the medians of the
        host's part and of communication that no compute hides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        f"training.seq_len={seq}",
        f"training.steps={args.warmup + args.steps}",
        f"lr_scheduler.warmup_steps={args.warmup}",
        *settings,
    ]
    train(args.program, args.config, folder, settings, f"--nproc={args.nproc}")
    rows = steps_of(folder, args.warmup)
    ms = [row["step_ms"] for row in rows]
    return {
        "ms": statistics.median(ms),
        "range": [min(ms), max(ms)],
        "host_ms": statistics.median(row["host_ms"] for row in rows),
        "exposed_ms": statistics.median(row["exposed_comm_ms"] for row in rows),
        "peak_GiB": max(row["memory_peak_bytes"] for row in rows) / 2**30,
    }


def peer_steps(args, script, log, options):
    """Returns the same of a benchmark in PyTorch, with the JSON that it prints."""
    options = [f"--warmup={args.warmup}", f"--steps={args.steps}", *options]
    row = json_lines(torchrun(args.nproc, script, options, log))[0]
    host_ms = sum(row["host_ms_forward_backward_step"])
    return {**row, "range": row["ms_range"], "host_ms": host_ms}


def fsdp2_steps(args, seq, options):
    """Returns the same of bench/fsdp2_llama.py."""
    log = args.out / f"{file_name('fsdp2', seq, *options)}.log"
    return peer_steps(args, "fsdp2_llama.py", log, [f"--seq={seq}", *options])


def machine():
    """Returns how many GPUs of which kind there are."""
    if shutil.which("nvidia-smi") is None:
        return "no GPU"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    names = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    return f"{len(names)}x {names[0]}" if names else "no GPU"


def write_json(path, found):
    """Writes `found` to `path`, or nothing without a path."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
