"""Images that need no download: letters and digits in the fonts that come with matplotlib, each bent anew."""

from __future__ import annotations

import math
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from esper.tasks.task import HostSpec, Split, Task, TestSplit

SIGNS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"  # neither I nor O, which look like 1 and 0
FAMILIES = (
    "DejaVuSans",
    "DejaVuSerif",
    "DejaVuSansMono",
    "STIXGeneral",
    "cmr10",
    "cmb10",
    "cmss10",
    "cmtt10",
)
DRAWN = 32  # pixels of the side on which a sign is drawn
NOISE = 0.25  # standard deviation, of a sign that is 1 on 0
PIECE = 10_000  # images that are bent at once


def drawn_signs() -> Tensor:
    """Every sign in every font, white on black.  # [signs, fonts, DRAWN, DRAWN]"""
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = sorted(path for path in folder.glob("*.ttf") if _family(path.stem) in FAMILIES)
    fonts = [ImageFont.truetype(str(path), 22) for path in files]
    images = [[_drawn(sign, font) for font in fonts] for sign in SIGNS]
    return torch.from_numpy(np.array(images, dtype=np.float32) / 255.0)


def _family(stem: str) -> str:
    """DejaVuSans-Bold and STIXGeneralBol belong to DejaVuSans and STIXGeneral."""
    return "STIXGeneral" if stem.startswith("STIXGeneral") else stem.split("-")[0]


def _drawn(sign: str, font: ImageFont.FreeTypeFont) -> np.ndarray:
    image = Image.new("L", (DRAWN, DRAWN))
    ImageDraw.Draw(image).text((DRAWN / 2, DRAWN / 2), sign, fill=255, font=font, anchor="mm")
    return np.asarray(image)


def bent(images: Tensor, side: int, dice: torch.Generator) -> Tensor:
    """Turned, sheared, scaled, shifted, and with noise.  # [n, DRAWN, DRAWN] → [n, 1, side, side]"""
    turn, shear, scale, x, y = torch.rand(5, len(images), generator=dice) * 2 - 1
    angle, scale = turn * math.pi / 7, torch.exp(0.35 * scale)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    rows = [torch.stack([cos, -sin + 0.3 * shear, 0.3 * x], 1), torch.stack([sin, cos, 0.3 * y], 1)]
    shape = [len(images), 1, side, side]
    grid = F.affine_grid(torch.stack(rows, dim=1), shape, align_corners=False)
    seen = F.grid_sample(images.unsqueeze(1), grid, align_corners=False)
    return (seen + NOISE * torch.randn(shape, generator=dice) - 0.2) / 0.5


def make_task(side: int, sizes: tuple[int, int, int]) -> Task:
    """Which sign is it? sizes: images for training, validation and test; side: their pixels."""
    signs, dice = drawn_signs(), torch.Generator().manual_seed(0)
    splits = []
    for count in sizes:
        sign = torch.randint(len(SIGNS), (count,), generator=dice)
        font = torch.randint(signs.shape[1], (count,), generator=dice)
        pieces = zip(sign.split(PIECE), font.split(PIECE), strict=True)
        splits.append(Split(torch.cat([bent(signs[a, b], side, dice) for a, b in pieces]), sign))
    train, validation, test = splits
    return Task(
        name="glyphs",
        topology="cnn",
        input_shape=(1, side, side),
        num_classes=len(SIGNS),
        train=train,
        validation=validation,
        held_out=TestSplit(test),
        host=HostSpec("resnet"),
    )
