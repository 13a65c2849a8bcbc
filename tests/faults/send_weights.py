#!/usr/bin/env python3
"""`flatshard train` on two CPU ranks sends its weights to an inference engine.

The engine is a process without inference that has the routes of SGLang, and joins the
group as SGLang does, over Gloo. It receives what `flatshard export` writes, bit for bit.
Then it is away, refuses requests, does not join the group, and dies after a part of the
weights: no step is lost,
and losses and weights equal a run that sends nothing, bit for bit. It is left paused only
with a part of the weights. A stop sends nothing.

usage: send_weights.py PROGRAM [cpu|cuda]

cuda: one rank on the first GPU, and the engine on the second one, over NCCL.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.request import urlopen

import small_run
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from small_run import Failure
from torch.distributed.distributed_c10d import _new_process_group_helper

STEPS = 8
EVERY = 3
SENDS = [3, 6, 8]
LIMIT_S = 120
STOPPED = 128 + signal.SIGTERM
TIMEOUT = timedelta(seconds=30)
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "0"}  # of the trainer
# Experts that are divided among the ranks. The router's float32 biases do not start at a
# multiple of their size after the other tensors, so there are two buckets.
EXPERTS = [
    "model.family=moe",
    "model.num_experts=4",
    "model.experts_per_token=2",
    "model.moe_ffn_dim=32",
    "moe.balance_rate=0.01",
    "parallelism.expert_parallel_degree=2",
]
ROUTES = [
    "/pause_generation",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
    "/continue_generation",
]
# The route that the engine refuses in a send, by the number of the send.
REFUSED = {
    1: "/init_weights_update_group",
    2: "/destroy_weights_update_group",
    3: "/update_weights_from_distributed",
    4: "/init_weights_update_group",
    5: "/init_weights_update_group",
}
# Whether it was left paused before each send. The third one left some weights there.
LEFT_PAUSED = [False, False, False, True, True, True, False, False]


def digest(tensor):
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


class Engine(BaseHTTPRequestHandler):
    """How it fails is the second argument: "none", "refuses", "ignores" or "dies". The
    third one is its device."""

    groups: dict[str, object] = {}
    received: dict[str, str] = {}
    routes: list[str] = []
    updates = 0
    paused = False
    left_paused: list[bool] = []  # before each send
    version = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Engine.routes.append(self.path)
        try:
            self.handle_route(body)
        except Exception as error:
            # A refusal is also one with status 200.
            status = 200 if self.path == "/update_weights_from_distributed" else 400
            self.answer(status, {"success": False, "message": str(error)})
        else:
            self.answer(200, {"success": True, "message": "done"})

    def handle_route(self, body):
        refuses = sys.argv[2] == "refuses"
        if refuses and REFUSED.get(len(self.left_paused)) == self.path:
            raise RuntimeError("out of memory")
        if self.path == "/pause_generation":
            assert body == {"mode": "retract"}, body
            self.left_paused.append(Engine.paused)
            Engine.paused = True
        elif self.path == "/init_weights_update_group":
            if sys.argv[2] == "ignores":
                return
            self.groups[body["group_name"]] = self.join(body)
        elif self.path == "/update_weights_from_distributed":
            self.update(body)
        elif self.path == "/destroy_weights_update_group":
            del self.groups[body["group_name"]]
        elif self.path == "/continue_generation":
            Engine.paused = False
        else:
            raise AssertionError(f"no route {self.path}")

    def join(self, body):
        """As SGLang's init_custom_process_group: torch has no public function for a
        group next to the default one."""
        backend = {"cpu": "gloo", "cuda": "nccl"}[sys.argv[3]]
        assert body["backend"] == backend, body
        size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
        store = dist.TCPStore(
            body["master_address"], body["master_port"], size, False, TIMEOUT
        )
        group, _ = _new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend(backend),
            dist.PrefixStore(name, store),
            group_name=name,
            timeout=TIMEOUT,
        )
        return group

    def update(self, body):
        Engine.updates += 1
        assert self.paused and body["load_format"] == "flattened_bucket", body
        if Engine.updates == 2 and sys.argv[2] == "dies":
            os._exit(1)
        kinds = [getattr(torch, dtype) for dtype in body["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * kind.itemsize
            for kind, shape in zip(kinds, body["shapes"])
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=sys.argv[3])
        self.groups[body["group_name"]].broadcast(flat, 0).wait()
        for name, kind, part in zip(body["names"], kinds, flat.split(sizes)):
            self.received[name] = digest(part.view(kind))
        if body["flush_cache"]:
            Engine.version = body["weight_version"]

    def do_GET(self):
        self.answer(
            200,
            {
                "weights": self.received,
                "routes": self.routes,
                "version": self.version,
                "paused": self.paused,
                "left_paused": self.left_paused,
                "groups": len(self.groups),
            },
        )

    def answer(self, status, value):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def serve():
    server = HTTPServer(("127.0.0.1", 0), Engine)
    print(server.server_port, flush=True)
    server.serve_forever()


class EngineProcess:
    def __init__(self, failure, device):
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", failure, device],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "1"},
        )
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def state(self):
        with urlopen(self.url, timeout=30) as answer:
            return json.load(answer)


def options_of_sends(url, every, timeout_s):
    return (
        f"weights.send={url}",
        f"weights.every={every}",
        f"weights.timeout_s={timeout_s}",
    )


class Runs:
    def __init__(self, program, device, folder):
        self.program, self.device, self.folder = program, device, folder
        self.experts = EXPERTS if device == "cpu" else EXPERTS[:-1]  # one rank
        self.corpus = small_run.prepare_corpus(program, folder)

    def command(self, name, *more):
        """Returns the command that trains this run."""
        config = self.folder / f"{name}.toml"
        text = small_run.CONFIG.format(
            output=self.folder / name,
            corpus=self.corpus,
            steps=STEPS,
            batch=4,
            warmup=0,
            interval=STEPS,
            keep=1,
            timeout=60,
        )
        config.write_text(text.replace('"float32"', '"bfloat16"'))
        command = [self.program, "train", config, "--device", self.device]
        command += ["--nproc", "2" if self.device == "cpu" else "1"]
        for option in ("debug.deterministic=true", *more):
            command += ["--set", option]
        return command

    def train(self, name, *more):
        """Returns the run's folder and its log."""
        done = subprocess.run(
            self.command(name, *more),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env=ENVIRONMENT,
        )
        if done.returncode != 0:
            raise Failure(f"{name}: exit {done.returncode}:\n{done.stderr[-3000:]}")
        return self.folder / name, done.stderr

    def send(self, name, url, *more, every=EVERY, timeout_s=30):
        options = options_of_sends(url, every, timeout_s)
        return self.train(name, *options, *more)

    def exported(self, run):
        """Returns the digest of each tensor of the last checkpoint in bfloat16."""
        to = self.folder / f"{run.name}_exported"
        command = [self.program, "export", "--run", run, "--to", to]
        subprocess.run(
            [*command, "--dtype", "bfloat16"], check=True, capture_output=True
        )
        found = {}
        for file in to.glob("*.safetensors"):
            found |= {name: digest(t) for name, t in load_file(file).items()}
        return found


def rows_of(run, key):
    with (run / "metrics.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    return [row for row in rows if key in row]


def expect(condition, what):
    if not condition:
        raise Failure(what)


def expect_equal_training(run, plain):
    """No step is lost, and nothing is trained in another way."""
    losses = [[row["loss"] for row in rows_of(r, "loss")] for r in (run, plain)]
    expect(len(losses[0]) == STEPS, f"{run.name}: steps {losses[0]}")
    expect(losses[0] == losses[1], f"{run.name}: losses {losses}")
    files = [(r / "model.safetensors").read_bytes() for r in (run, plain)]
    expect(files[0] == files[1], f"{run.name}: other weights")


def expect_sends(run, sent, failed):
    steps = [row["step"] for row in rows_of(run, "weights_s")]
    errors = rows_of(run, "weights_error")
    expect(steps == sent, f"{run.name}: sent {steps}, expected {sent}: {errors}")
    found = [(row["step"], row["weights_failures"]) for row in errors]
    wanted = [(step, i + 1) for i, step in enumerate(failed)]
    expect(found == wanted, f"{run.name}: failed {errors}, expected {wanted}")


def expect_warning(log, step, *parts):
    start = f"the weights of step {step} were not sent"
    lines = [line for line in log.splitlines() if start in line]
    for part in parts:
        expect(lines and part in lines[0], f"no warning with {part!r}:\n{log[-3000:]}")
    # torch's own lines about a failed connect.
    expect("connectFullMesh" not in log, f"a line of torch:\n{log[-3000:]}")


def check_sends(runs, plain):
    with EngineProcess("none", runs.device) as engine:
        run, log = runs.send("sends", engine.url)
        state = engine.state()
    expect_equal_training(run, plain)
    expect_sends(run, sent=SENDS, failed=[])
    expect(state["weights"] == runs.exported(run), "other weights than the export's")
    expect(state["routes"] == ROUTES * len(SENDS), f"routes {state['routes']}")
    expect(state["version"] == str(STEPS), f"version {state['version']}")
    expect(not state["paused"] and state["groups"] == 0, "the engine is left paused")
    expect("sent the weights of step 3 to http" in log, f"no line:\n{log[-3000:]}")


def check_absent(runs, plain):
    with EngineProcess("none", runs.device) as engine:
        url = engine.url
    run, log = runs.send("absent", url)
    expect_equal_training(run, plain)
    expect_sends(run, sent=[], failed=SENDS)
    expect_warning(log, 3, url, "/pause_generation", "refused", "next send is tried")
    expect_warning(log, STEPS, "; this was the last send: ")


def check_refuses(runs, plain):
    with EngineProcess("refuses", runs.device) as engine:
        # Longer than LIMIT_S if the three refused groups waited for the time limit.
        run, log = runs.send("refuses", engine.url, every=1, timeout_s=50)
        state = engine.state()
    expect_equal_training(run, plain)
    steps = list(range(1, STEPS + 1))
    expect_sends(run, sent=steps[len(REFUSED) :], failed=steps[: len(REFUSED)])
    expect_warning(log, 1, "expected status 200, got 400", "out of memory")
    expect_warning(log, 3, "/update_weights_from_distributed: the engine failed: ")
    expect_warning(log, 3, "out of memory", "stays paused until it has all weights: ")
    # The one that it refused to end.
    expect(state["groups"] == 1, f"the engine has {state['groups']} groups")
    expect(state["weights"] == runs.exported(run), "other weights than the export's")
    expect(state["left_paused"] == LEFT_PAUSED, f"paused: {state['left_paused']}")
    expect(not state["paused"], "the engine is left paused")


def check_ignores(runs, plain):
    if runs.device == "cuda":
        return  # NCCL connects in the first broadcast, which the engine refuses
    with EngineProcess("ignores", runs.device) as engine:
        run, log = runs.send("ignores", engine.url, every=STEPS, timeout_s=3)
        state = engine.state()
    expect_equal_training(run, plain)
    expect_sends(run, sent=[], failed=[STEPS])
    expect_warning(log, STEPS, "weights.timeout_s = 3 ", "weights.engine_ranks = 1 ")
    expect(not state["paused"], "the engine is left paused")
    expect_warning(log, STEPS, "the group's other ranks did not join in time")


def check_experts(runs, _):
    with EngineProcess("none", runs.device) as engine:
        run, _ = runs.send("experts", engine.url, *runs.experts)
        state = engine.state()
    expect_sends(run, sent=SENDS, failed=[])
    saved = load_file(run / "model.safetensors")
    expected = {
        name: digest(tensor if name.endswith("_bias") else tensor.bfloat16())
        for name, tensor in saved.items()
    }
    expect(state["weights"] == expected, "other weights than the saved ones")
    updates = state["routes"].count("/update_weights_from_distributed")
    expect(updates == 2 * len(SENDS), f"{updates} buckets")


def check_dies(runs, _):
    plain, _ = runs.train("plain_experts", *runs.experts)
    with EngineProcess("dies", runs.device) as engine:
        run, log = runs.send("dies", engine.url, *runs.experts)
    expect_equal_training(run, plain)
    expect_sends(run, sent=[], failed=SENDS)
    expect_warning(log, 3, "/update_weights_from_distributed")


def check_stops(runs, _):
    with EngineProcess("none", runs.device) as engine:
        options = options_of_sends(engine.url, every=1, timeout_s=30)
        command = runs.command("stops", *options, "training.steps=500")
        with subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        ) as process:
            while process.poll() is None and engine.state()["version"] is None:
                pass
            process.terminate()
            log = process.communicate(timeout=LIMIT_S)[1]
    expect(process.returncode == STOPPED, f"exit {process.returncode}:\n{log[-3000:]}")
    run = runs.folder / "stops"
    stop = rows_of(run, "loss")[-1]["step"]
    expect_sends(run, sent=list(range(1, stop)), failed=[])


CHECKS = (
    check_sends,
    check_absent,
    check_refuses,
    check_ignores,
    check_experts,
    check_dies,
    check_stops,
)


def main():
    with tempfile.TemporaryDirectory() as folder:
        device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
        runs = Runs(sys.argv[1], device, Path(folder))
        plain, _ = runs.train("plain")
        for check in CHECKS:
            check(runs, plain)
            print(f"ok  {check.__name__}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve()
    else:
        main()
