from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import esper.watch
from esper.lifecycle.actions import Op
from esper.lifecycle.stages import Stage

SCRIPT = Path(esper.watch.__file__).parent / "page" / "js" / "colours.js"
# Linear RGB as people with one kind of cone missing see it (Machado, Oliveira and Fernandes 2009).
SIGHT = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "no red cones": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green cones": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no blue cones": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
XYZ = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])


def lab(colour: str, sight: str) -> NDArray[np.float64]:
    """A colour in CIE L*a*b*, where a distance of 2.3 is just noticeable side by side."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    x, y, z = XYZ @ np.clip(np.array(SIGHT[sight]) @ linear, 0, 1) / (0.9505, 1, 1.0888)
    f = [np.cbrt(v) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def entries(table: str) -> dict[str, tuple[str, str, str]]:
    """Name → colour, letter and meaning, of a table of the script."""
    lines = SCRIPT.read_text(encoding="utf-8").split(f"const {table} = {{")[1].split("};")[0]
    found = re.findall(r'(\w+): \["(.*?)", "(.*?)", "(.*?)"\]', lines)
    return {name: (colour, letter, meaning) for name, colour, letter, meaning in found}


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_stages_can_be_told_apart(theme: str, sight: str) -> None:
    colours = {stage: colour for stage, (colour, _, _) in entries("STAGES").items() if stage != "UNKNOWN"}
    if theme == "dark":
        colours["DORMANT"] = re.findall(r'DORMANT_ON_DARK = "(.*?)"', SCRIPT.read_text(encoding="utf-8"))[0]
    shown = {stage: lab(colour, sight) for stage, colour in colours.items()}
    gaps = {
        pair: float(np.linalg.norm(shown[pair[0]] - shown[pair[1]]))
        for pair in itertools.combinations(shown, 2)
    }
    assert {pair: gap for pair, gap in gaps.items() if gap < 15} == {}


def test_every_stage_and_op_has_its_place_in_the_palette() -> None:
    stages, ops = entries("STAGES"), entries("OPS")
    assert set(stages) == {stage.name for stage in Stage}
    assert set(ops) == {op.name for op in Op}
    assert {name for name, (*_, meaning) in {**stages, **ops}.items() if not meaning} == {"UNKNOWN", "WAIT"}
    assert len({letter for _, letter, _ in stages.values()}) == len(stages), "letters are enough"
