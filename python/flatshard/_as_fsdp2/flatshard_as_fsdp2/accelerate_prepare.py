"""accelerate: `prepare` of a model that is sharded already.

`Trainer.train()` called twice does that. `Accelerator._prepare_fsdp2` then finds the
parameters of an optimizer again by the addresses of their local tensors. Shards without
rows on a rank have none, so several of them would become one. The optimizer of a sharded
model has the right parameters, so nothing is to be found.
"""

import functools

MODULE = "accelerate.accelerator"
# Versions that the patch was tried with: SHA-256 of the source of the method.
TRIED = {
    "1.15.0": "123905d6d7c29a484e436ccb4ad12ef337dc5972b8f96573660041225fe6aada",
}


def patch(accelerator):
    """Patches `Accelerator` of the module that was just imported."""
    cls = accelerator.Accelerator
    prepare = getattr(cls, "_prepare_fsdp2", None)
    if prepare is None:  # a version without FSDP2
        return

    @functools.wraps(prepare)
    def _prepare_fsdp2(self, *args):
        models = [arg for arg in args if _is_sharded(arg)]
        if not models:
            return prepare(self, *args)
        others = iter(prepare(self, *(arg for arg in args if not _is_sharded(arg))))
        for model in models:
            if not any(model is known for known in self._models):
                self._models.append(model)
        return tuple(arg if _is_sharded(arg) else next(others) for arg in args)

    cls._prepare_fsdp2 = _prepare_fsdp2


def _is_sharded(arg):
    from torch.distributed.fsdp import FSDPModule

    return isinstance(getattr(arg, "_orig_mod", arg), FSDPModule)
