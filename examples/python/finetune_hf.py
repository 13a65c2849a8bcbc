"""Fine-tunes a Hugging Face causal language model on text files, fully sharded.

`torchrun --nproc-per-node 8 finetune_hf.py --model meta-llama/Llama-3.2-1B --text *.txt`
`torchrun --nproc-per-node 2 finetune_hf.py --model gpt2 --text README.md --out tuned`
`torchrun --nproc-per-node 2 finetune_hf.py --model tiny --text README.md --steps 20`
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import flatshard

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True, help="hub name, folder, or tiny: random")
parser.add_argument("--text", required=True, nargs="+", help="files of text")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seq", type=int, default=256, help="tokens of one sample")
parser.add_argument("--lr", type=float, default=1e-4)
parser.add_argument(
    "--out", help="folder for the trained model and its tokenizer; default: not saved"
)
args = parser.parse_args()

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if cuda:
    torch.cuda.set_device(rank % torch.cuda.device_count())
device = "cuda" if cuda else "cpu"

texts = "\n".join(open(name, encoding="utf-8").read() for name in args.text)
torch.manual_seed(0)  # the ranks start from equal weights
tokenizer = folder = None
if args.model == "tiny":
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": None}  # bytes have neither
    config = LlamaConfig(vocab_size=256, num_hidden_layers=2, **sizes, **ids)
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.tensor(list(texts.encode()))
else:
    folder = args.model if os.path.isdir(args.model) else snapshot_download(args.model)
    # The model has no memory: each rank reads its part once the model is sharded.
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(folder)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # `verbose=False` avoids a warning that the text is longer than the model's context.
    # The text is split into samples below.
    tokens = torch.tensor(tokenizer(texts, verbose=False)["input_ids"])
if len(tokens) <= args.seq:
    raise SystemExit(f"--text: expected more than {args.seq} tokens, got {len(tokens)}")
model.train()

# transformers names the class of a model's blocks. It works for any attribute name:
# model.model.layers, model.transformer.h, ...
blocks = set(model._no_split_modules or [])
policy = flatshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None)
for module in list(model.modules()):
    if type(module).__name__ in blocks:
        flatshard.fully_shard(module, mp_policy=policy)
flatshard.fully_shard(model, mp_policy=policy)
if folder is not None:
    flatshard.load_hf(model, folder)
optimizer = flatshard.optim.AdamW(model.parameters(), lr=args.lr)

generator = torch.Generator().manual_seed(rank)  # every rank reads its own samples
for step in range(1, args.steps + 1):
    start = torch.randint(len(tokens) - args.seq, (1,), generator=generator).item()
    batch = tokens[start : start + args.seq].unsqueeze(0).to(device)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 1 or step % 10 == 0:
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)

if args.out:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if rank == 0:
        whole = AutoModelForCausalLM.from_config(model.config)
        whole.generation_config = model.generation_config
        whole.save_pretrained(args.out, state_dict=state)
        if tokenizer is not None:
            tokenizer.save_pretrained(args.out)
dist.destroy_process_group()
