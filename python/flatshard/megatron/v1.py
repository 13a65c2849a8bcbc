"""The names of Megatron-FSDP's first version (megatron_fsdp)."""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import diagnostics
from flatshard._fsdp.fully_shard import fully_shard as _fully_shard
from flatshard._fsdp.initialize import reset_parameters
from flatshard._fsdp.options import ShardOptions
from flatshard._fsdp.strategies import find_strategy
from flatshard.megatron import v2
from flatshard.megatron.experts import check_experts, check_group, expert_modules
from flatshard.megatron.tensor_parallel import check_tensor_parallel
from flatshard.megatron.float8 import check_dtype, float8_policy
from flatshard.megatron.overlap import add_hooks
from flatshard.megatron.precision import MixedPrecisionPolicy, main_dtype

# Argument: (default, values that need nothing here, what to do instead).
_WITHOUT_COUNTERPART = {
    "hybrid_fsdp_group": (None, (), "give a device_mesh with dp_outer_dim"),
    "fsdp_group_ag": (None, (), "all-gathers always have a separate group"),
    "overlap_grad_reduce": (True, (), "reductions always run in parallel with compute"),
    "overlap_param_gather": (
        True,
        (),
        "all-gathers always run in parallel with compute",
    ),
    "sync_model_each_microbatch": (True, (), "use no_sync() around microbatches"),
    "preproc_state_dict_for_dcp_ckpt": (True, (False,), ""),
    "average_in_collective": (False, (True,), ""),
    "disable_bucketing": (False, (True,), ""),
    "nccl_ub": (False, (), "NCCL user buffers are not supported"),
    "disable_symmetric_registration": (False, (True,), ""),
    "fsdp_double_buffer": (False, (True,), ""),  # slots have fixed places always
    "maxpool_double_buffer": (False, (True,), ""),
    "fsdp_db_use_persist_buf_on_alloc_fail": (False, (), "slots never fail"),
    "use_decoupled_grad": (False, (), "gradients have the parameters' dtype"),
    "suggested_communication_unit_size": (
        None,
        (),
        "use flatshard.configure(model, ModelOptions(prefetch=...))",
    ),
    "gradient_reduce_div_fusion": (True, (False,), ""),
    "fsdp_all_gather_in_start_param_sync": (True, (False,), ""),
}

_OUTER = {0: "replicate", "no_shard": "replicate", 1: "optim", "optim": "optim"}


def fully_shard_model(
    module: nn.Module,
    fsdp_unit_modules: Sequence[type | str] | None = None,
    device_mesh: DeviceMesh | None = None,
    dp_shard_dim: str | None = None,
    dp_outer_dim: str | None = None,
    tp_dim: str | None = None,
    *,
    zero_dp_strategy: int | str = 3,
    outer_dp_sharding_strategy: int | str = 0,
    device: torch.device | str | None = None,
    init_model_with_meta_device: bool = False,
    mixed_precision_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    calculate_per_token_loss: bool = False,
    report_nan_in_param_grad: bool = False,
    cuda_graph_mode: bool = False,
    keep_fp8_transpose_cache: bool = False,
    enable_fine_grained_param_gather: bool | None = None,
    expt_device_mesh: DeviceMesh | None = None,
    expt_fsdp_group_ag: object = None,
    hybrid_fsdp_expt_group: object = None,
    grads_in_place: bool | None = None,
    **others: object,
) -> nn.Module:
    """Shards `module`. Returns it; it is an FSDPModule from now on.

    Args:
        fsdp_unit_modules: classes or import paths of classes. Their instances are units.
        device_mesh, dp_shard_dim, dp_outer_dim: the mesh and the names of its
            dimensions that shard and that replicate. None: all ranks shard.
        tp_dim: the name of the dimension of device_mesh, expt_device_mesh or both whose
            ranks have parts of the same layers: those parameters are DTensors over it,
            as parallelize_module makes them. See flatshard.fully_shard.
        zero_dp_strategy: 0 to 3, or a name: "no_shard" ("zero0"), "optim" ("zero1"),
            "optim_grads" ("zero2"), "optim_grads_params" ("zero3").
        outer_dp_sharding_strategy: 0 or "no_shard"; with zero_dp_strategy 3 also 1 or
            "optim": the optimizer state is sharded over dp_outer_dim, too (HFSDP).
        init_model_with_meta_device: parameters on meta get their values from
            reset_parameters().
        mixed_precision_policy: MixedPrecisionPolicy of this module.
        calculate_per_token_loss: gradients are summed, and the program divides.
        cuda_graph_mode: True: fully_shard's cuda_graph for the units of
            fsdp_unit_modules.
        keep_fp8_transpose_cache: for mixed_precision_policy's FP8 weights in the units of
            fsdp_unit_modules: the planes that the backward reads stay unsharded until
            the weights change.
        enable_fine_grained_param_gather: True: schedules may call sub-modules of units;
            after `_replace_param_with_raw_if_needed()` each reports that its unit is
            needed, in the forward and in the backward (see flatshard.megatron.overlap).
            FP8 weights: True all-gathers one layer at a time, False full units, and None
            full units except in recomputations. Others are all-gathered by units.
        expt_device_mesh: mesh to shard experts over (modules whose parameters have
            allreduce = False): its dimensions dp_outer_dim and dp_shard_dim, or all but
            tp_dim if it has no dimension of the name. It and device_mesh are of one mesh:
            mesh["edp"], and mesh["edp", "ep"]._flatten("dp"). Parameters of experts
            that are DTensors over its tp_dim have parts of the experts' width (expert
            tensor parallelism). expt_fsdp_group_ag, hybrid_fsdp_expt_group: groups of
            the ranks of the dimension that shards experts, and of all of
            expt_device_mesh. All-gathers have separate communicators anyway.
        grads_in_place: of flatshard.ShardOptions, for all modules but experts;
            Megatron-FSDP has no such argument. Such nn.Linear can delay weight gradients.
        report_nan_in_param_grad: see flatshard.diagnostics.report_nan_in_param_grad.

    Raises:
        NotImplementedError, ValueError: naming the argument.
    """
    _check_others(others)
    if device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device}")
    if outer_dp_sharding_strategy not in _OUTER:
        raise ValueError(
            f"outer_dp_sharding_strategy: expected 0, 'no_shard', 1 or 'optim', got "
            f"{outer_dp_sharding_strategy!r}"
        )
    strategy = _strategy(zero_dp_strategy)
    check_tensor_parallel(module, tp_dim, device_mesh, expt_device_mesh)
    mesh = _mesh(device_mesh, dp_shard_dim, dp_outer_dim, tp_dim)
    expt_mesh = _expert_mesh(expt_device_mesh, dp_shard_dim, dp_outer_dim, tp_dim)
    inner = expt_mesh and (expt_mesh[expt_mesh.mesh_dim_names[-1]])
    check_group("expt_fsdp_group_ag", expt_fsdp_group_ag, inner)
    check_group("hybrid_fsdp_expt_group", hybrid_fsdp_expt_group, expt_mesh)
    kinds = tuple(_class(kind) for kind in fsdp_unit_modules or ())
    units = _outermost(module, kinds)
    _check_cuda_graph_mode(cuda_graph_mode, units)
    fp8 = float8_policy(
        mixed_precision_policy,
        keep_fp8_transpose_cache,
        enable_fine_grained_param_gather,
    )
    outer = _OUTER[outer_dp_sharding_strategy]
    if expt_mesh is not None:
        experts = expert_modules(module)
        check_experts(expt_mesh, experts, outer)
        for expert in experts:
            with main_dtype(expert, mixed_precision_policy) as policy:
                _fully_shard(
                    expert, mesh=expt_mesh, strategy=strategy, mp_policy=policy
                )
    for unit in [*units, module]:
        # Embeddings and the head stay what they are.
        own_fp8 = None if units and unit is module else fp8
        with main_dtype(unit, mixed_precision_policy) as policy:
            check_dtype(own_fp8, policy, unit)
            _fully_shard(
                unit,
                mesh=mesh,
                strategy=strategy,
                mp_policy=policy,
                options=ShardOptions(
                    outer=outer,
                    cuda_graph=cuda_graph_mode and unit is not module,
                    grads_in_place=grads_in_place,
                    fp8=own_fp8,
                ),
            )
        if calculate_per_token_loss:
            unit.set_gradient_divide_factor(1.0)
    if init_model_with_meta_device:
        reset_parameters(module)
    if report_nan_in_param_grad:
        diagnostics.report_nan_in_param_grad(module)
    add_hooks(module, units, enable_fine_grained_param_gather is True)
    return module


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    *,
    precision_aware: bool = False,
) -> torch.optim.Optimizer:
    """Adds the first version's keyword arguments to `step` and `zero_grad`. Returns
    `optimizer`. It was created from the sharded module's parameters.

    Args:
        preproc_state_dict_for_dcp_ckpt: of the first version; state dicts are always
            ready for torch.distributed.checkpoint.
        precision_aware: of the second one, see v2.fully_shard_optimizer.
    """
    v2.fully_shard_optimizer(optimizer, precision_aware=precision_aware)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(hasattr(p, "placements") for p in parameters):
        raise ValueError(
            "fully_shard_optimizer: expected an optimizer of the sharded module's "
            f"parameters, got one of {len(parameters)} that are not sharded; make it "
            "after fully_shard_model"
        )
    step, zero_grad = optimizer.step, optimizer.zero_grad

    @functools.wraps(step)
    def new_step(
        *args,
        sync_grad_before_optimizer_step=True,
        install_optimized_model_weights=True,
        **kwargs,
    ):
        for name, value in (
            ("sync_grad_before_optimizer_step", sync_grad_before_optimizer_step),
            ("install_optimized_model_weights", install_optimized_model_weights),
        ):
            if not value:
                raise NotImplementedError(f"optimizer.step: {name}=False")
        return step(*args, **kwargs)

    @functools.wraps(zero_grad)
    def new_zero_grad(*args, zero_grad_buffer=True, **kwargs):
        if not zero_grad_buffer:
            raise NotImplementedError("optimizer.zero_grad: zero_grad_buffer=False")
        return zero_grad(*args, **kwargs)

    # Attributes of this optimizer hide its class's methods.
    vars(optimizer).update(step=new_step, zero_grad=new_zero_grad)
    return optimizer


def fully_shard(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    preproc_state_dict_for_dcp_ckpt: bool = True,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Runs fully_shard_model and fully_shard_optimizer. `optimizer` was created from the
    module's parameters before. Returns both."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fully_shard: expected an optimizer, got a {type(optimizer).__name__}; "
            "the function of the second version, with a mesh as argument, is "
            "flatshard.megatron.v2.fully_shard"
        )
    if optimizer.state:
        raise ValueError("fully_shard: expected an optimizer that has not stepped yet")
    names = {id(p): name for name, p in module.named_parameters()}
    module = fully_shard_model(module, **options)
    sharded = dict(module.named_parameters())
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise ValueError(
                    "fully_shard: the optimizer has a parameter of shape "
                    f"{tuple(p.shape)} that does not belong to the module"
                )
        group["params"] = [sharded[names[id(p)]] for p in group["params"]]
    return module, fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt)


def _check_others(others):
    for name, value in others.items():
        if name not in _WITHOUT_COUNTERPART:
            raise TypeError(f"fully_shard_model has no argument {name!r}")
        default, harmless, instead = _WITHOUT_COUNTERPART[name]
        if value is not default and value not in (default, *harmless):
            raise NotImplementedError(
                f"{name}={value!r} is not supported"
                + (f": {instead}" if instead else "")
            )


def _check_cuda_graph_mode(mode, units):
    if not isinstance(mode, bool):
        raise NotImplementedError(
            f"cuda_graph_mode={mode!r} is not supported: expected True or False"
        )
    if mode and not units:
        raise ValueError(
            "cuda_graph_mode: expected modules of the classes of fsdp_unit_modules, "
            "whose forwards become CUDA graphs, found none"
        )


def _strategy(value):
    name = f"zero{value}" if value in range(4) else value
    return find_strategy(name, "zero_dp_strategy").name


def _mesh(device_mesh, shard_dim, outer_dim, tp_dim):
    if device_mesh is None:
        return None
    names = [name for name in (outer_dim, shard_dim) if name is not None]
    if not names and tp_dim is not None:
        names = [name for name in device_mesh.mesh_dim_names if name != tp_dim]
    for name in names:
        if name not in (device_mesh.mesh_dim_names or ()):
            raise ValueError(
                f"device_mesh: expected a dimension {name!r}, it has "
                f"{device_mesh.mesh_dim_names}"
            )
    if not names:
        return device_mesh
    return device_mesh[tuple(names)] if len(names) > 1 else device_mesh[names[0]]


def _expert_mesh(mesh, shard_dim, outer_dim, tp_dim):
    if mesh is None:
        return None
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            "expt_device_mesh: expected a mesh whose dimensions have names, part of the "
            "mesh that device_mesh is a part of"
        )
    own = tuple(name for name in (outer_dim, shard_dim) if name in names)
    own = own or tuple(name for name in names if name != tp_dim)
    return mesh if own == names else mesh[own]


def _class(kind):
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        return kind
    try:
        module, _, name = kind.rpartition(".")
        return getattr(importlib.import_module(module), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ValueError(
            "fsdp_unit_modules: expected classes or import paths such as "
            f"'package.module.Class', got {kind!r}"
        ) from error


def _outermost(module, kinds):
    units = []
    for child in module.children():
        if isinstance(child, kinds):
            units.append(child)
        else:
            units += _outermost(child, kinds)
    return units
