"""Small models of transformers, their data, and what of them is compared."""

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 65


def llama_config(tied=False, **more):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "use_cache": False,
    }
    return LlamaConfig(**{**sizes, "tie_word_embeddings": tied, **more})


def llama(tied=False, seed=0, dtype=torch.float32, **more):
    torch.manual_seed(seed)
    return LlamaForCausalLM(llama_config(tied, **more)).to(dtype)


def wide_llama(seed=0):
    """A model with parameters that are large enough for int8 states. All that it trains are
    matrices, as Muon expects."""
    model = llama(seed=seed, hidden_size=64, intermediate_size=128)
    for p in model.parameters():
        p.requires_grad_(p.dim() == 2)
    return model


def int8_adamw(parameters):
    import flatshard

    large = {"params": [p for p in parameters if p.numel() > 4096]}
    small = {"params": [p for p in parameters if p.numel() <= 4096]}
    groups = [{**large, "state_dtype": torch.int8}, {**small, "weight_decay": 0.0}]
    return flatshard.optim.AdamW(groups, lr=1e-2)


def muon(parameters):
    import flatshard

    return flatshard.optim.Muon([p for p in parameters if p.requires_grad], lr=1e-2)


def has_int8_states(optimizer):
    states = optimizer.state.values()
    return any(t.dtype == torch.int8 for state in states for t in state.values())


def qwen3_moe(seed=0):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            mlp_only_layers=[],
            max_position_embeddings=64,
            pad_token_id=0,
            tie_word_embeddings=False,
            use_cache=False,
        )
    )


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def token_rows(n=16, length=12, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (n, length), generator=generator)


def token_dataset(**more):
    return TensorDataset(token_rows(**more))


def full_weights(model):
    """Returns {name: full tensor}, on rank 0. Collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)


def sharded_by(model):
    """Returns the package of the FSDPModule that `model`'s class is made of, or None."""
    classes = type(getattr(model, "_orig_mod", model)).__mro__
    found = [c for c in classes if c.__name__ == "FSDPModule"]
    return found[0].__module__.split(".")[0] if found else None
