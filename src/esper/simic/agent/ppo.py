"""Masked, recurrent, factored PPO.

Nothing in `act` or inside `update` waits for the device. The early stop and the refusal of non-finite
gradients turn optimizer steps into no-ops there; faults and metrics come back in one transfer at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from esper.simic.agent.losses import LossTerms, explained_variance, ppo_loss, standardize
from esper.simic.agent.normalizers import ValueNormalizer
from esper.simic.agent.optimizer import VetoAdam
from esper.simic.agent.rollout_buffer import Sequences, TamiyoRolloutBuffer, Transition
from esper.simic.config import PPOConfig as PPOConfig
from esper.tamiyo.policy.network import TamiyoNet
from esper.utils.graphs import Graphed, GraphPool
from esper.utils.rows import add_prefix, check_like, map_tensors, strip_prefix
from esper.utils.streams import Stream, random_order


@dataclass(frozen=True)
class UpdateMetrics:
    """One update in plain numbers. Means run over the minibatches that were looked at."""

    policy_loss: float
    value_loss: float
    kl: float  # of the whole action, per step
    clip_fraction: float  # share of relevant ratios outside the clip range
    grad_norm: float  # before clipping
    explained_variance: float  # of the returns, by the values of the rollout
    epochs_done: float  # optimizer steps taken, over minibatches per epoch
    steps_vetoed: int  # optimizer steps refused for a non-finite gradient
    entropy_coefficient: float
    steps_learned: int  # transitions
    steps_dropped: int  # transitions with a non-finite return
    head_entropy: Mapping[str, float]  # 0..1; NaN if no step reads the head

    @property
    def entropy(self) -> float:
        """Return the mean over the heads that were read, 0..1."""
        read = [value for value in self.head_entropy.values() if value == value]
        return sum(read) / len(read) if read else float("nan")


MEANS = ("policy_loss", "value_loss", "kl", "clip_fraction", "grad_norm")


def count_minibatch(
    terms: LossTerms, grad_norm: Tensor, live: Tensor, vetoed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers of a minibatch, to be summed over an update; live []: not stopped before it.

    Returns MEANS and a 1, the entropy of each head and a 1 where it was read, and whether the step was taken
    and whether its gradient was not finite.  # [6], [2, H], [2], all float64
    """
    finite, one = grad_norm.isfinite(), torch.ones_like(terms.kl)
    means = [terms.policy_loss, terms.value_loss, terms.kl, terms.clip_fraction]
    heads = torch.stack((terms.head_entropy, torch.ones_like(terms.head_entropy)))
    # Minibatches after the early stop are computed as no-ops and do not count.
    return (
        torch.where(live, torch.stack([*means, torch.where(finite, grad_norm, 0.0), one]).double(), 0.0),
        torch.where(live & terms.head_used, heads.double(), 0.0),
        torch.stack((~vetoed, live & ~finite)).double(),
    )


def read_back(tensors: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Read tensors by name in one transfer: the one place where the learner waits for its device."""
    # One transfer for all metrics: a float64 holds every count exactly.
    values = torch.cat([tensor.detach().double().flatten() for tensor in tensors.values()])
    if values.device.type == "cuda":
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
        values = host
    sizes = [tensor.numel() for tensor in tensors.values()]
    return dict(zip(tensors, (part.tolist() for part in values.split(sizes)), strict=True))


REPLAYED_STEPS = 1 << 15  # a minibatch of a rollout up to this size is replayed: beyond, the GPU is busy


class PPOAgent:
    """Acts, and learns from a rollout buffer. The memory of the members stays with the caller."""

    def __init__(
        self,
        policy: TamiyoNet,
        config: PPOConfig | None = None,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> None:
        self.config = config or PPOConfig()
        self.device = torch.device(device)
        self.seed = seed
        self.policy = policy.to(self.device)
        self.optimizer = VetoAdam(policy, self.config.learning_rate, epsilon=1e-5)
        self.value_normalizer = ValueNormalizer().to(self.device)
        self.updates = 0
        self._imitates = False
        self._may_read = self.device.type == "cpu"  # a value inside an update
        self._fault = torch.zeros((), dtype=torch.long, device=self.device)
        pool = GraphPool() if self.device.type == "cuda" else None
        self._scaled = Graphed(self._scale, pool)
        self._learned = Graphed(self._learn, pool)

    def initial_state(self, num_members: int) -> Tensor:
        """Return the memory of fresh episodes.  # [N, state]"""
        return self.policy.initial_state(num_members, self.device)

    @torch.no_grad()
    def act(
        self, observation: Any, masks: Any, state: Tensor, resets: Tensor, uniforms: Tensor | None = None
    ) -> tuple[Transition, Tensor]:
        """Act once: sample by uniforms [N, H] in [0, 1), or take the likeliest choices without them.

        observation, masks: records of [N, ...]; state [N, state]; resets [N] clears a member's memory first.
        Returns the step, without its reward and its end, and the memory after it.  # [N, state]
        """
        as_sequence = partial(torch.unsqueeze, dim=1)  # a step is a sequence of length 1
        output = self.policy.sequence(
            map_tensors(as_sequence, observation),
            map_tensors(as_sequence, masks),
            state,
            as_sequence(resets),
            uniforms=None if uniforms is None else as_sequence(uniforms),
        )
        value = self.value_normalizer.denormalize(output.value[:, 0])
        nothing, never = torch.zeros_like(value), torch.zeros_like(resets)
        step = Transition(
            observation=observation,
            masks=masks,
            reset=resets,
            actions=output.actions[:, 0],
            log_prob=output.log_prob[:, 0],
            forced=output.forced[:, 0],
            value=value,
            reward=nothing,
            terminated=never,
            truncated=never,
            bootstrap_value=nothing,
        )
        return step, output.state

    def update(
        self, buffer: TamiyoRolloutBuffer, bootstrap_values: Tensor | None = None, imitate: bool = False
    ) -> UpdateMetrics:
        """Run K epochs of PPO over a rollout; bootstrap_values [N] as in compute_advantages_and_returns.

        imitate: the actions are a teacher's; the policy learns to take them, and V what they earned.
        Raises ValueError if a row of the buffer is unfinished or overfull, or if a head that was read had no
        legal choice; no step is taken once that is known.
        """
        config, self._imitates = self.config, imitate
        buffer.compute_advantages_and_returns(config.gamma, config.lam, bootstrap_values)
        broken, rollout = buffer.fault() > 0, buffer.get_batched_sequences()
        # Of a broken buffer no step counts: neither for the scale of V nor as a fault of the policy.
        batch, figures = self._prepare(replace(rollout, valid=rollout.valid & ~broken))
        entropy = torch.full((), self.entropy_coefficient, device=self.device)
        stopped, sums = torch.zeros_like(broken), list[Tensor]()
        # `_imitates` is read inside the captured function, so imitation runs uncaptured.
        replayed = batch.valid.numel() <= REPLAYED_STEPS and not imitate  # captured as it learns otherwise
        learn = self._learned if replayed else self._learn
        for rows in self._minibatches(buffer.num_members):
            stopped, *counted = learn(batch, rows, entropy, stopped, broken)
            sums = [total + number for total, number in zip(sums, counted, strict=True)] if sums else counted
            # On the CPU reading `stopped` is free and saves the no-ops; on a GPU it would stall the queue.
            if self._may_read and bool(stopped):
                break

        means, heads, steps = sums
        numbers = read_back(
            {
                "buffer_fault": buffer.fault(),
                "policy_fault": self._fault,
                **dict(zip(("explained_variance", "steps_learned", "steps_dropped"), figures, strict=True)),
                **dict(zip(MEANS, means[:-1] / means[-1].clamp(min=1), strict=True)),
                "head_entropy": heads[0] / heads[1],  # NaN for a head that no minibatch read
                "steps_taken": steps[0],
                "steps_vetoed": steps[1],
            }
        )
        buffer.check(int(numbers["buffer_fault"][0]))
        self._raise_fault(int(numbers["policy_fault"][0]))
        metrics = self._metrics(numbers, buffer.num_members)
        self.updates += 1
        return metrics

    @property
    def entropy_coefficient(self) -> float:
        """Return the entropy coefficient after the updates made so far."""
        config = self.config
        progress = min(self.updates / config.entropy_updates, 1.0)
        return config.entropy_start + (config.entropy_end - config.entropy_start) * progress

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that learning changed, as plain tensors."""
        return {
            **add_prefix("policy", self.policy.state_dict()),
            **add_prefix("optimizer", self.optimizer.state_dict()),
            **add_prefix("value_normalizer", self.value_normalizer.state_dict()),
            "updates": torch.tensor(self.updates),
            "seed": torch.tensor(self.seed),
        }

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `state_dict` returned; raise ValueError where it does not fit."""
        mend = "build the policy with the config it was trained with"
        check_like(self.state_dict(), tensors, "the agent's state", mend)
        self.policy.load_state_dict(strip_prefix("policy", tensors))
        self.optimizer.load_state_dict(strip_prefix("optimizer", tensors))
        self.value_normalizer.load_state_dict(strip_prefix("value_normalizer", tensors))
        self.updates, self.seed = int(tensors["updates"]), int(tensors["seed"])

    def _prepare(self, rollout: Sequences) -> tuple[Sequences, list[Tensor]]:
        """Return the rollout in the network's units, and the figures of `_scale`."""
        steps = rollout.steps
        learned, returns, advantages, *figures = self._scaled(
            rollout.valid, rollout.returns, rollout.advantages, steps.value, steps.forced
        )
        return replace(rollout, valid=learned, advantages=advantages, returns=returns), figures

    def _scale(
        self, valid: Tensor, returns: Tensor, advantages: Tensor, value: Tensor, forced: Tensor
    ) -> tuple[Tensor, ...]:
        """Update the units of V with these returns, and bring the rollout into the new ones.

        valid, forced: which steps are real, and which left no choice. Everything [N, T]
        Returns the steps to learn from, returns and advantages [N, T], and figures of the update [].
        """
        finite = returns.isfinite() & advantages.isfinite()
        learned = valid & finite
        returns, advantages = (torch.where(learned, given, 0.0) for given in (returns, advantages))
        variance = explained_variance(value, returns, learned)
        # Forced steps have no actor loss, so they are left out of the scale too.
        advantages = standardize(advantages, learned & ~forced)
        units, head = self.value_normalizer, self.policy.value_head
        # Adam's moments of the value head are in its old units, so they change with it.
        self.optimizer.rescale(head, units.update_returns(returns, learned, head))
        counts = learned.sum(), (valid & ~finite).sum()
        return learned, units.normalize(returns), advantages, variance, *counts

    def _minibatches(self, num_members: int) -> Iterator[Tensor | None]:
        """Return row indices of each minibatch, freshly shuffled in every epoch; None is the whole batch."""
        parts = min(self.config.minibatches, num_members)
        nobody = torch.full((1,), -1, device=self.device)  # the learner's own stream: no member has this id
        for epoch in range(self.config.epochs):
            if parts == 1:
                yield None
                continue
            # Counter-based random order: a resumed run draws the same minibatches.
            draw = self.updates * self.config.epochs + epoch
            (order,) = random_order(self.seed, nobody, Stream.DATA_ORDER, draw, num_members)
            yield from order.tensor_split(parts)

    def _learn(
        self, batch: Sequences, rows: Tensor | None, entropy: Tensor, stopped: Tensor, broken: Tensor
    ) -> tuple[Tensor, ...]:
        """Learn from one minibatch; return whether the update has stopped [], and `count_minibatch`.

        entropy [] the coefficient; stopped, broken [] bool: as of the minibatches before it
        """
        if rows is not None:
            batch = map_tensors(partial(torch.index_select, dim=0, index=rows), batch)
        steps, memory = batch.steps, self.initial_state(len(batch.valid))  # a rollout begins with an episode
        with torch.enable_grad():
            output = self.policy.sequence(
                steps.observation, steps.masks, memory, steps.reset, actions=steps.actions
            )
            terms = ppo_loss(output, batch, self.config, entropy, self._imitates)
        self._note_faults(output.fault & batch.valid.unsqueeze(-1), rows)
        self.optimizer.zero_grad()
        terms.loss.backward()
        terms = map_tensors(torch.Tensor.detach, terms)
        # Early stop: the step that exceeds the limit is skipped, and all after it.
        limit = float("inf") if self.config.target_kl is None else self.config.target_kl
        live, stopped = ~stopped, stopped | (terms.kl > limit)
        grad_norm = clip_grad_norm_(self.policy.parameters(), self.config.max_grad_norm)
        # A skipped step is still computed; that costs less than waiting for the device to know.
        vetoed = stopped | broken | (self._fault > 0) | ~grad_norm.isfinite()
        self.optimizer.step(vetoed)
        return stopped, *count_minibatch(terms, grad_norm, live, vetoed)

    def _metrics(self, numbers: Mapping[str, list[float]], num_members: int) -> UpdateMetrics:
        return UpdateMetrics(
            **{name: numbers[name][0] for name in (*MEANS, "explained_variance")},
            epochs_done=numbers["steps_taken"][0] / min(self.config.minibatches, num_members),
            steps_vetoed=int(numbers["steps_vetoed"][0]),
            entropy_coefficient=self.entropy_coefficient,
            steps_learned=int(numbers["steps_learned"][0]),
            steps_dropped=int(numbers["steps_dropped"][0]),
            head_entropy=dict(zip(self.policy.head_names, numbers["head_entropy"], strict=True)),
        )

    def _note_faults(self, fault: Tensor, rows: Tensor | None) -> None:
        """Record the last member and head at fault, on the device.  # fault [n, T, H], rows [n]"""
        num_heads = fault.shape[2]
        members = torch.arange(len(fault), device=self.device) if rows is None else rows
        # One integer above 0 names member and head, so that one maximum keeps it.
        code = members.unsqueeze(1) * num_heads + torch.arange(1, num_heads + 1, device=self.device)  # [n, H]
        self._fault.copy_(torch.maximum(self._fault, (code * fault.any(1)).amax()))

    def _raise_fault(self, code: int) -> None:
        if code:
            self._fault.zero_()
            member, head = divmod(code - 1, len(self.policy.head_names))
            raise ValueError(
                f"member {member}, head {self.policy.head_names[head]!r} has no legal choice; an op is legal "
                "only if each head that it reads has one, and actions need the masks they were sampled under"
            )
