"""Training runs that several benchmarks measure.

{name: (length of a sequence, settings in addition to examples/llama3_8b.toml)}
"""

_EXPERTS = [
    "model.preset=qwen3_30b_a3b",
    "model.layers=4",
    "training.local_batch_size=2",
]
_SMALL = "layers=64 dim=1024 heads=16 kv_heads=8 head_dim=64 ffn_dim=3584"
VARIANTS = {
    "8B, local batch 1": (8192, []),
    "8B, local batch 2": (8192, ["training.local_batch_size=2"]),
    "8B, local batch 3": (8192, ["training.local_batch_size=3"]),
    "8B, recompute full": (8192, ["activation_checkpoint.mode=full"]),
    "8B, recompute full, local batch 4": (
        8192,
        ["activation_checkpoint.mode=full", "training.local_batch_size=4"],
    ),
    "1B": (4096, ["model.preset=llama3_1b"]),
    "3B": (4096, ["model.preset=llama3_3b"]),
    "8B, ZeRO-3": (2048, []),
    "8B, ZeRO-2": (2048, ["parallelism.strategy=optim_grads"]),
    "8B, ZeRO-1": (2048, ["parallelism.strategy=optim"]),
    "64 layers of dim 1024": (2048, [f"model.{size}" for size in _SMALL.split()]),
    "8 layers of 8B shapes": (8192, ["model.layers=8"]),
    "20 layers of 8B shapes": (8192, ["model.layers=20"]),
    "4 layers of 8B shapes, 128k tokens": (
        131072,
        [
            "model.layers=4",
            "model.max_seq_len=131072",
            "activation_checkpoint.mode=full",
        ],
    ),
    "8 layers, tensorwise": (8192, ["model.layers=8", "float8.recipe=tensorwise"]),
    "8 layers, rowwise": (8192, ["model.layers=8", "float8.recipe=rowwise"]),
    "8 layers, blockwise": (8192, ["model.layers=8", "float8.recipe=blockwise"]),
    "4 layers of Qwen3-30B-A3B": (4096, _EXPERTS),
    "4 layers of Qwen3-30B-A3B, one representation": (
        4096,
        [*_EXPERTS, "parallelism.keep_compute_weights=false"],
    ),
    "6 layers of Qwen3-30B-A3B": (4096, [*_EXPERTS, "model.layers=6"]),
    "8 layers of Qwen3-30B-A3B": (4096, [*_EXPERTS, "model.layers=8"]),
    # The work of one of four ranks that divide the experts of the row before.
    "8 layers of Qwen3-30B-A3B, 32 experts": (
        4096,
        [*_EXPERTS, "model.layers=8", "model.num_experts=32"],
    ),
}
# A model that the GPU bounds, and one that the host bounds.
USUAL = {
    name: VARIANTS[name] for name in ("8 layers of 8B shapes", "64 layers of dim 1024")
}
