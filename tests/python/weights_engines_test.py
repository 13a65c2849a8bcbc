"""Weights of a sharded model in engines that have vLLM's and SGLang's routes."""

import json
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
import torch

from flatshard import weights
from tests.python import small_engine
from tests.python.models import Mlp
from tests.python.training import shard, train
from bench.harness.options import fully_shard

BF16 = torch.bfloat16
VLLM = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
SGLANG = (
    "/pause_generation",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/continue_generation",
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Client:
    """The trainer's side, on rank 0."""

    def __init__(self):
        self.store_port = free_port()
        program = Path(small_engine.__file__)
        self.engine = subprocess.Popen(
            [sys.executable, program, str(self.store_port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.url = f"http://127.0.0.1:{self.engine.stdout.readline().strip()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.engine.kill()
        self.engine.wait()
        self.engine.stdout.close()

    def call(self, route, body=None):
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(self.url + route, data, timeout=60) as answer:
            return json.load(answer)

    def connect(self, route):
        self.call(route, {})
        self.group = small_engine.join(self.store_port, 0)

    def update(self, route, body, tensors):
        """Calls the route, and meanwhile broadcasts what it receives."""
        failures = []

        def call():
            try:
                self.call(route, body)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        for tensor in tensors:
            self.group.broadcast(tensor.contiguous().cpu(), 0).wait()
        thread.join()
        assert not failures


class Nobody:
    """The client of other ranks: they only iterate."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def call(self, *_):
        return {"weights": None, "routes": None}

    def connect(self, *_):
        pass

    def update(self, route, body, tensors):
        for _ in tensors:
            pass


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def send_to_vllm(client, model):
    init, start, update, finish = VLLM
    source = weights.vllm_source(model, dtype=BF16)
    client.connect(init)
    client.call(start, {})
    metadata = source.metadata()
    info = {
        "names": [meta.name for meta in metadata],
        "dtype_names": [dtype_name(meta.dtype) for meta in metadata],
        "shapes": [meta.shape for meta in metadata],
    }
    tensors = (tensor for _, tensor in source)
    client.update(update, {"update_info": info}, tensors)
    client.call(finish, {})


def send_to_sglang(client, model):
    pause, init, update, go_on = SGLANG
    client.call(pause, {})
    client.connect(init)
    for bucket in weights.sglang_buckets(model, nbytes=3000, dtype=BF16):
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": "trainer",
            "load_format": "flattened_bucket",
        }
        client.update(update, body, [bucket.flattened_tensor])
    client.call(go_on, {})


@pytest.mark.parametrize(
    "send, routes",
    [(send_to_vllm, VLLM), (send_to_sglang, SGLANG)],
    ids=["vllm", "sglang"],
)
def test_an_engine_receives_all_weights(send, routes, mesh, rank):
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    train(model, rank, steps=1)
    with Client() if rank == 0 else Nobody() as client:
        send(client, model)
        found = client.call("/")
    expected = {
        name: small_engine.digest(tensor.cpu())
        for name, tensor in weights.stream(model, dtype=BF16)
    }
    if rank == 0:
        assert found["weights"] == expected
        assert tuple(dict.fromkeys(found["routes"])) == routes
