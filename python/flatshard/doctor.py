"""`python -m flatshard.doctor`: tries what this installation can do on this machine.

Prints versions, GPUs and the features of each kind of GPU. Then it trains a step on the
CPU and on each kind of GPU, and one on two ranks. It ends with 0 when training works on
this machine's devices, a CPU or GPUs, else with 1 and the reason.
"""

import argparse
import math
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import flatshard
from flatshard import _C

# Timeout for two ranks to connect and to train a step.
RANKS_S = 180


def findings():
    """Returns (name, value) of everything that matters."""
    yield "flatshard", flatshard.__version__
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "torch", f"{torch.__version__} (flatshard was built for {_C.torch_version})"
    yield "extension", _C.__file__
    yield "CUDA in torch", torch.version.cuda or "no"
    yield from (fact for fact in _C.build_facts() if fact[0] != "torch")
    yield from _C.machine_facts()
    yield "gloo", "yes" if dist.is_gloo_available() else "no"
    yield "nccl", "yes" if dist.is_nccl_available() else "no"


def problems():
    """Returns what does not work on this machine, and what to do about it."""
    if torch.cuda.is_available() and not _C.with_cuda:
        yield (
            "training on this machine's GPUs: flatshard is built for CPUs only; build "
            "it with FLATSHARD_CUDA=on, or install a wheel with cu in its version"
        )
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield "training on several GPUs: this torch has no NCCL"
    if not dist.is_gloo_available():
        yield "training on CPUs: this torch has no Gloo"


def notes():
    """Returns what this machine does not have, as far as torch sees."""
    if _C.with_cuda and not torch.cuda.is_available():
        yield "torch sees no GPU, so training is on the CPU (look at nvidia-smi)"


def try_step(device, ranks=1):
    """Trains one step of a tiny model with FP8 weights, emulated in bfloat16 where the
    device has no FP8 matmuls.

    Args:
        device: torch.device.
        ranks: number of ranks of the process group; all of them call this.

    Raises:
        RuntimeError: a loss or a weight is NaN, or the loss does not fall.
    """
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(128, 256), torch.nn.GELU(), torch.nn.Linear(256, 16)
    ).to(device)
    mesh = init_device_mesh(device.type, (ranks,))
    precision = flatshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fp8 = flatshard.Float8Policy("rowwise", emulate=True)
    options = flatshard.ShardOptions(fp8=fp8)
    flatshard.fully_shard(model[0], mesh=mesh, mp_policy=precision, options=options)
    flatshard.fully_shard(model, mesh=mesh, mp_policy=precision)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(2):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if not all(map(math.isfinite, losses)) or losses[1] >= losses[0]:
        raise RuntimeError(f"expected a lower loss after a step, got {losses}")


def try_out(device):
    """Runs try_step on one rank, in this process. Returns why it does not work, or ""."""
    try:
        if device.type == "cuda":
            _C.check_gpu(device)
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
        )
        try:
            try_step(device)
        finally:
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 -- it is reported
        return str(error) or repr(error)
    return ""


def try_ranks(kind):
    """Runs try_step on two ranks, each a process. Returns why it does not work, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            output = open(Path(folder) / f"rank{rank}", "w+")  # noqa: SIM115
            command = [sys.executable, "-m", "flatshard.doctor"]
            command += ["--rank", str(rank), kind, str(Path(folder) / "store")]
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            ranks.append((process, output))
        failures = []
        for rank, (process, output) in enumerate(ranks):
            try:
                code = process.wait(timeout=RANKS_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = f"none within {RANKS_S} s"
            output.seek(0)
            lines = output.read().strip().splitlines() or ["no output"]
            output.close()
            if code != 0:
                failures.append(f"rank {rank}, exit code {code}: {lines[-1]}")
        return "; ".join(failures)


def as_rank(rank, kind, store):
    """Runs the part of a process of try_ranks."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
    )
    try:
        try_step(device, ranks=2)
    finally:
        dist.destroy_process_group()


def trials():
    """Returns (name, why it does not work or "") of each trial, as it ends."""
    if dist.is_gloo_available():
        yield "one step on a CPU", try_out(torch.device("cpu"))
    if not (_C.with_cuda and torch.cuda.is_available()):
        if dist.is_gloo_available():
            yield "two ranks by Gloo", try_ranks("cpu")
        return
    for index, _ in _C.gpu_kinds():
        yield f"one step on GPU {index}", try_out(torch.device("cuda", index))
    if torch.cuda.device_count() > 1:
        yield "two ranks by NCCL", try_ranks("cuda")
        yield "copies of GPUs", "; ".join(_C.try_peer_copies())


def main(arguments=()):
    parser = argparse.ArgumentParser(
        prog="python -m flatshard.doctor", description=__doc__
    )
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank:
        as_rank(int(chosen.rank[0]), *chosen.rank[1:])
        return 0
    for name, value in findings():
        print(f"{name:18} {value}")
    for _, text in _C.gpu_kinds():
        print(text, end="")
    for note in notes():
        print(f"{'note':18} {note}")
    found = list(problems())
    for name, why in trials():
        print(f"{name:18} {'FAILED' if why else 'works'}", flush=True)
        if why:
            found.append(f"{name}: {why}")
    for problem in found:
        print(f"would not work: {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
