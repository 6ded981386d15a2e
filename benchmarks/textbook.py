"""Do the built-in hosts train as well as textbook networks? `python -m benchmarks.textbook`

    python -m benchmarks.textbook                                    the small ones, minutes on one core
    python -m benchmarks.textbook gpt resnet --data F --device cuda  the large ones; F holds CIFAR-10 as
                                                                     train/CLASS/*.jpg and test/CLASS/*.jpg

Each host family stands beside an ordinary PyTorch network of about its size, written out below and trained
by a plain loop: AdamW, gradients clipped at norm 1, the same batch size and learning-rate schedule, the same
training FLOPs by the same count. Both sides choose their learning rate from the same grid by the validation
loss of a run of its own; then both train once for each seed and read the test split once. Seeds draw weights
and batches on both sides; they are not paired, so the interval of the difference is Welch's.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

from esper.population.config import PopulationConfig
from esper.population.optimizer import rate_share
from esper.simic.config import EpisodeConfig, GovernorConfig
from esper.simic.environment import EnvironmentSpec, GrowthEnvironment
from esper.simic.rollout import evaluate_test, play
from esper.tamiyo.scripted import Static
from esper.tasks import load_task
from esper.tasks.task import HostSpec, Split, Task, TestSplit
from esper.utils.flops import flop_counter
from studies import command_line, gpt

VALIDATION = 10  # every so many training images of a folder are for validation
HOST_SEED = 11  # a host's weights and batches follow from this and the id of its member
CHOOSING = 1000  # the member that chooses the learning rate, and the seed of the plain loop that does


# ---- textbook networks -----------------------------------------------------------------------------------


class GPTLayer(nn.Module):
    """A pre-norm transformer layer in the shape of nanoGPT, with biases."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.ln_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        # [B, heads, T, D / heads]
        mixed = F.scaled_dot_product_attention(*qkv, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.ln_2(x)))), dropout)


class GPT(nn.Module):
    """nanoGPT's network: std 0.02, residual projections scaled by depth, the head tied to the embedding."""

    def __init__(
        self, vocabulary: int, context: int, width: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(GPTLayer(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        logits: Tensor = self.head(self.norm(self.layers(x)))
        return logits


class PreActivationBlock(nn.Module):
    """BatchNorm, ReLU, 3×3 convolution, twice, around a shortcut (He et al., 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn_1, self.bn_2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        changes = stride > 1 or inputs != outputs
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        ready = F.relu(self.bn_1(x))
        skip = x if self.shortcut is None else self.shortcut(ready)
        result: Tensor = skip + self.conv_2(F.relu(self.bn_2(self.conv_1(ready))))
        return result


def resnet(channels: int, classes: int, width: int, stages: int, depth: int) -> nn.Module:
    """Stack stages of pre-activation blocks; each later stage halves the resolution and doubles the width."""
    layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1, bias=False)]
    inputs = width
    for stage in range(stages):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            layers.append(PreActivationBlock(inputs, width << stage, stride))
            inputs = width << stage
    tail = (
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(inputs, classes),
    )
    model = nn.Sequential(*layers, *tail)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def cnn(shape: Sequence[int], classes: int, width: int, depth: int) -> nn.Module:
    """Convolution, BatchNorm, ReLU; every layer but the first halves the resolution."""
    conv, norm = (nn.Conv2d, nn.BatchNorm2d) if len(shape) == 3 else (nn.Conv1d, nn.BatchNorm1d)
    pool = (nn.AdaptiveAvgPool2d if len(shape) == 3 else nn.AdaptiveAvgPool1d)(1)
    layers: list[nn.Module] = []
    for k, (d_in, d_out) in enumerate(pairwise([shape[0]] + [width] * depth)):
        layers += [conv(d_in, d_out, 3, 2 if k else 1, 1, bias=False), norm(d_out), nn.ReLU()]
    return nn.Sequential(*layers, pool, nn.Flatten(), nn.Linear(width, classes))


def mlp(shape: Sequence[int], classes: int, width: int, depth: int) -> nn.Module:
    """Linear layers with ReLU between them."""
    sizes = [math.prod(shape)] + [width] * depth
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, classes))


# ---- families --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A host preset, the textbook network beside it, and how both are trained."""

    host: str
    options: dict[str, int]
    textbook: Callable[[Task], nn.Module]
    load: Callable[[Path | None], Task]
    flops: float  # training FLOPs of every run
    rates: tuple[float, ...]
    batch: int = 128
    weight_decay: float = 0.05
    score: str = "accuracy"  # on the test split; "loss" for language models
    large: bool = False  # wants a GPU


def _text(_: Path | None) -> Task:
    return gpt.make_task(gpt.FULL)


def load_images(folder: Path | None) -> Task:
    """CIFAR-10 or another folder of train/CLASS and test/CLASS with images of one size."""
    from PIL import Image

    if folder is None or not (folder / "train").is_dir() or not (folder / "test").is_dir():
        raise ValueError(f"--data is {folder}; give a folder with train/CLASS/*.jpg and test/CLASS/*.jpg")
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())

    def read(part: str) -> Split:
        files = [(p, k) for k, name in enumerate(classes) for p in sorted((folder / part / name).iterdir())]
        pixels = np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files])
        inputs = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)
        order = torch.from_numpy(np.random.default_rng(0).permutation(len(files)))
        return Split(inputs, torch.tensor([k for _, k in files])).subset(order)

    training, test = read("train"), read("test")
    deviation, mean = torch.std_mean(training.inputs, dim=(0, 2, 3), keepdim=True)
    chosen = torch.arange(len(training)) % VALIDATION == 0
    train, validation, test = (
        Split((part.inputs - mean) / deviation, part.targets)
        for part in (
            training.subset((~chosen).nonzero()[:, 0]),
            training.subset(chosen.nonzero()[:, 0]),
            test,
        )
    )
    shape = tuple(train.inputs.shape[1:])
    return Task("images", "cnn", shape, len(classes), train, validation, TestSplit(test), HostSpec("resnet"))


def _built_in(name: str, _: Path | None) -> Task:
    return load_task(name)


FAMILIES = {
    "gpt": Family(
        "gpt", {"width": 256, "heads": 4, "depth": 4},
        lambda t: GPT(t.num_classes, t.input_shape[0], 256, 4, 4),
        _text, 4.1e15, (1.5e-3, 3e-3, 6e-3), weight_decay=0.1, score="loss", large=True,
    ),
    "resnet": Family(
        "resnet", {"width": 16, "stages": 3, "depth": 2},
        lambda t: resnet(t.input_shape[0], t.num_classes, 16, 3, 2),
        load_images, 1.0e14, (1e-3, 4e-3, 1.6e-2, 3.2e-2, 6.4e-2), large=True,
    ),
    "resmlp": Family(
        "resmlp", {"width": 32, "hidden": 64, "depth": 2}, lambda t: mlp(t.input_shape, t.num_classes, 70, 3),
        partial(_built_in, "letter"), 6e9, (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2), weight_decay=0.01,
    ),
    "cnn": Family(
        "cnn", {"width": 16, "depth": 3}, lambda t: cnn(t.input_shape, t.num_classes, 16, 3),
        partial(_built_in, "digits"), 6e9, (5e-3, 1e-2, 2e-2, 4e-2, 8e-2), batch=64, weight_decay=0.01,
    ),
    "mlp": Family(
        "mlp", {"width": 64, "depth": 3}, lambda t: mlp(t.input_shape, t.num_classes, 64, 3),
        partial(_built_in, "letter"), 6e9, (2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2), weight_decay=0.01,
    ),
}  # fmt: skip


# ---- the plain loop --------------------------------------------------------------------------------------


def forward_flops(model: nn.Module, sample: Tensor) -> int:
    """Count one sample's forward pass: products and convolutions, as for hosts.  # sample [1, ...]"""
    with flop_counter() as counter, torch.no_grad():
        model.eval()(sample)
    return int(counter.get_total_flops())


def decay_groups(model: nn.Module, decay: float) -> list[dict[str, object]]:
    """Give weight decay to matrices and kernels, none to norms and biases."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def batches(split: Split, size: int, text: bool, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Draw batches: windows of text at any offset, or samples in a new order for each epoch."""
    draw = torch.Generator(split.inputs.device).manual_seed(seed)
    device = split.inputs.device
    if text:
        stream = torch.cat([split.inputs.flatten(), split.targets[-1, -1:]])
        window = torch.arange(split.inputs.shape[1], device=device)
        last = len(stream) - len(window) - 1

        def crop() -> tuple[Tensor, Tensor]:
            index = torch.randint(last + 1, (size, 1), generator=draw, device=device) + window
            return stream[index], stream[index + 1]

        return crop
    queue: list[Tensor] = []

    def take() -> tuple[Tensor, Tensor]:
        if not queue:
            order = torch.randperm(len(split), generator=draw, device=device)
            queue.extend(order[: len(split) // size * size].split(size))
        index = queue.pop()
        return split.inputs[index], split.targets[index]

    return take


@dataclass
class PlainLoop:
    """A textbook network and a loop that trains it for a number of FLOPs."""

    family: Family
    task: Task
    device: str
    model: nn.Module = field(init=False)
    steps: int = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.family.textbook(self.task)
        cost = 3 * self.family.batch * forward_flops(self.model, self.task.train.inputs[:1])
        self.steps = round(self.family.flops / cost)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        self.cuda = self.device.startswith("cuda")
        self.model.to(self.device)
        forward = partial(nn.Module.__call__, self.model)
        # A function of ours around it, since dynamo splits an nn.Sequential at the top into its children.
        self.forward = torch.compile(lambda inputs: forward(inputs)) if self.cuda else forward
        self.train = self.task.train.to(self.device)

    def run(self, rate: float, seed: int) -> float:
        """Train from new weights; return the seconds that it took."""
        torch.manual_seed(seed)
        fresh = self.family.textbook(self.task).state_dict()
        self.model.load_state_dict(fresh)
        groups = decay_groups(self.model, self.family.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.99), fused=True)
        take = batches(self.train, self.family.batch, self.task.topology == "transformer", seed)
        schedule = rate_share(
            torch.arange(self.steps) / self.steps, recipe(self.family, self.device)
        ).tolist()
        self.model.train()
        began = time.perf_counter()
        for share in schedule:
            inputs, targets = take()
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                logits = self.forward(inputs)
            F.cross_entropy(logits.float().flatten(0, -2), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            optimizer.step()
            optimizer.zero_grad()
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    @torch.no_grad()
    def measure(self, split: Split) -> tuple[float, float]:
        """Return loss and accuracy on a split."""
        self.model.eval()
        loss = hits = count = 0.0
        for start in range(0, len(split), 256):
            inputs, targets = (
                split.inputs[start : start + 256],
                split.targets[start : start + 256].to(self.device),
            )
            with torch.autocast(self.device, torch.bfloat16, enabled=self.cuda):
                logits = self.forward(inputs.to(self.device)).float().flatten(0, -2)
            loss += float(F.cross_entropy(logits, targets.flatten(), reduction="sum"))
            hits += float((logits.argmax(-1) == targets.flatten()).sum())
            count += targets.numel()
        return loss / count, hits / count


# ---- both sides ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """What one side reached, a number for each seed."""

    name: str
    parameters: int
    rate: float
    tried: dict[str, float]  # learning rate → validation loss
    loss: list[float]
    accuracy: list[float]
    seconds: float  # of one run on the plain side, of all of them at once on the host's side


def recipe(family: Family, device: str) -> PopulationConfig:
    """How both sides train; the host's learning rate is scaled for each run."""
    return PopulationConfig(
        batch_size=family.batch, batches_per_epoch=20, validation_samples=1000, validation_batch=250,
        host_lr=1.0, seed_lr=1.0, weight_decay=family.weight_decay, second_beta=0.99, clip_norm=1.0,
        schedule="flat", warmup=0.02, decay=0.4, widest=1, initial_weights=4096,
        precision="bfloat16" if device.startswith("cuda") else "float32",
    )  # fmt: skip


def make_hosts(
    family: Family, task: Task, device: str, members: Sequence[int], rates: Sequence[float]
) -> GrowthEnvironment:
    """Make a host that never grows for each member id, with `family.flops` to train for at its rate."""
    return GrowthEnvironment(
        EnvironmentSpec(
            task=replace(task, host=HostSpec(family.host, family.options)),
            members=torch.tensor(members),
            gamma=1.0,
            seed=HOST_SEED,
            device=device,
            episode=EpisodeConfig(clock="compute", flops=family.flops),
            governor=GovernorConfig(enabled=False),
            population=recipe(family, device),
            rate_scale=tuple(rates),
        )
    )


def train_hosts(family: Family, task: Task, seeds: int, device: str) -> Side:
    """Choose a rate, then train one host for each seed, all at once."""
    count = len(family.rates)
    choosing = make_hosts(family, task, device, [CHOOSING] * count, family.rates)
    losses = np.nan_to_num(play(choosing, Static(), 0).loss[-1], nan=np.inf)
    rate = family.rates[int(losses.argmin())]
    began = time.perf_counter()
    hosts = make_hosts(family, task, device, range(seeds), [rate] * seeds)
    record, test = play(hosts, Static(), 0), evaluate_test(hosts)
    return Side(
        f"host {family.host}",
        int(record.parameters[-1][0]),
        rate,
        {f"{tried:g}": loss for tried, loss in zip(family.rates, losses.tolist(), strict=True)},
        test.loss.tolist(),
        test.accuracy.tolist(),
        time.perf_counter() - began,
    )


def train_textbook(family: Family, task: Task, seeds: int, device: str) -> Side:
    """Choose a rate, then train one textbook network for each seed, one after another."""
    loop = PlainLoop(family, task, device)
    validation = task.validation.subset(torch.arange(min(1000, len(task.validation))))
    tried = {}
    for rate in family.rates:
        loop.run(rate, CHOOSING)
        tried[f"{rate:g}"] = loop.measure(validation)[0]
    rate = family.rates[int(np.nan_to_num(list(tried.values()), nan=np.inf).argmin())]
    test, scores, seconds = task.test(), [], []
    for seed in range(seeds):
        seconds.append(loop.run(rate, seed))
        scores.append(loop.measure(test))
    return Side(
        "textbook", loop.parameters, rate, tried, [s[0] for s in scores], [s[1] for s in scores],
        float(np.median(seconds)),
    )  # fmt: skip


SIDES = {"textbook": train_textbook, "host": train_hosts}


def difference(host: Sequence[float], textbook: Sequence[float]) -> tuple[float, float]:
    """Return the difference of means and half of its 95 % interval (Welch)."""
    test = stats.ttest_ind(host, textbook, equal_var=False)
    low, high = test.confidence_interval(0.95)
    return float(np.mean(host) - np.mean(textbook)), float(high - low) / 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line for each side and one for their difference; append all figures to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    small = [name for name, family in FAMILIES.items() if not family.large]
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--data", type=Path, help="a folder of images, for resnet")
    parser.add_argument("--side", choices=SIDES, help="one side alone")
    parser.add_argument("--seeds", type=command_line.positive, default=5)
    parser.add_argument("--flops", type=float, help="another budget")
    parser.add_argument("--rates", type=float, nargs="+", help="other learning rates to choose from")
    parser.add_argument("--device", type=command_line.existing_device, default="cpu")
    parser.add_argument("--out", type=Path, help="a file that gets a JSON line for each side")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.families if name not in FAMILIES]
    if unknown:
        parser.error(f"there is no family {unknown[0]!r}; give some of {', '.join(FAMILIES)}")
    if given.device == "cpu":
        torch.set_num_threads(1)
    for name in given.families or small:
        family = replace(FAMILIES[name], **{k: v for k in ("flops", "rates") if (v := getattr(given, k))})
        task = family.load(given.data)
        scores = {}
        for which in [given.side] if given.side else SIDES:
            side = SIDES[which](family, task, given.seeds, given.device)
            scores[which] = getattr(side, family.score)
            _print(name, family, side, given)
        if given.side:
            continue
        unit = 100 if family.score == "accuracy" else 1
        gap, half = difference(scores["host"], scores["textbook"])
        print(
            f"{name}: host minus textbook, test {family.score}: {unit * gap:+.4f} ± {unit * half:.4f}",
            flush=True,
        )


def _print(name: str, family: Family, side: Side, given: argparse.Namespace) -> None:
    score = getattr(side, family.score)
    print(
        f"{name:7} {side.name:12} {side.parameters:>9,} parameters, rate {side.rate:g}, test {family.score} "
        f"{np.mean(score):.4f} (deviation {np.std(score, ddof=1):.4f}), {side.seconds:.1f} s",
        flush=True,
    )
    if given.out:
        gpu = torch.cuda.get_device_name() if given.device.startswith("cuda") else "none"
        where = {
            "machine": platform.processor() or platform.machine(),
            "gpu": gpu,
            "torch": torch.__version__,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as file:
            file.write(json.dumps({"family": name, "flops": family.flops, **asdict(side), **where}) + "\n")


if __name__ == "__main__":
    command_line.run(main)
