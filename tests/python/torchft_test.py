"""torchft's quorum over set_all_reduce_hook: training continues without a lost replica."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

coordination = pytest.importorskip("torchft.coordination")

RANKS = 2  # of a replica
UPDATES = 8
LOST = 3  # the update that one replica does not see
LIMIT_S = 120


def start(name, last, lighthouse):
    """Starts the ranks of a replica."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    of_replica = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "TORCHFT_LIGHTHOUSE": lighthouse,
    }
    program = [sys.executable, "-m", "tests.python.torchft_replica"]
    return [
        subprocess.Popen(
            [*program, name, str(UPDATES), str(last)],
            cwd=Path(__file__).parents[2],
            env={**os.environ, **of_replica, "RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]


def rows(process):
    out, _ = process.communicate(timeout=LIMIT_S)
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def test_training_continues_without_a_lost_replica(rank):
    if rank != 0:
        return  # it starts its own ranks
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000
    )
    address = lighthouse.address()
    processes = start("lost", LOST, address)
    processes += start("stays", UPDATES, address)
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        lost, _, *stays = [rows(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
        lighthouse.shutdown()
    assert stays[0] == stays[1]  # ranks of a replica agree
    assert [row["step"] for row in stays[0]] == list(range(UPDATES))
    replicas = [row["replicas"] for row in stays[0]]
    assert replicas == [2] * LOST + [1] * (UPDATES - LOST)
    assert lost == stays[0][:LOST]  # the mean of both replicas was applied in both
