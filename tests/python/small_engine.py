"""An inference engine without inference: it has the routes through which vLLM and SGLang
receive weights, as they document them, and broadcasts over Gloo.

usage: small_engine.py STORE_PORT

It prints the port of its routes. GET / returns {name: SHA-256 of the bytes} of what it
received, and the routes that were called.
"""

import hashlib
import json
import sys
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def join(port, rank):
    """Returns the group of the trainer, rank 0, and the engine."""
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, TIMEOUT, False)
    return dist.ProcessGroupGloo(store, rank, 2, TIMEOUT)


def digest(tensor):
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Engine(BaseHTTPRequestHandler):
    group = None
    routes: list[str] = []
    received: dict[str, str] = {}

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(length) or "{}")
        self.routes.append(self.path)
        if self.path in ("/init_weight_transfer_engine", "/init_weights_update_group"):
            self.answer({"success": True})  # before the trainer connects
            Engine.group = join(int(sys.argv[1]), 1)
            return
        if self.path == "/update_weights":
            info = body["update_info"]
            names, dtypes = info["names"], info["dtype_names"]
            for name, dtype, shape in zip(names, dtypes, info["shapes"]):
                tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                self.receive(tensor)
                self.received[name] = digest(tensor)
        elif self.path == "/update_weights_from_distributed":
            assert body["load_format"] == "flattened_bucket"
            kinds = [getattr(torch, dtype) for dtype in body["dtypes"]]
            sizes = [
                torch.Size(shape).numel() * kind.itemsize
                for kind, shape in zip(kinds, body["shapes"])
            ]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            self.receive(flat)
            for name, part in zip(body["names"], flat.split(sizes)):
                self.received[name] = digest(part)
        self.answer({"success": True})

    def receive(self, tensor):
        self.group.broadcast(tensor, 0).wait()

    def do_GET(self):
        self.answer({"weights": self.received, "routes": self.routes})

    def answer(self, value):
        text = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = HTTPServer(("127.0.0.1", 0), Engine)
    print(server.server_port, flush=True)
    server.serve_forever()
