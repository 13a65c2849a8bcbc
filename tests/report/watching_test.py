"""Runs write what docs/reference/log_and_metrics.md describes, and other programs can
read it.

usage: watching_test.py PROGRAM
"""

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = "build/flatshard"
CHECK_PAGE = ROOT / "scripts/check_page"
CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

DENSE = """
[run]
output_dir = "{folder}/{name}"
save_weights = false
[model]
dim = 32
layers = 1
heads = 2
ffn_dim = 64
vocab_size = 257
[data]
train = "{folder}/corpus"
validation = "{folder}/corpus"
[training]
steps = 6
seq_len = 16
local_batch_size = 2
[validation]
freq = 3
sequences = 2
[metrics]
log_freq = 1
"""
EXPERTS = """
[run]
output_dir = "{folder}/{name}"
save_weights = false
[model]
family = "moe"
dim = 32
layers = 1
heads = 2
ffn_dim = 64
vocab_size = 64
num_experts = 4
experts_per_token = 2
moe_ffn_dim = 32
[moe]
balance_rate = 0.01
[data]
train = "random"
[training]
steps = 2
seq_len = 16
local_batch_size = 2
[parallelism]
expert_parallel_degree = 2
[metrics]
log_freq = 1
"""
# Only with a GPU or a failure.
NOT_WRITTEN_HERE = {
    "profile.span_ms",
    "profile.compute_ms",
    "profile.exposed_ms",
    "profile.idle_ms",
    "profile.classes_ms.*",
    "checkpoint_error",
    "cuda_graph.fallbacks.*",
}
# Only with an engine.
NOT_WRITTEN_HERE |= {f"weights_{key}" for key in ("s", "nbytes", "error", "failures")}
# Pixels of the highest point of the loss below the upper end of its plot.
HIGHEST = """
const chart = charts.find((each) => each.spec.title === "Loss");
Math.min(...chart.lines.flatMap((line) => line.y.map(chart.py))) - chart.frame_.top
"""
# Objects whose keys are names.
NAMED = {
    "start.environment",
    "validation_losses",
    "weight_norms",
    "grad_norms",
    "profile.operators_ms",
    "cuda_graph.fallbacks",
}


def strict(text):
    """Reads JSON as the standard has it: no NaN, no Infinity."""

    def refuse(word):
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def fields_of(value, prefix=""):
    """Yields the full names of an object's fields, where fields of names end with
    `.*`."""
    for key, member in value.items():
        name = prefix + key
        if name == "not_finite":
            yield name
        elif name in NAMED:
            yield from [f"{name}.*"] if member else []
        elif isinstance(member, dict):
            yield from fields_of(member, f"{name}.")
        else:
            yield name


def records_of(data):
    """Yields the records of a .wandb file: LevelDB's log format after 7 bytes."""
    block, at, record = 32768, 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:  # no room for a header: zeros
            at += block - at % block
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]  # 1: whole, 2: first, 3: middle, 4: last
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


class Watching(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        temporary = tempfile.TemporaryDirectory()
        cls.addClassCleanup(temporary.cleanup)
        cls.folder = Path(temporary.name)
        for name, text in (("corpus", "README.md"), ("other", "CONTRIBUTING.md")):
            cls.program("data", "prepare", "--input", str(ROOT / text), "--output",
                        str(cls.folder / name), "--tokenizer", "bytes",
                        "--format", "text", "--validation-fraction", "0.2")  # fmt: skip
        saving = ["checkpoint.interval=4", "metrics.tensorboard=true"]
        cls.train("dense", DENSE, *saving, "diagnostics.norms_freq=3",
                  "profiling.enabled=true", "profiling.step=2")  # fmt: skip
        # Steps 5 and 6 are trained again.
        cls.train("dense", DENSE, *saving, "training.steps=8",
                  "checkpoint.load_step=4")  # fmt: skip

    @classmethod
    def program(cls, *arguments, fails=False):
        result = subprocess.run(
            [PROGRAM, *arguments], text=True, capture_output=True, timeout=120
        )
        if (result.returncode != 0) != fails:
            raise AssertionError(f"{arguments}: {result.stdout}{result.stderr}")
        return result.stdout + result.stderr

    @classmethod
    def train(cls, name, config, *settings, ranks=1, fails=False):
        path = cls.folder / f"{name}.toml"
        path.write_text(config.format(folder=cls.folder, name=name))
        return cls.program(
            "train", str(path), "--device", "cpu", "--nproc", str(ranks),
            "--set", *settings, fails=fails,
        )  # fmt: skip

    @classmethod
    def rows(cls, name):
        text = (cls.folder / name / "metrics.jsonl").read_text()
        return [strict(line) for line in text.splitlines()]

    def test_the_page_has_the_fields_that_runs_write(self):
        self.train("experts", EXPERTS, "metrics.log_freq=1", ranks=2)
        self.train("graphs", DENSE, "cuda_graph.impl=unit", "debug.emulate_graphs=true")
        self.train(
            "float8", DENSE, "float8.recipe=rowwise", "precision.compute=bfloat16"
        )
        self.train("skips", DENSE, "training.on_nonfinite=skip",
                   "debug.spoil_gradient_step=2")  # fmt: skip
        paths = [self.folder / name for name in ("corpus", "other")]
        mixture = ", ".join(f'{{ path = "{path}", weight = 1 }}' for path in paths)
        self.train("mixture", DENSE, f"data.train=[{mixture}]",
                   f"data.validation=[{mixture}]")  # fmt: skip
        self.train("diverges", DENSE, "optimizer.lr=1e38", "validation.freq=1",
                   fails=True)  # fmt: skip
        names = ["dense", "experts", "graphs", "float8", "skips", "mixture", "diverges"]
        written = {
            field
            for name in names
            for row in self.rows(name)
            for field in fields_of(row)
        }
        page = (ROOT / "docs/reference/log_and_metrics.md").read_text()
        page = page[page.index("## metrics.jsonl") : page.index("## TensorBoard")]
        documented = set(re.findall(r"^- `([a-z0-9_.*]+)`: ", page, re.M))
        self.assertEqual(written - documented, set(), "written, not on the page")
        self.assertEqual(documented - written - NOT_WRITTEN_HERE, set(), "not written")

    def test_a_loss_that_becomes_nan_is_valid_json(self):
        log = self.train("nan", DENSE, "optimizer.lr=1e38", "validation.freq=1",
                         fails=True)  # fmt: skip
        self.assertIn("is not finite", log)
        rows = self.rows("nan")
        validation = next(row for row in rows if "validation_loss" in row)
        self.assertIsNone(validation["validation_loss"])
        self.assertEqual(
            validation["not_finite"],
            dict.fromkeys(("validation_loss", "perplexity", "bits_per_byte"), "nan"),
        )
        self.assertIn("nonfinite", rows[-1])
        self.assertNotIn("goes_on_after", rows[-1])
        report = strict(
            self.program("report", "--run", str(self.folder / "nan"), "--json")
        )
        columns = report["runs"][0]["validation"]["columns"]
        self.assertEqual(columns["validation_loss"], [None])

    def curve(self):
        """Returns the losses of the dense run by step, as the last start has them."""
        return {
            row["step"]: row["loss"]
            for row in self.rows("dense")
            if "loss" in row and "overtaken" not in row
        }

    def test_json_has_the_series_of_the_last_start(self):
        report = strict(
            self.program("report", "--run", str(self.folder / "dense"), "--json")
        )
        run = report["runs"][0]
        training = run["training"]
        curve = dict(zip(training["step"], training["columns"]["loss"], strict=True))
        self.assertEqual(curve, self.curve())
        self.assertEqual(list(curve), list(range(1, 9)))
        self.assertEqual([start["step"] for start in run["starts"]], [0, 4])
        self.assertEqual([row["step"] for row in run["checkpoints"]], [4, 8])
        tokens = training["columns"]["tokens"]
        self.assertEqual(tokens, [32 * step for step in range(1, 9)])
        self.assertTrue(run["ended"])
        self.assertIn("training.steps", run["changed"])
        # Given by the ranks and not by the user.
        self.assertNotIn("training.global_batch_size", run["changed"])
        (data,) = run["starts"][1]["start"]["data"]
        self.assertEqual(data["path"], str(self.folder / "corpus"))
        self.assertEqual(data["steps_per_epoch"], data["samples"] / 2)
        self.assertEqual(data["epochs"], 8 / data["steps_per_epoch"])

    def test_bad_input_is_named(self):
        log = self.program("report", "--run", "/none", fails=True)
        self.assertIn("--run /none: the directory does not exist", log)
        dense = str(self.folder / "dense")
        log = self.program(
            "report", "--run", dense, "--compare", str(self.folder), fails=True
        )
        self.assertIn("it has no metrics.jsonl", log)
        log = self.program("report", "--run", dense, "--to", "/none/x.html", fails=True)
        self.assertIn("[--to] io error", log)
        self.assertIn("/none/x.html", log)
        damaged = self.folder / "damaged"
        shutil.copytree(self.folder / "dense", damaged)
        with (damaged / "metrics.jsonl").open("a") as file:
            file.write('{"step": 9, "lo')
        num_rows = len(self.rows("dense"))
        page = str(self.folder / "damaged.html")
        log = self.program("report", "--run", str(damaged), "-o", page)
        self.assertIn(f"damaged/metrics.jsonl:{num_rows + 1}: skipped", log)
        self.assertIn(f"metrics.jsonl:{num_rows + 1}: skipped", Path(page).read_text())

    @unittest.skipUnless(
        importlib.util.find_spec("tensorboard"),
        "tensorboard is not installed (requirements.txt has it)",
    )
    def test_tensorboard_reads_the_events(self):
        from tensorboard.backend.event_processing import event_accumulator

        folder = self.folder / "dense/tensorboard"
        self.assertEqual(len(list(folder.iterdir())), 2)
        events = event_accumulator.EventAccumulator(str(folder))
        events.Reload()
        self.assertEqual(events.file_version, 2.0)
        scalars = events.Scalars("train/loss")
        self.assertEqual([scalar.step for scalar in scalars], list(range(1, 9)))
        for scalar in scalars:
            self.assertAlmostEqual(scalar.value, self.curve()[scalar.step], places=5)
        validations = [scalar.step for scalar in events.Scalars("validation/loss")]
        self.assertEqual(validations, [3, 6, 8])
        times = [scalar.wall_time for scalar in scalars]
        self.assertEqual(times, sorted(times))
        self.assertIn("memory/peak_bytes", events.Tags()["scalars"])

    @unittest.skipUnless(
        importlib.util.find_spec("wandb"),
        "wandb is not installed (requirements-dev.txt has it)",
    )
    def test_wandb_takes_what_the_example_follows(self):
        from wandb.proto import wandb_internal_pb2

        environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true",
                       "WANDB_DIR": str(self.folder)}  # fmt: skip
        subprocess.run(
            [sys.executable, ROOT / "examples/python/wandb_follow.py",
             self.folder / "dense"],
            env=environment, timeout=120, check=True,
        )  # fmt: skip
        (file,) = (self.folder / "wandb").glob("offline-run-*/*.wandb")
        curve = {}
        for data in records_of(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            row = {
                ".".join([item.key, *item.nested_key]).strip("."): item.value_json
                for item in record.history.item
            }
            if "loss" in row:
                curve[int(row["step"])] = float(row["loss"])
        self.assertEqual(curve.keys(), self.curve().keys())
        for step, loss in self.curve().items():
            self.assertTrue(math.isclose(curve[step], loss, rel_tol=1e-9))

    def test_a_browser_shows_the_page_without_errors(self):
        if not any(map(shutil.which, CHROMIUM)):
            self.skipTest("there is no Chromium (Debian: apt-get install chromium)")
        self.train("second", DENSE, "optimizer.lr=0.01", "training.steps=3",
                   "validation.freq=1")  # fmt: skip
        runs = [str(self.folder / name) for name in ("dense", "second")]
        for more in ([], ["--compare", runs[1]]):
            page = str(self.folder / "page.html")
            self.program("report", "--run", runs[0], *more, "-o", page)
            result = subprocess.run(
                [CHECK_PAGE, page], text=True, capture_output=True, timeout=120
            )
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_chart_of_a_short_run_leaves_nothing_out(self):
        if not any(map(shutil.which, CHROMIUM)):
            self.skipTest("there is no Chromium (Debian: apt-get install chromium)")
        folder = self.folder / "steep"
        folder.mkdir()
        for num_rows, all_inside in ((1, True), (60, True), (300, False)):
            rows = [{"step": i, "loss": 2 + 50 / i} for i in range(1, num_rows + 1)]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / "metrics.jsonl").write_text(text)
            self.program("report", "--run", str(folder))
            result = subprocess.run(
                [CHECK_PAGE, folder / "report.html", "--evaluate", HIGHEST],
                text=True, capture_output=True, timeout=120, check=True,
            )  # fmt: skip
            self.assertEqual(float(result.stdout) >= 0, all_inside, num_rows)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1) if len(sys.argv) > 1 else PROGRAM
    unittest.main(verbosity=2)
