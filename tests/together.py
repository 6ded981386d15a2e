"""Processes that share a run, the writer of which is killed.

`python -m tests.together RUN KEPT CHECKPOINT SETTINGS...`: two processes play RUN, which is copied to KEPT;
then three of them play it again from CHECKPOINT. torchrun's own agent starts them, as forks of this program,
so that what all of them need is imported once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # every process would import it in the end, and it is slow
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from esper import cli
from esper.runs.checkpoints import load_checkpoint
from esper.runs.run_folder import RunFolder
from esper.simic.agent.gae import GaeInputs, compute_gae
from esper.training import TrainingRun
from esper.utils.errors import LostProcessError
from esper.utils.gather import processes
from esper.utils.launch import Launch
from esper.watch import report


def in_processes(size: int, work: Callable[..., None], *arguments: object, restarts: int = 0) -> None:
    """`work` in as many processes, as torchrun would start a command in them."""
    place = LaunchConfig(
        1, 1, size, rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="together",
        max_restarts=restarts, start_method="fork",
    )  # fmt: skip
    elastic_launch(place, work)(*arguments)


def train(folder: Path, settings: list[str]) -> None:
    """`esper train`; process 0, which writes, is killed in its first life, once a round is done."""
    launch = Launch.of()
    metrics, last = folder / "metrics.jsonl", folder / "checkpoints" / "last.safetensors"
    if (launch.rank, launch.restarts) == (0, 0):
        threading.Thread(target=die_after_a_round, args=[metrics], daemon=True).start()
    if (launch.rank, launch.restarts) == (0, 1):
        kept = int(load_checkpoint(last).tensors["rounds_done"]) if last.exists() else 0
        print(f"{metrics.read_text().count(chr(10)) - kept} rounds lost", flush=True)
    code = cli.run(["train", "--quiet", "--out", str(folder), *settings])
    if code:
        sys.exit(code)
    print(f"process {launch.rank} ended after {launch.restarts} restarts", flush=True)


def die_after_a_round(metrics: Path) -> None:
    while not metrics.exists() or not metrics.read_text():
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(folder: Path, checkpoint: Path) -> None:
    """The run again from a checkpoint; in the end the last process hangs, and the others say so."""
    with processes(Launch.of()) as gather:
        run = TrainingRun.resume(folder, checkpoint=checkpoint, gather=gather)
        begun = run.trainer.rounds_done
        run.run()
        gather.exchange(b"")  # the first process has still written files when the others were done
        played, gather.timeout = run.trainer.rounds_done - begun, 0.5
        if gather.rank == gather.size - 1:
            time.sleep(2)
            return
        try:
            gather.exchange(b"")
        except LostProcessError as error:
            print(f"process {gather.rank} of {gather.size}, after {played} rounds: {error}", flush=True)


def compile_kernel() -> None:
    """The advantages of one step, so that no process has to load the compiler for them."""
    one, no = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.bool)
    compute_gae(GaeInputs(one, one, one, no, ~no, torch.ones(1, dtype=torch.long)), 1.0, 1.0)


def write_no_report(folder: RunFolder) -> Path:
    folder.report_path.write_text("")
    return folder.report_path


if __name__ == "__main__":
    run, kept, older, *settings = sys.argv[1:]
    report.write_report = write_no_report  # it takes longer than the run
    compile_kernel()
    in_processes(2, train, Path(run), settings, restarts=1)
    shutil.copytree(run, kept)
    in_processes(3, go_on, Path(run), Path(older))
