"""Trains with FSDP2, and mentions Flatshard nowhere.

usage: torchrun ... program.py [accelerate | lightning | spawn | none | fsdp1 | private]

Each rank writes a line with its rank and the package whose FSDPModule it got. `none`
shards nothing and ends with 3, `fsdp1` uses FSDP1, and `private` a private name.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def write(model):
    classes = [c for c in type(model).__mro__ if c.__name__ == "FSDPModule"]
    package = classes[0].__module__.split(".")[0]
    # One write, so that lines of two ranks do not mix.
    os.write(1, f"rank {dist.get_rank()}: {package}\n".encode())


def by_hand():
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = net()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    write(model)
    dist.destroy_process_group()


def with_accelerate():
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tests.python.libraries import cpu

    cpu.ranks_as_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="no_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(2, 8)).sum())
    write(model)
    dist.destroy_process_group()


def with_lightning():
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Module(lightning.LightningModule):
        def configure_model(self):
            self.net = net()
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch, index):
            return self.net(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_end(self):
            write(self.net)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(4, 8)))


def spawned(rank, folder):
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    by_hand()


def spawn():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(spawned, (folder,), nprocs=2)


def nothing():
    os.write(1, b"a program\n")
    sys.exit(3)


def one_process():
    """Below plain python there is no launcher."""
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")


def with_fsdp1():
    from torch.distributed.fsdp import FullyShardedDataParallel

    one_process()
    FullyShardedDataParallel(net(), device_id=torch.device("cpu"))


def with_private_name():
    from torch.distributed.fsdp import fully_shard

    one_process()
    fully_shard(net())._get_fsdp_state()


WAYS = {
    "accelerate": with_accelerate,
    "lightning": with_lightning,
    "spawn": spawn,
    "none": nothing,
    "fsdp1": with_fsdp1,
    "private": with_private_name,
}

if __name__ == "__main__":
    WAYS.get("".join(sys.argv[1:2]), by_hand)()
