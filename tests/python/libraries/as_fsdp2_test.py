"""python -m flatshard.as_fsdp2: what its command reaches, reports and refuses."""

import hashlib
import importlib.metadata
import inspect
import os
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest

from flatshard import as_fsdp2

PROGRAM = str(Path(__file__).with_name("program.py"))
GRAPHS = str(Path(__file__).with_name("graphs_program.py"))
SWAP = [sys.executable, "-m", "flatshard.as_fsdp2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
ACCELERATE += ["--num_processes", "2", "--main_process_port", "0"]
LAUNCHERS = {
    "python": [sys.executable],
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2"],
    "accelerate launch": ACCELERATE,
}
NEVER = "flatshard.as_fsdp2: fully_shard was never called: nothing ran on Flatshard"
# The programs must not inherit these variables from the rank that runs the tests.
OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


def run(*command, **environment):
    inherited = {k: v for k, v in os.environ.items() if k not in OF_RANKS}
    return subprocess.run(
        command,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def lines_of_swap(done):
    """The lines that the swap wrote to stderr."""
    lines = done.stderr.splitlines()
    return [line for line in lines if line.startswith("flatshard.as_fsdp2:")]


def check_both_ranks(done, closing):
    assert done.returncode == 0, done.stderr
    ranks = [line for line in done.stdout.splitlines() if line.startswith("rank")]
    assert sorted(ranks) == ["rank 0: flatshard", "rank 1: flatshard"]
    assert lines_of_swap(done) == [f"flatshard.as_fsdp2: {closing}"]


def test_torchrun():
    two = [*TORCHRUN, "--nproc-per-node", "2", PROGRAM]
    options = ["--strategy", "zero2", "--granularity", "chunk", "--prefetch", "2"]
    done = run(*SWAP, *options, "--require", *two)
    check_both_ranks(done, "3 units, zero2")


def test_accelerate_launch():
    done = run(*SWAP, *ACCELERATE, PROGRAM, "accelerate")
    check_both_ranks(done, "1 unit, zero3")


def test_lightning_starts_the_other_ranks():
    pytest.importorskip("lightning")
    done = run(*SWAP, sys.executable, PROGRAM, "lightning")
    check_both_ranks(done, "1 unit, zero3")


def test_cuda_graphs_of_blocks():
    command = [*SWAP, "--cuda-graph", sys.executable, GRAPHS]
    done = run(*command, FLATSHARD_EMULATE_CUDA_GRAPHS="1")
    assert done.returncode == 0, done.stderr
    # A list of modules, and a module that contains units, cannot be captured.
    assert done.stdout == "[True, False, False]\n3\n"
    without_gpu = run(*command)
    assert without_gpu.returncode == 1
    assert "cuda_graph: expected a mesh of GPUs, got cpu" in without_gpu.stderr


ODD_ROWS = """
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from flatshard.optim import AdamW
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = fully_shard(torch.nn.Linear(33, 130))
AdamW(net.parameters(), state_dtype=torch.int8)"""


def test_int8_states():
    program = [sys.executable, "-c", ODD_ROWS]
    done = run(*SWAP, "--int8-states", *program)
    assert done.returncode == 0, done.stderr
    refused = run(*SWAP, *program)
    assert refused.returncode == 1
    assert "weight of shape [130, 33] has slices of 33" in refused.stderr
    assert "(as_fsdp2: --int8-states)" in refused.stderr


def test_processes_that_the_program_starts():
    done = run(*SWAP, sys.executable, PROGRAM, "spawn")
    check_both_ranks(done, "3 units, zero3")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_program_without_fully_shard_ends_as_it_would(launcher):
    command = [*LAUNCHERS[launcher], PROGRAM, "none"]
    plain, done = run(*command), run(*SWAP, *command)
    assert done.returncode == plain.returncode != 0
    # A launcher may end the other rank before it has printed.
    assert set(done.stdout.splitlines()) == set(plain.stdout.splitlines())
    assert lines_of_swap(done) == [NEVER]


# test_install compares the rest of their texts.
REFUSED = {"fsdp1": "fsdp_version: 2", "private": "leave out tiled_mlp"}


@pytest.mark.parametrize(
    "launcher, way", zip(LAUNCHERS, ("private", "fsdp1", "private"), strict=True)
)
def test_refusals_end_each_kind_of_command(launcher, way):
    done = run(*SWAP, *LAUNCHERS[launcher], PROGRAM, way)
    assert done.returncode != 0
    assert "NotImplementedError: flatshard.as_fsdp2: " in done.stderr
    assert REFUSED[way] in done.stderr


def test_require(tmp_path):
    left = tmp_path / "left"
    program = f"file = open({str(left)!r}, 'w'); file.write('all')"
    # The environment's own sitecustomize runs, too.
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('own')")
    path = os.pathsep.join([str(own), os.environ["PYTHONPATH"]])
    done = run(*SWAP, "--require", sys.executable, "-c", program, PYTHONPATH=path)
    assert done.returncode == 1
    assert lines_of_swap(done) == [NEVER]
    assert done.stdout == "own\nown\n"  # of the command and of the program
    assert left.read_text() == "all"


INSTALLED = """
import sys, types
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch.distributed.fsdp import fully_shard

from flatshard import as_fsdp2

def error_of(call, *args, **more):
    try:
        call(*args, **more)
    except Exception as error:
        return f"{type(error).__name__}: {error}"

taker = types.ModuleType("taker")
taker.shard = fully_shard
sys.modules["taker"] = taker
print(error_of(as_fsdp2.install))
del sys.modules["taker"], fully_shard
del globals()["taker"]
print(error_of(as_fsdp2.install, strategy="zero9"))
print(error_of(as_fsdp2.install, strateg="zero2"))
sys.modules["__main__"] = types.ModuleType("__main__")
as_fsdp2.install(strategy="zero1", check_same_values=False)
print(error_of(as_fsdp2.install))
for name in ("fully_shard", "FSDPModule", "share_comm_ctx"):
    print(getattr(fsdp, name).__module__.split(".")[0])
from torch.distributed._composable.fsdp import fully_shard
print(fully_shard is fsdp.fully_shard is fsdp._fully_shard.fully_shard)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = fully_shard(torch.nn.Linear(4, 4))
sharding = fully_shard.state(net).sharding
print(sharding.strategy, sharding.options.check_same_values)
print(error_of(lambda: net._get_fsdp_state()))
print(error_of(lambda: fully_shard.state(net)._state_ctx))
print(error_of(fsdp.FullyShardedDataParallel, torch.nn.Linear(4, 4)))
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
FSDPParam.init_dtype_attrs = lambda *args: None
print(error_of(fully_shard, torch.nn.Linear(4, 4)))
"""


def test_install():
    done = run(sys.executable, "-c", INSTALLED)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for line, words in zip(
        lines,
        (
            ["RuntimeError", "taker", "Call install() before"],
            ["ValueError", "strategy", "zero3", "zero9"],
            ["TypeError", "'strateg'", "check_same_values"],
            ["RuntimeError", "call install() only once"],
            ["flatshard"],
            ["flatshard"],
            ["flatshard"],
            ["True"],
            ["zero1 False"],
            ["NotImplementedError", "_get_fsdp_state", "leave out tiled_mlp"],
            ["NotImplementedError", "_state_ctx", "pipeline parallelism"],
            ["NotImplementedError", "FSDP1", "fsdp_version: 2"],
            ["NotImplementedError", "init_dtype_attrs", "adapter: lora"],
        ),
        strict=True,
    ):
        assert all(word in line for word in words), (line, words)
    assert lines_of_swap(done) == ["flatshard.as_fsdp2: 1 unit, zero1"]


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "expected a command"),
        (["--strategy", "zero9", "python"], "zero9"),
        (["--strategy", "zero0", "--granularity", "chunk", "python"], "granularity"),
        (["--prefetch", "-1", "python"], "prefetch"),
        (["--copy-engines", "some", "python"], "copy-engines"),
        (["--strat", "zero2", "python"], "--strat"),
        (["train.py"], "write: python train.py"),
        (["no-such-program"], "no-such-program: expected a program"),
        (["python", "-I", "train.py"], "python -I ignores PYTHONPATH"),
    ],
)
def test_bad_commands(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["as_fsdp2", *words])
    with pytest.raises(SystemExit) as ended:
        as_fsdp2.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_accelerate_is_what_the_patch_was_tried_with():
    from flatshard_as_fsdp2.accelerate_prepare import TRIED

    method = accelerate.Accelerator._prepare_fsdp2
    source = inspect.getsource(inspect.unwrap(method))
    digest = hashlib.sha256(source.encode()).hexdigest()
    version = importlib.metadata.version("accelerate")
    assert TRIED.get(version) == digest, (
        f"accelerate {version}: _prepare_fsdp2 changed; run scripts/library_matrix -k "
        f"twice and add {digest} to accelerate_prepare.py"
    )
