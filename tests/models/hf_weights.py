#!/usr/bin/env python3
"""The initial weights of a run, compared with the weights that transformers loads.

transformers writes a small Llama, and each case changes the folder as users' folders
are changed: buffers that older versions saved, an index next to the single file, a head
that is stored although it is tied, no head, other dtypes. `flatshard train` starts from
it (model.init_from) and runs one step with learning rate zero, so its model.safetensors
has the initial weights. transformers loads the same tensors from the same folder.

Exits with 77 (skipped) without transformers.

usage: hf_weights.py PROGRAM
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SKIPPED = 77

CONFIG = """
[run]
output_dir = "{run}"
[model]
init_from = "{weights}"
[data]
train = "random"
[training]
steps = 1
seq_len = 16
[optimizer]
lr = 0
[precision]
compute = "float32"
"""

try:
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import (
        AutoModelForCausalLM,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
    )
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(SKIPPED)

META = {"format": "pt"}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def make(folder, **changes):
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, vocab_size=64, **changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_file(folder / SINGLE)


def shard(folder, tensors, index):
    """Files of the tensors, `{file: names}`, and an index, `{name: file}`."""
    for file, names in tensors.items():
        save_file(names, folder / file, META)
    text = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / INDEX).write_text(json.dumps(text))


def buffers(folder):
    tensors = make(folder)
    for i in range(2):
        tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["model.layers.0.self_attn.masked_bias"] = torch.tensor(-1e4)
    tensors["score.weight"] = torch.ones(2, 16)
    save_file(tensors, folder / SINGLE, META)
    return [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.masked_bias",
        "score.weight",
    ]


def single_and_index(folder):
    tensors = make(folder)
    other = {name: value + 1 for name, value in tensors.items()}
    shard(folder, {"a.safetensors": other}, dict.fromkeys(other, "a.safetensors"))
    return [INDEX]


def tensors_twice(folder):
    tensors = make(folder)
    (folder / SINGLE).unlink()
    name = "model.norm.weight"
    second = {name: tensors[name] + 1, "extra": torch.ones(2)}
    index = dict.fromkeys(tensors, "a.safetensors")
    index["lm_head.weight"] = "b.safetensors"
    second["lm_head.weight"] = tensors.pop("lm_head.weight")
    shard(folder, {"a.safetensors": tensors, "b.safetensors": second}, index)
    return ["extra"]


def tied_with_a_head(folder):
    tensors = make(folder, tie_word_embeddings=True)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, folder / SINGLE, META)
    return ["lm_head.weight of", "model ties its head to the embedding"]


def base_model(folder):
    tensors = make(folder, tie_word_embeddings=True)
    bare = {name.removeprefix("model."): value for name, value in tensors.items()}
    save_file(bare, folder / SINGLE, META)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["LlamaModel"]
    (folder / "config.json").write_text(json.dumps(config))
    return []


def several_dtypes(folder):
    tensors = make(folder)
    kinds = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for i, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].to(kinds[i % len(kinds)])
    save_file(tensors, folder / SINGLE, META)
    return []


def mxfp4(folder):
    """Experts of four bits, in the format of the published gpt-oss weights."""
    torch.manual_seed(1)
    config = GptOssConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=64,
    )
    GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / SINGLE)
    for name in list(tensors):
        if name.endswith((".gate_up_proj", ".down_proj")):
            experts, wide, out = tensors.pop(name).shape
            scales = torch.randint(110, 124, (experts, out, wide // 32))
            blocks = torch.randint(0, 256, (*scales.shape, 16))
            tensors[f"{name}_scales"] = scales.to(torch.uint8)
            tensors[f"{name}_blocks"] = blocks.to(torch.uint8)
    save_file(tensors, folder / SINGLE, META)
    written = json.loads((folder / "config.json").read_text())
    written["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (folder / "config.json").write_text(json.dumps(written))
    return []


def no_head(folder):
    tensors = make(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / SINGLE, META)
    return "set model.tie_embeddings = true"


def a_bias(folder):
    tensors = make(folder)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(16)
    save_file(tensors, folder / SINGLE, META)
    return "no parameter for tensor 'model.layers.0.self_attn.q_proj.bias'"


def fewer_layers(folder):
    make(folder, max_position_embeddings=64)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))
    return ", and 4 more; check that the config matches these weights"


def bin_only(folder):
    make(folder)
    (folder / SINGLE).rename(folder / "pytorch_model.bin")
    return "pytorch_model.bin is not a safetensors file"


def pointer(folder):
    make(folder)
    lfs = "version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 3\n"
    (folder / SINGLE).write_text(lfs)
    return "is a Git LFS pointer"


def train(program, folder, *options):
    config = folder / "run.toml"
    config.write_text(CONFIG.format(run=folder / "run", weights=folder / "hf"))
    done = subprocess.run(
        [program, "train", config, "--device", "cpu", *options],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout + done.stderr


def expect(ok, what, said):
    if not ok:
        sys.exit(f"hf_weights.py: {what}\n{said}")


def main():
    program = sys.argv[1]
    good = [buffers, single_and_index, tensors_twice, tied_with_a_head, base_model]
    for case in [*good, several_dtypes, mxfp4]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            says = case(folder / "hf")
            code, said = train(program, folder)
            expect(code == 0, f"{case.__name__}: exit code {code}", said)
            for text in says:
                expect(text in said, f"{case.__name__}: expected {text!r} in", said)
            ours = load_file(folder / "run" / SINGLE)
            model = AutoModelForCausalLM.from_pretrained(
                folder / "hf", dtype=torch.float32
            )
            theirs = model.state_dict()
            for tensor, value in ours.items():
                same = torch.equal(value, theirs[tensor].float())
                expect(same, f"{case.__name__}: {tensor} differs", said)
            expect(len(ours) >= len(theirs) - 1, f"{case.__name__}: too few", said)
    for case in [no_head, a_bias, fewer_layers, bin_only, pointer]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            says = case(folder / "hf")
            code, said = train(program, folder)
            ok = code == 1 and says in said
            expect(ok, f"{case.__name__}: expected {says!r}, exit code {code}", said)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        a_bias(folder / "hf")
        leave_out = "checkpoint.exclude=*.bias,lm_head.*"
        code, said = train(program, folder, "--set", leave_out)
        expect(code == 0 and "q_proj.bias" in said, "checkpoint.exclude", said)
        code, said = train(program, folder, "--set", "model.layers=1",
                           "--set", leave_out)  # fmt: skip
        expect(code == 0 and "model.layers.1." in said, "model.layers", said)
    print("the weights that transformers loads, in all cases")


if __name__ == "__main__":
    main()
