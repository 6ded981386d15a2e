"""When does it pay to grow into a model? Fixed and grown networks at equal training FLOPs.

    python -m studies.growth_grid gpt --device cuda --out FILE              several processes share the arms
    python -m studies.growth_grid resnet vit --data F --device cuda --out FILE
    python -m studies.growth_grid --arms LIST --test --device cuda --out FILE   arms, or results again
    python -m studies.growth_grid --read FILE [FILE ...]                    the tables

gpt: bytes of the sources of the standard library and of torch; gpt-21m: of other packages too; text: of a
folder of texts (*.md, *.txt, *.rst); llama: the same, with the layers of Llama. resnet, vit: a folder of
images such as CIFAR-10 (train/CLASS/*.jpg, test/CLASS/*.jpg), randomly shifted and flipped. resmlp: the table
`letter`.

A grown arm trains a part of the blocks first; the others begin as copies. All arms of a budget have the same
FLOPs and batch size, and, where an arm says nothing else, the same learning-rate schedule by compute: warm-up
over 2 %, flat, linear decay over the last 40 %. The arm "equal steps" takes as many steps as the whole
network, and so spends less.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.textbook import GPT, batches, decay_groups, forward_flops, load_images, resnet
from esper.growing.blocks import find_blocks
from esper.growing.progressive import ORDERS, Progressive, copy_parameter
from esper.tasks import load_task
from esper.tasks.task import Split, Task
from esper.utils.errors import UserError
from esper.utils.statistics import paired_interval
from studies import command_line, gpt

DECAY = 0.4  # of the compute
EQUAL_STEPS_AT = 0.36  # of the steps: saves 18 % of the FLOPs, what copies of the middle save at equal loss
OUTPUTS = {"proj", "down"}  # layers that add to the residual stream
SHIFT = 4  # pixels by which training images are shifted at most

Batches = Callable[[], tuple[Tensor, Tensor]]


# ---- networks --------------------------------------------------------------------------------------------


class ViT(nn.Module):
    """A vision transformer of PyTorch's own pre-norm layers, with mean pooling."""

    def __init__(self, width: int, depth: int, patch: int = 4, side: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        for name, parameter in self.encoder.named_parameters():
            if parameter.ndim == 2:  # TransformerEncoder copies one layer, so each is drawn anew
                residual = name.endswith(("out_proj.weight", "linear2.weight"))
                nn.init.trunc_normal_(parameter, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


class Llama(nn.Module):
    """The Llama of transformers over bytes: RMSNorm, rotary positions, gated linear units, no biases."""

    def __init__(self, width: int, depth: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=8 * width // 3 // 8 * 8,
            num_hidden_layers=depth, num_attention_heads=width // 64, tie_word_embeddings=True,
            max_position_embeddings=gpt.FULL.context, use_cache=False, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.network = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.network(input_ids=tokens).logits
        return logits


class ResidualLayer(nn.Module):
    """LayerNorm, Linear, ReLU, Linear around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.relu(self.up(self.norm(x))))
        return result


def resmlp(width: int, depth: int) -> nn.Module:
    """Make a residual perceptron for `letter`."""
    layers = [ResidualLayer(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(16, width), *layers, nn.LayerNorm(width), nn.Linear(width, 26))


# ---- families --------------------------------------------------------------------------------------------


def adamw(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """AdamW as most transformers use it."""
    return torch.optim.AdamW(decay_groups(model, decay), lr=rate, betas=(0.9, 0.99), fused=True)


def sgd(model: nn.Module, rate: float, decay: float) -> torch.optim.Optimizer:
    """SGD as most residual networks use it."""
    groups = decay_groups(model, decay)
    return torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)


def muon(model: nn.Module, rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks and AdamW for the rest, at rates of the same meaning."""
    blocks = [block for each in find_blocks(model) for block in each.blocks]
    matrices = [p for block in blocks for p in block.parameters() if p.ndim == 2]
    taken = set(matrices)
    groups = decay_groups(model, decay)
    rest = [{**group, "params": [p for p in group["params"] if p not in taken]} for group in groups]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.99), fused=True),
    ]


@dataclass(frozen=True)
class Family:
    """A kind of network, its data and its optimizer."""

    make: Callable[[int, int], nn.Module]  # width, depth
    load: Callable[[Path | None], Task]
    optimizer: Callable[[nn.Module, float, float], torch.optim.Optimizer]
    width: int
    depth: int
    rate: float
    weight_decay: float
    batch: int
    images: bool = False
    text: bool = False
    validation: int = 5000  # samples, or windows of text


def make_gpt(width: int, depth: int) -> nn.Module:
    """A GPT over bytes, with heads of 64 features."""
    return GPT(256, gpt.FULL.context, width, depth, width // 64)


def load_texts(folder: Path | None) -> Task:
    """Make the task of predicting the next byte of a user's texts."""
    if folder is None or not any(path.suffix in gpt.TEXTS and path.is_file() for path in folder.rglob("*")):
        raise UserError(f"--data is {folder}; give a folder with files {', '.join(gpt.TEXTS)}")
    return gpt.make_task(gpt.FULL, folder)


FAMILIES = {
    "gpt": Family(
        make_gpt, lambda _: gpt.make_task(gpt.FULL), adamw, 256, 8, 3e-3, 0.1, 128, False, True, 2048
    ),
    "gpt-21m": Family(  # 21 million parameters
        make_gpt, lambda _: gpt.make_task(gpt.LARGE), adamw, 384, 12, 2e-3, 0.1, 128, False, True, 2048
    ),
    "text": Family(make_gpt, load_texts, adamw, 256, 8, 3e-3, 0.1, 128, False, True, 2048),
    "llama": Family(Llama, load_texts, adamw, 128, 6, 6e-3, 0.1, 32, False, True, 2048),
    "resnet": Family(
        lambda width, depth: resnet(3, 10, width, 3, depth), load_images, sgd, 16, 6, 0.2, 5e-4, 256, True
    ),
    "vit": Family(ViT, load_images, adamw, 192, 8, 1e-3, 0.05, 256, True),
    "resmlp": Family(resmlp, lambda _: load_task("letter"), adamw, 32, 8, 1e-2, 0.01, 128),
}


def augmented(split: Split, size: int, seed: int) -> Batches:
    """Draw images in a new order for each epoch, each shifted and perhaps mirrored."""
    device, side = split.inputs.device, split.inputs.shape[-1]
    padded = Split(F.pad(split.inputs, [SHIFT] * 4), split.targets)
    take = batches(padded, size, False, seed)
    draw = torch.Generator(device).manual_seed(seed)
    pixels, each = torch.arange(side, device=device), torch.arange(size, device=device)[:, None, None]

    def shift() -> tuple[Tensor, Tensor]:
        images, targets = take()
        down, right = torch.randint(2 * SHIFT + 1, (2, size, 1), generator=draw, device=device)
        mirror = torch.rand(size, 1, generator=draw, device=device) < 0.5
        columns = torch.where(mirror, pixels.flip(0), pixels) + right
        # Indices around the slice put the channels last: [batch, side, side, channels].
        shifted = images[each, :, (pixels + down)[:, :, None], columns[:, None, :]]
        return shifted.permute(0, 3, 1, 2), targets

    return shift


# ---- arms ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One network and how it trains."""

    family: str
    budget: float  # FLOPs
    depth: int
    width: int
    rate: float
    start: int = 0  # active layers at first; 0: all
    grow_at: tuple[float, ...] = ()  # fractions of the compute
    # Of ORDERS; halved; zeroed: new layers are fresh and add nothing at first; or alternating: no copies, the
    # first and the last layer train at first, and with them a share of the others that changes at every step.
    order: str = "interleaved"
    tied: float | None = (
        None  # fraction of the steps until which interleaved layers share weights with theirs
    )
    equal_steps: bool = False  # as many steps as without growth, so fewer FLOPs; grow_at is of the steps
    seed: int = 0
    warmup: float = 0.02  # of the compute
    decay: float = DECAY  # of the compute, at its end
    batch: int = 0  # 0: that of the family
    muon: bool = False  # instead of the optimizer of the family

    @property
    def name(self) -> str:
        """Name the arm without family, budget, rate and seed."""
        warmup = "" if self.warmup == Arm.warmup else f" warm-up {self.warmup:g}"
        decay = "" if self.decay == DECAY else f" decay {self.decay:g}"
        return self._network + warmup + decay + (" Muon" if self.muon else "")

    @property
    def _network(self) -> str:
        if not self.start:
            return f"fixed {self.depth}x{self.width}"
        times = "+".join(f"{at:g}" for at in self.grow_at)
        tied = "" if self.tied is None else f" tied to {self.tied:g}"
        equal = " equal steps" if self.equal_steps else ""
        return f"{self.start}→{self.depth}x{self.width} at {times} {self.order}{tied}{equal}"


def plan(arm: Arm) -> tuple[list[int], list[float]]:
    """Return the steps of each phase and the FLOPs of one step in it."""
    family = FAMILIES[arm.family]
    shape = (gpt.FULL.context,) if family.text else (3, 32, 32) if family.images else (16,)
    sample = torch.zeros(1, *shape, dtype=torch.long if family.text else torch.float)
    hops = len(arm.grow_at)
    start = arm.start or arm.depth
    depths = [round(start * (arm.depth / start) ** (hop / max(hops, 1))) for hop in range(hops + 1)]
    batch = arm.batch or family.batch
    costs = [3.0 * batch * forward_flops(family.make(arm.width, d), sample) for d in depths]
    shares = [b - a for a, b in pairwise([0.0, *arm.grow_at, 1.0])]
    per_step = [costs[-1]] * len(costs) if arm.equal_steps else costs
    return [round(arm.budget * share / cost) for share, cost in zip(shares, per_step, strict=True)], costs


def rate_share(progress: float, warmup: float, decay: float) -> float:
    """Return the learning rate at a fraction of the compute, relative to its peak."""
    return min(progress / warmup, 1.0, (1.0 - progress) / decay)


class TrainingStep:
    """An optimizer step of a network: compiled with products in bfloat16, or plain in float32.

    On a GPU it is compiled and replayed as a CUDA graph: launching the kernels of a step takes longer than
    running them, 19 against 5 ms for a ViT of 8 layers. `compiling` has the seconds that this takes first.
    """

    WARM_UP = 3  # plain steps before a capture: they compile, and make the state of the optimizer

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], device: str, bfloat16: bool
    ) -> None:
        self.model, self.optimizers, self.device, self.bfloat16 = model, optimizers, device, bfloat16
        self.rate: Any = 0.0
        self.compiling = 0.0
        self.forward: Callable[[Tensor], Tensor] = model
        self.reset()
        if bfloat16:
            torch._dynamo.reset()  # the limit of graphs counts those of earlier arms too
            # A function of ours around it, since dynamo splits an nn.Sequential at the top into its children.
            self.forward = torch.compile(lambda inputs: model(inputs))
        if device != "cpu":
            self.rate = torch.zeros((), device=device)
            for optimizer in optimizers:
                if not isinstance(optimizer, torch.optim.Muon):
                    for group in optimizer.param_groups:  # a replay reads the rate from memory
                        group.update({"lr": self.rate, "capturable": True})

    def reset(self) -> None:
        """Capture the step anew, as when the network has grown."""
        self.graph: torch.cuda.CUDAGraph | None = None
        self.plain_steps = 0
        self.batch: list[Tensor] = []
        self._zero_grad()

    def __call__(self, batch: Sequence[Tensor], rate: float) -> None:
        """Train on a batch of inputs and targets."""
        if self.device == "cpu":
            for group in (group for each in self.optimizers for group in each.param_groups):
                group["lr"] = rate
            self._update(*batch)
            return
        self.rate.fill_(rate)
        if self.graph is not None:
            for held, tensor in zip(self.batch, batch, strict=True):
                held.copy_(tensor)
            self.graph.replay()
            return
        torch.cuda.synchronize()
        began, self.plain_steps = time.perf_counter(), self.plain_steps + 1
        with torch.cuda.stream(torch.cuda.Stream()):  # a capture needs steps on another stream than the usual
            self._update(*batch)
        torch.cuda.synchronize()
        if self.plain_steps == self.WARM_UP:
            self.graph, self.batch = torch.cuda.CUDAGraph(), [tensor.clone() for tensor in batch]
            with torch.cuda.graph(self.graph):
                self._update(*self.batch)
        self.compiling += time.perf_counter() - began

    def _zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _update(self, inputs: Tensor, targets: Tensor) -> None:
        self._zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bfloat16):
            logits = self.forward(inputs)
        F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            if self.device != "cpu" and isinstance(optimizer, torch.optim.Muon):
                step_at(optimizer, self.rate)
            else:
                optimizer.step()


@torch.no_grad()
def step_at(optimizer: torch.optim.Optimizer, rate: Tensor) -> None:
    """Make a step at a rate in memory, for an optimizer that takes a number, which a capture would freeze.

    Its step must be linear in the rate: this one makes it at its own rate, and goes a part of the way.
    """
    before = [[p.clone() for p in group["params"]] for group in optimizer.param_groups]
    optimizer.step()
    for group, old in zip(optimizer.param_groups, before, strict=True):
        for parameter, start in zip(group["params"], old, strict=True):
            parameter.copy_(start.lerp(parameter, rate / group["lr"]))


def train(arm: Arm, task: Task, device: str, test: bool = False, bfloat16: bool = False) -> dict[str, Any]:
    """Train an arm; return its scores, the curve and the seconds; test scores if asked for.

    bfloat16: compile the network and multiply in bfloat16 on a CPU too.

    The curve has rows of FLOPs, seconds of training alone, validation loss and accuracy; `seconds` of the
    result counts compilation and validation too.
    """
    family = FAMILIES[arm.family]
    torch.manual_seed(arm.seed)
    model = family.make(arm.width, arm.depth).to(device, memory_format=_layout(family))
    make = muon if arm.muon else lambda *given: [family.optimizer(*given)]
    optimizers = make(model, arm.rate, family.weight_decay)
    steps, costs = plan(arm)
    total, grower = sum(steps), None
    if arm.start:
        at = [sum(steps[: hop + 1]) / total for hop in range(len(arm.grow_at))]
        example = (task.train.inputs[:1].to(device),)
        grower = Progressive(
            model,
            optimizers,
            total,
            start=arm.start / arm.depth,
            grow_at=at,
            order=arm.order if arm.order in ORDERS else "interleaved",  # type: ignore[arg-type]
            example=example,
        )
    bfloat16 |= device != "cpu"
    subsets = alternating_subsets(arm.start, arm.depth) if arm.order == "alternating" else [[]]
    updates = [TrainingStep(model, optimizers, device, bfloat16) for _ in subsets]
    update = updates[-1]
    for each in updates:  # the last one was given to the optimizers, and is compiled
        each.rate, each.forward = update.rate, update.forward
    data, batch = task.train.to(device), arm.batch or family.batch
    take = augmented(data, batch, arm.seed) if family.images else batches(data, batch, family.text, arm.seed)
    validation = task.validation.subset(torch.arange(min(family.validation, len(task.validation)))).to(device)
    spent, measuring, curve, began = 0.0, 0.0, [], time.perf_counter()
    shared: list[tuple[nn.Module, str, nn.Parameter]] = []
    per_step = [cost for cost, count in zip(costs, steps, strict=True) for _ in range(count)]
    whole = sum(per_step)
    every = max(1, total // 10)
    for step, cost in enumerate(per_step):
        turn = step % len(subsets) if step < steps[0] else -1
        if len(subsets) > 1 and step < steps[0]:
            grower.lists[0].activate(subsets[turn])
        updates[turn](take(), arm.rate * rate_share(spent / whole, arm.warmup, arm.decay))
        spent += cost
        if len(subsets) > 1:
            if step + 1 == steps[0]:  # without copies: all layers have trained
                grower.set_stage(1)
                update.reset()
                update.compiling += sum(each.compiling for each in updates[:-1])
        elif grower is not None:
            before = [each.active for each in grower.lists]
            if grower.step():
                if arm.order == "zeroed":
                    restart_blocks(grower, before, family.make(arm.width, arm.depth), optimizers)
                if arm.order == "halved":
                    halve_outputs(grower)
                if arm.tied is not None:
                    shared += tie_blocks(grower, before)
                update.reset()
        if shared and step + 1 == round((arm.tied or 0) * total):
            untie_blocks(shared, optimizers)
            update.reset()
        if (step + 1) % every == 0 or step + 1 == total:
            if device != "cpu":
                torch.cuda.synchronize()
            paused = time.perf_counter()
            seconds = paused - began - update.compiling - measuring
            curve.append((spent, seconds, *measure(model, validation, device, bfloat16)))
            measuring += time.perf_counter() - paused
    assert grower is None or grower.whole
    tested = measure(model, task.test().to(device), device, bfloat16) if test else (None, None)
    return {
        **asdict(arm),
        "name": arm.name,
        "validation": curve[-1][2],
        "accuracy": curve[-1][3],
        "test": tested[0],
        "test_accuracy": tested[1],
        "steps": steps,
        "flops": spent,
        "seconds": time.perf_counter() - began,
        "compiling": update.compiling,
        "measuring": measuring,
        "parameters": sum(p.numel() for p in model.parameters()),
        "bfloat16": bfloat16,
        "gpu": torch.cuda.get_device_name() if device != "cpu" else platform.machine(),
        "curve": curve,
    }


def alternating_subsets(start: int, depth: int) -> list[list[int]]:
    """Split the layers between the first and the last, and return sets of `start` with these two in each."""
    if start < 3 or start == depth or (depth - 2) % (start - 2):
        raise UserError(f"{depth - 2} layers in the middle are no several sets of {start - 2}")
    turns = (depth - 2) // (start - 2)
    return [[0, *range(1 + turn, depth - 1, turns), depth - 1] for turn in range(turns)]


@torch.no_grad()
def restart_blocks(
    grower: Progressive,
    before: Sequence[Sequence[int]],
    fresh: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Give the weights of a fresh network, with outputs of zero, to blocks that were not active before."""
    drawn = dict(fresh.named_parameters())
    for each, old in zip(grower.lists, before, strict=True):
        for k in (k for k in each.active if k not in old):
            for name, parameter in each.blocks[k].named_parameters():
                parameter.copy_(drawn[f"{each.names[k]}.{name}"])
                if name.split(".")[0] in OUTPUTS:
                    parameter.zero_()
                for value in (v for each in optimizers for v in each.state.get(parameter, {}).values()):
                    value.zero_()


def tie_blocks(
    grower: Progressive, before: Sequence[Sequence[int]]
) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Let new blocks use the parameters of those ahead of them; return which they had, and where."""
    shared = []
    for each, old in zip(grower.lists, before, strict=True):
        for k in (k for k in each.active if k not in old):
            source = each.blocks[max(i for i in old if i < k)]
            for new, first in zip(each.blocks[k].modules(), source.modules(), strict=True):
                for name, parameter in first.named_parameters(recurse=False):
                    shared.append((new, name, getattr(new, name)))
                    setattr(new, name, parameter)
    return shared


def untie_blocks(
    shared: list[tuple[nn.Module, str, nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Give tied blocks parameters of their own again, as copies."""
    while shared:
        module, name, own = shared.pop()
        copy_parameter(getattr(module, name), own, optimizers)
        setattr(module, name, own)


@torch.no_grad()
def halve_outputs(grower: Progressive) -> None:
    """Let every active block add half as much, so that a block and its copy add about what it added alone."""
    for block in (each.blocks[k] for each in grower.lists for k in each.active):
        for name, parameter in block.named_parameters():
            if name.split(".")[0] in OUTPUTS:
                parameter.mul_(0.5)


def _layout(family: Family) -> torch.memory_format:
    return torch.channels_last if family.images else torch.contiguous_format


@torch.no_grad()
def measure(model: nn.Module, split: Split, device: str, bfloat16: bool) -> tuple[float, float]:
    """Return the loss (of text in nats for each byte) and the accuracy on a split."""
    model.eval()
    loss, hits = torch.zeros(2, device=device)
    for start in range(0, len(split), 256):
        with torch.autocast(device, torch.bfloat16, enabled=bfloat16):
            logits = model(split.inputs[start : start + 256])
        logits, targets = logits.float().flatten(0, -2), split.targets[start : start + 256].flatten()
        loss += F.cross_entropy(logits, targets, reduction="sum")
        hits += (logits.argmax(-1) == targets).sum()
    model.train()
    return float(loss) / split.targets.numel(), float(hits) / split.targets.numel()


def pilot(families: Iterable[str], budgets: Sequence[float]) -> list[Arm]:
    """List one seed of the whole and the half network, and of growth at several times and rates."""
    arms = []
    for name, budget in ((name, budget) for name in families for budget in budgets):
        family = FAMILIES[name]
        whole = Arm(name, budget, family.depth, family.width, family.rate)
        half = replace(whole, depth=family.depth // 2)
        grown = replace(whole, start=family.depth // 2)
        arms += [replace(arm, rate=r * arm.rate) for arm in (whole, half) for r in (0.5, 1.0, 2.0)]
        arms += [replace(grown, grow_at=(at,)) for at in (0.15, 0.3, 0.5)]
        arms += [replace(grown, grow_at=(0.3,), rate=r * grown.rate) for r in (0.5, 2.0)]
        arms += [replace(grown, grow_at=(0.3,), order="stacked")]
    return arms


def finals(families: Iterable[str], budgets: Sequence[float], at: float, rates: Sequence[float]) -> list[Arm]:
    """List five seeds of growth, of the whole network and of the half-size one, each at a rate."""
    return [
        replace(arm, seed=seed)
        for seed in range(1, 6)
        for name in families
        for budget in budgets
        for arm in _finalists(Arm(name, budget, FAMILIES[name].depth, FAMILIES[name].width, 0.0), at, rates)
    ]


def _finalists(whole: Arm, at: float, rates: Sequence[float]) -> list[Arm]:
    half, grown = whole.depth // 2, replace(whole, start=whole.depth // 2)
    arms = [replace(grown, grow_at=(at,)), whole, replace(whole, depth=half)]
    arms = [replace(arm, rate=rate) for arm, rate in zip(arms, rates, strict=True)]
    return [*arms, replace(arms[0], grow_at=(EQUAL_STEPS_AT,), equal_steps=True)]


def read_arms(path: Path) -> list[Arm]:
    """Return the arms of a file with a JSON object of fields in each line, such as a file of results."""
    names = {field.name for field in fields(Arm)}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    given = [{name: value for name, value in line.items() if name in names} for line in lines]
    return [Arm(**{**each, "grow_at": tuple(each.get("grow_at", ()))}) for each in given]


def table(paths: Sequence[Path]) -> str:
    """Return the mean validation loss of every arm by family and budget, then the scores of the finals."""
    runs = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    found: dict[tuple[str, float, str, float], list[tuple[float, float]]] = defaultdict(list)
    tested: dict[tuple[str, float], dict[tuple[str, float], dict[int, dict[str, Any]]]] = defaultdict(dict)
    for run in runs:
        family = f"{run.get('family', 'gpt')} {run.get('data', '')}".strip()
        score = run["validation"], run.get("accuracy", np.nan)
        found[family, run["budget"], run["name"], run["rate"]].append(score)
        if run.get("test") is not None:
            by_seed = tested[family, run["budget"]].setdefault((run["name"], run["rate"]), {})
            by_seed[run["seed"]] = run
    lines = ["validation loss and accuracy"]
    for (family, budget, name, rate), scores in sorted(found.items(), key=lambda x: (*x[0][:2], min(x[1]))):
        loss, accuracy = np.mean(scores, 0)
        lines.append(
            f"{family:6} {gpt.peta(budget):>5}  {name:46} rate {rate:<7g} {loss:.4f} {accuracy:.4f}  "
            f"n={len(scores)}"
        )
    lines += [
        "",
        "test scores of the finals, seconds, and grown minus each at equal FLOPs; at equal steps; by seed",
    ]
    for (family, budget), arms in tested.items():
        score = "test" if FAMILIES[family.split()[0]].text else "test_accuracy"
        grown = [arm for arm in arms if "→" in arm[0]]
        muon = {arm: "Muon" in arm[0] for arm in arms}  # which are compared among themselves
        equal_steps = [arm for arm in grown if "equal steps" in arm[0]]
        # The networks with the most seeds; of equal ones, with the least validation loss.
        best = [
            min(
                kind,
                key=lambda arm: (-len(arms[arm]), np.mean([run["validation"] for run in arms[arm].values()])),
            )
            for which in ([arm for arm in grown if arm not in equal_steps], equal_steps)
            for optimizer in (False, True)
            if (kind := [arm for arm in which if muon[arm] == optimizer])
        ]
        for (name, rate), by_seed in arms.items():
            scores = [run[score] for run in by_seed.values()]
            seconds = np.median([run["seconds"] for run in by_seed.values()])
            flops = np.mean([run["flops"] for run in by_seed.values()])
            line = f"{family:6} {gpt.peta(budget):>5}  {name:46} rate {rate:<7g} {np.mean(scores):.4f}"
            line += f"  n={len(scores)}  {gpt.peta(flops)} {seconds:.1f} s"
            for one in (arm for arm in best if (name, rate) not in grown and muon[arm] == muon[name, rate]):
                both = sorted(by_seed.keys() & arms[one].keys())
                if len(both) > 1:
                    pair = ([arms[arm][seed][score] for seed in both] for arm in (one, (name, rate)))
                    line += "  {:+.4f} ± {:.4f}".format(*paired_interval(*pair))
            lines.append(line)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train the arms that nobody has taken yet, and append a line for each to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--data", type=Path, help="a folder of images, for resnet and vit, or of texts")
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a JSON line for each run")
    parser.add_argument("--budgets", type=float, nargs="+", default=[1e15], help="FLOPs of a run")
    parser.add_argument(
        "--finals",
        type=float,
        nargs=4,
        metavar=("AT", "GROWN", "WHOLE", "HALF"),
        help="five seeds of growth at AT of the compute, with the rates of the three arms",
    )
    parser.add_argument(
        "--arms", type=Path, help="a file with the fields of an arm in each line, as JSON; results will do"
    )
    parser.add_argument("--test", action="store_true", help="with --arms: read the test split at the end")
    parser.add_argument(
        "--bfloat16", action="store_true", help="compiled, with products in bfloat16; on a GPU always"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no arm after these")
    parser.add_argument("--read", type=Path, nargs="+")
    given = parser.parse_args(arguments)
    if given.read:
        print(table(given.read))
        return
    unknown = [name for name in given.families if name not in FAMILIES]
    if unknown or given.out is None or bool(given.families) == bool(given.arms):
        parser.error(f"give --out, and --arms or some of the families {', '.join(FAMILIES)}")
    torch.set_float32_matmul_precision("high")
    torch.backends.mha.set_fastpath_enabled(False)
    if given.arms:
        arms = read_arms(given.arms)
    elif given.finals:
        arms = finals(given.families, given.budgets, given.finals[0], given.finals[1:])
    else:
        arms = pilot(given.families, given.budgets)
    tasks: dict[str, Task] = {}
    began = time.perf_counter()
    for arm in arms:
        if time.perf_counter() - began > 60 * given.minutes:
            break
        key = f"{arm.family}-{arm.budget:g}-{arm.name}-{arm.rate:g}-{arm.seed}".replace(" ", "_")
        try:  # several processes share the list: who makes the file first trains the arm
            Path(f"{given.out}.{key}.taken").open("x").close()
        except FileExistsError:
            continue
        if arm.family not in tasks:
            tasks[arm.family] = FAMILIES[arm.family].load(given.data)
        test = bool(given.finals) or given.test
        result = train(arm, tasks[arm.family], given.device, test, given.bfloat16)
        with given.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(
            f"{arm.family} {gpt.peta(arm.budget)} {arm.name} rate {arm.rate:g}: {result['validation']:.4f} "
            f"{result['accuracy']:.4f}, {result['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    command_line.run(main)
