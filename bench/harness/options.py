"""`fully_shard` with every option as a keyword, for tests and benchmarks."""

from dataclasses import fields

import flatshard
from flatshard import ModelOptions, ShardOptions

_OF_UNITS = {field.name for field in fields(ShardOptions)}
_OF_MODELS = {field.name for field in fields(ModelOptions)}


def fully_shard(module, **options):
    """flatshard.fully_shard; fields of ShardOptions and ModelOptions are keywords."""
    of_model = {k: options.pop(k) for k in _OF_MODELS & set(options)}
    of_unit = {k: options.pop(k) for k in _OF_UNITS & set(options)}
    if of_model:
        for m in module if isinstance(module, (list, tuple)) else [module]:
            flatshard.configure(m, ModelOptions(**of_model))
    if of_unit:
        options["options"] = ShardOptions(**of_unit)
    return flatshard.fully_shard(module, **options)
