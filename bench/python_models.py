"""Models of transformers and timm under Flatshard's and FSDP2's fully_shard, defaults only.

PYTHONPATH=build/python torchrun --nproc-per-node 2 bench/python_models.py

Qwen3-0.6B, GPT-2 medium, ViT-L/16, Qwen2-0.5B, BERT-large, Whisper-small, a small
Qwen3-MoE, and adapters of peft in 16 layers of Llama-3-8B, with random weights. A unit
for each block and one for the rest, bf16 compute and reduction, float32 main weights,
torch's fused AdamW. The base of the adapters is frozen and bfloat16. Each library shards
with its default options. Runs alternate. The script prints the median step of each run,
the host's part and the peak of allocated memory. It also prints the median ratio
Flatshard / FSDP2 of the pairs.

--libraries flatshard-chunk flatshard compares granularity="chunk" (plain DTensors, as
torch.chunk splits them) with the default instead.

--libraries fsdp2 flatshard unsharded, on one rank, adds the model without a library:
weights, gradients and AdamW's states are bfloat16, and no weight is cast. Its step is a
lower bound for libraries that shard, and not the same training.

--trace FOLDER writes a trace of each model, kind and library for bench/kernel_kinds.py.
"""

import functools
import importlib.util
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from harness.command_line import Parser
from harness.peers import LLAMA_SIZES, adamw, fully_shard_of, llama_config, release
from harness.programs import file_name, write_json
from harness.ranks import about, join_mesh, say
from harness.steps import measure
from harness.tables import by_turns, ratios

LIBRARIES = ("fsdp2", "flatshard")
# After a dash: granularity of ShardOptions.
CHOICES = (*LIBRARIES, "flatshard-chunk", "unsharded")


@dataclass
class Case:
    """A model, its blocks, and the loss of one batch as a function without arguments."""

    model: torch.nn.Module
    blocks: list
    loss: object


def language_model(model, blocks, batch, seq, device):
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (batch, seq), device=device)
    return Case(model, blocks, lambda: model(input_ids=ids, labels=ids).loss)


def qwen3(tiny, device):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28)
    sizes |= dict(num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    sizes |= dict(vocab_size=151936, tie_word_embeddings=True, use_cache=False)
    if tiny:
        sizes |= dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    return language_model(model, model.model.layers, 1, 16 if tiny else 2048, device)


def gpt2_medium(tiny, device):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_embd=1024, n_layer=24, n_head=16, use_cache=False)
    sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    if tiny:
        sizes |= dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64)
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    return language_model(model, model.transformer.h, 4, 16 if tiny else 1024, device)


def vit_large(tiny, device):
    import timm

    sizes = dict(depth=2, embed_dim=32, num_heads=4) if tiny else {}
    model = timm.create_model("vit_large_patch16_224", **sizes)
    batch = 2 if tiny else 32
    images = torch.randn(batch, 3, 224, 224, device=device)
    classes = torch.randint(1000, (batch,), device=device)
    return Case(
        model, model.blocks, lambda: F.cross_entropy(model(images).float(), classes)
    )


def qwen2(tiny, device):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24)
    sizes |= dict(num_attention_heads=14, num_key_value_heads=2, vocab_size=151936)
    if tiny:
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    config = Qwen2Config(tie_word_embeddings=True, use_cache=False, **sizes)
    model = Qwen2ForCausalLM(config)
    return language_model(model, model.model.layers, 1, 16 if tiny else 2048, device)


def bert_large(tiny, device):
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24)
    sizes |= dict(num_attention_heads=16)
    if tiny:
        sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2)
        sizes |= dict(num_attention_heads=4, vocab_size=64)
    sizes |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(BertConfig(**sizes))
    blocks = model.bert.encoder.layer
    return language_model(model, blocks, 2 if tiny else 16, 16 if tiny else 512, device)


def whisper_small(tiny, device):
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = dict(d_model=768, encoder_layers=12, decoder_layers=12)
    sizes |= dict(encoder_attention_heads=12, decoder_attention_heads=12)
    sizes |= dict(encoder_ffn_dim=3072, decoder_ffn_dim=3072)
    if tiny:
        sizes = dict(d_model=32, encoder_layers=2, decoder_layers=2)
        sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=4)
        sizes |= dict(encoder_ffn_dim=48, decoder_ffn_dim=48)
    config = WhisperConfig(use_cache=False, **sizes)
    model = WhisperForConditionalGeneration(config)
    batch, frames = (1 if tiny else 8), 2 * config.max_source_positions
    sound = torch.randn(batch, config.num_mel_bins, frames, device=device)
    labels = torch.randint(1000, (batch, 8 if tiny else 256), device=device)
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return Case(model, blocks, lambda: model(input_features=sound, labels=labels).loss)


def qwen3_moe(tiny, device):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(hidden_size=1024, moe_intermediate_size=512, num_hidden_layers=8)
    sizes |= dict(num_attention_heads=16, num_key_value_heads=4, head_dim=64)
    sizes |= dict(num_experts=32, num_experts_per_tok=4, vocab_size=32000)
    if tiny:
        sizes |= dict(hidden_size=32, moe_intermediate_size=16, num_hidden_layers=2)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
        sizes |= dict(num_experts=4, num_experts_per_tok=2, vocab_size=64)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(use_cache=False, **sizes))
    return language_model(model, model.model.layers, 1, 16 if tiny else 4096, device)


def llama_peft(tiny, device):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    hidden, intermediate, layers, heads, kv_heads = LLAMA_SIZES["8b"]
    sizes = LLAMA_SIZES["tiny"] if tiny else (hidden, intermediate, 16, heads, kv_heads)
    vocab = 64 if tiny else 128256
    config = llama_config(sizes, vocab_size=vocab, use_cache=False)
    base = LlamaForCausalLM(config).to(torch.bfloat16)
    adapters = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    blocks = base.model.layers
    return language_model(model, blocks, 1, 16 if tiny else 4096, device)


MODELS = {
    "qwen3-0.6b": qwen3,
    "gpt2-medium": gpt2_medium,
    "vit-l/16": vit_large,
    "qwen2-0.5b": qwen2,
    "bert-large": bert_large,
    "whisper-small": whisper_small,
    "qwen3-moe": qwen3_moe,
    "llama-peft": llama_peft,
}


def compute_in_bfloat16(model):
    """Casts all parameters, and the inputs of each forward."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()

    def cast(_, args, kwargs):
        def to_bfloat16(x):
            return x.bfloat16() if x.is_floating_point() else x

        return tree_map_only(torch.Tensor, to_bfloat16, (args, kwargs))

    model.register_forward_pre_hook(cast, with_kwargs=True)


def shard(library, case, mesh):
    package, _, granularity = library.partition("-")
    options = {"granularity": granularity} if granularity else {}
    fully_shard = functools.partial(fully_shard_of(package), mesh=mesh, **options)
    for module in (*case.blocks, case.model):
        fully_shard(module)


def run(library, name, compiled, mesh, args):
    # After compiled steps of a model torch keeps one tensor of the loss (1.2 GiB of
    # Qwen3's logits). The peaks of later runs do not count it.
    kept = torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    torch.manual_seed(0)
    with torch.device(mesh.device_type):
        case = MODELS[name](args.tiny, mesh.device_type)
    if compiled:
        for block in case.blocks:
            block.compile()
    if library == "unsharded":
        compute_in_bfloat16(case.model)
    else:
        shard(library, case, mesh)
    torch.manual_seed(1 + dist.get_rank())
    trace = args.trace
    if trace:
        kind = "compiled" if compiled else "eager"
        trace /= f"{file_name(name, kind, library)}.json.gz"
    found = measure(case.loss, adamw(case.model), args, trace=trace)
    found["peak_GiB"] = round(found["peak_GiB"] - kept, 3)
    del case
    torch._dynamo.reset()
    release()
    return found


def main():
    parser = Parser(__doc__).options("tiny", "trace", warmup=6, steps=15, pairs=3)
    parser.options(out=Path("outputs/python_models.json"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=("eager", "compiled"),
        default=["eager", "compiled"],
    )
    parser.add_argument(
        "--libraries",
        nargs="+",
        choices=CHOICES,
        default=list(LIBRARIES),
        metavar="LIBRARY",
        help=f"of {', '.join(CHOICES)}; ratios are to the first [{' '.join(LIBRARIES)}]",
    )
    args = parser.parse_args()
    if args.tiny:
        args.warmup, args.steps, args.pairs = 1, 2, 1
    mesh = join_mesh("cpu" if args.tiny else "cuda")
    if "unsharded" in args.libraries and mesh.size() > 1:
        raise SystemExit(f"unsharded: expected one rank, got {mesh.size()}")
    say(about(mesh))
    results = {}
    if "vit-l/16" in args.models and importlib.util.find_spec("timm") is None:
        say("vit-l/16 is left out: pip install timm")
        args.models.remove("vit-l/16")
    for name in args.models:
        for kind in args.kinds:

            def one(library, pair, name=name, kind=kind):
                return run(library, name, kind == "compiled", mesh, args)

            runs = by_turns(args.libraries, args.pairs, one)
            results[f"{name} {kind}"] = {"runs": runs, "ratios": {}}
            for library, of_library in runs.items():
                ms = ", ".join(f"{r['ms']:.1f}" for r in of_library)
                host = statistics.median(
                    sum(r["host_ms_forward_backward_step"]) for r in of_library
                )
                peak, loss = of_library[-1]["peak_GiB"], of_library[-1]["loss"]
                say(
                    f"{name} {kind}, {library}: ms {ms}; host {host:.1f} ms; "
                    f"peak {peak:.2f} GiB; loss {loss:.3f}"
                )
            base, *others = args.libraries
            for other in others:
                each, median = ratios(runs[base], runs[other])
                results[f"{name} {kind}"]["ratios"][other] = each
                say(f"{name} {kind}: {other} / {base} {median:.3f}")
    if dist.get_rank() == 0:
        write_json(args.out, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
