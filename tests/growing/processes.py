"""Growth in two processes: `python -m tests.growing.processes FOLDER` trains by DDP and FSDP2.

The processes are forks of this program, so that what they need is imported once.
"""

from __future__ import annotations

import copy
import os
import sys

import pytest
import torch
import torch._dynamo  # every process would import it for its optimizer, and it is slow
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from esper.growing.progressive import Progressive
from esper.utils.errors import UserError
from examples import ddp
from tests.growing.test_progressive import OPTIMIZERS, TABLE, make, train_step


def run(rank: int, folder: str, processes: int) -> None:
    store = f"file://{folder}/store{processes}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    train(rank, folder, processes)
    torch.distributed.destroy_process_group()


def train(rank: int, folder: str, processes: int) -> None:
    """Grow into a small model in each way; write the weights to WAY-PROCESSES-RANK.pt.

    The models end with this function: a reducer of DDP that outlives its process group keeps it, and takes it
    down under Python's lock, for which a thread of gloo may be waiting (torch 2.13 hangs then).
    """
    model = make()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()  # statistics of half a batch would differ
    sharded = copy.deepcopy(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (processes,))
    for module in (*sharded[1], sharded):  # type: ignore[misc]
        fully_shard(module, mesh=mesh)
    static = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True, static_graph=True)
    with pytest.raises(UserError, match="without static_graph=True"):
        Progressive(static, OPTIMIZERS["adamw"](static.parameters()), 6)
    ways = {
        "ddp": DistributedDataParallel(model, find_unused_parameters=True),
        "fsdp2": sharded,
    }
    for name, wrapped in ways.items():
        optimizer = OPTIMIZERS["adamw"](wrapped.parameters())
        grower = Progressive(wrapped, optimizer, 6, grow_at=0.5)
        for _ in range(6):
            train_step(wrapped, optimizer, TABLE.chunk(processes)[rank])
            grower.step()
        weights = getattr(wrapped, "module", wrapped).state_dict()
        full = {
            key: value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in weights.items()
        }
        torch.save(full, f"{folder}/{name}-{processes}-{rank}.pt")


def run_example(rank: int, port: int) -> None:
    """Run examples/ddp.py with the variables that torchrun would set."""
    variables = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = True  # a port that is only known to be free may be taken
    os.environ.update({name: str(value) for name, value in variables.items()})
    ddp.main(samples=256)
    sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    mp.start_processes(run, (sys.argv[1], 2), nprocs=2, start_method="fork")
    mp.start_processes(run_example, (store.port,), nprocs=2, start_method="fork")
    run(0, sys.argv[1], 1)
