"""`python -m benchmarks.hot_paths [work ...]`: the hot paths against the shapes that they replace.

A baseline is the shape that a review of earlier code quotes; the tests compare masks and features with it.
Works whose name ends in `_proposed` measure the fix that the review asked for. `--kl-waits` shows how long
each way of summing the KL holds the host, on a CPU or on a GPU.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import (
    MEMBERS,
    SLOTS,
    Case,
    Work,
    measure,
    one_thread,
    print_json,
    print_table,
    synchronize,
    thread_ms,
)
from esper.lifecycle.actions import NUM_HEADS, Head, head_sizes, relevance
from esper.lifecycle.slot_states import SlotConfig
from esper.simic.agent.gae import GaeInputs, compute_gae
from esper.simic.agent.losses import approximate_kl
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import Sequences, TamiyoRolloutBuffer, Transition
from esper.tamiyo.policy.action_masks import SlotMaskState, compute_batch_masks
from esper.tamiyo.policy.distribution import MaskedHeads
from esper.tamiyo.policy.features import (
    BASE_FEATURE_SIZE,
    COLUMNS,
    SLOT_FEATURE_SIZE,
    batch_obs_to_features,
)
from esper.tamiyo.policy.network import TamiyoNet, TamiyoNetConfig, pad_masks
from esper.utils.rows import map_tensors, tensors_of
from studies.command_line import existing_device
from tests.rollouts import Scene, play, step_of
from tests.scenes import random_observation, random_states
from tests.tamiyo.features_by_element import (
    MemberReport,
    column_slice,
    features_one_by_one,
    slot_features,
    to_reports,
    write_base,
)
from tests.tamiyo.masks_by_member import compute_action_masks, masks_one_by_one, to_mask_states

GAE_STEPS, KL_STEPS, BUFFER_STEPS, UPDATE_STEPS = 150, 150, 25, 25
GAMMA, LAMBDA = 0.995, 0.98
ONE_EPOCH = PPOConfig(epochs=1, minibatches=1, target_kl=None)


# Action masks


def masks_preallocated(
    batch_slot_states: list[list[SlotMaskState | None]], slot_config: SlotConfig, device: str = "cpu"
) -> dict[str, Tensor]:
    """The mend that the review proposes: batch tensors first, filled member by member."""
    first = compute_action_masks(batch_slot_states[0], slot_config, device)
    batch_masks = {key: mask.new_zeros(len(batch_slot_states), *mask.shape) for key, mask in first.items()}
    for i, slot_states in enumerate(batch_slot_states):
        single_masks = compute_action_masks(slot_states, slot_config, device)
        for key, mask in single_masks.items():
            batch_masks[key][i] = mask
    return batch_masks


def prepare_masks(members: int, slots: int) -> Case:
    states = random_states(np.random.default_rng(0), members, slots)
    objects, config = to_mask_states(states), SlotConfig.grid(1, slots)
    return Case(lambda: compute_batch_masks(states, config), lambda: masks_one_by_one(objects, config))


def prepare_masks_from_objects(members: int, slots: int) -> Case:
    objects = to_mask_states(random_states(np.random.default_rng(0), members, slots))
    config = SlotConfig.grid(1, slots)
    return Case(lambda: compute_batch_masks(objects, config), lambda: masks_one_by_one(objects, config))


def prepare_masks_proposed(members: int, slots: int) -> Case:
    objects = to_mask_states(random_states(np.random.default_rng(0), members, slots))
    config = SlotConfig.grid(1, slots)
    return Case(lambda: masks_preallocated(objects, config), lambda: masks_one_by_one(objects, config))


# Features


def features_by_slot(batch: list[MemberReport], slot_config: SlotConfig) -> Tensor:
    """The mend that the review proposes: a NumPy array for each slot, one write into the tensor."""
    at = {c.name: column_slice(c.name).start for c in COLUMNS}
    features = torch.zeros(len(batch), BASE_FEATURE_SIZE + SLOT_FEATURE_SIZE * slot_config.num_slots)
    for env_idx, member in enumerate(batch):
        write_base(features, env_idx, member, at)
    for slot_idx, slot_id in enumerate(slot_config.slot_ids):
        block = np.zeros((len(batch), SLOT_FEATURE_SIZE), dtype=np.float32)
        for env_idx, member in enumerate(batch):
            for column, value in slot_features(member.slots[slot_id], at):
                block[env_idx, column] = value
        start = BASE_FEATURE_SIZE + slot_idx * SLOT_FEATURE_SIZE
        features[:, start : start + SLOT_FEATURE_SIZE] = torch.from_numpy(block)
    return features


def prepare_features(members: int, slots: int) -> Case:
    observation = random_observation(np.random.default_rng(0), members, slots)
    config = SlotConfig.grid(1, slots)
    reports = to_reports(observation, config)
    return Case(lambda: batch_obs_to_features(observation), lambda: features_one_by_one(reports, config))


def prepare_features_proposed(members: int, slots: int) -> Case:
    config = SlotConfig.grid(1, slots)
    reports = to_reports(random_observation(np.random.default_rng(0), members, slots), config)
    return Case(lambda: features_by_slot(reports, config), lambda: features_one_by_one(reports, config))


# KL of the heads


def make_heads(members: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Log-ratios and causal masks as an update meets them.  # [N, T, H] each"""
    generator = torch.Generator().manual_seed(0)
    shape = (members, KL_STEPS, len(Head))
    log_ratio = 0.1 * torch.randn(shape, generator=generator)
    return log_ratio.to(device), (torch.rand(shape, generator=generator) < 0.4).to(device)


def split_heads(values: Tensor) -> dict[str, Tensor]:
    return {head.name: values[..., head].contiguous() for head in Head}


def on_device_loop(log_ratios: dict[str, Tensor], masks: dict[str, Tensor]) -> Tensor:
    """The code under review: a loop over heads that stays on the device."""
    any_ratio = next(iter(log_ratios.values()))
    total, weight = torch.zeros((), device=any_ratio.device), torch.zeros((), device=any_ratio.device)
    for key, log_ratio in log_ratios.items():
        mask = masks[key].float()
        total = total + ((log_ratio.exp() - 1 - log_ratio) * mask).sum()
        weight = weight + mask.sum()
    return total / weight.clamp(min=1e-8)


def python_floats(log_ratios: dict[str, Tensor], masks: dict[str, Tensor]) -> float:
    """The proposed fix: Python floats, and so two reads from the device for every head."""
    total, weight = 0.0, 0.0
    for key, log_ratio in log_ratios.items():
        mask = masks[key].float()
        total += ((log_ratio.exp() - 1 - log_ratio) * mask).sum().item()
        weight += mask.sum().item()
    return total / max(weight, 1e-8)


def kl_variants(members: int, device: str = "cpu") -> dict[str, Callable[[], object]]:
    """The three, over the same numbers, ready to call."""
    log_ratio, mask = make_heads(members, device)
    ratios, masks = split_heads(log_ratio), split_heads(mask)
    return {
        "loop on the device (reviewed)": lambda: on_device_loop(ratios, masks),
        "Python floats (proposed)": lambda: python_floats(ratios, masks),
        "all heads at once (ours)": lambda: approximate_kl(log_ratio, mask),
    }


def prepare_kl(members: int, slots: int) -> Case:
    variants = kl_variants(members)
    return Case(ours=variants["all heads at once (ours)"], baseline=variants["Python floats (proposed)"])


class CountReads(TorchDispatchMode):
    """Counts operations, and those that read a number back to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def show_kl_waits(device: str) -> None:
    """Print operations, reads and the time that the host is held, alone and behind queued products."""
    work = torch.randn(4096, 4096, device=device) if device != "cpu" else None
    print("members, variant, operations, reads, ms alone, ms behind work")
    for members in (16, 128, 512):
        for name, call in kl_variants(members, device).items():
            with CountReads() as counted:
                call()
            with one_thread():
                alone = thread_ms(call) if work is None else held_ms(call, None)
            behind = "-" if work is None else f"{held_ms(call, work):.3f}"
            print(f"{members:>4}  {name:<30} {counted.operations:>4} {counted.reads:>3} {alone:.3f} {behind}")


def held_ms(call: Callable[[], object], work: Tensor | None) -> float:
    """Median wall time until a call returns, with four products of `work` queued ahead of it."""
    times = []
    for _ in range(30):
        synchronize("cuda")
        for _ in range(4 if work is not None else 0):
            work @ work  # type: ignore[operator]  # what forward and backward passes leave in the queue
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


# Generalized advantage estimation


def make_rows(members: int, steps: int = GAE_STEPS, device: str = "cpu") -> GaeInputs:
    """Full rows with an end now and then."""
    generator = torch.Generator().manual_seed(0)
    floats = [torch.randn(members, steps, generator=generator) for _ in range(3)]
    flags = [torch.rand(members, steps, generator=generator) < 0.01 for _ in range(2)]
    rows = GaeInputs(*floats, *flags, torch.full((members,), steps))
    return GaeInputs(*(tensor.to(device) for tensor in rows))


def gae_member_by_member(rows: GaeInputs, gamma: float = GAMMA, lam: float = LAMBDA) -> tuple[Tensor, Tensor]:
    """What the earlier buffer did."""
    advantages, returns = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    zero = torch.zeros(())
    for member, steps in enumerate(rows.step_counts.tolist()):
        last_gae = zero.clone()
        for t in reversed(range(steps)):
            if rows.terminated[member, t]:
                last_gae = zero.clone()
            going_on = 1.0 - float(rows.terminated[member, t])
            linked = going_on * (1.0 - float(rows.truncated[member, t]))
            delta = rows.rewards[member, t] + gamma * rows.next_values[member, t] * going_on
            delta = delta - rows.values[member, t]
            last_gae = delta + gamma * lam * linked * last_gae
            advantages[member, t] = last_gae
            returns[member, t] = last_gae + rows.values[member, t]
    return advantages, returns


def gae_proposed(rows: GaeInputs, gamma: float = GAMMA, lam: float = LAMBDA) -> tuple[Tensor, Tensor]:
    """The mend that the review proposes: ends as a mask made before the loop, and no clone."""
    advantages, returns = torch.zeros_like(rows.rewards), torch.zeros_like(rows.rewards)
    going_on = (~rows.terminated).float()
    linked = going_on * (~rows.truncated).float()
    for member, steps in enumerate(rows.step_counts.tolist()):
        last_gae = torch.zeros(())
        for t in reversed(range(steps)):
            delta = rows.rewards[member, t] + gamma * rows.next_values[member, t] * going_on[member, t]
            delta = delta - rows.values[member, t]
            last_gae = delta + gamma * lam * linked[member, t] * last_gae
            advantages[member, t] = last_gae
            returns[member, t] = last_gae + rows.values[member, t]
    return advantages, returns


def prepare_gae(members: int, slots: int) -> Case:
    rows = make_rows(members)
    return Case(
        ours=lambda: compute_gae(rows, gamma=GAMMA, lam=LAMBDA), baseline=lambda: gae_member_by_member(rows)
    )


def prepare_gae_proposed(members: int, slots: int) -> Case:
    rows = make_rows(members)
    return Case(ours=lambda: gae_proposed(rows), baseline=lambda: gae_member_by_member(rows))


# Rollout buffer


def fields_by_head(transition: Transition) -> dict[str, Tensor]:
    """The fields of a transition, with one tensor for each head instead of a column."""
    fields = tensors_of(transition)
    for name in ("actions", "log_prob"):
        column = fields.pop(name)
        fields |= {f"{name}.{head.name}": column[:, head] for head in Head}
    return fields


class MemberByMember:
    """Preallocated tensors as well, but a step is added for one member at a time."""

    def __init__(self, members: int, example: Transition) -> None:
        self.tensors = {
            name: torch.zeros(members, BUFFER_STEPS, *tensor.shape[1:], dtype=tensor.dtype)
            for name, tensor in fields_by_head(example).items()
        }
        self.step_counts = [0] * members

    def add(self, fields: dict[str, Tensor]) -> None:
        for member, step in enumerate(self.step_counts):
            for name, tensor in self.tensors.items():
                tensor[member, step] = fields[name][member]
            self.step_counts[member] = (step + 1) % BUFFER_STEPS


def prepare_buffer(members: int, slots: int, ragged: bool = False) -> Case:
    agent = PPOAgent(TamiyoNet())
    state, no = agent.initial_state(members), torch.zeros(members, dtype=torch.bool)
    step, _ = step_of(agent, Scene.random(members, slots, steps=1), 0, state, no)
    buffer, baseline = TamiyoRolloutBuffer(members, BUFFER_STEPS, step), MemberByMember(members, step)
    active, fields = ~no if ragged else None, fields_by_head(step)

    def ours() -> None:
        if buffer._columns == BUFFER_STEPS:
            buffer.reset()
        buffer.add(step, active)

    return Case(ours=ours, baseline=lambda: baseline.add(fields))


def prepare_buffer_ragged(members: int, slots: int) -> Case:
    return prepare_buffer(members, slots, ragged=True)


def prepare_step_counts(members: int, slots: int) -> Case:
    """The mask of stored steps: from the buffer's own tensor, or from a list that becomes one."""
    agent = PPOAgent(TamiyoNet())
    state, no = agent.initial_state(members), torch.zeros(members, dtype=torch.bool)
    step, _ = step_of(agent, Scene.random(members, slots, steps=1), 0, state, no)
    buffer, counts = TamiyoRolloutBuffer(members, BUFFER_STEPS, step), [BUFFER_STEPS] * members

    def baseline() -> Tensor:
        return torch.arange(BUFFER_STEPS) < torch.tensor(counts).unsqueeze(1)

    return Case(ours=lambda: buffer.valid_mask, baseline=baseline)


# Heads of the policy


def list_of_categoricals(logits: list[Tensor], legal: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What most libraries do with several heads."""
    answers = []
    for head_logits, head_legal in zip(logits, legal, strict=True):
        head = Categorical(logits=head_logits.masked_fill(~head_legal, -1e8))
        action = head.sample()
        answers.append((action, head.log_prob(action), head.entropy()))
    return answers


def prepare_heads(members: int, slots: int) -> Case:
    sizes = head_sizes(slots)
    choices = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)  # [H, largest size]
    open_choices = choices.expand(members, -1, -1)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(open_choices.shape, generator=generator)
    legal = open_choices & (torch.rand(open_choices.shape, generator=generator) < 0.7)
    legal[..., 0] = True
    uniforms = torch.rand(members, NUM_HEADS, generator=generator)
    relevant = torch.ones(members, NUM_HEADS, dtype=torch.bool)
    by_head = [logits[:, h, :size] for h, size in enumerate(sizes)]
    legal_by_head = [legal[:, h, :size] for h, size in enumerate(sizes)]

    def ours() -> object:
        heads = MaskedHeads(logits, legal)
        return heads.evaluate(heads.sample(uniforms), relevant)

    return Case(ours=ours, baseline=lambda: list_of_categoricals(by_head, legal_by_head))


# PPO update


class StepByStep:
    """One epoch of PPO over a rollout, as a list of heads and a loop over steps."""

    def __init__(self, net: TamiyoNet) -> None:
        self.net = net
        self.optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)

    def update(self, batch: Sequences) -> float:
        steps = batch.steps
        read = relevance(steps.actions[..., Head.OP])  # [N, T, H]
        columns, state = [], self.net.initial_state(len(batch.valid))
        for t in range(batch.valid.shape[1]):
            heads, value, state = self._step(batch, t, state)
            columns.append((heads, value))
        loss = torch.zeros(())
        kl, weight = 0.0, 0.0
        for head in Head:
            mask = (read[..., head] & batch.valid & ~steps.forced).float()
            log_prob = torch.stack([column[0][head][0] for column in columns], dim=1)
            entropy = torch.stack([column[0][head][1] for column in columns], dim=1)
            log_ratio = log_prob - steps.log_prob[..., head]
            ratio = log_ratio.exp()
            surrogate = torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
            count = mask.sum().clamp(min=1)
            loss = loss - (surrogate * mask).sum() / count - 0.05 * (entropy * mask).sum() / count
            kl += ((ratio - 1 - log_ratio) * mask).sum().item()
            weight += mask.sum().item()
        value = torch.stack([column[1] for column in columns], dim=1)
        loss = loss + 0.25 * (((value - batch.returns) ** 2) * batch.valid).sum() / batch.valid.sum()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
        self.optimizer.step()
        return kl / max(weight, 1e-8)

    def _step(
        self, batch: Sequences, t: int, state: Tensor
    ) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
        """Log-prob and entropy of each head at one step, with a Categorical for each."""
        net, at = self.net, slice(t, t + 1)
        inputs = map_tensors(lambda tensor: tensor[:, at], batch.steps.observation)
        masks = map_tensors(lambda tensor: tensor[:, at], batch.steps.masks)
        actions = batch.steps.actions[:, at]
        seen = net._encode(inputs, state, batch.steps.reset[:, at])
        op = actions[..., Head.OP]
        embedded = net.op_embedding(op)
        slot_logits = net._slot_logits(seen, embedded)[:, 0, 0]
        slot_legal = masks.slot_by_op[:, 0].gather(1, op.unsqueeze(-1).expand(-1, -1, slot_logits.shape[-1]))[
            :, 0
        ]
        reads_slot = torch.ones_like(actions[..., :1], dtype=torch.bool)
        details = net._detail_logits(seen, embedded, actions[..., :1], reads_slot)[:, 0]
        legal = [slot_legal, *pad_masks(masks)[:, 0].unbind(1), masks.op[:, 0]]
        logits = [slot_logits, *details.unbind(1), net.op_head(seen.memory)[:, 0]]
        heads = []
        for head in Head:
            distribution = Categorical(logits=logits[head].masked_fill(~legal[head], -1e8))
            heads.append((distribution.log_prob(actions[:, 0, head]), distribution.entropy()))
        return heads, net._value(seen.memory)[:, 0], seen.state


def prepare_update(members: int, slots: int) -> Case:
    torch.manual_seed(0)
    net = TamiyoNet(TamiyoNetConfig(width=128))
    agent = PPOAgent(net, ONE_EPOCH)
    buffer = play(agent, Scene.random(members, slots, UPDATE_STEPS))
    buffer.compute_advantages_and_returns(ONE_EPOCH.gamma, ONE_EPOCH.lam)
    batch, baseline = buffer.get_batched_sequences(), StepByStep(copy.deepcopy(net))
    return Case(ours=lambda: agent.update(buffer), baseline=lambda: baseline.update(batch))


WORKS = {
    work.name: work
    for work in (
        Work("masks", "arrays, all members at once, against one member after another", prepare_masks),
        Work(
            "masks_from_objects",
            "the same from per-slot objects",
            prepare_masks_from_objects,
        ),
        Work("masks_proposed", "tensors filled member by member", prepare_masks_proposed, (128,), (3, 25)),
        Work("features", "arrays, one pass, against nested loops with element writes", prepare_features),
        Work("features_proposed", "a NumPy array for each slot", prepare_features_proposed, (128,), (9, 25)),
        Work("kl", f"KL of eight heads over {KL_STEPS} steps", prepare_kl, slots=(1,)),
        Work("gae", f"GAE over {GAE_STEPS} steps", prepare_gae, (16, 64, 128), (1,)),
        Work("gae_proposed", "ends as a mask made before the loop", prepare_gae_proposed, (16,), (1,)),
        Work("buffer", "one step of every member into the rollout", prepare_buffer, slots=(3,)),
        Work("buffer_ragged", "the same with a mask of active members", prepare_buffer_ragged, slots=(3,)),
        Work("step_counts", "the mask of stored steps", prepare_step_counts, slots=(3,)),
        Work("heads", "sample, log-prob and entropy of eight masked heads", prepare_heads, slots=(3, 25)),
        Work("update", f"one epoch of PPO over {UPDATE_STEPS} steps", prepare_update, (16, 64, 128), (3,)),
    )
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hot_paths", description=__doc__)
    parser.add_argument(
        "works", nargs="*", metavar="work", help=f"any of {', '.join(WORKS)}; all if none is named"
    )
    parser.add_argument("--json", action="store_true", help="one object per row instead of a table")
    parser.add_argument("--members", type=int, nargs="+", help=f"numbers of members, default {MEMBERS}")
    parser.add_argument("--slots", type=int, nargs="+", help=f"numbers of slots, default {SLOTS}")
    parser.add_argument("--seconds", type=float, default=1.0, help="CPU seconds for each row")
    parser.add_argument("--kl-waits", action="store_true", help="how long each way of the KL holds the host")
    parser.add_argument("--device", type=existing_device, default="cpu", help="of --kl-waits")
    given = parser.parse_args(arguments)
    if given.kl_waits:
        return show_kl_waits(given.device)
    unknown = [name for name in given.works if name not in WORKS]
    if unknown:
        parser.error(f"unknown work {', '.join(unknown)}; there are {', '.join(WORKS)}")
    for name in given.works or WORKS:
        work = WORKS[name]
        rows = measure(work, given.members or work.members, given.slots or work.slots, given.seconds)
        print_json(rows) if given.json else print_table(work, rows)


if __name__ == "__main__":
    main()
