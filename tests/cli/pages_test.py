#!/usr/bin/env python3
"""Every command of README.md, docs/get_started and docs/guides is run here, by another
test, or was run on the machine that the page names.

The commands of this test run in the order of the pages. They run in a folder that looks
like a clone, with a tiny model and two CPU ranks.

usage: pages_test.py PROGRAM
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.program import expect  # noqa: E402

PAGES = [
    "README.md",
    *("docs/get_started/" + n for n in ("install.md", "quickstart_trainer.md")),
    *("docs/get_started/" + n for n in ("quickstart_python.md", "quickstart_cpp.md")),
]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(
    r"flatshard |torchrun |python3? |make |scripts/|bench/|cmake |pip |git |"
    r"tensorboard |srun |build[\w/-]+ |[A-Z]\w*=\S+ "
)
# The first words of a command, and the program that runs it.
ELSEWHERE = {
    "MASTER_ADDR=": "shellcheck reads the script",
    "build-example/": "tests/install/cpp_guide_test.py",
    "flatshard train bench/overlap_moe.toml": "two H100, as the page says",
    "cmake ": "tests/install/install_example.sh",
    "flatshard data prepare --chat": "the test of the guide of fine-tuning",
    "flatshard data show corpora/chats": "the test of the guide of fine-tuning",
    "flatshard plan --calibrate": "a GPU, as the page says",
    "git clone": "every clone",
    "make ": "tests/lint/scripts_test.py, and CI",
    "python -m flatshard.as_fsdp2 ": "tests/python/libraries, and scripts/library_matrix",
    "python -m flatshard.doctor": "tests/python/doctor_test.py",
    "python examples/python/wandb_follow.py": "tests/report/watching_test.py",
    "python3 -m venv": "scripts/bootstrap",
    "scripts/demo_data": "scripts/demo, which prepares the same data",
    "python3 bench/": "tests/lint/bench_test.py reads it, the page names the machine",
    "srun ": "tests/launch reads Slurm's variables; shellcheck reads the script",
    "tensorboard ": "tests/report/watching_test.py",
    "torchrun --no-python --nnodes 4": "tests/faults/two_hosts.py",
    "torchrun --no-python --nproc_per_node 2 build-example": "cpp_guide_test.py",
    "torchrun --nproc-per-node 2 examples": "tests/python/example_test.sh",
    "torchrun --nproc-per-node 8 train.py": "tests/python/example_test.sh",
}
SHAPE = {
    "model.dim": 48,
    "model.layers": 2,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.head_dim": 12,
    "model.ffn_dim": 96,
    "model.vocab_size": 257,
}
SMALL = {
    "training.seq_len": 32,
    "training.local_batch_size": 1,
    "precision.compute": "float32",
    "lr_scheduler.warmup_steps": 1,
    "checkpoint.interval": 4,
    "validation.freq": 0,
}


def commands_of(page):
    for language, block in BLOCK.findall((ROOT / page).read_text()):
        if language not in ("", "bash"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s{2,}#.*", "", line).strip()
            if COMMAND.match(line) and not line.startswith("build/tests/"):
                yield re.sub(r"\s+", " ", line)


def has_own_test(page):
    """Whether the page names the test that runs its commands."""
    text = (ROOT / page).read_text()
    return re.search(r"`tests/\w+/\w+\.(?:py|sh)`\s+runs\s+its\s+commands", text)


class Runner:
    def __init__(self, program, folder):
        self.folder = folder
        self.steps = 0
        self.shape = SHAPE
        (folder / "flatshard").symlink_to(Path(program).resolve())
        for name in ("examples", "bench"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "texts/more").mkdir(parents=True)
        for i in range(20):
            text = f"Once upon a time there was number {i}. " * (i + 1)
            (folder / f"texts/{i}.txt").write_text(text)
            (folder / f"texts/more/{i}.txt").write_text(text.upper())

    def config_of(self, page, beginning, name="run.toml"):
        """Writes the config of a page to a file."""
        (text,) = [
            block
            for block in re.findall(
                r"^```toml\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S
            )
            if block.startswith(beginning)
        ]
        tomllib.loads(text)
        (self.folder / name).write_text(text)

    def adapted(self, command):
        words = re.sub(r"--nproc \d+", "--nproc 2", command)
        if re.match(r"flatshard train ", words):
            self.steps += 4
            settings = {**SMALL, **self.shape, "training.steps": self.steps}
            sets = " ".join(f"--set {key}={value}" for key, value in settings.items())
            words = words.replace(" train run.toml", f" train run.toml {sets}")
            words += "" if "--nproc" in words else " --nproc 2"
            words += " --device cpu"
        if re.match(r"flatshard generate ", words):
            words += " --max-new-tokens 4 --device cpu"
        return words

    def run(self, command):
        adapted = self.adapted(command)
        done = subprocess.run(
            ["bash", "-c", adapted],
            capture_output=True,
            text=True,
            errors="replace",  # a model without training prints bytes
            check=False,
            cwd=self.folder,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "FLATSHARD_PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "PATH": f"{self.folder}:{os.environ['PATH']}",
            },
        )
        expect(done.returncode == 0, f"{adapted}:\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def page(self, page):
        """Runs the commands of a page; returns what each printed."""
        printed = {}
        for command in commands_of(page):
            if not any(map(command.startswith, ELSEWHERE)):
                printed[command] = self.run(command)
        return printed

    def rows(self, run):
        lines = (self.folder / run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def read_checkpoint_as_the_page_does(folder, step):
    """Runs the program of docs/reference/checkpoint_format.md."""
    page = (ROOT / "docs/reference/checkpoint_format.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    program = program.replace("step-200", f"step-{step}")
    program += "assert weight.shape == (48,) and weight.isfinite().all(), weight\n"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True
    )
    expect(done.returncode == 0, done.stderr)


def follow(runner):
    folder = runner.folder
    runner.config_of("README.md", "model.preset")
    printed = runner.page("README.md")
    generated = next(said for c, said in printed.items() if " generate " in c)
    expect("Once upon a time" in generated, generated)

    runner.page("docs/guides/checkpoints.md")
    steps = [row["step"] for row in runner.rows("outputs/run") if "loss" in row]
    expect(max(steps) == runner.steps, f"steps {steps}, the run did not resume")
    hf = json.loads((folder / "outputs/hf/config.json").read_text())
    expect(hf["hidden_size"] == SHAPE["model.dim"], hf)
    read_checkpoint_as_the_page_does(folder, runner.steps)
    for words in ("list", "inspect", "verify", "prune --keep 1"):
        name, *options = words.split()
        runner.run(f"flatshard checkpoint {name} outputs/run {' '.join(options)}")

    for name in "abc":
        shutil.copytree(folder / "outputs/run", folder / "outputs" / name)
    runner.page("docs/guides/report.md")
    expect("runs" in json.loads((folder / "run.json").read_text()), "run.json")
    expect(list((folder / "outputs/run/tensorboard").iterdir()), "no event files")

    runner.config_of("docs/guides/plan.md", "base", "my.toml")
    printed = runner.page("docs/guides/plan.md")
    expect("GPU-hours" in str(printed), printed)
    expect((folder / "step.svg").exists(), "no picture")
    said = runner.run("flatshard plan bench/overlap_moe.toml --ranks 2 --gpu h100")
    expect("tokens/s" in said, said)

    # The export is the Hugging Face folder of the quickstart.
    shutil.copytree(folder / "outputs/hf", folder / "Llama-3.2-1B")
    shutil.rmtree(folder / "outputs")
    shutil.rmtree(folder / "corpora")
    runner.config_of("docs/get_started/quickstart_trainer.md", "[run]")
    runner.shape, runner.steps = {}, 0
    runner.page("docs/get_started/quickstart_trainer.md")
    loss = [row["loss"] for row in runner.rows("outputs/first") if "loss" in row]
    expect(loss[0] < 5.5, f"losses {loss}, not of the weights of the folder")


def main():
    pages = [
        *PAGES,
        *(f"docs/guides/{p.name}" for p in (ROOT / "docs/guides").iterdir()),
    ]
    commands = [
        c for page in pages if not has_own_test(page) for c in commands_of(page)
    ]
    for beginning in ELSEWHERE:
        used = any(c.startswith(beginning) for c in commands)
        expect(used, f"ELSEWHERE: no page has '{beginning}'")
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(sys.argv[1], Path(name))
        ran = set()
        run = runner.run
        runner.run = lambda command: (ran.add(command), run(command))[1]
        follow(runner)
    left = [
        command
        for command in commands
        if command not in ran and not any(map(command.startswith, ELSEWHERE))
    ]
    expect(not left, f"no test runs these commands: {left}")
    print(f"passed: {len(ran)} commands of the pages ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
