"""`python -m benchmarks.peers`: the learner against other libraries, the same work in one run.

Needs the extra `peers`; a library that does not import is said to be missing. Before the clock starts, every
peer's answer is held against ours where the work has one answer. Every peer has a process of its own, since
some libraries turn process-wide switches when they are imported, to the good or harm of the next.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import Case, one_thread, paired_ms
from benchmarks.hot_paths import GAE_STEPS as STEPS
from benchmarks.hot_paths import GAMMA, LAMBDA, make_rows
from esper.lifecycle.actions import head_sizes
from esper.simic.agent.gae import GaeInputs, compute_gae
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.config import PPOConfig
from esper.tamiyo.policy.distribution import MaskedHeads
from tests.simic.flat_policy import FlatMasks, FlatObservation, FlatPolicy, FlatPolicyConfig, padded_choices

HEADS = head_sizes(num_slots=3)
WIDTH = FEATURES = 128
ENVS = 16
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Peer:
    """One piece of work in one library, at some sizes."""

    work: str
    library: str  # as pip names it
    way: str  # which of the library's ways, in a few words
    module: str  # what must import
    prepare: Callable[[int], Case]  # size → case
    sizes: tuple[int, ...]
    size_name: str


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    work: str
    size: str
    peer: str
    peer_ms: float
    ours_ms: float
    ratio: float


def agree(name: str, ours: Any, theirs: Any) -> None:
    """The same work has the same answer."""
    gap = float(np.abs(np.asarray(ours) - np.asarray(theirs)).max())
    if not gap <= TOLERANCE:
        raise RuntimeError(f"{name} differs from ours by {gap:.2e}; at most {TOLERANCE:g} is the same work")


# --- advantages ---------------------------------------------------------------------------------------------


def rows_with_terminals(members: int) -> GaeInputs:
    """Full rows whose next values are those of the next step: what every library can express."""
    rows = make_rows(members)
    following = torch.cat((rows.values[:, 1:], rows.next_values[:, -1:]), dim=1)
    return rows._replace(next_values=following, truncated=torch.zeros_like(rows.truncated))


def gae_case(rows: GaeInputs, theirs: Callable[[], Any], name: str) -> Case:
    """theirs() → advantages [N, T]"""
    agree(name, compute_gae(rows, GAMMA, LAMBDA)[0], theirs())
    return Case(ours=lambda: compute_gae(rows, GAMMA, LAMBDA), baseline=theirs)


def gae_stable_baselines(members: int) -> Case:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    rows = rows_with_terminals(members)
    box, choices = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
    buffer = RolloutBuffer(STEPS, box, choices, "cpu", LAMBDA, GAMMA, members)
    buffer.rewards, buffer.values = (t.T.contiguous().numpy() for t in (rows.rewards, rows.values))
    ends = rows.terminated.T.float().numpy()  # [T, N]
    buffer.episode_starts[1:] = ends[:-1]

    def theirs() -> Any:
        buffer.compute_returns_and_advantage(rows.next_values[:, -1], ends[-1])
        return buffer.advantages.T

    return gae_case(rows, theirs, "stable-baselines3")


def gae_torchrl(function: str) -> Callable[[int], Case]:
    def prepare(members: int) -> Case:
        estimate = getattr(importlib.import_module("torchrl.objectives.value.functional"), function)
        rows = rows_with_terminals(members)
        fields = (rows.values, rows.next_values, rows.rewards, rows.terminated, rows.terminated)
        inputs = [tensor.unsqueeze(-1).contiguous() for tensor in fields]  # [N, T, 1]
        return gae_case(rows, lambda: estimate(GAMMA, LAMBDA, *inputs)[0].squeeze(-1), "torchrl")

    return prepare


def gae_tianshou(members: int) -> Case:
    """Its compiled kernel; the returns, which it leaves to its caller, are added as its caller does."""
    from tianshou.algorithm.algorithm_base import _gae

    rows = rows_with_terminals(members)
    ends = rows.terminated.clone()
    ends[:, -1] = True  # one row after another, so that every row ends
    rewards, values = (t.flatten().numpy() for t in (rows.rewards, rows.values))
    following = rows.next_values.masked_fill(rows.terminated, 0.0).flatten().numpy()

    def theirs() -> Any:
        advantages = _gae(values, following, rewards, ends.flatten().numpy(), GAMMA, LAMBDA)
        _ = advantages + values
        return advantages.reshape(members, STEPS)

    return gae_case(rows, theirs, "tianshou")


# --- masked heads -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadInputs:
    """Logits and masks of every head, padded, and head after head without padding."""

    logits: torch.Tensor  # [B, H, C]
    legal: torch.Tensor  # [B, H, C] bool
    flat_logits: torch.Tensor  # [B, sum of choices]
    flat_legal: torch.Tensor  # [B, sum of choices] bool

    @staticmethod
    def random(batch: int) -> HeadInputs:
        generator = torch.Generator().manual_seed(0)
        choices = padded_choices(HEADS)
        logits = torch.randn(batch, *choices.shape, generator=generator)
        legal = choices & (torch.rand(logits.shape, generator=generator) < 0.7)
        legal[..., 0] = True
        return HeadInputs(logits, legal, logits[:, choices], legal[:, choices])


def heads_case(given: HeadInputs, theirs: Callable[[], Any], name: str) -> Case:
    """theirs() → actions [B, H] and the log-prob of the whole action [B]"""
    everything = torch.ones(given.logits.shape[:2], dtype=torch.bool)

    def ours() -> Any:
        heads = MaskedHeads(given.logits, given.legal)
        return heads.evaluate(heads.sample(torch.rand(everything.shape)), everything)

    actions, log_prob, _ = theirs()
    own = MaskedHeads(given.logits, given.legal).evaluate(actions, everything)
    agree(name, own.log_prob.sum(1), log_prob)
    return Case(ours=ours, baseline=theirs)


def heads_sb3_contrib_unchecked(batch: int) -> Case:
    """The same with torch's checks of a distribution's arguments off, which are on unless one asks."""
    torch.distributions.Distribution.set_default_validate_args(False)
    return heads_sb3_contrib(batch)


def heads_sb3_contrib(batch: int) -> Case:
    from sb3_contrib.common.maskable.distributions import MaskableMultiCategoricalDistribution

    given = HeadInputs.random(batch)
    heads = MaskableMultiCategoricalDistribution(list(HEADS))

    def theirs() -> Any:
        heads.proba_distribution(given.flat_logits)
        heads.apply_masking(given.flat_legal)
        actions = heads.sample()
        return actions, heads.log_prob(actions), heads.entropy()

    return heads_case(given, theirs, "sb3-contrib")


def heads_torchrl(batch: int) -> Case:
    from torchrl.modules.distributions import MaskedCategorical

    given = HeadInputs.random(batch)
    logits, legal = given.flat_logits.split(HEADS, dim=1), given.flat_legal.split(HEADS, dim=1)

    def theirs() -> Any:
        heads = [MaskedCategorical(logits=x, mask=m) for x, m in zip(logits, legal, strict=True)]
        actions = [head.sample() for head in heads]
        log_probs = [head.log_prob(action) for head, action in zip(heads, actions, strict=True)]
        entropy = torch.stack([head.entropy() for head in heads])
        return torch.stack(actions, dim=1), torch.stack(log_probs).sum(0), entropy

    return heads_case(given, theirs, "torchrl")


# --- PPO update ---------------------------------------------------------------------------------------------


def our_update(sizes: tuple[int, ...], minibatches: int) -> Callable[[], object]:
    """One epoch of our update over a made-up rollout, with masks."""
    torch.manual_seed(0)
    policy = FlatPolicy(FEATURES, sizes, FlatPolicyConfig(width=WIDTH, depth=1, recurrent=True))
    agent = PPOAgent(policy, PPOConfig(epochs=1, minibatches=minibatches, target_kl=None))
    state = agent.initial_state(ENVS)
    legal = padded_choices(sizes) & (torch.rand(ENVS, len(sizes), max(sizes)) < 0.7)
    legal[..., 0] = True
    masks, no = FlatMasks(legal), torch.zeros(ENVS, dtype=torch.bool)
    buffer = None
    for t in range(STEPS):
        observation = FlatObservation(torch.randn(ENVS, FEATURES))
        reset = torch.full((ENVS,), t == 0)
        decided, state = agent.act(observation, masks, state, reset, torch.rand(ENVS, len(sizes)))
        step = replace(decided, reward=torch.randn(ENVS), terminated=no)
        buffer = buffer or TamiyoRolloutBuffer(ENVS, STEPS, step)
        buffer.add(step)
    assert buffer is not None
    rollout, after = buffer, torch.zeros(ENVS)
    return lambda: agent.update(rollout, bootstrap_values=after)


def their_update(sizes: tuple[int, ...], minibatches: int) -> Callable[[], object]:
    """One epoch of RecurrentPPO with one LSTM for actor and critic and no layer behind it; no masks."""
    import gymnasium
    from gymnasium import spaces
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Quiet(BaseCallback):
        def _on_step(self) -> bool:
            return True

    class Noise(gymnasium.Env):  # type: ignore[type-arg]
        observation_space = spaces.Box(-np.inf, np.inf, (FEATURES,), np.float32)
        action_space = spaces.Discrete(sizes[0]) if len(sizes) == 1 else spaces.MultiDiscrete(sizes)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            return self.observe(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return self.observe(), float(self.np_random.normal()), False, False, {}

        def observe(self) -> Any:
            return self.np_random.normal(size=FEATURES).astype(np.float32)

    shape = {
        "lstm_hidden_size": WIDTH, "shared_lstm": True, "enable_critic_lstm": False,
        "net_arch": {"pi": [], "vf": []},
    }  # fmt: skip
    model = RecurrentPPO(
        "MlpLstmPolicy", DummyVecEnv([Noise] * ENVS), n_steps=STEPS, batch_size=ENVS * STEPS // minibatches,
        n_epochs=1, ent_coef=0.05, policy_kwargs=shape, seed=0, device="cpu",
    )  # fmt: skip
    model._setup_learn(ENVS * STEPS)
    callback = Quiet()
    callback.init_callback(model)
    model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
    return model.train


def update_case(sizes: tuple[int, ...]) -> Callable[[int], Case]:
    return lambda minibatches: Case(our_update(sizes, minibatches), their_update(sizes, minibatches))


# --- the table ----------------------------------------------------------------------------------------------

GAE = ("advantages, T=150", (128, 1024), "N")
MASKED = ("eight masked heads: sample, log-prob, entropy", (128,), "batch")
UPDATE = (1, 4)

_LOOP, _VECTOR = "generalized_advantage_estimate", "vec_generalized_advantage_estimate"
PEERS = (
    Peer(GAE[0], "stable-baselines3", "numpy loop", "stable_baselines3", gae_stable_baselines, *GAE[1:]),
    Peer(GAE[0], "torchrl", "loop", "torchrl.objectives", gae_torchrl(_LOOP), *GAE[1:]),
    Peer(GAE[0], "torchrl", "vectorised", "torchrl.objectives", gae_torchrl(_VECTOR), *GAE[1:]),
    Peer(GAE[0], "tianshou", "numba kernel", "tianshou.algorithm", gae_tianshou, *GAE[1:]),
    Peer(MASKED[0], "sb3-contrib", "list of heads", "sb3_contrib", heads_sb3_contrib, *MASKED[1:]),
    Peer(MASKED[0], "sb3-contrib", "unchecked", "sb3_contrib", heads_sb3_contrib_unchecked, *MASKED[1:]),
    Peer(MASKED[0], "torchrl", "list of heads", "torchrl.modules", heads_torchrl, *MASKED[1:]),
    Peer(
        "recurrent PPO update, one head of 6", "sb3-contrib", "RecurrentPPO", "sb3_contrib",
        update_case((6,)), UPDATE, "minibatches",
    ),
    Peer(
        "recurrent PPO update, eight heads", "sb3-contrib", "RecurrentPPO", "sb3_contrib",
        update_case(HEADS), UPDATE, "minibatches",
    ),
)  # fmt: skip


def imports(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def measure_peer(seconds: float, index: int) -> list[Row]:
    """A row for every size; NaN where the library is missing."""
    peer = PEERS[index]
    here = imports(peer.module)
    name = f"{peer.library} {version(peer.library) if here else 'not installed'}, {peer.way}"
    rows = []
    for size in peer.sizes:
        ours = theirs = float("nan")
        if here:
            case = peer.prepare(size)
            with one_thread():
                ours, theirs = paired_ms(case, seconds)
        rows.append(Row(peer.work, f"{peer.size_name}={size}", name, theirs, ours, theirs / ours))
    return rows


def run(seconds: float) -> Iterator[Row]:
    """The rows of all peers, one process after another."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for rows in processes.map(partial(measure_peer, seconds), range(len(PEERS))):
            yield from rows


def machine() -> str:
    """The processor, and the versions that the figures depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    chip = models[0] if models else platform.processor() or "unknown processor"
    return f"{chip} ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}"


NOTE = (
    "CPU ms of one thread, medians taken in turns: ratios hold inside this run, times only for this machine. "
    "The update is one epoch over 16 × 150 = 2,400 samples, observation 128, one LSTM of 128 for actor and "
    "critic; ours has masks, an encoder before the LSTM and the advantages on top, the peer has none of them."
)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="CPU seconds for each row")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one object per row instead of a table")
    form.add_argument("--markdown", action="store_true", help="a page instead of a table")
    given = parser.parse_args(arguments)
    rows = run(given.seconds)
    if given.json:
        for row in rows:
            print(json.dumps(asdict(row)), flush=True)
    elif given.markdown:
        print_page(list(rows))
    else:
        print_table(list(rows))


def cells(row: Row) -> tuple[str, ...]:
    times = (f"{row.peer_ms:,.2f}", f"{row.ours_ms:,.3f}", f"{row.ratio:,.1f}×")
    return (row.work, row.size, row.peer, *(t.replace("nan×", "–").replace("nan", "–") for t in times))


COLUMNS = ("work", "size", "peer", "peer ms", "ours ms", "ratio")


def print_table(rows: list[Row]) -> None:
    table = Table(title=machine(), caption=NOTE, title_justify="left", caption_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if "ms" in column or column == "ratio" else "left")
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)


def print_page(rows: list[Row]) -> None:
    print(f"# Peers on a CPU\n\n{machine()}. `python -m benchmarks.peers --markdown`.\n\n{NOTE}\n")
    for line in (COLUMNS, ("---",) * 3 + ("---:",) * 3, *(cells(row) for row in rows)):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
