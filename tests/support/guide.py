"""Runs the commands of a guide's page in a folder that looks like a clone."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.support.program import expect

ROOT = Path(__file__).resolve().parents[2]
# A guide's first commands: they need a network, or minutes.
SETUP = ("git clone", "scripts/build", "hf download")
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)


class Guide:
    """The commands of a page, in its order, on two ranks."""

    def __init__(self, page, program, folder, settings):
        """settings: what the config of a run is changed to, key=value."""
        text = (ROOT / "docs/guides" / page).read_text()
        lines = [line for block in BLOCK.findall(text) for line in block.splitlines()]
        self.commands = [line for line in lines if not line.startswith(SETUP)]
        self.folder = folder
        self.settings = settings
        if not (folder / "bin").exists():
            (folder / "bin").mkdir()
            (folder / "bin/flatshard").symlink_to(Path(program).resolve())
            (folder / "examples").symlink_to(ROOT / "examples")

    def run(self, beginning):
        """Runs the next command of the page and returns what it printed. The command
        has to start with `beginning`."""
        expect(self.commands, f"the page ends before '{beginning}'")
        command = self.commands.pop(0)
        expect(
            command.startswith(f"flatshard {beginning}"),
            f"the page has '{command}', and the test expects '{beginning}'",
        )
        words = shlex.split(command, comments=True)
        if words[1] == "train":
            words[words.index("--nproc") + 1] = "2"
            for setting in self.settings:
                words += ["--set", setting]
        if "--seq-len" in words:
            of_run = dict(setting.split("=", 1) for setting in self.settings)
            words[words.index("--seq-len") + 1] = of_run["training.seq_len"]
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env={
                **os.environ,
                "CUDA_VISIBLE_DEVICES": "",
                "FLATSHARD_PYTHON": sys.executable,
                "OMP_NUM_THREADS": "1",
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            },
        )
        expect(done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}")
        return done.stdout + done.stderr

    def loss(self, beginning):
        """The loss that the page's next command, an evaluation, prints."""
        return self.evaluation(beginning)["loss"]

    def evaluation(self, beginning):
        """The loss of the page's next evaluation, and the samples that it measured."""
        said = self.run(beginning)
        loss = re.search(r"^loss +([\d.]+) nats per token$", said, re.M)
        samples = re.search(r"^sequences +(.*)$", said, re.M)
        expect(loss and samples, said)
        return {"loss": float(loss[1]), "samples": samples[1]}

    def rows(self, path):
        text = (self.folder / path).read_text()
        return [json.loads(line) for line in text.splitlines()]

    def end(self):
        expect(not self.commands, f"the test leaves out {self.commands}")
