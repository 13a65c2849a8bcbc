"""Every rank runs the same tests (scripts/run_python_tests starts them under
torchrun). After each test the ranks compare how it went: one that failed fails on
all, and the session ends there, since the ranks may have parted.

FLATSHARD_TEST_DEVICE=cuda runs them on GPUs, one for each rank."""

import gc
import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.python.device import DEVICE
from tests.python.sum_order import use_as_default
from tests.slow_cases import pytest_addoption, pytest_collection_modifyitems

__all__ = ["pytest_addoption", "pytest_collection_modifyitems"]

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def pytest_configure(config):
    if DEVICE not in BACKENDS:
        raise pytest.UsageError(
            f"FLATSHARD_TEST_DEVICE: expected cpu or cuda, got {DEVICE!r}"
        )
    if DEVICE == "cuda":
        use_a_gpu()
    torch.set_num_threads(1)
    use_as_default()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29411")
    use_one_thread_of_gloo()
    # A rank that left a test early is a failure soon, not a hang.
    dist.init_process_group(BACKENDS[DEVICE], timeout=timedelta(seconds=120))
    if dist.get_rank() != 0:
        config.option.verbose = -2
        config.option.tbstyle = "short"


def use_one_thread_of_gloo():
    """Gives each of torch's groups over Gloo one worker thread.

    The two that it has by default write the name of the last collective without a lock
    (torch 2.11 to 2.15). With several all-gathers in flight the process sometimes aborts
    in malloc.
    """

    class OneThread(dist.ProcessGroupGloo):
        def __init__(self, store, rank, size, timeout, **others):
            options = dist.ProcessGroupGloo._Options()
            options._threads = 1
            options._timeout = timeout
            options._devices = [self.create_device(hostname="127.0.0.1")]
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OneThread


def pytest_collection_finish(session):
    # The modules of all tests and their cases: garbage collection leaves them out.
    gc.collect()
    gc.freeze()


_calm = set()


def calm_gloo():
    """Gloo's event loops do not preempt those that send to them.

    A loop tries to lock a connection again and again. If there are more ranks than
    cores, the thread that owns the lock is often preempted by the loop that its message
    woke. That cost half of the time. The loops among Gloo's threads have no name.
    """
    main = os.getpid()
    own = Path(f"/proc/{main}/task/{main}/comm").read_text()
    for task in set(os.listdir("/proc/self/task")) - _calm - {str(main)}:
        try:
            if Path(f"/proc/self/task/{task}/comm").read_text() == own:
                os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended
            continue
        _calm.add(task)


def use_a_gpu():
    """Uses this rank's GPU, where equal operations give equal bits in float32."""
    # Read by cuBLAS when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    number = int(os.environ.get("LOCAL_RANK", 0))
    wanted = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    found = torch.cuda.device_count()
    if found < wanted:
        pytest.exit(
            f"FLATSHARD_TEST_DEVICE=cuda: expected a GPU for each of {wanted} ranks, "
            f"found {found}; run fewer ranks",
            returncode=1,
        )
    torch.cuda.set_device(number)
    torch.use_deterministic_algorithms(True)
    # That would also fill new memory, by kernels in addition to those that the core
    # orders.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.allow_tf32 = False


def pytest_unconfigure(config):
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "setup":
        calm_gloo()
    if report.when == "call":
        reason = failure_of_ranks(report.outcome)
        if reason:
            item.session.shouldfail = f"{item.name} {reason}"
            if report.outcome != "failed":
                report.outcome = "failed"
                report.longrepr = f"{reason}, not on this one"
    return report


def failure_of_ranks(outcome):
    """Returns where a test failed, or None. Collective."""
    outcomes = [None] * dist.get_world_size()
    try:
        dist.all_gather_object(outcomes, outcome)
    except RuntimeError as error:
        # The failure of this rank still has to be reported.
        return f"failed on some rank, which left the others in a collective: {error}"
    bad = [rank for rank, one in enumerate(outcomes) if one == "failed"]
    return f"failed on ranks {bad}" if bad else None


@pytest.fixture(scope="session")
def world():
    return dist.get_world_size()


@pytest.fixture(scope="session")
def rank():
    return dist.get_rank()


@pytest.fixture(scope="session")
def mesh(world):
    return init_device_mesh(DEVICE, (world,), mesh_dim_names=("dp",))


@pytest.fixture(scope="session")
def mesh_2d(world):
    if world % 2:
        pytest.skip("needs an even number of ranks")
    return init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("outer", "dp"))


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


@pytest.fixture
def graphs_on_cpu(monkeypatch):
    """CUDA graphs of blocks where there is no GPU."""
    if DEVICE == "cpu":
        monkeypatch.setenv("FLATSHARD_EMULATE_CUDA_GRAPHS", "1")
