"""Lightning's ModelParallelStrategy, and Fabric, with FSDP2."""

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.python.libraries import models


def net():
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3))
    return nn.Sequential(*blocks, nn.Linear(16, 5))


def data(n=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, generator=generator)
    return TensorDataset(x, torch.randint(5, (n,), generator=generator))


def shard(model, mesh, **options):
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


class Module(lightning.LightningModule):
    def __init__(self, options={}, on_meta=False):
        super().__init__()
        self.options, self.on_meta = options, on_meta
        self.losses, self.norms, self.validated = [], [], []

    def configure_model(self):
        if hasattr(self, "net"):
            return
        self.net = net()
        shard(self.net, self.device_mesh["data_parallel"], **self.options)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]).float(), batch[1])
        self.validated.append(loss.item())

    def on_before_optimizer_step(self, optimizer):
        from torch.nn.utils import get_total_norm

        norm = get_total_norm(p.grad for p in self.parameters())
        self.norms.append(norm.full_tensor().item())


def make(folder, full=False, **more):
    strategy = ModelParallelStrategy(
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
        save_distributed_checkpoint=not full,
    )
    settings = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        **more,
    }
    return lightning.Trainer(strategy=strategy, **settings)


def found(module):
    return {
        "losses": module.losses,
        "norms": module.norms,
        "validated": module.validated,
        "weights": models.full_weights(module.net),
    }


def loader(**more):
    return DataLoader(data(**more), batch_size=2)


def fitted(folder, module=None, validate=False, **more):
    module = module or Module()
    trainer = make(folder, **more)
    trainer.fit(module, loader(), loader(n=8, seed=7) if validate else None)
    return found(module), trainer


def case_fit(folder):
    return fitted(folder, validate=True)[0]


def case_accumulate(folder):
    return fitted(folder, accumulate_grad_batches=2)[0]


def case_bf16_mixed(folder):
    return fitted(folder, precision="bf16-mixed")[0]


def case_bf16_true(folder):
    return fitted(folder, precision="bf16-true")[0]


def case_bf16_policy(folder):
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    return fitted(folder, Module({"mp_policy": policy}))[0]


class Manual(Module):
    """Steps its optimizer itself."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def case_manual_optimization(folder):
    return fitted(folder, Manual())[0]


def resumed(folder, full):
    expected, trainer = fitted(folder, full=full, max_epochs=1)
    trainer.save_checkpoint(f"{folder}/saved")
    whole, _ = fitted(folder, full=full)
    module = Module()
    again = make(folder, full)
    again.fit(module, loader(), ckpt_path=f"{folder}/saved")
    got = found(module)
    half = len(expected["losses"])
    assert got["losses"] == whole["losses"][half:]
    for name, weight in whole["weights"].items():
        assert torch.equal(weight, got["weights"][name]), name
    return whole


def case_resume_distributed(folder):
    return resumed(folder, full=False)


def case_resume_full(folder):
    return resumed(folder, full=True)


# -- Fabric --------------------------------------------------------------------------------


def fabric_of(precision="32-true"):
    strategy = FabricStrategy(
        parallelize_fn=lambda model, mesh: shard(model, mesh["data_parallel"]),
        data_parallel_size=dist.get_world_size(),
        tensor_parallel_size=1,
    )
    devices = dist.get_world_size()
    fabric = lightning.Fabric(
        accelerator="cpu", devices=devices, strategy=strategy, precision=precision
    )
    fabric.launch()
    return fabric


def with_fabric(fabric):
    model = fabric.setup_module(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, fabric.setup_optimizers(optimizer)


def train(fabric, model, optimizer, steps=4, accumulate=False):
    losses = []
    batches = fabric.setup_dataloaders(loader())
    for i, (x, y) in enumerate(batches):
        if i == steps:
            break
        with fabric.no_backward_sync(model, enabled=accumulate and i % 2 == 0):
            loss = nn.functional.cross_entropy(model(x).float(), y)
            fabric.backward(loss)
        losses.append(loss.item())
        if not accumulate or i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def fabric_result(precision="32-true", **more):
    fabric = fabric_of(precision)
    model, optimizer = with_fabric(fabric)
    losses = train(fabric, model, optimizer, **more)
    return {"losses": losses, "weights": models.full_weights(model.module)}


def case_fabric(folder):
    return fabric_result()


def case_fabric_no_backward_sync(folder):
    return fabric_result(accumulate=True)


def case_fabric_bf16(folder):
    return fabric_result("bf16-mixed")


def case_fabric_save(folder):
    fabric = fabric_of()
    model, optimizer = with_fabric(fabric)
    train(fabric, model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    fabric.save(f"{folder}/saved", state)
    expected = train(fabric, model, optimizer)
    other, its_optimizer = with_fabric(fabric)
    fabric.load(f"{folder}/saved", {"model": other, "optimizer": its_optimizer})
    assert train(fabric, other, its_optimizer) == expected
    weights, loaded = (models.full_weights(m.module) for m in (model, other))
    for name, weight in weights.items():
        assert torch.equal(weight, loaded[name]), name
    return {"losses": expected, "weights": weights}
