"""examples/cpp trains, saves, and resumes from its checkpoint at another number of ranks,
trains by whole steps, or by a custom schedule. The pages below quote it line by line.

usage: cpp_guide_test.py PROGRAM WHOLE_STEP EXPERTS OWN_SCHEDULE MINIMAL TENSOR_PARALLEL
                         TRANSFORMER WORK_FOLDER
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

paths = map(Path, sys.argv[1:])
program, whole_step, experts, own_schedule, minimal, *paths = paths
tensor_parallel, transformer, work = paths
root = Path(__file__).resolve().parents[2]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def lines(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


source = [
    line
    for name in (
        "main",
        "whole_step",
        "experts",
        "own_schedule",
        "minimal",
        "tensor_parallel",
        "transformer",
    )
    for line in lines((root / f"examples/cpp/{name}.cpp").read_text())
]
for page, at_least in (
    ("docs/get_started/quickstart_cpp.md", 8),
    ("docs/guides/cuda_graphs.md", 2),
    ("docs/guides/custom_schedule.md", 2),
    ("docs/guides/tensor_parallel.md", 2),
    ("README.md", 1),
):
    text = (root / page).read_text()
    blocks = re.findall(r"^```cpp\n(.*?)^```$", text, re.M | re.S)
    assert len(blocks) >= at_least, f"{len(blocks)} blocks of code in {page}"
    for block in blocks:
        quoted = lines(block)
        n = len(quoted)
        assert any(source[i : i + n] == quoted for i in range(len(source))), (
            f"{page} quotes what examples/cpp does not have:\n{block}"
        )


def run(*arguments):
    """Returns the program's report of its run: first and last step, ranks, losses."""
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(
        r"steps (\d+) to (\d+) on (\d+) ranks: loss ([\d.]+) -> ([\d.]+)\n",
        done.stdout,
    )
    assert said, done.stdout
    return [float(x) if "." in x else int(x) for x in said.groups()]


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
folder = str(work / "checkpoints")
*steps, before, after = run(folder, "2")
assert steps == [0, 100, 2], steps
assert after < 0.5 * before, (before, after)
*steps, again, best = run(folder)
assert steps == [100, 200, 1], steps
# Sums of float32 in another order, and five printed digits.
assert abs(again - after) < 5e-5, (after, again)
assert best < after, (after, best)
# The same under torchrun, from the checkpoint of one rank.
done = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    + ["--nproc_per_node", "2", program, folder],
    capture_output=True,
    text=True,
    timeout=120,
)
assert done.returncode == 0, done.stderr
assert "steps 200 to 300 on 2 ranks" in done.stdout, done.stdout
failed = subprocess.run([program], capture_output=True, text=True)
assert failed.returncode == 1 and "expected FOLDER" in failed.stderr, failed

# Experts on one rank, divided among two, and each part sharded over two more.
folder = str(work / "experts")
loss = None
for i, (ranks, here) in enumerate(((1, 4), (2, 2), (4, 2))):
    done = subprocess.run(
        [experts, folder, str(ranks)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(
        rf"steps {100 * i} to {100 * i + 100} on {ranks} ranks, {here} of 4 experts on "
        r"each: loss ([\d.]+) -> ([\d.]+)\n",
        done.stdout,
    )
    assert said, done.stdout
    before, after = map(float, said.groups())
    # A checkpoint is read at any degree.
    assert loss is None or abs(before - loss) < 5e-5, (before, loss)
    assert after < 0.9 * before, (before, after)
    loss = after

# Two microbatches in flight train the same model, to the last digit.
said = []
for name, more in (("plain", []), ("overlapped", ["overlap"])):
    done = subprocess.run(
        [experts, str(work / name), "2", *more],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    said.append(done.stdout)
assert said[0] == said[1] and "loss" in said[0], said

done = subprocess.run([whole_step], capture_output=True, text=True, timeout=120)
assert done.returncode == 0, done.stderr
said = re.fullmatch(
    r"100 steps, (\d+) of them replays: loss ([\d.]+) -> ([\d.]+)\n", done.stdout
)
assert said, done.stdout
# After a warm-up of three steps.
assert int(said[1]) == 97, done.stdout
assert float(said[3]) < 0.5 * float(said[2]), done.stdout

said = []
for arguments in ([], ["plain"]):
    done = subprocess.run(
        [own_schedule, *arguments], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"60 steps: loss [\d.]+ -> [\d.]+\n", done.stdout), done.stdout
    said.append(done.stdout)
# Bitwise identical.
assert said[0] == said[1], said

# Ranks that share layers print the same digits as one rank.
said = []
for ranks in ("1", "2", "4"):
    done = subprocess.run(
        [tensor_parallel, ranks], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step (\d+) loss ([\d.]+) norm ([\d.]+)\n", done.stdout)
    said.append([float(x) for row in found for x in row])
assert len(said[0]) == 6 and said[0][4] < said[0][1], said
# Sums of float32 in another order, and four printed digits.
assert all(abs(a - b) < 5e-4 for row in said for a, b in zip(row, said[0])), said

# A transformer. Its ranks draw their own rows.
for ranks in ("1", "2"):
    done = subprocess.run(
        [transformer, ranks], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said = re.fullmatch(r"100 steps: loss ([\d.]+) -> ([\d.]+)\n", done.stdout)
    assert said and float(said[2]) < 0.2 * float(said[1]), done.stdout

# The example that README.md quotes, on two ranks.
job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
ranks = [
    subprocess.Popen(
        [minimal],
        env=os.environ | job | {"RANK": rank, "LOCAL_RANK": rank},
        stdout=subprocess.PIPE,
        text=True,
    )
    for rank in ("0", "1")
]
curves = []
for rank in ranks:
    printed, _ = rank.communicate(timeout=120)
    assert rank.returncode == 0, printed
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0], printed
    curves.append(losses)
# Each rank has its own data.
assert curves[0] != curves[1], curves
