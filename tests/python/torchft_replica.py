"""One rank of a replica that torchft keeps in step with others; torchft_test.py starts them.

usage: torchft_replica.py NAME UPDATES LAST, with torchrun's environment and TORCHFT_LIGHTHOUSE

The replica trains until UPDATES updates are committed. It ends without a word before update
LAST, if that is earlier. Prints a row of JSON for each update that is not thrown away.
"""

import hashlib
import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from flatshard import fully_shard, optim
from tests.python.models import Mlp

TIMEOUT = timedelta(seconds=20)


def digest(model):
    """Collective."""
    bits = hashlib.sha256()
    for parameter in model.parameters():
        bits.update(parameter.full_tensor().detach().numpy().tobytes())
    return bits.hexdigest()


def main():
    name, updates, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*model.units(), model]:
        fully_shard(unit, mesh=mesh)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        min_replica_size=1,
        load_state_dict=None,
        state_dict=None,
        replica_id=name,
        use_async_quorum=False,
        init_sync=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
    )
    for unit in [*model.units(), model]:
        unit.set_all_reduce_hook(lambda reduced: manager.allreduce(reduced).wait())
    print("ready", flush=True)
    sys.stdin.readline()  # a quorum waits only for replicas that it knows
    while manager.current_step() < updates:
        step = manager.current_step()
        manager.start_quorum()
        if step == last:
            os._exit(1)  # after the others have agreed on this update
        data = torch.Generator().manual_seed(100 * step + dist.get_rank())
        model.loss(data).backward()
        if manager.should_commit():
            optimizer.step()
            row = {"step": step, "replicas": manager.num_participants()}
            print(json.dumps({**row, "digest": digest(model)}), flush=True)
        optimizer.zero_grad()
    manager.shutdown(wait=False)
    os._exit(0)  # torchft's threads would wait for the lost replica


if __name__ == "__main__":
    main()
