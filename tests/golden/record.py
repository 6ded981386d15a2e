"""Digests of the scenes: `python -m tests.golden.record [SCENE ...]` writes them to digests.json.

A digest of a series is the type and number of its values, a hash of their bytes, their sum and the sum of
their absolute values, and the first three. Bits depend on the machine and on the build of torch: hashes are
compared where both are those of the recording, sums elsewhere.

Record again only where a number was meant to change, and say in the commit which and why. A series that is
gone on purpose can be deleted from the file: it has one line.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.golden.scenes import SCENES, Series

DIGESTS = Path(__file__).parent / "digests.json"
TOLERANCE = 1e-4  # of sums on another machine, relative to the sum of absolute values
# Besides, for each value: where a gradient is 0 but for rounding, as that of a key's bias ahead of a softmax,
# no relative tolerance holds.
NOISE = 1e-6

Digest = dict[str, Any]


def machine() -> dict[str, str]:
    """Describe what decides the bits: the system, the processor's maker and abilities, and torch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    vendors = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "vendor": vendors[0] if vendors else platform.processor(),  # MKL has other kernels for other makers
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def digest(values: np.ndarray) -> Digest:
    flat = np.ascontiguousarray(values).reshape(-1)
    numbers = np.nan_to_num(flat.astype(np.float64))
    return {
        "type": str(values.dtype),
        "count": values.size,
        "sha256": hashlib.sha256(f"{values.dtype} ".encode() + flat.tobytes()).hexdigest()[:16],
        "sum": float(f"{numbers.sum():.9g}"),
        "abs": float(f"{np.abs(numbers).sum():.9g}"),
        "first": [float(f"{number:.6g}") for number in numbers[:3]],
    }


def digests(series: Series) -> dict[str, Digest]:
    return {name: digest(values) for name, values in series.items()}


def differences(found: dict[str, Digest], recorded: dict[str, Digest], exact: bool) -> list[str]:
    """Say which recorded series are not among the found ones, whatever these are called now.

    Series that were not recorded are no difference. exact: compare hashes, else sums.
    """
    if exact:
        left = Counter(one["sha256"] for one in found.values())
        lost = []
        for name, wanted in recorded.items():
            if left[wanted["sha256"]] > 0:
                left[wanted["sha256"]] -= 1
            else:
                lost.append(name)
    else:
        free = dict(found)
        lost = []
        for name in sorted(recorded, key=lambda name: name not in found):  # those with their old names first
            wanted = recorded[name]
            candidates = [name, *free] if name in free else list(free)
            match = next((other for other in candidates if _alike(free[other], wanted)), None)
            if match is None:
                lost.append(name)
            else:
                del free[match]
    return [
        f"{name}: recorded {recorded[name]}, now {found.get(name, 'under no such name')}" for name in lost
    ]


def _alike(one: Digest, other: Digest) -> bool:
    """Whether two series have as many values of one type, and sums that are equal but for rounding."""
    allowed = TOLERANCE * max(one["abs"], other["abs"]) + NOISE * one["count"]
    same = all(one[key] == other[key] for key in ("type", "count"))
    return same and all(abs(one[key] - other[key]) <= allowed for key in ("sum", "abs"))


def load() -> dict[str, Any]:
    recorded: dict[str, Any] = json.loads(DIGESTS.read_text())
    return recorded


def save(recorded: dict[str, Any]) -> None:
    """Write one line for each series, so that a diff shows what changed."""
    scenes = [
        f'  "{scene}": {{\n'
        + ",\n".join(f"   {json.dumps(name)}: {json.dumps(one)}" for name, one in series.items())
        + "\n  }"
        for scene, series in recorded["scenes"].items()
    ]
    head = "".join(f' "{key}": {json.dumps(recorded[key])},\n' for key in ("machine", "python"))
    DIGESTS.write_text("{\n" + head + ' "scenes": {\n' + ",\n".join(scenes) + "\n }\n}\n")


def main(names: list[str]) -> None:
    """Record the named scenes, or all of them."""
    unknown = set(names) - set(SCENES)
    if unknown:
        sys.exit(f"no scene is called {', '.join(sorted(unknown))}; there are {', '.join(SCENES)}")
    kept = load()["scenes"] if names else {}
    if names and load()["machine"] != machine():
        sys.exit("the other scenes were recorded on another machine; record all of them")
    scenes = {name: digests(SCENES[name]()) if name in (names or SCENES) else kept[name] for name in SCENES}
    save({"machine": machine(), "python": platform.python_version(), "scenes": scenes})


if __name__ == "__main__":
    main(sys.argv[1:])
