"""A Hugging Face folder of a Llama with random weights, and its reading by ranks."""

import json

import torch
from torch.distributed.tensor import DTensor

PARTS = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def name_of(name):
    """Returns Hugging Face's name of a parameter of harness.models.Llama."""
    if name in OUTER:
        return OUTER[name]
    layers, layer, part, weight = name.split(".")
    return f"model.{layers}.{layer}.{PARTS[part]}.{weight}"


def write(folder, model, args):
    """Writes the shapes of `model`, on the meta device, with random values in bfloat16.

    Each layer has a file, and the other parameters share one. Keeps a folder of the same
    configuration that is complete.
    """
    from safetensors.torch import save_file

    config = json.dumps(config_of(args))
    config_file = folder / "config.json"
    if config_file.exists() and config_file.read_text() == config:
        return
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, parameter in model.named_parameters():
        stored = name_of(name)
        part = stored.split(".")[2] if stored.startswith("model.layers.") else "outer"
        files.setdefault(f"model-{part}.safetensors", {})[stored] = parameter.shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for file, shapes in files.items():
        tensors = {
            name: (torch.randn(shape, device=device) * 0.02).bfloat16().cpu()
            for name, shape in shapes.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
    index = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    config_file.write_text(config)  # the last: the folder is complete


def config_of(args):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.dim,
        "intermediate_size": args.ffn,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "vocab_size": args.vocab,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def load(folder, model, rank, world):
    """Reads this rank's rows of each parameter of `model`; the GPU converts them."""
    from safetensors import safe_open

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored = name_of(name)
            file = index["weight_map"][stored]
            if file not in files:
                files[file] = safe_open(folder / file, "pt")
            sharded = isinstance(parameter, DTensor)
            local = parameter.to_local() if sharded else parameter
            each = -(-parameter.shape[0] // world)
            begin = min(rank * each, parameter.shape[0])
            rows = files[file].get_slice(stored)[begin : begin + local.shape[0]]
            local.copy_(rows.to(local.device))
