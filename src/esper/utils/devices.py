"""Choose devices and CPU threads, and keep small constant tables on each device once."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor
from torch.nn.functional import embedding

from esper.utils.errors import UserError
from esper.utils.launch import Launch

POPULATION_DEVICES = ("cpu", "cuda")  # device types that a population runs on
MODEL_DEVICES = (*POPULATION_DEVICES, "mps")  # device types that one model of the user runs on
# FLOPs of the forward pass of a batch below which a model counts as small. On two busy cores two threads took
# 16 to 39 times as long as one up to 5e7, 4 to 13 times at 1e8 to 1.4e8, and 2 to 3 times from 2e8 on.
SMALL_PASS = 2e8
# Of glibc's mallopt, by their numbers in malloc.h; the values are bytes, above what tensors on a CPU have.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BLOCK, KEPT_MEMORY = 2**30, 2**31 - 1


def choose_device(name: str, local_rank: int = 0, kinds: Sequence[str] = POPULATION_DEVICES) -> torch.device:
    """Return the device of that name; 'auto' is the first CUDA device where there is one.

    Of several processes on one machine each has a GPU of its own as long as there are enough: 'auto' and
    'cuda' are the GPU with the number of the process there, `local_rank`.
    """
    # Process 0 keeps "cuda" without a number, as a single process has it.
    if name in ("auto", "cuda") and local_rank and torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device is {name!r}; allowed are auto, cpu, cuda, cuda:1, ...") from None
    if device.type not in kinds:
        raise UserError(f"device is {name!r}; this runs on {' and '.join(kinds)}")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device is {name!r}, and this torch sees no such device; choose cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device is {name!r}, and this torch sees {torch.cuda.device_count()} CUDA devices; choose "
            "another, or look with 'esper doctor'"
        )
    return device


def own_device(name: str) -> torch.device:
    """Choose the device of this process and make it torch's current one.

    CUDA streams, graphs and Triton kernels are made on the current device.
    """
    device = choose_device(name, Launch.of().local_rank)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def memory_of(device: torch.device) -> int:
    """Return the memory of a device in bytes, used or free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if not hasattr(os, "sysconf"):  # Windows
        return sys.maxsize
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads for a block that trains; 0 changes nothing.

    The order of a sum depends on their number, so that it belongs to what decides the bits of a run.
    """
    keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def keep_freed_memory() -> None:
    """Let this process use memory again that it has freed, where the C library is glibc.

    By default large blocks go back to the system, and every step of a training gets its activations page by
    page, each cleared: a quarter of a step of 16 small convolutional networks.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)
        mallopt(M_TRIM_THRESHOLD, KEPT_MEMORY)


def threads_for(flops: float) -> int:
    """Return the CPU threads for a model whose forward pass of a batch has so many FLOPs; 0: as they are set.

    That is 1 for a small model, unless the user chose a number: a thread that waits for the other spins. A
    number that torch would choose by itself does not count as chosen.
    """
    defaults = {torch.get_num_interop_threads(), os.cpu_count()}
    if hasattr(os, "sched_getaffinity"):
        defaults.add(len(os.sched_getaffinity(0)))
    chosen = "OMP_NUM_THREADS" in os.environ or torch.get_num_threads() not in defaults
    return 0 if chosen or flops >= SMALL_PASS else 1


P = ParamSpec("P")


def device_table(build: Callable[P, Tensor]) -> Callable[Concatenate[torch.device, P], Tensor]:
    """Turn `build(*key) -> CPU tensor` into `table(device, *key)`, built once per device and key."""

    @lru_cache(maxsize=None, typed=True)  # typed: members of two IntEnums may be equal
    @wraps(build)
    def table(device: torch.device, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        # A tensor made in inference mode could not be saved for a later backward pass.
        with torch.inference_mode(False):
            return build(*args, **kwargs).to(device, non_blocking=True)

    return table  # type: ignore[return-value]


def lookup(values: Sequence[float] | Sequence[Sequence[float]]) -> Callable[[Tensor], Tensor]:
    """Return a function that reads these values, or rows, at a tensor of indices, on its device."""
    table = device_table(lambda: torch.tensor(values))

    def look_up(index: Tensor) -> Tensor:
        found = table(index.device)
        return found.take(index) if found.ndim == 1 else embedding(index, found)

    return look_up
