"""The C++ core as the package uses it. Not a public interface.

Written by scripts/python_stubs.
"""

import typing
from collections.abc import Callable, Mapping, Sequence

import torch

version: str
torch_version: str
with_cuda: bool

class Error(RuntimeError):
    """An error of the runtime. `code` is one of config, usage, comm, timeout, cuda, io, format, memory, internal."""

    code: str

class ConfigError(Error, ValueError):
    """An Error of code config or usage: an argument or a call that cannot work."""

class BackwardPass:
    """Forward and backward of one microbatch whose units run in pieces."""
    def __init__(self, runtime: Runtime) -> None: ...
    def backward_begin(self, unit: int) -> None: ...
    def backward_end(self, unit: int) -> None: ...
    def close_backward(self) -> None: ...
    def forward_begin(self, unit: int) -> None: ...
    def forward_end(self, unit: int) -> None: ...
    def give_up(self) -> None: ...
    def open_backward(self, is_last: bool, interleaved: bool) -> None: ...
    def recompute_begin(self, unit: int) -> None: ...
    def recompute_end(self, unit: int) -> None: ...
    def run_wgrads(self, unit: int, node: int) -> None: ...
    def set_delay_wgrad(self, delays: bool, node: int) -> None: ...
    @property
    def num_late(self) -> int: ...

class Callbacks:
    """Calls of the root."""
    def __init__(
        self,
        *,
        before_forward: Callable[[], None],
        before_backward: Callable[[], None],
        whole_written: Callable[[int, Sequence[torch.Tensor]], None],
        look_inside: Callable[
            [int, list[typing.Any], bool], tuple[list[torch.Tensor], bool]
        ],
    ) -> None: ...

class ChangedWeights:
    """The elements that changed since they were returned last."""
    def __init__(
        self, units: Sequence[Unit], dtype: torch.dtype | None, mesh: Mesh
    ) -> None: ...
    def finish(self, sent: bool) -> bool:
        """Ends a pass. Its patches count as sent if they were, on all ranks.
        Collective."""
    def next(self) -> list[tuple[str, list[int], torch.Tensor, torch.Tensor]] | None:
        """Returns name, shape, indices and values of the parameters of the next group;
        None at the end. Collective."""

class Checkpointer:
    """Writes checkpoints."""
    def __init__(
        self, mesh: Mesh, state: TrainingState, folder: str, keep_latest: int
    ) -> None: ...
    def save(self, step: int, state: Mapping[str, str]) -> None: ...
    def take_results(self) -> list[SaveResult]: ...
    def wait(self) -> None: ...
    def wait_for_copies(self) -> None: ...

class CommStreams:
    """Streams that Runtimes of one mesh, or of several, share."""
    def __init__(self, mesh: Mesh) -> None: ...

class Float8DequantizeOptions:
    def __init__(self, *, axis: str, transpose: bool, dtype: torch.dtype) -> None: ...

class Float8Format:
    """FP8 format of the weights of a unit."""
    def __init__(
        self, *, recipe: str, stored_columns: bool, gather_parts: str, emulate: bool
    ) -> None: ...
    def why_not(self, shape: Sequence[int]) -> str:
        """Returns why a weight of this shape cannot be FP8, or an empty string."""

class Float8PlaneOptions:
    def __init__(
        self,
        *,
        axis: str,
        transpose: bool,
        multiple: int,
        amax: torch.Tensor | None,
        scales: torch.Tensor | None,
    ) -> None: ...

class Float8Quantizer:
    def __init__(self, *, recipe: str, format: str, rounding: str) -> None: ...

class GradViews:
    """The gradients of a unit as `.grad`s of its shards."""
    def __init__(
        self,
        unit: Unit,
        shards: Sequence[torch.Tensor],
        beside: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        rows_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None: ...
    def release(self) -> None: ...
    def take(self) -> list[int]: ...

class GraphOptions:
    def __init__(
        self, *, enabled: bool, warmup_steps: int, audit: bool, emulate_on_cpu: bool
    ) -> None: ...

class LossOptions:
    def __init__(self, *, mean: bool, ignore_index: int, chunk_tokens: int) -> None: ...

class MatrixOptions:
    """The matrices of parameters, and the ranks that store them together."""
    def __init__(
        self,
        *,
        split_sizes: Sequence[Sequence[int]],
        mesh: Mesh | None,
        cut_axes: Sequence[Sequence[Sequence[str]]],
    ) -> None: ...

class Member:
    """One parameter to shard."""
    def __init__(
        self,
        *,
        name: str,
        whole: torch.Tensor,
        values: torch.Tensor,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype,
        float8: bool,
        trainable: bool,
        apart: int,
        has_weights: bool,
        granularity: str,
        float32_states: bool = False,
    ) -> None: ...

class Mesh:
    """Named axes over ranks, with communicators of Flatshard's own."""
    @staticmethod
    def create(
        axes: Sequence[tuple[str, int]],
        rank: int,
        store: torch.distributed.Store,
        device: torch.device,
        options: MeshOptions,
    ) -> Mesh:
        """Collective over the ranks of the mesh, and no others."""
    @staticmethod
    def single(device: torch.device) -> Mesh: ...
    def __repr__(self) -> str: ...
    def is_part_of(self, other: Mesh) -> bool:
        """The axes of this one are axes of `other`, of the same mesh."""
    def on_all_ranks(self, name: str, work: Callable[[], int]) -> int:
        """Runs `work` on every rank. Raises on all ranks if it raises on one, else
        returns rank 0's result. Collective."""
    def sub_mesh(self, names: Sequence[str]) -> Mesh: ...
    @property
    def axes(self) -> list[tuple[str, int]]:
        """Name and size of each, outermost first."""
    @property
    def coordinates(self) -> list[int]: ...
    @property
    def has_fast_links(self) -> bool:
        """Whether NVLink joins all GPUs of the mesh. Collective."""
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

class MeshOptions:
    def __init__(self, *, name: str, timeout_s: float) -> None: ...

class Optimizer:
    """One of the core's optimizers, for the parameters of some units."""
    def __init__(
        self,
        units: Sequence[Unit],
        group_of_parameters: Sequence[Sequence[int]],
        values: Sequence[ParameterValues],
        matrices: MatrixOptions,
    ) -> None: ...
    def decoded(self, unit: Unit, parameter: int) -> dict[str, torch.Tensor]: ...
    def encode(
        self, unit: Unit, parameter: int, name: str, values: torch.Tensor
    ) -> None: ...
    def num_updates(self, unit: Unit, parameter: int) -> int: ...
    def set_num_updates(self, unit: Unit, parameter: int, updates: int) -> None: ...
    def set_stochastic_rounding(self, seed: int) -> None: ...
    def state(self, unit: Unit, parameter: int) -> dict[str, torch.Tensor]: ...
    def step(
        self,
        values: Sequence[ParameterValues],
        without_gradient: Sequence[Sequence[int]],
    ) -> None: ...

class ParameterValues:
    """The algorithm and the options of a parameter group."""
    @staticmethod
    def adamw(
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        state_dtype: torch.dtype,
    ) -> ParameterValues: ...
    @staticmethod
    def muon(
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_coefficients: typing.Annotated[Sequence[float], "FixedSize(3)"],
        eps: float,
        ns_steps: int,
        adjust_lr_fn: str,
    ) -> ParameterValues: ...

class Place:
    def __init__(
        self,
        parameters: dict,
        name: str,
        whole: typing.Any,
        shard: typing.Any,
        shown: typing.Any = None,
    ) -> None: ...

class RoutedTokens:
    """The tokens of one layer and microbatch, and where their rows go. Collective.
    dispatch, or finish, waits for the counts of all ranks."""
    def __init__(self, exchange: TokenExchange, experts: torch.Tensor) -> None:
        """experts: integers [tokens, slots], numbers among the experts of all ranks."""
    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """[num_received, dim] -> [tokens, dim], the sums of each token."""
    def dispatch(
        self, x: torch.Tensor, row_weights: torch.Tensor
    ) -> list[torch.Tensor]:
        """[tokens, dim] and [rows] -> [num_received, dim] and [num_received], by
        expert."""
    def finish(self) -> None: ...
    def queued(self) -> StreamEvent:
        """See start_dispatch."""
    def row_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, slots] -> [rows], an argument of dispatch."""
    def start_combine(
        self, rows: Sequence[torch.Tensor | None], made: StreamEvent
    ) -> RowTransfer: ...
    def start_dispatch(
        self, rows: Sequence[torch.Tensor | None], made: StreamEvent
    ) -> RowTransfer:
        """dispatch without a graph, as far as the host queues it. It waits for `made`.
        None for a tensor that no rank has."""
    @property
    def ends(self) -> torch.Tensor:
        """int32 [experts here]: where the rows of each end."""
    @property
    def num_received(self) -> int: ...

class RowTransfer:
    """Rows under way."""
    def wait(self) -> list[torch.Tensor]:
        """The rows that arrive, for kernels on the current stream. Once."""

class Runtime:
    """All-gathers, reshards and reduces."""
    def __init__(
        self,
        mesh: Mesh,
        units: Sequence[TreeUnit],
        callbacks: Callbacks,
        options: RuntimeOptions,
    ) -> None: ...
    def float8_inputs(self) -> tuple[int, int]:
        """Returns the number of inputs of layers with FP8 weights, and the number of
        calls that found their input quantized."""
    def forward_begin(
        self, unit: int, args: typing.Any, kwargs: typing.Any
    ) -> None: ...
    def forward_end(self, unit: int, output: typing.Any, more_follow: bool) -> None: ...
    def forward_error(self, unit: int) -> None: ...
    def gathered_written(self, unit: int) -> None: ...
    def graph_forward(
        self,
        unit: int,
        *,
        function: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor] | None,
        constants: Sequence[torch.Tensor],
        reason: str,
    ) -> tuple[list[torch.Tensor] | None, bool]:
        """RegionGraphs::run_unit: outputs of a replay or None, and whether graph_ran is
        to follow the forward. `function` accepts a list of tensors and returns one, is
        kept, and must not keep the model. Without inputs the forward cannot be part of
        a graph: `reason` is the obstacle. With them `reason` is the difference from the
        last watched forward, if any."""
    def graph_ran(
        self, unit: int, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None: ...
    def graph_stats(self) -> dict: ...
    def in_forward(self) -> bool: ...
    def keeps_inner(self, unit: int, output: typing.Any) -> None: ...
    def linear(
        self, input: typing.Any, weight: typing.Any, bias: typing.Any
    ) -> torch.Tensor | None:
        """torch.nn.functional.linear whose backward writes the gradients of weight and
        bias into the memory that is reduced. Both are unsharded parameters of this
        runtime's units. None: run torch's function."""
    def main_grad(self, weight: torch.Tensor) -> torch.Tensor: ...
    def parameter_norms(self) -> list[tuple[str, float, float | None]]: ...
    def report_nan_in_param_grad(self, reports: bool) -> None: ...
    def reset(self) -> None: ...
    def reset_graphs(self) -> None: ...
    def reshard(self, unit: int) -> None: ...
    def set_is_last_microbatch(self, last: bool) -> None: ...
    def set_keeps(self, unit: int, keeps: bool) -> None: ...
    def set_keeps_trace(self, keeps: bool) -> None: ...
    def set_max_grad_slots(self, max_grad_slots: int) -> None: ...
    def set_policy(self, unit: int, policy: UnitPolicy) -> None: ...
    def show_shards(self, unit: int) -> None: ...
    def shows_others(self) -> bool:
        """Some module shows another tensor than the one put there last."""
    def take_trace(self) -> list[tuple[str, str, int, int, str, int]]: ...
    def trains_others(self) -> bool:
        """requires_grad of some parameter is not what it was at first."""
    def unshard(self, unit: int, awaits: bool) -> None: ...
    def weights_written(self, unit: int) -> None: ...

class RuntimeOptions:
    def __init__(
        self,
        *,
        prefetch: int,
        copy_engines: bool,
        slots_on_demand: bool,
        trace: bool,
        graphs: GraphOptions,
        shared_streams: CommStreams,
    ) -> None: ...

class SaveResult:
    """The result of one save."""
    @property
    def error(self) -> str | None: ...
    @property
    def seconds(self) -> float: ...
    @property
    def step(self) -> int: ...

class SeveralOptimizers:
    """Several optimizers of one model, for a checkpoint."""
    def __init__(self, of: Sequence[Optimizer]) -> None: ...
    def give_updates(self) -> None: ...
    def take_updates(self) -> None: ...

class StreamEvent:
    """A point of a stream, after the work that was queued before it."""

class TensorStates:
    """The state of an optimizer that the core does not have."""
    def __init__(
        self,
        units: Sequence[Unit],
        states: Sequence[Sequence[Mapping[str, torch.Tensor]]],
    ) -> None: ...
    def set_updates(self, updates: Sequence[Sequence[int]]) -> None: ...

class TokenExchange:
    """Token exchange of the ranks of a mesh of one axis. Collective."""
    def __deepcopy__(self, arg0: dict) -> typing.Any:
        """A copy of a module exchanges tokens as the module does."""
    def __init__(self, mesh: Mesh, options: TokenExchangeOptions) -> None: ...

class TokenExchangeOptions:
    def __init__(self, *, num_experts: int, copies: bool, timeout_s: float) -> None: ...

class TrainingState:
    """The tensors that checkpoints have of a training run."""
    def __init__(
        self,
        *,
        units: Sequence[Unit],
        optimizer: Optimizer | SeveralOptimizers | TensorStates | None,
        buffers: Sequence[tuple[str, torch.Tensor]],
    ) -> None: ...

class TreeUnit:
    """A unit in the tree of a model. `parent` is the number of the unit around it, -1
    for none."""
    def __init__(
        self, unit: Unit, parent: int, places: Sequence[Place], grads: GradViews
    ) -> None: ...

class Unit:
    """The sharded parameters of one unit."""
    def __init__(
        self, members: Sequence[Member], mesh: Mesh, options: UnitOptions
    ) -> None: ...
    def cuts(self, i: int) -> list[int]: ...
    def drop(self, i: int) -> None:
        """Checkpoints leave parameter i out from now on."""
    def grad(self, i: int) -> torch.Tensor | None: ...
    def group_index(self, i: int) -> int: ...
    def join(self, other: Unit) -> None:
        """Appends the parameters of `other` to this unit. Its own parameters keep their
        numbers."""
    def mark_written(self) -> None:
        """Somebody else may have written the shards."""
    def set_access_error(self, i: int, text: str) -> None:
        """Sets the error of reading unsharded parameter i, or a view of it, while it
        has no memory. After set_names."""
    def set_divisor(self, divisor: float) -> None: ...
    def set_names(self, unit: str, names: Sequence[Sequence[str]]) -> None: ...
    def set_part(
        self,
        i: int,
        cuts: Sequence[tuple[int, int, int, int]] | None,
        outside: tuple[int, int],
    ) -> None:
        """Makes parameter i the indices [start, end) of dimension `dim` of a tensor
        with `size` indices there, for each (dim, size, start, end); None: it stays what
        it is. `outside`: (index, count) of this rank among the ranks outside the
        model's mesh that have the same part."""
    def set_reduced_hook(self, hook: Callable[[torch.Tensor], None] | None) -> None:
        """None for none."""
    def set_sums_only(self, sums_only: bool) -> None:
        """Makes collectives only sum; means are computed afterwards."""
    def shard(self, i: int) -> torch.Tensor: ...
    def shard_of_ranks(self, i: int) -> list[int]: ...
    def trainable(self, i: int) -> bool: ...
    def whole(self, i: int) -> torch.Tensor: ...
    def write_grads_in_place(self) -> None: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def offloads(self) -> bool: ...

class UnitOptions:
    """Sharding options of a unit."""
    def __init__(
        self,
        *,
        strategy: str,
        offload: bool,
        pin_memory: bool,
        grads_in_place: bool,
        peers_read: bool,
        float8: Float8Format | None,
        post_forward_ranks: int,
        part: Mesh | None = None,
        slices: tuple[int, int] = (1, 0),
        int8_states: bool | None = None,
    ) -> None: ...

class UnitPolicy:
    """A program's choices for one unit."""
    def __init__(
        self,
        *,
        reshard_after_forward: bool,
        reshard_after_backward: bool,
        unshard_in_backward: bool,
        forward_prefetch: Sequence[int] | None,
        backward_prefetch: Sequence[int] | None,
        keep_backward_planes: bool,
        keep_post_forward: bool,
        sync_gradients: bool,
        all_reduce: bool,
    ) -> None: ...

class WeightStream:
    """The full parameters of units, one group after another."""
    def __init__(
        self, units: Sequence[Unit], dtype: torch.dtype | None, mesh: Mesh
    ) -> None: ...
    def gather_ahead(self) -> None: ...
    def metadata(self) -> list[tuple[str, torch.dtype, list[int]]]: ...
    def next(self) -> list[tuple[str, torch.Tensor]] | None:
        """Returns names and tensors of the next group; None at the end. Collective."""

def block_scales_name(weight: str) -> str: ...
def block_scales_shape(weight: Sequence[int]) -> list[int]: ...
def build_facts() -> list[tuple[str, str]]:
    """Versions, and the GPUs that the CUDA code is built for."""

def check_gpu(device: torch.device) -> None:
    """Raises for a GPU that this build does not run on."""

def describe_checkpoint(folder: str) -> dict:
    """Step, state, updates, and dtypes by role and name."""

def describe_excessive_padding(units: Sequence[Unit], max_padding: float) -> str | None:
    """A sentence about the padding of a model, or None where it is not worth one."""

def float8_amax(tensor: torch.Tensor) -> torch.Tensor: ...
def float8_dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    recipe: str,
    options: Float8DequantizeOptions,
) -> torch.Tensor: ...
def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor: ...
def float8_multiplies(recipe: str, device: torch.device) -> bool:
    """Whether the device multiplies the recipe in FP8."""

def float8_quantize(
    tensor: torch.Tensor, quantizer: Float8Quantizer, options: Float8PlaneOptions
) -> tuple[torch.Tensor, torch.Tensor]: ...
def float8_swizzle_mx_scales(scales: torch.Tensor) -> torch.Tensor: ...
def float8_transpose(data: torch.Tensor) -> torch.Tensor: ...
def float8_why_not_multiplied(recipe: str, device: torch.device) -> str:
    """Returns which GPU this is, and which ones multiply the recipe in FP8."""

def gpu_kinds() -> list[tuple[int, str]]:
    """(index of one GPU, what it does) for each kind of GPU."""

def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """x[r] W[e]^T for the rows r of each expert e."""

def grouped_swiglu_linear(
    gate_up: torch.Tensor,
    row_weights: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor:
    """(silu(gate[r]) * up[r] * row_weights[r]) W[e]^T. Saves only gate_up for the
    backward."""

def is_linear_of_a_block(name: str, num_dims: int) -> bool: ...
def latest_checkpoint(folder: str) -> int | None:
    """Returns the step of the latest complete checkpoint, or None."""

def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    options: LossOptions,
    runtime: Runtime | None,
) -> torch.Tensor: ...
def load_checkpoint(
    folder: str, mesh: Mesh, state: TrainingState, exclude: Sequence[str]
) -> None:
    """Collective. All or nothing."""

def machine_facts() -> list[tuple[str, str]]:
    """The host, the driver, and each GPU."""

def note_shared(tensor: torch.Tensor) -> None:
    """Notes that an array of another library shares the memory of `tensor`. If that
    belongs to an unsharded parameter, its reshard is an error."""

def overlap_plan(
    layers: int, microbatches: int, delay_wgrad: bool, dense: Sequence[bool]
) -> list[tuple[str, int, int, str]]:
    """Steps of an OverlapPlan in launch order: pass, microbatch, layer, node."""

def quantize_blocks(
    name: str, weight: torch.Tensor, advice: str
) -> tuple[torch.Tensor, torch.Tensor]: ...
def strategies() -> list:
    """The table of named strategies: name, other name, name with replicas along an
    outer axis, and where parameters, gradients and states are stored, a letter each for
    outer and inner axes."""

def try_peer_copies() -> list[str]:
    """Returns the error of copies between GPUs, or an empty string."""
