"""Every rank runs the same tests (scripts/run_python_tests starts them under
torchrun). After each test the ranks compare how it went: one that failed fails on
all, and the session ends there, since the ranks may have parted."""

import os
import shutil
import tempfile
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def pytest_configure(config):
    torch.set_num_threads(1)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29411")
    # A rank that left a test early is a failure soon, not a hang.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if dist.get_rank() != 0:
        config.option.verbose = -2
        config.option.tbstyle = "short"


def pytest_unconfigure(config):
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        outcomes = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, report.outcome)
        bad = [rank for rank, outcome in enumerate(outcomes) if outcome == "failed"]
        if bad:
            item.session.shouldfail = f"{item.name} failed on ranks {bad}"
            if report.outcome != "failed":
                report.outcome = "failed"
                report.longrepr = f"failed on ranks {bad}, not on this one"
    return report


@pytest.fixture(scope="session")
def world():
    return dist.get_world_size()


@pytest.fixture(scope="session")
def rank():
    return dist.get_rank()


@pytest.fixture(scope="session")
def mesh(world):
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))


@pytest.fixture(scope="session")
def mesh_2d(world):
    if world % 2:
        pytest.skip("needs an even number of ranks")
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "dp"))


@pytest.fixture
def folder(rank):
    name = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(name)
    yield name[0]
    dist.barrier()
    if rank == 0:
        shutil.rmtree(name[0])


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
