"""The rollout: preallocated [N, T] tensors on one device, a column written for all members at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from esper.simic.agent.gae import GaeInputs, compute_gae, valid_steps
from esper.utils.graphs import Graphed, GraphPool
from esper.utils.rows import map_tensors, tensors_of


@dataclass(frozen=True)
class Transition:
    """One step of N members: what was decided on what, and, once it is known, what that led to."""

    observation: Any  # a record of [N, ...]
    masks: Any  # a record of [N, ...]
    reset: Tensor  # [N] bool: the memory was cleared before this step
    actions: Tensor  # [N, H] int64, as sampled
    log_prob: Tensor  # [N, H] float32, of the sampled action
    forced: Tensor  # [N] bool: there was nothing to choose
    value: Tensor  # [N] float32, in units of reward
    reward: Tensor  # [N] float32
    terminated: Tensor  # [N] bool: the episode ended here
    truncated: Tensor  # [N] bool: it was cut here
    bootstrap_value: Tensor  # [N] float32: V of the state after a cut; read at truncations alone


@dataclass(frozen=True)
class Sequences:
    """A rollout as whole rows, ready to learn from. Views into the buffer."""

    steps: Transition  # [N, T, ...]
    valid: Tensor  # [N, T] bool
    advantages: Tensor  # [N, T]
    returns: Tensor  # [N, T]
    weights: Tensor  # [N] how much each row counts in imitation


class TamiyoRolloutBuffer:
    """N rows of up to T transitions.

    No operation depends on how many rows there are, nor on how many are active. Steps that were never
    written are 0, after a reset too.
    """

    def __init__(
        self,
        num_members: int,
        horizon: int,
        example: Transition,
        device: torch.device | str = "cpu",
        pool: GraphPool | None = None,
    ) -> None:
        """Allocate tensors like those of `example`, members first; pool: where writing a step is captured."""
        self.num_members = num_members
        self.horizon = horizon
        self.device = torch.device(device)

        def allocate(tensor: Tensor) -> Tensor:
            # Rows that sit a step out write to a spare last row: no index depends on how many are active.
            size = (num_members + 1, horizon, *tensor.shape[1:])
            return torch.zeros(size, dtype=tensor.dtype, device=self.device)

        storage = map_tensors(allocate, example)
        self._storage = tensors_of(storage)
        self._flat = {name: tensor.flatten(0, 1) for name, tensor in self._storage.items()}  # views
        self._steps = map_tensors(lambda tensor: tensor[:num_members], storage)
        self._rows = torch.arange(num_members, device=self.device)
        self._everyone = torch.ones(num_members, dtype=torch.bool, device=self.device)
        self.step_counts = torch.zeros(num_members, dtype=torch.long, device=self.device)
        self.advantages = torch.zeros(num_members, horizon, device=self.device)
        self.returns = torch.zeros(num_members, horizon, device=self.device)
        self.weights = torch.ones(num_members, device=self.device)
        self._open_rows = torch.zeros_like(self._everyone)  # [N] rows that GAE found without an end
        self._scattered = Graphed(self._scatter, pool)
        self._columns = 0  # no row is longer than this
        self._even = True  # every row has exactly that many steps

    @property
    def valid_mask(self) -> Tensor:
        """Return True where a transition is stored.  # [N, T]"""
        return valid_steps(self.step_counts, self.horizon)

    def reset(self) -> None:
        """Forget everything."""
        own = [self.step_counts, self.advantages, self.returns]
        torch._foreach_zero_([*own, *self._storage.values()])
        self.weights.fill_(1.0)
        self._columns, self._even = 0, True

    @torch.no_grad()
    def add(self, transition: Transition, active: Tensor | None = None) -> None:
        """Append one transition to every row, or to the active ones.  # active [N] bool

        Raises ValueError where rows of equal length are full. Else a row that is full keeps what it has: it
        then lacks its end, which `check` reports.
        """
        # All rows have the same length: one column is written in place, without an index.
        if active is None and self._even:
            if self._columns == self.horizon:
                raise ValueError(f"the buffer of {self.horizon} steps is full; call reset(), or lengthen it")
            for name, value in tensors_of(transition).items():
                self._storage[name][:-1, self._columns] = value
            self.step_counts += 1
        else:
            self._scattered(transition, self._everyone if active is None else active)
            self._even = False
        self._columns = min(self._columns + 1, self.horizon)

    def _scatter(self, transition: Transition, active: Tensor) -> tuple[()]:
        """Write each active row's own next column; whoever sits out writes into the spare row."""
        fields, full = tensors_of(transition), self.step_counts == self.horizon
        # Raising for a full row would wait for the device here.
        row = torch.where(active & ~full, self._rows, self.num_members)
        index = row * self.horizon + self.step_counts.clamp(max=self.horizon - 1)
        for name, flat in self._flat.items():
            flat.index_copy_(0, index, fields[name])
        self.step_counts += active & ~full
        return ()

    @torch.no_grad()
    def add_to_last_reward(self, amount: Tensor) -> None:
        """Add to the reward of every row's last transition; a row that has none ignores it.  # amount [N]"""
        last = (self.step_counts - 1).clamp(min=0).unsqueeze(1)
        owed = torch.where(self.step_counts > 0, amount, 0.0)
        self._steps.reward.scatter_add_(1, last, owed.unsqueeze(1))

    @torch.no_grad()
    def weigh_rows(self, members: Tensor, temperature: float, gamma: float) -> None:
        """Weigh the rows of each member by the softmax of their returns, to a mean of 1.  # members [N]"""
        own = members.unsqueeze(1) == members  # [N, N]
        # Σ γ^t r_t; rewards of steps that were never written are 0.
        discount = torch.pow(gamma, torch.arange(self.horizon, device=self.device))
        earned = (self._steps.reward * discount).sum(1) / temperature
        shares = torch.where(own, earned, -torch.inf).softmax(1)
        self.weights.copy_(shares.diagonal() * own.sum(1))

    @torch.no_grad()
    def compute_advantages_and_returns(
        self, gamma: float, lam: float, bootstrap_values: Tensor | None = None
    ) -> None:
        """Compute GAE over every row.

        bootstrap_values [N]: V after the last stored step, for rows that end in neither a terminal nor a
        truncation. Without it such a row is a fault, which `check` reports.
        """
        steps = self._steps
        last = (self.step_counts - 1).clamp(min=0).unsqueeze(1)
        ended = (steps.terminated | steps.truncated).gather(1, last).squeeze(1)
        self._open_rows = ~ended & (self.step_counts > 0) & (bootstrap_values is None)
        after = torch.zeros_like(steps.value[:, :1])
        if bootstrap_values is not None:
            after = bootstrap_values.to(steps.value.dtype).unsqueeze(1)
        # v'_t = v_{t+1} inside a row, the bootstrap value after its last step and at every truncation.
        following = torch.cat((steps.value[:, 1:], after), dim=1).scatter(1, last, after)
        following = torch.where(steps.truncated, steps.bootstrap_value, following)
        ends = steps.terminated, steps.truncated
        rows = GaeInputs(steps.reward, steps.value, following, *ends, self.step_counts)
        self.advantages, self.returns = compute_gae(rows, gamma, lam)

    def get_batched_sequences(self) -> Sequences:
        """Return the rollout as views: no copy, and no column that no row has reached."""
        columns = max(self._columns, 1)
        return Sequences(
            steps=map_tensors(lambda tensor: tensor[:, :columns], self._steps),
            valid=self.valid_mask[:, :columns],
            advantages=self.advantages[:, :columns],
            returns=self.returns[:, :columns],
            weights=self.weights,
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the rollout by name, for `concatenate`: views, without columns that no row has reached."""
        steps = tensors_of(self.get_batched_sequences().steps)
        own = {"step_counts": self.step_counts, "weights": self.weights}
        return {f"steps.{name}": value for name, value in steps.items()} | own

    def concatenate(self, parts: Sequence[Mapping[str, Tensor]]) -> TamiyoRolloutBuffer:
        """Build a buffer like this one with the rows of several, given as their `tensors` on any device."""
        example = map_tensors(lambda tensor: tensor[:, 0], self._steps)
        total = sum(len(part["step_counts"]) for part in parts)
        whole = TamiyoRolloutBuffer(total, self.horizon, example, self.device)
        first = 0
        for part in parts:
            rows = slice(first, first + len(part["step_counts"]))
            for name, stored in whole._storage.items():
                given = part[f"steps.{name}"]
                stored[rows, : given.shape[1]] = given.to(self.device)
                whole._columns = max(whole._columns, given.shape[1])
            whole.step_counts[rows] = part["step_counts"].to(self.device)
            whole.weights[rows] = part["weights"].to(self.device)
            first = rows.stop
        whole._even = False
        return whole

    def fault(self) -> Tensor:
        """Return one number on the device: 0, or member + 1 for the last row without an end.  # []"""
        return (self._open_rows * (self._rows + 1)).amax()

    def check(self, code: int | None = None) -> None:
        """Raise ValueError if GAE found a row without an end; code: of `fault()`, if it was read already."""
        code = int(self.fault()) if code is None else code
        if code:
            raise ValueError(
                f"the row of member {code - 1} ends in neither a terminal nor a truncation; pass "
                "bootstrap_values [members], mark the end of the episode, or give a longer horizon than "
                f"{self.horizon} steps"
            )
