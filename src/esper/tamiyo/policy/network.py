"""Tamiyo's network: slots are a set, so that weights trained with 3 slots run with 9 or 25.

One encoder reads every slot; the pooled set and the base features feed the recurrent core. The action is
drawn op first, then the slot under that op by a pointer over the slot encodings, then the other heads
given op and slot. V(s) is read from the core alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from esper.lifecycle.actions import HEAD_CHOICES, NUM_BLUEPRINTS, NUM_OPS, Head, relevance
from esper.tamiyo.policy.action_masks import ActionMasks
from esper.tamiyo.policy.config import MOST_CHOICES
from esper.tamiyo.policy.config import TamiyoNetConfig as TamiyoNetConfig
from esper.tamiyo.policy.distribution import MaskedHeads
from esper.tamiyo.policy.features import BASE_FEATURE_SIZE, SLOT_FEATURE_SIZE
from esper.tamiyo.policy.protocol import Policy, PolicyOutput, linear
from esper.tamiyo.policy.recurrent import RecurrentCore
from esper.utils.devices import device_table

# The heads between slot and op, in head order: those that are drawn last.
DETAIL_HEADS = tuple(head for head in Head if head not in (Head.SLOT, Head.OP))
DETAIL_CHOICES = max(len(HEAD_CHOICES[head]) for head in DETAIL_HEADS)
assert DETAIL_CHOICES == MOST_CHOICES, "the floor of TamiyoNetConfig is bounded by the widest head"


@dataclass(frozen=True)
class TamiyoInputs:
    """What batch_obs_to_features returns: the numbers and the blueprint of every slot."""

    features: Tensor  # [..., BASE + SLOT·S] float32
    blueprints: Tensor  # [..., S] int64, -1 where the slot is empty


class _Seen(NamedTuple):
    memory: Tensor  # [N, T, W]
    slots: Tensor  # [N, T, S, W]
    state: Tensor  # [N, 2W]


class TamiyoNet(Policy):
    """Slot encoder, recurrent core, pointer over slots, and op → slot → details."""

    head_names = tuple(head.name.lower() for head in Head)
    core: RecurrentCore

    def __init__(self, config: TamiyoNetConfig | None = None) -> None:
        super().__init__()
        self.config = config or TamiyoNetConfig()
        width, embedding = self.config.width, self.config.embedding
        self.blueprint_embedding = nn.Embedding(NUM_BLUEPRINTS + 1, embedding)  # row 0: an empty slot
        self.op_embedding = nn.Embedding(NUM_OPS, embedding)
        self.slot_encoder = nn.Sequential(
            linear(SLOT_FEATURE_SIZE + embedding, width), nn.SiLU(), linear(width, width), nn.SiLU()
        )
        self.base_encoder = nn.Sequential(linear(BASE_FEATURE_SIZE + 2 * width, width), nn.SiLU())
        self.core = RecurrentCore(width, width)
        self.op_head = linear(width, NUM_OPS, gain=0.01)
        self.slot_query = linear(width + embedding, width, gain=1.0)
        self.slot_key = linear(width, width, gain=1.0)
        self.detail_encoder = nn.Sequential(linear(2 * width + embedding, width), nn.SiLU())
        self.detail_heads = linear(width, len(DETAIL_HEADS) * DETAIL_CHOICES, gain=0.01)
        self.value_encoder = nn.Sequential(linear(width, width), nn.SiLU())
        self.value_head = linear(width, 1, gain=0.01)  # V begins as a constant

    def sequence(
        self,
        observation: TamiyoInputs,
        masks: ActionMasks,
        state: Tensor,
        resets: Tensor,
        actions: Tensor | None = None,
        uniforms: Tensor | None = None,
    ) -> PolicyOutput:
        """As `Policy.sequence` says: the op first, then the slot under it, then what else the op reads."""
        seen = self._see(observation, state, resets)
        legal_details = pad_masks(masks)  # [N, T, 6, 13]

        def choose(heads: slice, logits: Tensor, legal: Tensor) -> Tensor:
            """The given choices of these heads, or new ones.  # [N, T, heads]"""
            if actions is not None:
                return actions[..., heads]
            distribution = MaskedHeads(logits, legal, self.config.floor)
            return distribution.mode() if uniforms is None else distribution.sample(uniforms[..., heads])

        op_logits = self.op_head(seen.memory).unsqueeze(-2)  # [N, T, 1, ops]
        op = choose(slice(Head.OP, Head.OP + 1), op_logits, masks.op.unsqueeze(-2))
        relevant = self.reads(op.squeeze(-1))  # [N, T, H]
        op_embedded = self.op_embedding(op.squeeze(-1))  # [N, T, E]

        slot_logits = self._slot_logits(seen, op_embedded)  # [N, T, 1, S]
        slot_index = op.unsqueeze(-1).expand(*op.shape, slot_logits.shape[-1])
        slot_legal = masks.slot_by_op.gather(-2, slot_index)  # [N, T, 1, S]
        slot = choose(slice(Head.SLOT, Head.SLOT + 1), slot_logits, slot_legal)
        slot = slot * relevant[..., Head.SLOT, None]

        detail_logits = self._detail_logits(seen, op_embedded, slot, relevant[..., Head.SLOT, None])
        details = choose(slice(Head.SLOT + 1, Head.OP), detail_logits, legal_details)

        chosen = torch.cat((slot, details, op), dim=-1) * relevant
        heads = MaskedHeads(
            stack_heads(slot_logits, detail_logits, op_logits),
            stack_heads(slot_legal, legal_details, masks.op.unsqueeze(-2)),
            self.config.floor,
        )
        return PolicyOutput(
            **vars(heads.evaluate(chosen, relevant)),
            actions=chosen,
            relevant=relevant,
            forced=heads.num_legal[..., Head.OP] == 1,
            value=self._value(seen.memory),
            state=seen.state,
        )

    def reads(self, op: Tensor) -> Tensor:
        """The heads that are chosen, and judged, under each op.  # [N, T] → [N, T, H] bool"""
        return relevance(op)

    def relevant(self, actions: Tensor) -> Tensor:
        """As `Policy.relevant` says: the op decides.  # [N, T, H] → [N, T, H] bool"""
        return self.reads(actions[..., Head.OP])

    def _see(self, observation: TamiyoInputs, state: Tensor, resets: Tensor) -> _Seen:
        """Encode every slot, pool them, and remember."""
        base, slots = observation.features.split(
            (BASE_FEATURE_SIZE, observation.features.shape[-1] - BASE_FEATURE_SIZE), dim=-1
        )
        blueprints = self.blueprint_embedding(observation.blueprints + 1)  # [N, T, S, E]
        slots = slots.unflatten(-1, (-1, SLOT_FEATURE_SIZE))  # [N, T, S, F]
        with torch.autocast(slots.device.type, torch.bfloat16, enabled=self.config.bf16):
            encoded = self.slot_encoder(torch.cat((slots, blueprints), dim=-1))  # [N, T, S, W]
            pooled = torch.cat((base, encoded.mean(-2), encoded.amax(-2)), dim=-1)
            memory, state = self.core(self.base_encoder(pooled), state, resets)
        return _Seen(memory.float(), encoded.float(), state)

    def _slot_logits(self, seen: _Seen, op_embedded: Tensor) -> Tensor:
        """A pointer: how well each slot answers what memory and op ask for.  # [N, T, 1, S]"""
        query = self.slot_query(torch.cat((seen.memory, op_embedded), dim=-1)).unsqueeze(-2)
        logits: Tensor = query @ self.slot_key(seen.slots).transpose(-1, -2) / math.sqrt(self.config.width)
        return logits

    def _detail_logits(self, seen: _Seen, op_embedded: Tensor, slot: Tensor, reads_slot: Tensor) -> Tensor:
        """The heads between slot and op, given both.  # slot, reads_slot [N, T, 1] → [N, T, 6, 13]"""
        index = slot.unsqueeze(-1).expand(*slot.shape, seen.slots.shape[-1])
        chosen_slot = seen.slots.gather(-2, index).squeeze(-2) * reads_slot  # [N, T, W]
        context = self.detail_encoder(torch.cat((seen.memory, op_embedded, chosen_slot), dim=-1))
        logits: Tensor = self.detail_heads(context).unflatten(-1, (len(DETAIL_HEADS), DETAIL_CHOICES))
        return logits

    def _value(self, memory: Tensor) -> Tensor:
        values: Tensor = self.value_head(self.value_encoder(memory)).squeeze(-1)
        return values


def pad_masks(masks: ActionMasks) -> Tensor:
    """The masks of the detail heads, padded with False.  # [..., 6, 13]"""
    flat = torch.cat([masks.head(head) for head in DETAIL_HEADS], dim=-1)
    return pad(flat, (0, 1))[..., _padding_index(flat.device)]


def stack_heads(slot: Tensor, details: Tensor, op: Tensor) -> Tensor:
    """The three groups of heads in head order, padded with 0 to the widest.  # [..., H, C]"""
    choices = max(slot.shape[-1], DETAIL_CHOICES)
    return torch.cat([pad(group, (0, choices - group.shape[-1])) for group in (slot, details, op)], dim=-2)


@device_table
def _padding_index() -> Tensor:
    """Where each padded choice lies in the row of all masks; one past the end is False.  # [6, 13]"""
    sizes = [len(HEAD_CHOICES[head]) for head in DETAIL_HEADS]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    rows = [
        [start + c if c < size else sum(sizes) for c in range(DETAIL_CHOICES)]
        for start, size in zip(starts, sizes, strict=True)
    ]
    return torch.tensor(rows)
