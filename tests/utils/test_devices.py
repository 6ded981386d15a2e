"""Devices by name, and constant tables on each of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from esper.lifecycle.actions import AlphaTarget, Style
from esper.utils.devices import (
    MODEL_DEVICES,
    choose_device,
    cpu_threads,
    device_table,
    lookup,
    memory_of,
    threads_for,
)
from esper.utils.errors import UserError


def test_a_living_model_may_be_on_a_kind_of_device_that_a_population_may_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="this runs on cpu and cuda"):
        choose_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="sees no such device; choose cpu"):
        choose_device("mps", kinds=MODEL_DEVICES)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device("mps", kinds=MODEL_DEVICES).type == "mps"


def test_a_system_that_does_not_tell_its_memory_has_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < memory_of(torch.device("cpu")) < sys.maxsize
    monkeypatch.delattr(os, "sysconf")
    assert memory_of(torch.device("cpu")) == sys.maxsize


def test_small_models_run_on_one_thread_unless_the_user_chose_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    default = torch.get_num_interop_threads()
    with cpu_threads(default):
        assert threads_for(1e5) == 1
        assert threads_for(1e12) == 0
        monkeypatch.setenv("OMP_NUM_THREADS", str(default))
        assert threads_for(1e5) == 0
        monkeypatch.delenv("OMP_NUM_THREADS")
    with cpu_threads(default + 61):
        assert threads_for(1e5) == 0


FAULTS = """
import resource, torch
from esper.utils.devices import cpu_threads

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        torch.ones(2**23)  # 32 MiB, the most that glibc keeps by itself
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
with cpu_threads(1):
    faults()
    print(before, faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="not the C library of GNU")
def test_a_training_uses_memory_again_that_it_has_freed() -> None:
    printed = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60)
    before, during = map(int, printed.stdout.split())
    assert before > 20 * during, printed


CPU = torch.device("cpu")


def test_a_table_is_built_once_for_each_key() -> None:
    built: list[int] = []

    @device_table
    def squares(count: int) -> Tensor:
        built.append(count)
        return torch.arange(count) ** 2

    assert squares(CPU, 3).tolist() == [0, 1, 4]
    assert squares(CPU, 3) is squares(CPU, 3)
    assert squares(CPU, 2).tolist() == [0, 1]
    assert built == [3, 2]


def test_equal_members_of_two_enums_are_two_keys() -> None:
    @device_table
    def name_length(choice: Style | AlphaTarget) -> Tensor:
        return torch.tensor(len(choice.name))

    assert Style.SIGMOID_ADD == AlphaTarget.FULL
    assert name_length(CPU, Style.SIGMOID_ADD).item() == len("SIGMOID_ADD")
    assert name_length(CPU, AlphaTarget.FULL).item() == len("FULL")


def test_a_table_first_asked_for_in_inference_mode_can_be_kept_for_backward() -> None:
    @device_table
    def halves() -> Tensor:
        return torch.full((3,), 0.5)

    with torch.inference_mode():
        halves(CPU)
    weight = torch.ones(3, requires_grad=True)
    (weight * halves(CPU)).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5] * 3


def test_a_lookup_keeps_the_shape_of_the_positions_and_counts_from_the_end() -> None:
    letters = lookup([10.0, 20.0, 30.0])
    assert letters(torch.tensor([[0, 2], [1, -1]])).tolist() == [[10.0, 30.0], [20.0, 30.0]]
    assert lookup([True, False])(torch.tensor(0)).dtype == torch.bool
