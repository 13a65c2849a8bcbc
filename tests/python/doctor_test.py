"""What `python -m flatshard.doctor` says of a machine, and how it ends. Its step is taken
for granted here; wheel_test.sh runs all of it."""

import re

import pytest
import torch

from flatshard import doctor


@pytest.mark.parametrize(
    "built, gpus, works, code, text",
    [
        (True, False, True, 0, "note .*torch sees no GPU"),
        (False, False, True, 0, "one step on a CPU +works"),
        (True, False, False, 1, "one step on a CPU +FAILED"),
        (False, True, True, 1, "would not work: training on this machine's GPUs"),
    ],
)
def test_it_ends_with_0_where_training_works(
    built, gpus, works, code, text, monkeypatch, capsys
):
    monkeypatch.setattr(doctor._C, "with_cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(doctor, "try_out", lambda: works)
    assert doctor.main() == code

    assert re.search(text, capsys.readouterr().out)
