"""Tamiyo's network and its LSTM.

Observations and masks are frozen dataclasses of tensors that share their leading axes: [N, ...] for one
step, [N, T, ...] for a sequence. A step is a sequence of length 1, so that acting and learning run the
same code. The slots are a set, so that weights trained with 3 slots run with 9 or 25.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from esper.lifecycle.actions import HEAD_CHOICES, NUM_BLUEPRINTS, NUM_OPS, RATE_HEAD, Head, Rate, relevance
from esper.tamiyo.config import TamiyoNetConfig as TamiyoNetConfig
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.distribution import MaskedHeads
from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, RATE_FEATURE_SIZE, SLOT_FEATURE_SIZE
from esper.utils.devices import device_table


class RecurrentCore(nn.Module):
    """An LSTM over [N, T] that forgets before every step that is marked as a reset.

    The inputs of all steps are projected by one product; a step is left with one product and the gates.
    """

    def __init__(self, input_size: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.from_input = nn.Linear(input_size, 4 * width)  # input, forget and output gate, candidate
        self.from_hidden = nn.Linear(width, 4 * width, bias=False)
        nn.init.orthogonal_(self.from_input.weight)
        nn.init.zeros_(self.from_input.bias)
        for gate in self.from_hidden.weight.data.chunk(4):
            nn.init.orthogonal_(gate)
        # Forget bias of 1, as in Jozefowicz et al. 2015: the memory is kept to begin with.
        self.from_input.bias.data[width : 2 * width] = 1.0

    def forward(self, inputs: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor]:
        """Run inputs [N, T, I], state [N, 2W], resets [N, T] bool → outputs [N, T, W], state [N, 2W]."""
        projected = self.from_input(inputs).transpose(0, 1)  # [T, N, 4W]
        weight = self.from_hidden.weight
        resets = resets.T.unsqueeze(-1)  # [T, N, 1]
        if torch.is_grad_enabled():
            outputs, state = _Unrolled.apply(projected, weight, state, resets)  # type: ignore[no-untyped-call]
        else:
            outputs, state, _ = unroll(projected, weight, state, resets)
        return outputs.transpose(0, 1), state


class Tape(NamedTuple):
    """What the backward pass needs to know of every step."""

    hidden: list[Tensor]  # [N, W] before the step
    cell: list[Tensor]  # [N, W] before the step
    gates: list[Tensor]  # [N, 4W] activated: input, forget and output gate, candidate
    tanh_cell: list[Tensor]  # [N, W] tanh of the cell after the step


def unroll(projected: Tensor, weight: Tensor, state: Tensor, resets: Tensor) -> tuple[Tensor, Tensor, Tape]:
    """Run the LSTM step after step.

    projected [T, N, 4W], weight [4W, W], state [N, 2W], resets [T, N, 1] → outputs [T, N, W], state [N, 2W]
    """
    width = weight.shape[1]
    hidden, cell = state.split(width, dim=-1)
    tape, outputs = Tape([], [], [], []), []
    for projection, reset in zip(projected.unbind(0), resets.unbind(0), strict=True):
        # The reset sits inside the cell, so that no other code knows about episodes.
        hidden, start = hidden.masked_fill(reset, 0.0), cell.masked_fill(reset, 0.0)
        # i, f, o = σ(·), g = tanh(·); c = f·c + i·g; h = o·tanh(c)
        gates = torch.addmm(projection, hidden, weight.T)
        doors, candidate = gates.split((3 * width, width), dim=-1)
        input_gate, forget_gate, output_gate = doors.sigmoid_().split(width, dim=-1)
        cell = torch.addcmul(forget_gate * start, input_gate, candidate.tanh_())
        tanh_cell = cell.tanh()
        for kept, value in zip(tape, (hidden, start, gates, tanh_cell), strict=True):
            kept.append(value)
        hidden = output_gate * tanh_cell
        outputs.append(hidden)
    return torch.stack(outputs), torch.cat((hidden, cell), dim=-1), tape


class _Unrolled(Function):
    """`unroll` with its backward pass written out.

    Whatever does not wait for a later step is done for all steps at once: only two gradients are carried
    from step to step, and the weight's gradient is one product.
    """

    @staticmethod
    def forward(
        ctx: Any, projected: Tensor, weight: Tensor, state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs, state, tape = unroll(projected, weight, state, resets)
        ctx.save_for_backward(weight, resets, *(torch.stack(kept) for kept in tape))
        return outputs, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_outputs: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, resets, hidden, cell, gates, tanh_cell = ctx.saved_tensors
        width = weight.shape[1]
        input_gate, forget_gate, output_gate, candidate = gates.split(width, dim=-1)  # [T, N, W] each
        slopes = torch.stack(  # of each gate before its squashing, per unit of what it moves: [T, N, 4, W]
            (
                candidate * input_gate * (1 - input_gate),
                cell * forget_gate * (1 - forget_gate),
                tanh_cell * output_gate * (1 - output_gate),
                input_gate * (1 - candidate.square()),
            ),
            dim=2,
        ).unbind(0)
        through = (output_gate * (1 - tanh_cell.square())).unbind(0)  # how an output moves with its cell
        carried = forget_gate.masked_fill(resets, 0.0).unbind(0)  # how a cell moves with the one before
        grads, forget = grad_outputs.unbind(0), resets.unbind(0)
        grad_hidden, grad_cell = grad_state.split(width, dim=-1)
        grad_gates = []
        for t in range(len(gates) - 1, -1, -1):
            grad_hidden = grads[t] + grad_hidden
            grad_cell = torch.addcmul(grad_cell, grad_hidden, through[t])
            moved = torch.stack((grad_cell, grad_cell, grad_hidden, grad_cell), dim=1)
            grad_gates.append((slopes[t] * moved).flatten(1))
            grad_hidden = (grad_gates[-1] @ weight).masked_fill_(forget[t], 0.0)
            grad_cell = grad_cell * carried[t]
        grad_projected = torch.stack(grad_gates[::-1])
        grad_weight = grad_projected.flatten(0, 1).T @ hidden.flatten(0, 1)
        return grad_projected, grad_weight, torch.cat((grad_hidden, grad_cell), dim=-1), None


@dataclass(frozen=True)
class PolicyOutput:
    """What a policy says about N rows of T steps with H heads."""

    actions: Tensor  # [N, T, H] int64; 0 where the head is not read
    log_prob: Tensor  # [N, T, H] float32; 0 where the head is not read
    entropy: Tensor  # [N, T, H] in 0..1; 0 where the head is not read
    relevant: Tensor  # [N, T, H] bool: the sampled action reads this head
    forced: Tensor  # [N, T] bool: there was nothing to choose
    fault: Tensor  # [N, T, H] bool: a head that is read has no legal choice
    value: Tensor  # [N, T] float32, in the units that the value head was trained in
    state: Tensor  # [N, state] the memory after the last step


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2.0)) -> nn.Linear:
    """Make a linear layer with orthogonal weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


# The heads between slot and op, in head order: those that are drawn last.
DETAIL_HEADS = tuple(head for head in Head if head not in (Head.SLOT, Head.OP))
DETAIL_CHOICES = max(len(HEAD_CHOICES[head]) for head in DETAIL_HEADS)


@dataclass(frozen=True)
class TamiyoInputs:
    """What batch_obs_to_features returns: the numbers and the blueprint of every slot."""

    features: Tensor  # [..., BASE + SLOT·S] float32
    blueprints: Tensor  # [..., S] int64, -1 where the slot is empty


class _Encoding(NamedTuple):
    memory: Tensor  # [N, T, W]
    slots: Tensor  # [N, T, S, W]
    state: Tensor  # [N, 2W]


class TamiyoNet(nn.Module):
    """Slot encoder, recurrent core, pointer over slots, op → slot → details and, with `rates`, the rate."""

    def __init__(self, config: TamiyoNetConfig | None = None, rates: bool = False) -> None:
        """Draw the first weights; rates: with features and a head for the learning rate."""
        super().__init__()
        self.config, self.rates = config or TamiyoNetConfig(), rates
        self.head_names = (*(head.name.lower() for head in Head), *(["rate"] if rates else []))
        self._base_size = BASE_FEATURE_SIZE + (RATE_FEATURE_SIZE if rates else 0)
        width, embedding = self.config.width, self.config.embedding
        self.blueprint_embedding = nn.Embedding(NUM_BLUEPRINTS + 1, embedding)  # row 0: an empty slot
        self.op_embedding = nn.Embedding(NUM_OPS, embedding)
        self.slot_encoder = nn.Sequential(
            linear(SLOT_FEATURE_SIZE + embedding, width), nn.SiLU(), linear(width, width), nn.SiLU()
        )
        self.base_encoder = nn.Sequential(linear(self._base_size + 2 * width, width), nn.SiLU())
        self.core = RecurrentCore(width, width)
        self.op_head = linear(width, NUM_OPS, gain=0.01)
        self.slot_query = linear(width + embedding, width, gain=1.0)
        self.slot_key = linear(width, width, gain=1.0)
        self.detail_encoder = nn.Sequential(linear(2 * width + embedding, width), nn.SiLU())
        self.detail_heads = linear(width, len(DETAIL_HEADS) * DETAIL_CHOICES, gain=0.01)
        self.value_encoder = nn.Sequential(linear(width, width), nn.SiLU())
        self.value_head = linear(width, 1, gain=0.01)  # V begins as a constant
        if rates:
            self.rate_head = linear(width, len(Rate), gain=0.01)

    def initial_state(self, num_rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the memory of a fresh episode, of the output and the cell: zeros.  # [N, 2W]"""
        return torch.zeros(num_rows, 2 * self.core.width, device=device)

    def sequence(
        self,
        observation: TamiyoInputs,
        masks: ActionMasks,
        state: Tensor,
        resets: Tensor,
        actions: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyOutput:
        """Judge the given actions, or sample by the uniforms, or take the likeliest if neither is given.

        The op comes first, then the slot under it, then what else the op reads. state [N, state]; resets
        [N, T]: the memory is cleared before that step; actions, uniforms [N, T, H].
        """
        seen = self._encode(observation, state, resets)
        legal_details = pad_masks(masks)  # [N, T, 6, 16]

        def choose(heads: slice, logits: Tensor, legal: Tensor) -> Tensor:
            """Return the given choices of these heads, or new ones.  # [N, T, heads]"""
            if actions is not None:
                return actions[..., heads]
            distribution = MaskedHeads(logits, legal)
            return distribution.mode() if uniforms is None else distribution.sample(uniforms[..., heads])

        # π(a) = π(op)·π(slot | op)·Π π(detail | op, slot)
        op_logits = self.op_head(seen.memory).unsqueeze(-2)  # [N, T, 1, ops]
        op = choose(slice(Head.OP, Head.OP + 1), op_logits, masks.op.unsqueeze(-2))
        relevant = relevance(op.squeeze(-1))  # [N, T, H]
        op_embedded = self.op_embedding(op.squeeze(-1))  # [N, T, E]

        slot_logits = self._slot_logits(seen, op_embedded)  # [N, T, 1, S]
        slot_index = op.unsqueeze(-1).expand(*op.shape, slot_logits.shape[-1])
        # Slots that are legal under the chosen op.
        slot_legal = masks.slot_by_op.gather(-2, slot_index)  # [N, T, 1, S]
        slot = choose(slice(Head.SLOT, Head.SLOT + 1), slot_logits, slot_legal)
        slot = slot * relevant[..., Head.SLOT, None]

        detail_logits = self._detail_logits(seen, op_embedded, slot, relevant[..., Head.SLOT, None])
        details = choose(slice(Head.SLOT + 1, Head.OP), detail_logits, legal_details)

        choices, logits = [slot, details, op], [slot_logits, detail_logits, op_logits]
        legal = [slot_legal, legal_details, masks.op.unsqueeze(-2)]
        if self.rates:
            logits.append(self.rate_head(seen.memory).unsqueeze(-2))  # [N, T, 1, rates]
            rates = masks.rate
            if rates is None:  # the rate is not the controller's: only KEEP, the first choice
                rates = pad(torch.ones_like(masks.op[..., :1]), (0, len(Rate) - 1))
            legal.append(rates.unsqueeze(-2))
            choices.append(choose(slice(RATE_HEAD, RATE_HEAD + 1), logits[-1], legal[-1]))
            # Whatever the op is, the rate is read where there is more than KEEP to choose.
            relevant = torch.cat((relevant, legal[-1].sum(-1) > 1), dim=-1)

        # A head that the op does not read has action 0, log-probability 0 and entropy 0.
        chosen = torch.cat(choices, dim=-1) * relevant
        heads = MaskedHeads(stack_heads(*logits), stack_heads(*legal))
        return PolicyOutput(
            **vars(heads.evaluate(chosen, relevant)),
            actions=chosen,
            relevant=relevant,
            forced=(heads.num_legal[..., Head.OP :] == 1).all(-1),
            value=self.value_head(self.value_encoder(seen.memory)).squeeze(-1),
            state=seen.state,
        )

    def _encode(self, observation: TamiyoInputs, state: Tensor, resets: Tensor) -> _Encoding:
        """Encode every slot, pool them, and remember."""
        base, slots = observation.features.split(
            (self._base_size, observation.features.shape[-1] - self._base_size), dim=-1
        )
        blueprints = self.blueprint_embedding(observation.blueprints + 1)  # [N, T, S, E]
        slots = slots.unflatten(-1, (-1, SLOT_FEATURE_SIZE))  # [N, T, S, F]
        encoded = self.slot_encoder(torch.cat((slots, blueprints), dim=-1))  # [N, T, S, W]
        # Mean and maximum over the set of slots: the same weights serve any number of them.
        pooled = torch.cat((base, encoded.mean(-2), encoded.amax(-2)), dim=-1)
        memory, state = self.core(self.base_encoder(pooled), state, resets)
        return _Encoding(memory, encoded, state)

    def _slot_logits(self, seen: _Encoding, op_embedded: Tensor) -> Tensor:
        """Compute pointer logits over the slots, given memory and op.  # [N, T, 1, S]"""
        query = self.slot_query(torch.cat((seen.memory, op_embedded), dim=-1)).unsqueeze(-2)
        # q·k / sqrt(width), as in attention.
        return query @ self.slot_key(seen.slots).transpose(-1, -2) / math.sqrt(self.config.width)

    def _detail_logits(
        self, seen: _Encoding, op_embedded: Tensor, slot: Tensor, reads_slot: Tensor
    ) -> Tensor:
        """Compute the logits of the detail heads, given op and slot.  # [N, T, 1] twice → [N, T, 6, 16]"""
        index = slot.unsqueeze(-1).expand(*slot.shape, seen.slots.shape[-1])
        chosen_slot = seen.slots.gather(-2, index).squeeze(-2) * reads_slot  # [N, T, W]
        context = self.detail_encoder(torch.cat((seen.memory, op_embedded, chosen_slot), dim=-1))
        return self.detail_heads(context).unflatten(-1, (len(DETAIL_HEADS), DETAIL_CHOICES))


def pad_masks(masks: ActionMasks) -> Tensor:
    """Return the masks of the detail heads, padded with False.  # [..., 6, 16]"""
    flat = torch.cat([masks.head(head) for head in DETAIL_HEADS], dim=-1)
    return pad(flat, (0, 1))[..., _padding_index(flat.device)]


def stack_heads(*groups: Tensor) -> Tensor:
    """Return groups of heads, in head order, padded with 0 to the widest.  # [..., H, C]"""
    choices = max(groups[0].shape[-1], DETAIL_CHOICES)
    return torch.cat([pad(group, (0, choices - group.shape[-1])) for group in groups], dim=-2)


@device_table
def _padding_index() -> Tensor:
    """Return where each padded choice lies in the row of all masks; one past the end is False.  # [6, 16]"""
    sizes = torch.tensor([[len(HEAD_CHOICES[head])] for head in DETAIL_HEADS])
    starts, choices = sizes.cumsum(0) - sizes, torch.arange(DETAIL_CHOICES)
    return torch.where(choices < sizes, starts + choices, sizes.sum())
