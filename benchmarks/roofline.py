"""How far a population's step is from what the device allows, and which kernels take its time.

    python -m benchmarks.roofline --device cuda
    python -m benchmarks.roofline --hosts tiny --members 2 --precision float32 --device cpu

Two bounds for a minibatch of all members: the time of its products at the rate of a large one, and the time
to move the weights and moments of AdamW once, in float32, at the rate of a large copy. No step is faster than
the larger of them, so the size of a minibatch limits the share of the product rate. Activations are not
counted: a kernel may keep them on the chip.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import machine_name
from benchmarks.members import BATCH, BATCHES, HOSTS, PRECISIONS, Measurement, free_memory, milliseconds
from esper.population import network
from studies.command_line import existing_device, positive

# A step reads and writes a weight and two moments of four bytes each; gradients need not be stored.
UPDATE_BYTES = 2 * 3 * 4
NAME = 90  # characters of a kernel's name that are printed


@dataclass(frozen=True)
class Bounds:
    """Milliseconds of a minibatch of all members."""

    products: float
    update: float

    @property
    def least(self) -> float:
        return max(self.products, self.update)

    @property
    def share(self) -> float:
        """The largest share of the product rate that a step can have."""
        return self.products / self.least


def copy_rate(device: torch.device) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**22, device=device)
    target = torch.empty_like(source)
    return 2e3 * source.nbytes / milliseconds(lambda: target.copy_(source), device, 10)


def bounds(measurement: Measurement, members: int, bytes_per_second: float) -> Bounds:
    """Return the bounds for members of a host."""
    products = measurement.flops * members / measurement.rate
    return Bounds(1e3 * products, 1e3 * UPDATE_BYTES * measurement.parameters * members / bytes_per_second)


def kernel_times(call: Callable[[], object], device: torch.device) -> dict[str, tuple[float, int]]:
    """Return the milliseconds and the number of launches of each kernel in a call; on a CPU, of operators."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as prof:
        call()
        if cuda:
            torch.cuda.synchronize()
    kind, found = (DeviceType.CUDA if cuda else DeviceType.CPU), defaultdict(lambda: (0.0, 0))
    for event in prof.events() or ():
        if event.device_type == kind:
            spent, count = found[event.name]
            took = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
            found[event.name] = spent + took / 1e3, count + 1
    return dict(found)


def report(measurement: Measurement, members: int, bytes_per_second: float, top: int) -> str:
    """Measure a step and return its bounds and its dearest kernels as text."""
    device = measurement.device
    epoch = measurement.population_step(members, network.convolution_method(device))
    took = milliseconds(epoch, device, measurement.repeats) / BATCHES
    bound = bounds(measurement, members, bytes_per_second)
    lines = [
        f"{members} × {measurement.name} of {measurement.parameters:,} parameters, {measurement.precision}, "
        f"{measurement.batch} samples: {took:.2f} ms a minibatch, {took / bound.least:.1f} times the bound",
        f"    products {bound.products:.2f} ms, weights and moments {bound.update:.2f} ms; "
        f"share of the product rate {bound.products / took:.3f}, at most {bound.share:.2f}",
    ]
    kernels = sorted(kernel_times(epoch, device).items(), key=lambda item: -item[1][0])
    for name, (spent, count) in kernels[:top]:
        lines.append(f"    {spent / BATCHES:8.3f} ms  {count / BATCHES:6.1f} launches  {name[:NAME]}")
    del epoch
    free_memory(device)  # the next host needs it
    rest = kernels[top:]
    spent, count = sum(times[0] for _, times in rest), sum(times[1] for _, times in rest)
    lines.append(f"    {spent / BATCHES:8.3f} ms  {count / BATCHES:6.1f} launches  {len(rest)} other kernels")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", choices=HOSTS, nargs="+", default=["resmlp", "resnet", "gpt"])
    parser.add_argument("--members", type=positive, default=512)
    parser.add_argument("--batch", type=positive, default=BATCH, help="samples of a minibatch")
    parser.add_argument("--precision", choices=PRECISIONS, nargs="+", default=["bfloat16"])
    parser.add_argument("--device", type=existing_device, default="auto")
    parser.add_argument("--top", type=positive, default=12, help="how many kernels to name")
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    rate = copy_rate(device)
    print(f"{machine_name(args.device)}: a copy moves {rate / 1e12:.2f} TB/s")
    for host in args.hosts:
        for precision in args.precision:
            measurement = Measurement(host, precision, device, args.repeats, args.batch)
            print(f"products reach {measurement.rate / 1e12:.1f} TFLOP/s")
            print(report(measurement, args.members, rate, args.top), flush=True)


if __name__ == "__main__":
    main()
