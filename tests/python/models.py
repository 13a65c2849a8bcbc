"""Small models of the kinds that people shard, with the modules to wrap."""

import torch
from torch import nn

from tests.python.device import on_device


class Block(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        on_device(self)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, each a unit, and a head."""

    def __init__(self, blocks, head, embed=None):
        super().__init__()
        if embed is not None:
            self.embed = embed
        self.blocks = nn.ModuleList(blocks)
        self.head = head()
        on_device(self)

    def run(self, block, x):
        return block(x)

    def forward(self, x):
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x)

    def units(self):
        return list(self.blocks)


class TokenModel(Stack):
    """A stack on an embedding of `vocab` tokens."""

    def __init__(self, vocab, dim, blocks, head=None):
        head = head or (lambda: nn.Linear(dim, vocab, bias=False))
        super().__init__(blocks, head, nn.Embedding(vocab, dim))

    def forward(self, tokens):
        return super().forward(self.embed(tokens))

    def loss(self, generator):
        vocab = self.embed.num_embeddings
        tokens = on_device(torch.randint(vocab, (3, 7), generator=generator))
        return nn.functional.cross_entropy(
            self(tokens).float().flatten(0, 1), tokens.roll(1, 1).flatten()
        )


class Mlp(Stack):
    def __init__(self, dim=13, hidden=40, blocks=3):
        super().__init__(
            (Block(dim, hidden) for _ in range(blocks)), lambda: nn.Linear(dim, 5)
        )

    def loss(self, generator):
        x = on_device(torch.randn(4, 13, generator=generator))
        y = on_device(torch.randn(4, 5, generator=generator))
        return (self(x) - y).square().mean()


def biases_only():
    """Returns an Mlp whose weights are frozen."""
    model = Mlp()
    for name, p in model.named_parameters():
        p.requires_grad = "bias" in name
    return model


# Boundaries between ranks are at multiples of 16 elements: these have several, none
# of them even.
DIM, HIDDEN = 13, 40


class Body(Stack):
    """Blocks and a function that calls them."""

    def __init__(self, body, blocks=3):
        super().__init__(
            (Block(DIM, HIDDEN) for _ in range(blocks)), lambda: nn.Linear(DIM, 5)
        )
        self.body = body

    def forward(self, x):
        return self.head(self.body(self, x))


def plain(m, x):
    for block in m.blocks:
        x = block(x)
    return x


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(6, 7, 3), nn.ReLU())
        self.head = nn.Linear(7, 4)
        on_device(self)

    def forward(self, x):
        return self.head(self.second(self.first(x)).mean((2, 3)))

    def units(self):
        return [self.first, self.second]

    def loss(self, generator):
        x = on_device(torch.randn(2, 3, 8, 8, generator=generator))
        y = on_device(torch.randint(4, (2,), generator=generator))
        return nn.functional.cross_entropy(self(x), y)


class Expert(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.w = nn.Linear(dim, 2 * dim, bias=False)
        self.v = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x):
        return self.v(torch.nn.functional.silu(self.w(x)))


class MoeBlock(nn.Module):
    """Top-1 routing; which experts get tokens differs between ranks."""

    def __init__(self, dim, experts):
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim) for _ in range(experts))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            picked = chosen == number
            out = out.index_put(
                (picked,), weights[picked].unsqueeze(-1) * expert(x[picked])
            )
        return x + out


class Moe(Stack):
    def __init__(self):
        super().__init__((MoeBlock(8, 4) for _ in range(2)), lambda: nn.Linear(8, 3))

    def loss(self, generator):
        x = on_device(torch.randn(6, 8, generator=generator))
        y = on_device(torch.randint(3, (6,), generator=generator))
        return nn.functional.cross_entropy(self(x), y)


class HuggingFace(nn.Module):
    """A causal or encoder-decoder model of transformers with random weights."""

    def __init__(self, model, units, vocab):
        super().__init__()
        self.model = model
        self._units = units
        self._vocab = vocab
        on_device(self)

    def forward(self, ids):
        return self.model(input_ids=ids, labels=ids).loss

    def units(self):
        return self._units(self.model)

    def loss(self, generator):
        ids = torch.randint(self._vocab, (2, 10), generator=generator)
        return self(on_device(ids))


# Most models of transformers have these sizes.
SIZES = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)


def llama(tied=False, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 67, **SIZES, "tie_word_embeddings": tied, **options}
    config = LlamaConfig(**sizes)
    return HuggingFace(LlamaForCausalLM(config), lambda m: list(m.model.layers), 67)


def with_adapters(llama, rank=3):
    """Returns a Llama of transformers with adapters of peft."""
    import peft

    config = peft.LoraConfig(
        r=rank,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(llama.model, config)
    # peft initializes lora_B to zeros. That would hide the gradients of lora_A.
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.normal(0.0, 0.1, p.shape, generator=generator))
    return on_device(model)


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=61,
        n_positions=32,
        n_embd=24,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return HuggingFace(GPT2LMHeadModel(config), lambda m: list(m.transformer.h), 61)


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=59,
        d_model=24,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return HuggingFace(
        T5ForConditionalGeneration(config),
        lambda m: list(m.encoder.block) + list(m.decoder.block),
        59,
    )


MODELS = {
    "mlp": Mlp,
    "cnn": Cnn,
    "moe": Moe,
    "llama": llama,
    "llama_tied": lambda: llama(tied=True),
    "gpt2": gpt2,
    "t5": t5,
}
