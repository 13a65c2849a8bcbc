"""Programs that train with FSDP2 through a library. bench/libraries.py measures them.

torchrun --nproc-per-node 1 bench/libraries_train.py trainer
torchrun --nproc-per-node 1 bench/libraries_train.py trainer --compile
torchrun --nproc-per-node 1 bench/libraries_train.py sft
torchrun --nproc-per-node 1 bench/libraries_train.py accelerate

Without torchrun, `trainer --unsharded` trains in bfloat16 on one GPU. Random weights and
data; nothing is downloaded. Under `python -m flatshard.as_fsdp2` the
same programs train on Flatshard. Rank 0 prints a line of JSON: the time of a step, peak
memory, the loss, and the library that sharded the model. The time of a step is measured
from the end of the previous step to its own end.
"""

import json
import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist

from harness.command_line import Parser
from harness.peers import LLAMA_SIZES, llama_config
from harness.steps import rounded, synchronize


class Clock:
    """Times from the end of a step to the end of the next one."""

    def __init__(self, warmup):
        self.warmup, self.ends, self.losses = warmup, [], []

    def step_ended(self):
        synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.warmup and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def report(self, model, last_loss):
        ends = self.ends[self.warmup - 1 :]
        ms = [1e3 * (after - before) for before, after in zip(ends, ends[1:])]
        on_gpu = torch.cuda.is_available()
        peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
        found = {"ms": statistics.median(ms), "ms_range": [min(ms), max(ms)]}
        found = rounded(found) | {"peak_GiB": round(peak, 3)}
        found["loss"] = round(last_loss, 4)
        found["sharded_by"] = library_of(model)
        if int(os.environ.get("RANK", 0)) == 0:
            print(json.dumps(found), flush=True)


def library_of(model):
    """Returns which library's FSDPModule `model` is, or none. It is `model` or the
    module that torch.compile wrapped."""
    classes = [*type(model).__mro__, *type(getattr(model, "_orig_mod", model)).__mro__]
    found = [c.__module__.split(".")[0] for c in classes if c.__name__ == "FSDPModule"]
    return {"torch": "fsdp2"}.get(found[0], found[0]) if found else None


def ranks_as_gpus():
    """Lets accelerate shard on CPUs. It normally shards on accelerators only."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    init = PartialState.__init__

    def on_cpu(self, cpu=False, **keywords):
        init(self, True)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = on_cpu
    torch.cpu.set_device = lambda device: None


# -- transformers and TRL ------------------------------------------------------------------


def timed(trainer_class, clock):
    """Returns an object that trains with `clock`; logs nothing in between."""
    from transformers import TrainerCallback

    class Timed(TrainerCallback):
        def on_step_end(self, args, state, control, **more):
            clock.step_ended()

    def make(**more):
        trainer = trainer_class(callbacks=[Timed()], **more)
        result = trainer.train()
        clock.report(trainer.model_wrapped, result.training_loss)

    return make


def usual_arguments(args, folder, **more):
    """Returns TrainingArguments that do not disturb the measurement."""
    return {
        "output_dir": folder,
        "max_steps": args.warmup + args.steps,
        "per_device_train_batch_size": 1,
        "bf16": True,
        "fsdp": True,
        "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": args.tiny,
        "seed": 0,
        **more,
    }


def tokens(args, vocab):
    generator = torch.Generator().manual_seed(1)
    n = 4 * (args.warmup + args.steps)
    return torch.randint(vocab, (n, args.seq), generator=generator).tolist()


def qwen3_06b(tiny):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    if tiny:
        sizes |= {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        sizes |= {"num_hidden_layers": 2, "head_dim": 16, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2}
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(tie_word_embeddings=True, use_cache=False, **sizes)
    )


def train_trainer(args, folder, clock):
    from transformers import Trainer, TrainingArguments

    model = qwen3_06b(args.tiny)
    rows = [{"input_ids": row, "labels": row} for row in tokens(args, model.vocab_size)]
    settings = usual_arguments(args, folder, torch_compile=args.compile)
    if args.unsharded:
        model.to(torch.bfloat16)
        for name in ("bf16", "fsdp", "fsdp_config"):
            del settings[name]
    timed(Trainer, clock)(
        model=model,
        args=TrainingArguments(**settings),
        train_dataset=rows,
        data_collator=lambda rows: {
            key: torch.tensor([row[key] for row in rows]) for key in rows[0]
        },
    )


def llama_8b(tiny, layers):
    from transformers import LlamaForCausalLM

    hidden, intermediate, _, heads, kv_heads = LLAMA_SIZES["8b"]
    sizes = (hidden, intermediate, layers, heads, kv_heads)
    vocab = 128 if tiny else 128256
    config = llama_config(
        LLAMA_SIZES["tiny"] if tiny else sizes,
        vocab_size=vocab,
        use_cache=False,
        rope_theta=500000.0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        rank = int(os.environ["LOCAL_RANK"])
        with torch.device("cpu" if tiny else f"cuda:{rank}"):
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def own_tokenizer():
    """Returns a tokenizer that SFTTrainer asks for its special tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "</s>": 1, "<unk>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def train_sft(args, folder, clock):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    model = llama_8b(args.tiny, args.layers)
    settings = usual_arguments(
        args, folder, gradient_checkpointing=True, max_length=args.seq
    )
    timed(SFTTrainer, clock)(
        model=model,
        args=SFTConfig(**settings),
        train_dataset=Dataset.from_dict({"input_ids": tokens(args, model.vocab_size)}),
        processing_class=own_tokenizer(),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )


# -- accelerate ----------------------------------------------------------------------------


def train_accelerate(args, folder, clock):
    import timm
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, TorchDynamoPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        cpu_ram_efficient_loading=False,
    )
    compiled = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=plugin,
        dynamo_plugin=compiled if args.compile else None,
    )
    torch.manual_seed(0)
    name = "vit_tiny_patch16_224" if args.tiny else "vit_large_patch16_224"
    model = timm.create_model(name, num_classes=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not args.tiny)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = 2 if args.tiny else args.images
    images = torch.randn(batch, 3, 224, 224, device=accelerator.device)
    labels = torch.randint(1000, (batch,), device=accelerator.device)
    for _ in range(args.warmup + args.steps):
        loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_ended()
    clock.report(model, loss.item())


CASES = {"trainer": train_trainer, "sft": train_sft, "accelerate": train_accelerate}


def main():
    parser = Parser(__doc__).options(
        "seq", "tiny", warmup=8, steps=16, images=32, layers=16, compile=False
    )
    parser.options(unsharded=False)
    parser.add_argument("case", choices=CASES)
    args = parser.parse_args()
    if args.unsharded and args.case != "trainer":
        parser.error(f"--unsharded requires the case trainer, got {args.case}")
    # This folder has a kernels.py, and libraries would import it for the package.
    sys.path.remove(os.path.dirname(os.path.abspath(__file__)))
    if args.tiny:
        args.seq = min(args.seq, 64)
        if not args.unsharded:
            ranks_as_gpus()
    with tempfile.TemporaryDirectory() as folder:
        CASES[args.case](args, folder, Clock(args.warmup))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
