"""`PYTHONPATH=src python -m benchmarks.sync_check`: does the learner ever wait for its GPU?

A rollout and an update run under `torch.cuda.set_sync_debug_mode("error")`, where every hidden wait raises;
a control shows that the mode would have caught one. Then the KL three ways, the advantages two ways, and
the update, all timed on the GPU. Needs nothing beyond torch, numpy and pydantic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.kl_shapes import by_head as split_heads
from benchmarks.kl_shapes import make_heads, python_floats, variants
from esper.foundation.rows import map_tensors
from esper.simic.agent.gae import GaeInputs, compute_gae, fastest_kernel, loop_kernel, scan_kernel
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig
from tests.rollouts import Scene, play, step_of

DEVICE = "cuda"


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Inside, any operation that makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ragged_rollout(agent: PPOAgent, scene: Scene, buffer: TamiyoRolloutBuffer) -> None:
    """Some members sit steps out."""
    state = agent.initial_state(scene.members)
    no = torch.zeros(scene.members, dtype=torch.bool, device=agent.device)
    even = torch.arange(scene.members, device=agent.device) % 2 == 0
    buffer.reset()
    for t in range(scene.steps):
        step, state = step_of(agent, scene, t, state, no)
        buffer.add(step, ~even if t == 1 else ~no)


def check_learner(members: int, steps: int) -> dict[str, Any]:
    """Act, store and learn without a hidden wait; raises where there is one."""
    torch.manual_seed(0)
    agent = PPOAgent(TamiyoNet(), PPOConfig(target_kl=1e-4), DEVICE)  # so small that the early stop acts too
    scene = Scene.random(members, 3, steps, DEVICE)
    buffer = play(agent, scene)
    agent.update(buffer)
    ragged_rollout(agent, scene, buffer)  # everything has been compiled and every table built
    agent.update(buffer)
    agent.check()
    torch.cuda.synchronize()
    with waits_are_errors():
        play(agent, scene, buffer)
        even = agent.update(buffer)
        ragged_rollout(agent, scene, buffer)
        ragged = agent.update(buffer)
    return {
        "members": members,
        "steps": steps,
        "rollout_and_update_without_a_wait": True,
        "stopped_early": even.stopped_early,
        "epochs_done": even.epochs_done,
        "steps_learned": [even.steps_learned, ragged.steps_learned],
    }


def check_control() -> dict[str, Any]:
    """The same mode must raise when the KL is read head by head."""
    log_ratio, mask = make_heads(16, DEVICE)
    ratios, masks = split_heads(log_ratio), split_heads(mask)
    try:
        with waits_are_errors():
            python_floats(ratios, masks)
    except RuntimeError as error:
        return {"caught": True, "message": str(error).splitlines()[0]}
    return {"caught": False}


def wall_ms(call: Callable[[], object], repeats: int = 50) -> float:
    """Median wall time of a call with the GPU idle before and after, in ms."""
    call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def time_kl(members: int) -> list[dict[str, Any]]:
    """Each variant alone, and behind GPU work as in an update: how long the host is held up."""
    work = torch.randn(4096, 4096, device=DEVICE)
    rows = []
    for name, call in variants(members, DEVICE).items():
        held = []
        for _ in range(30):
            torch.cuda.synchronize()
            for _ in range(4):
                work @ work  # what the forward and backward passes leave in the queue
            start = time.perf_counter()
            call()
            held.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        rows.append(
            {
                "members": members,
                "variant": name,
                "alone_ms": wall_ms(call),
                "host_held_behind_work_ms": statistics.median(held),
            }
        )
    return rows


def time_gae(members: int, steps: int = 150) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    floats = [torch.from_numpy(rng.normal(size=(members, steps)).astype(np.float32)) for _ in range(3)]
    flags = [torch.from_numpy(rng.random((members, steps)) < 0.02) for _ in range(2)]
    rows = GaeInputs(*floats, *flags, torch.from_numpy(rng.integers(0, steps + 1, members)))
    on_gpu = GaeInputs(*(tensor.to(DEVICE) for tensor in rows))
    expected, found = loop_kernel(rows, 0.995, 0.98)[0], compute_gae(on_gpu, gamma=0.995, lam=0.98)[0]
    return {
        "members": members,
        "kernel": fastest_kernel(DEVICE).__name__,
        "largest_difference": float((found.cpu() - expected).abs().max()),
        "ms": wall_ms(lambda: compute_gae(on_gpu, gamma=0.995, lam=0.98)),
        "torch_scan_ms": wall_ms(lambda: scan_kernel(on_gpu, 0.995, 0.98)),
    }


def time_update(members: int, steps: int) -> dict[str, Any]:
    agent = PPOAgent(TamiyoNet(), PPOConfig(epochs=4, minibatches=4, target_kl=None), DEVICE)
    scene = Scene.random(members, 3, steps, DEVICE)
    buffer = play(agent, scene)
    update = wall_ms(lambda: agent.update(buffer), repeats=5)
    rollout = wall_ms(lambda: play(agent, scene, buffer), repeats=5)
    return {
        "members": members,
        "steps": steps,
        "update_ms": update,
        "samples_per_second": 4e3 * members * steps / update,
        "act_and_add_ms": rollout / steps,
    }


def bf16_ratio(members: int = 128, steps: int = 25) -> dict[str, Any]:
    """How far the ratio at unchanged weights is from 1 with a bf16 backbone."""
    torch.manual_seed(0)
    net = TamiyoNet(TamiyoNetConfig(bf16=True)).to(DEVICE)
    scene = Scene.random(members, 3, steps, DEVICE)
    buffer = play(PPOAgent(net, device=DEVICE), scene)
    batch = buffer.get_batched_sequences()

    def largest(rows: int) -> float:
        part = map_tensors(lambda tensor: tensor[:rows], batch)
        with torch.no_grad():
            output = net.sequence(
                part.steps.observation,
                part.steps.masks,
                part.initial_state,
                part.steps.reset,
                part.steps.actions,
            )
        shift: Tensor = output.log_prob - part.steps.log_prob
        return float((shift.exp() - 1).abs().max())

    return {"all_rows": largest(members), "a_quarter": largest(members // 4)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sync_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sync_check.json"))
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this check needs a CUDA device; torch sees none")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    sections: dict[str, Callable[[], Any]] = {
        "learner": lambda: [check_learner(16, 25), check_learner(512, 25)],
        "control": check_control,
        "bf16_ratio_off_by": bf16_ratio,
        "kl": lambda: [row for members in (16, 128, 512) for row in time_kl(members)],
        "gae": lambda: [time_gae(members) for members in (128, 1024, 8192)],
        "update": lambda: [time_update(128, 25), time_update(512, 25), time_update(128, 150)],
    }
    for name, section in sections.items():
        report[name] = section()
        print(name, json.dumps(report[name], indent=2), flush=True)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
