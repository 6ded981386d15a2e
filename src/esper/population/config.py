"""How the bodies train."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from esper.utils.settings import Config


class PopulationConfig(Config):
    """Training of hosts and seeds. A decision step is one epoch of `batches_per_epoch` minibatches."""

    batch_size: int = Field(64, ge=1, description="samples in a minibatch of one member")
    batches_per_epoch: int = Field(4, ge=1, description="minibatches in a decision step")
    validation_samples: int = Field(512, ge=1, description="most validation samples of a measurement")
    validation_batch: int = Field(256, ge=1, description="validation samples that run at once")
    optimizer: Literal["adamw", "sgd"] = Field(
        "adamw", description="what moves the weights; esper.grow takes any other one by make_optimizer"
    )
    host_lr: float = Field(3e-2, gt=0, description="peak learning rate of the host")
    seed_lr: float = Field(3e-2, gt=0, description="peak learning rate of a seed")
    weight_decay: float = Field(1e-2, ge=0, description="decoupled weight decay")
    momentum: float = Field(0.9, ge=0, lt=1, description="sgd: momentum; adamw: the first beta")
    second_beta: float = Field(0.999, ge=0, lt=1, description="adamw: the second beta")
    clip_norm: float = Field(
        5.0,
        gt=0,
        description="gradient norm at most this: of a host with all that became part of it, and of a seed",
    )
    schedule: Literal["constant", "cosine", "one_cycle", "flat"] = Field(
        "one_cycle", description="how the learning rates move over an episode"
    )
    warmup: float = Field(0.05, ge=0, lt=1, description="one_cycle, flat: share of the episode spent rising")
    decay: float = Field(0.4, ge=0, le=1, description="flat: share of the episode spent falling to 0")
    rows_per_chunk: int = Field(4096, ge=1, description="members that run together: bounds memory")
    precision: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="of activations and products; weights, sums and the head stay in float32 (a GPU's own "
        "products of float32 are TF32)",
    )
    folds: int = Field(
        0,
        ge=0,
        description="how many seeds of a slot can become part of the host; 0: a fossil keeps its slot",
    )
    widest: int = Field(2, ge=1, description="a block is widened to at most this many times its units")
    initial_weights: int = Field(1024, ge=1, description="how many different initial hosts a run draws from")
    seed_weights: int = Field(64, ge=1, description="the same for the seeds of each blueprint")

    @model_validator(mode="after")
    def _rise_ends_before_fall(self) -> Self:
        both = self.warmup + self.decay
        if self.schedule == "flat" and both > 1 + 1e-9:  # sums such as 0.7 + 0.3 round upwards
            raise ValueError(f"warmup is {self.warmup:g} and decay is {self.decay:g}; at most 1 in sum")
        return self
