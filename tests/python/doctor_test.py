"""Checks the report of `python -m flatshard.doctor` on a machine, and its exit status.
Its steps, except for one, are replaced here; wheel_test.sh runs all of it."""

import re

import pytest
import torch

from flatshard import doctor


@pytest.fixture
def trial(monkeypatch):
    """The last (device or kind) that was tried; `why` is what its trial returns."""
    state = {"why": ""}
    monkeypatch.setattr(doctor, "try_out", lambda device: state["why"])
    monkeypatch.setattr(doctor, "try_ranks", lambda kind: state["why"])
    return state


@pytest.mark.parametrize(
    "built, gpus, why, code, text",
    [
        (True, False, "", 0, "note .*torch sees no GPU"),
        (False, False, "", 0, "one step on a CPU +works"),
        (False, False, "", 0, "two ranks by Gloo +works"),
        (True, False, "no way", 1, "one step on a CPU +FAILED"),
        (True, False, "no way", 1, "would not work: two ranks by Gloo: no way"),
        (False, True, "", 1, "would not work: training on this machine's GPUs"),
    ],
)
def test_it_ends_with_0_where_training_works(
    built, gpus, why, code, text, trial, monkeypatch, capsys
):
    monkeypatch.setattr(doctor._C, "with_cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    trial["why"] = why
    assert doctor.main() == code

    assert re.search(text, capsys.readouterr().out)


def test_each_kind_of_gpu_and_two_of_them_are_tried(trial, monkeypatch, capsys):
    kinds = [(0, "GPUs 0, 1 (A100, sm_80)\n"), (2, "GPU 2 (H100, sm_90)\n")]
    monkeypatch.setattr(doctor._C, "with_cuda", True)
    monkeypatch.setattr(doctor._C, "gpu_kinds", lambda: kinds)
    monkeypatch.setattr(doctor._C, "try_peer_copies", lambda: ["0 to 2: lost"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert doctor.main() == 1

    out = capsys.readouterr().out
    for name in ("step on GPU 0", "step on GPU 2", "two ranks by NCCL"):
        assert re.search(f"{name} +works", out)
    assert "step on GPU 1" not in out
    assert "(A100, sm_80)" in out
    assert "would not work: copies of GPUs: 0 to 2: lost" in out


def test_a_rank_that_fails_is_reported_with_its_reason(tmp_path, monkeypatch):
    """Python's stand-in: arguments -m flatshard.doctor --rank RANK KIND STORE."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho began\necho $4 on $5 fell\nexit $4\n")
    python.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(python))
    assert doctor.try_ranks("cuda") == "rank 1, exit code 1: 1 on cuda fell"


def test_the_versions_and_what_the_build_is_for():
    facts = dict(doctor.findings())
    assert "flatshard was built for" in facts["torch"]
    assert facts["CUDA code for"]
    assert "threads" in facts["host"]
