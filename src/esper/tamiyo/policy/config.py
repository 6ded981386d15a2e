"""The shape of the network, apart from it so that reading a configuration does not import torch."""

from __future__ import annotations

from pydantic import Field

from esper.utils.settings import Config

MOST_CHOICES = 16  # of the widest head but slot and op; the network checks it


class TamiyoNetConfig(Config):
    """The shape of Tamiyo's network."""

    width: int = Field(default=128, ge=8, description="width of the encoders and of the memory")
    embedding: int = Field(default=16, ge=1, description="width of the blueprint and op embeddings")
    floor: float = Field(
        default=0.0, ge=0, lt=1 / MOST_CHOICES, description="least probability of a legal choice; 0 is off"
    )
    bf16: bool = Field(
        default=False, description="whether encoders and memory multiply in bfloat16; heads never do"
    )
