"""The C++ core as the package sees it. Not a public interface."""

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch

version: str
torch_version: str
with_cuda: bool

class Error(RuntimeError):
    """An error of the runtime. `code` is one of config, usage, comm, timeout, cuda,
    io, format, memory, internal."""

    code: str

class ConfigError(Error, ValueError):
    """An Error of code config or usage: an argument or a call that cannot work."""

class Mesh:
    @staticmethod
    def create(
        axes: Sequence[tuple[str, int]],
        rank: int,
        store: torch.distributed.Store,
        device: torch.device,
        name: str,
        timeout_s: float,
    ) -> Mesh: ...
    @staticmethod
    def single(device: torch.device) -> Mesh: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def num_axes(self) -> int: ...
    @property
    def has_fast_links(self) -> bool: ...
    @property
    def axes(self) -> list[tuple[str, int]]: ...
    @property
    def coordinates(self) -> list[int]: ...
    def sub_mesh(self, names: Sequence[str]) -> Mesh: ...
    def is_part_of(self, other: Mesh) -> bool: ...

def strategies() -> list[tuple[str, str, str, str, str, str]]: ...

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
    ) -> None: ...

class UnitOptions:
    """How a unit is sharded."""

    def __init__(
        self,
        *,
        strategy: str,
        offload: bool,
        pin_memory: bool,
        grads_in_place: bool,
        copy_engines: bool,
        float8: Float8Format | None,
        post_forward_ranks: int,
        part: Mesh | None = None,
        slices: tuple[int, int] = (1, 0),
    ) -> None: ...

class Unit:
    """The sharded parameters of one unit; `i` counts them in the core's order."""

    def __init__(
        self,
        members: Sequence[Member],
        mesh: Mesh,
        options: UnitOptions,
    ) -> None: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def num_groups(self) -> int: ...
    @property
    def offloads(self) -> bool: ...
    def write_grads_in_place(self) -> None: ...
    def join(self, other: Unit) -> None: ...
    def whole(self, i: int) -> torch.Tensor: ...
    def shard(self, i: int) -> torch.Tensor: ...
    def grad(self, i: int) -> torch.Tensor | None: ...
    def cuts(self, i: int) -> list[int]: ...
    def shard_of_ranks(self, i: int) -> list[int]: ...
    def trainable(self, i: int) -> bool: ...
    def mark_written(self) -> None: ...
    def set_divisor(self, divisor: float) -> None: ...
    def set_sums_only(self, sums_only: bool) -> None: ...
    def set_reduced_hook(
        self, hook: Callable[[torch.Tensor], object] | None
    ) -> None: ...
    def set_attribute(self, i: int, key: str, value: str) -> None: ...
    def drop(self, i: int) -> None: ...
    def set_part(
        self,
        i: int,
        cuts: Sequence[tuple[int, int, int, int]] | None,
        outside: tuple[int, int],
    ) -> None: ...
    def set_names(self, unit: str, names: Sequence[Sequence[str]]) -> None: ...

def describe_excessive_padding(
    units: Sequence[Unit], max_padding: float
) -> str | None: ...

class GradViews:
    """The gradients of a unit as `.grad`s of its shards."""

    def __init__(
        self,
        unit: Unit,
        shards: Sequence[torch.Tensor],
        beside: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        rows_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None: ...
    def take(self) -> None: ...
    def release(self) -> None: ...

class Place:
    """Where a parameter stands in a module: its `_parameters` and the name."""

    def __init__(
        self,
        parameters: dict[str, torch.Tensor],
        name: str,
        whole: torch.Tensor,
        shard: torch.Tensor,
        shown: object = None,
    ) -> None: ...

class GraphOptions:
    def __init__(
        self, *, enabled: bool, warmup_steps: int, audit: bool, emulate_on_cpu: bool
    ) -> None: ...

class CommStreams:
    """Streams that Runtimes of one mesh, or of several, share."""

    def __init__(self, mesh: Mesh) -> None: ...

class RuntimeOptions:
    def __init__(
        self,
        *,
        prefetch: int,
        copy_engines: bool,
        slots_on_demand: bool,
        trace: bool,
        graphs: GraphOptions,
        shared_streams: CommStreams | None,
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

class TreeUnit:
    """A unit in the tree of a model; `parent` is the number of the unit around it."""

    def __init__(
        self, unit: Unit, parent: int, places: Sequence[Place], grads: GradViews
    ) -> None: ...

class Callbacks:
    """Calls of the root."""

    def __init__(
        self,
        *,
        before_forward: Callable[[], None],
        before_backward: Callable[[], None],
        whole_written: Callable[[int, Sequence[torch.Tensor]], None],
    ) -> None: ...

class Runtime:
    def __init__(
        self,
        mesh: Mesh,
        units: Sequence[TreeUnit],
        callbacks: Callbacks,
        options: RuntimeOptions,
    ) -> None: ...
    def linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None: ...
    def forward_begin(self, unit: int, args: object, kwargs: object) -> None: ...
    def forward_end(self, unit: int, output: object, more_follow: bool) -> None: ...
    def forward_error(self, unit: int) -> None: ...
    def keeps_inner(self, unit: int, output: object) -> None: ...
    def in_forward(self) -> bool: ...
    def weights_written(self, unit: int) -> None: ...
    def gathered_written(self, unit: int) -> None: ...
    def graph_forward(
        self,
        unit: int,
        *,
        function: Callable[[list[torch.Tensor]], list[torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        obstacle: str,
        difference: str,
    ) -> tuple[list[torch.Tensor] | None, bool]: ...
    def graph_ran(
        self,
        unit: int,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> None: ...
    def graph_stats(self) -> dict[str, int | dict[str, int] | list[str]]: ...
    def reset_graphs(self) -> None: ...
    def shows_others(self) -> bool: ...
    def trains_others(self) -> bool: ...
    def unshard(self, unit: int, awaits: bool) -> None: ...
    def reshard(self, unit: int) -> None: ...
    def set_keeps(self, unit: int, keeps: bool) -> None: ...
    def show_shards(self, unit: int) -> None: ...
    def set_policy(self, unit: int, policy: UnitPolicy) -> None: ...
    def set_is_last_microbatch(self, last: bool) -> None: ...
    def set_max_grad_slots(self, max_grad_slots: int) -> None: ...
    def reset(self) -> None: ...
    def parameter_norms(self) -> list[tuple[str, float, float | None]]: ...
    def report_nan_in_param_grad(self) -> None: ...
    def main_grad(self, weight: torch.Tensor) -> torch.Tensor: ...
    def defers(self, weight: torch.Tensor) -> bool: ...
    def defer(
        self, weight: torch.Tensor, write: Callable[[torch.Tensor, bool], None]
    ) -> None: ...
    def float8_inputs(self) -> tuple[int, int]: ...
    def take_trace(self) -> list[tuple[str, str, int, int, str, int]]: ...
    def set_keeps_trace(self, keeps: bool) -> None: ...

class BackwardPass:
    """Forward and backward of one microbatch whose units run in pieces."""

    def __init__(self, runtime: Runtime) -> None: ...
    def forward_begin(self, unit: int) -> None: ...
    def forward_end(self, unit: int) -> None: ...
    def open_backward(self, is_last: bool, interleaved: bool) -> None: ...
    def backward_begin(self, unit: int) -> None: ...
    def backward_end(self, unit: int) -> None: ...
    def recompute_begin(self, unit: int) -> None: ...
    def recompute_end(self, unit: int) -> None: ...
    def set_delay_wgrad(self, delays: bool, node: int) -> None: ...
    def run_wgrads(self, unit: int, node: int) -> None: ...
    def close_backward(self) -> None: ...
    @property
    def num_late(self) -> int: ...
    def give_up(self) -> None: ...

def overlap_plan(
    layers: int, microbatches: int, delay_wgrad: bool, dense: Sequence[bool]
) -> list[tuple[str, int, int, str]]: ...

class TokenExchangeOptions:
    def __init__(self, *, num_experts: int, copies: bool, timeout_s: float) -> None: ...

class TokenExchange:
    """How the ranks of a mesh of one axis exchange tokens."""

    def __init__(self, mesh: Mesh, options: TokenExchangeOptions) -> None: ...

class RowTransfer:
    """Rows under way."""

    def wait(self) -> list[torch.Tensor | None]: ...

class StreamEvent:
    """A point of a stream, after the work that was queued before it."""

class RoutedTokens:
    """The tokens of one layer and microbatch, and where their rows go."""

    def __init__(self, exchange: TokenExchange, experts: torch.Tensor) -> None: ...
    def finish(self) -> None: ...
    @property
    def ends(self) -> torch.Tensor: ...
    @property
    def num_received(self) -> int: ...
    def row_weights(self, weights: torch.Tensor) -> torch.Tensor: ...
    def dispatch(
        self, x: torch.Tensor, row_weights: torch.Tensor
    ) -> list[torch.Tensor]: ...
    def combine(self, rows: torch.Tensor) -> torch.Tensor: ...
    def queued(self) -> StreamEvent: ...
    def start_dispatch(
        self, rows: Sequence[torch.Tensor | None], made: StreamEvent
    ) -> RowTransfer: ...
    def start_combine(
        self, rows: Sequence[torch.Tensor | None], made: StreamEvent
    ) -> RowTransfer: ...

def grouped_linear(
    x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor: ...
def grouped_swiglu_linear(
    gate_up: torch.Tensor,
    row_weights: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
) -> torch.Tensor: ...

class AdamW:
    def __init__(
        self,
        units: Sequence[Unit],
        *,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
    ) -> None: ...
    def step(self, lr: float) -> None: ...
    def state(self, unit: Unit, parameter: int) -> dict[str, torch.Tensor]: ...
    def num_updates(self, unit: Unit, parameter: int) -> int: ...
    def set_num_updates(self, unit: Unit, parameter: int, updates: int) -> None: ...

class TensorStates:
    """The state of an optimizer that the core does not have."""

    def __init__(
        self,
        units: Sequence[Unit],
        states: Sequence[Sequence[dict[str, torch.Tensor]]],
    ) -> None: ...
    def set_updates(self, updates: Sequence[Sequence[int]]) -> None: ...

class SaveResult:
    @property
    def step(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def error(self) -> str | None: ...

class Checkpointer:
    def __init__(
        self,
        mesh: Mesh,
        units: Sequence[Unit],
        optimizer: AdamW | TensorStates | None,
        buffers: Sequence[tuple[str, torch.Tensor]],
        folder: str,
        keep_latest: int,
    ) -> None: ...
    def save(self, step: int, state: dict[str, str]) -> None: ...
    def wait_for_copies(self) -> None: ...
    def wait(self) -> None: ...
    def take_results(self) -> list[SaveResult]: ...

def linear_cross_entropy(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    mean: bool,
    ignore_index: int,
    chunk_tokens: int,
    runtime: Runtime | None,
) -> torch.Tensor: ...
def float8_quantize(
    tensor: torch.Tensor,
    recipe: str,
    *,
    axis: str,
    rounding: str,
    format: str,
    transpose: bool,
    multiple: int,
    amax: torch.Tensor | None,
    scales: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]: ...
def float8_dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    recipe: str,
    *,
    axis: str,
    transpose: bool,
    dtype: torch.dtype,
) -> torch.Tensor: ...
def float8_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor: ...
def float8_amax(tensor: torch.Tensor) -> torch.Tensor: ...
def float8_swizzle_mx_scales(scales: torch.Tensor) -> torch.Tensor: ...
def float8_transpose(data: torch.Tensor) -> torch.Tensor: ...
def build_facts() -> list[tuple[str, str]]: ...
def machine_facts() -> list[tuple[str, str]]: ...
def gpu_kinds() -> list[tuple[int, str]]: ...
def check_gpu(device: torch.device) -> None: ...
def try_peer_copies() -> list[str]: ...
def float8_multiplies(recipe: str, device: torch.device) -> bool: ...
def float8_why_not_multiplied(recipe: str, device: torch.device) -> str: ...

class Float8Format:
    """How the weights of a unit are FP8."""

    def __init__(
        self,
        *,
        recipe: str,
        stored_columns: bool,
        gather_parts: str,
        emulate: bool,
    ) -> None: ...
    def why_not(self, shape: Sequence[int]) -> str: ...

class _Checkpoint(TypedDict):
    step: int
    state: dict[str, str]
    updates: dict[str, int]
    dtypes: dict[str, dict[str, str]]

def latest_checkpoint(folder: str) -> int | None: ...
def describe_checkpoint(folder: str) -> _Checkpoint: ...
def load_checkpoint(
    folder: str,
    mesh: Mesh,
    units: Sequence[Unit],
    optimizer: AdamW | TensorStates | None,
    buffers: Sequence[tuple[str, torch.Tensor]],
    exclude: Sequence[str],
) -> None: ...
