"""Streams of minibatches whose rule changes at unknown times, drawn from seeds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.tasks.synthetic import TEACHER_GAIN, TEACHER_WIDTH

Floats = NDArray[np.float64]
LENGTHS = (96, 192, 384)  # minibatches, a third of the streams each
BATCH, FEATURES, CLASSES = 32, 12, 8  # at most so many features and classes
WIDTH = 12  # of the two hidden layers of a network
MOST_SHIFTS, APART = 4, 6  # shifts lie at least so many minibatches apart, and from both ends
KINDS = ("labels", "inputs", "rule")
NOISE = 0.2  # at most this share of the labels is drawn anew
END = 1024  # samples of the last rule for the accuracy at the end
SHAPES = ((FEATURES, WIDTH), (WIDTH, WIDTH), (WIDTH, CLASSES))  # of the layers


@dataclass(frozen=True)
class Stream:
    """Samples in their order; the rule changes at `shifts`: (minibatch, kind, severity in (0, 1])."""

    features: int
    classes: int
    noise: float
    shifts: tuple[tuple[int, str, float], ...]
    inputs: Tensor  # [length * BATCH + END, FEATURES], padded with zeros
    targets: Tensor  # [length * BATCH + END]


def make_stream(length: int, seed: int) -> Stream:
    """Draw a stream; its rules are random networks, as in the made tables of the preset `demo`."""
    rng = np.random.default_rng([seed, length])
    features, classes = int(rng.integers(4, FEATURES + 1)), int(rng.integers(2, CLASSES + 1))
    noise, count = float(rng.uniform(0, NOISE)), int(rng.integers(MOST_SHIFTS + 1))
    free = length - (count + 1) * APART  # minibatches beyond the least distances
    places = np.sort(rng.integers(0, free + 1, count)) + APART * np.arange(1, count + 1)
    shifts = tuple((int(at), str(rng.choice(KINDS)), float(rng.uniform(0.1, 1.0))) for at in places)
    shapes = ((features, TEACHER_WIDTH), (TEACHER_WIDTH, TEACHER_WIDTH), (TEACHER_WIDTH, classes))

    def draw_rule() -> list[Floats]:
        gains = (TEACHER_GAIN, TEACHER_GAIN, 1.0)
        weights = [g * rng.standard_normal(s) / np.sqrt(s[0]) for g, s in zip(gains, shapes, strict=True)]
        return [*weights, *rng.standard_normal((2, TEACHER_WIDTH))]

    rule, names, turn = draw_rule(), np.arange(classes), np.eye(features)
    parts = []
    for k, (first, last) in enumerate(itertools.pairwise([0, *(at for at, _, _ in shifts), length])):
        if k:
            _, kind, severity = shifts[k - 1]
            if kind == "labels":  # that share of the classes change their names in a circle, at least two
                some = rng.permutation(classes)[: max(2, round(severity * classes))]
                names[some] = names[np.roll(some, 1)]
            elif kind == "inputs":  # rotated by up to 90 degrees in random planes, then scaled
                q = np.linalg.qr(rng.standard_normal((features, features)))[0]
                angle, rotation = severity * np.pi / 2, np.eye(features)
                for i in range(0, features - 1, 2):
                    c, s = np.cos(angle), np.sin(angle)
                    rotation[i : i + 2, i : i + 2] = [[c, -s], [s, c]]
                scales = np.exp(0.5 * severity * rng.standard_normal(features))
                turn = turn @ q @ rotation @ q.T * scales
            else:  # at severity 1 nothing is left of the old rule
                angle = severity * np.pi / 2
                rule = [np.cos(angle) * a + np.sin(angle) * b for a, b in zip(rule, draw_rule(), strict=True)]
        points = rng.standard_normal(((last - first) * BATCH + (END if last == length else 0), features))
        first_weights, second_weights, last_weights, first_bias, second_bias = rule
        hidden = np.tanh(np.tanh(points @ first_weights + first_bias) @ second_weights + second_bias)
        logits = hidden @ last_weights
        labels = names[((logits - logits.mean(0)) / logits.std(0)).argmax(1)]
        anew = rng.random(len(labels)) < noise
        parts.append((points @ turn, np.where(anew, rng.integers(0, classes, len(labels)), labels)))
    inputs = np.zeros((length * BATCH + END, FEATURES), np.float32)
    inputs[:, :features] = np.concatenate([part for part, _ in parts])
    targets = torch.from_numpy(np.concatenate([part for _, part in parts]))
    return Stream(features, classes, noise, shifts, torch.from_numpy(inputs), targets)


class Bank:
    """Streams of one length; each has `twins` networks with weights and an order of samples of their own."""

    def __init__(self, length: int, seeds: Sequence[int], twins: int) -> None:
        self.length, self.twins = length, twins
        self.streams = [make_stream(length, seed) for seed in seeds]
        self.rows = len(seeds) * twins  # a stream's twins lie together
        self._inputs = torch.stack([stream.inputs for stream in self.streams])
        self._targets = torch.stack([stream.targets for stream in self.streams])
        self.stream_of = torch.arange(len(seeds)).repeat_interleave(twins)
        self.classes = torch.tensor([stream.classes for stream in self.streams])[self.stream_of]
        self.absent = torch.arange(CLASSES) >= self.classes[:, None]  # [rows, CLASSES]
        # Segments: which one a minibatch is in, how old that is, and how long it lasts.  # [rows, length]
        segment = torch.zeros(len(seeds), length, dtype=torch.long)
        age, span = torch.zeros_like(segment), torch.zeros_like(segment)
        orders, weights = [], []
        for k, (stream, seed) in enumerate(zip(self.streams, seeds, strict=True)):
            bounds = [0, *(at for at, _, _ in stream.shifts), length]
            for index, (first, last) in enumerate(itertools.pairwise(bounds)):
                segment[k, first:last], span[k, first:last] = index, last - first
                age[k, first:last] = torch.arange(last - first)
            for twin in range(twins):
                draw = torch.Generator().manual_seed(1000 * seed + twin)
                within = [
                    a * BATCH + torch.randperm((b - a) * BATCH, generator=draw)
                    for a, b in itertools.pairwise(bounds)
                ]
                orders.append(torch.cat(within).view(length, BATCH))
                weights.append(initial_weights(stream.features, draw))
        self.segment, self.age, self.span = (x[self.stream_of] for x in (segment, age, span))
        self._order, self.initial = torch.stack(orders), torch.stack(weights)

    def minibatch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs [rows, BATCH, FEATURES] and targets [rows, BATCH]."""
        index = self.stream_of[:, None], self._order[:, step]
        return self._inputs[index], self._targets[index]

    def last_rule(self) -> tuple[Tensor, Tensor]:
        """Return the samples for the accuracy at the end, shaped as a minibatch is."""
        return self._inputs[self.stream_of, -END:], self._targets[self.stream_of, -END:]


def initial_weights(features: int, draw: torch.Generator) -> Tensor:
    """Draw the parameters of a network as torch's Linear does, but for biases of 0.  # → [P]"""
    fans, parts = (features, WIDTH, WIDTH), []
    for (fan_in, fan_out), fan in zip(SHAPES, fans, strict=True):
        drawn = (2 * torch.rand(fan_in * fan_out, generator=draw) - 1) * fan**-0.5
        parts += [drawn, torch.zeros(fan_out)]
    return torch.cat(parts)
