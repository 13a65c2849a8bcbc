"""Options of a swap. They reach other processes in an environment variable."""

import json
import os
from dataclasses import asdict, dataclass

VARIABLE = "FLATSHARD_AS_FSDP2"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Defaults for every call of fully_shard. None: Flatshard's default.

    Attributes:
        strategy: of `flatshard.fully_shard`.
        granularity, check_same_values, int8_states: of `flatshard.ShardOptions`.
        cuda_graph: of the same, for each module that contains no other unit.
        copy_engines, prefetch: of `flatshard.ModelOptions`.
        require: the program exits with 1 if it never called fully_shard.
    """

    strategy: str | None = None
    granularity: str | None = None
    check_same_values: bool | None = None
    int8_states: bool | None = None
    cuda_graph: bool = False
    copy_engines: str | None = None
    prefetch: int | None = None
    require: bool = False

    def given(self, *names):
        """Returns the options among `names` that are set."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def of_unit(self):
        """Returns the given ShardOptions, except cuda_graph."""
        return self.given("granularity", "check_same_values", "int8_states")

    def check(self):
        """Raises ValueError for a value that Flatshard does not have."""
        from flatshard import ModelOptions, ShardOptions
        from flatshard._fsdp.arguments import check_granularity
        from flatshard._fsdp.strategies import find_strategy

        find_strategy(self.strategy or "zero3")
        of_unit = ShardOptions(**self.of_unit(), cuda_graph=self.cuda_graph)
        check_granularity(of_unit.granularity, self.strategy or "zero3")
        ModelOptions(**self.given("copy_engines", "prefetch"))


def to_environment(options):
    os.environ[VARIABLE] = json.dumps(asdict(options))


def from_environment():
    """Returns the Options that a command above this process was given, or None."""
    text = os.environ.get(VARIABLE)
    try:
        return Options(**json.loads(text)) if text else None
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}: expected what python -m flatshard.as_fsdp2 writes there, got "
            f"{text!r} ({error}); unset it"
        ) from error
