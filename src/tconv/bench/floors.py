"""What a GPU allows: measured ceilings, and the floor that they set for a problem.

A ceiling here was measured, not read from a data sheet: the floor is a time that the same machine
reached with simpler work. No torch, no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from tconv.problem import ITEM_BYTES, Axis, Problem


@dataclass(frozen=True)
class Ceilings:
    """The rates that one GPU was measured at.

    Attributes:
        name: the GPU, as `--gpu` takes it.
        device: its name, as CUDA gives it.
        arch: its architecture.
        copy: device memory, bytes read + bytes written a second.
        rates: operations a second by arithmetic: "tf32", or a dtype in its full precision.
    """

    name: str
    device: str
    arch: str
    copy: float
    rates: dict[str, float]


# Measured once, in one run, on one NVIDIA H200 with torch 2.11.0+cu130 and cuDNN 9.19:
# copy: a device-to-device copy, bytes read and written;
# tf32, bfloat16: cuBLAS, matrices of 8192 x 8192; float32, float64: the same without TF32;
# float16: taken to be bfloat16's, which the tensor cores run at the same rate.
H200 = Ceilings(
    name="h200",
    device="NVIDIA H200",
    arch="sm_90a",
    copy=4.28e12,
    rates={
        "tf32": 375e12,
        "float32": 51e12,
        "float64": 63e12,
        "bfloat16": 791e12,
        "float16": 791e12,
    },
)

GPUS: dict[str, Ceilings] = {gpu.name: gpu for gpu in (H200,)}


@dataclass(frozen=True)
class Floor:
    """The least time in which a problem could run, in seconds, without its launch.

    Attributes:
        memory: of moving every element once.
        arithmetic: of the products that count, at the rate of the problem's arithmetic.
    """

    memory: float
    arithmetic: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.memory, self.arithmetic)

    @property
    def bound(self) -> str:
        """Which of the two it is: "memory" or "arithmetic"."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


def arithmetic(problem: Problem) -> str:
    """The key of `Ceilings.rates` for the problem: "tf32", or its dtype."""
    return "tf32" if problem.math == "tf32" else problem.dtype


def rows_read(axis: Axis) -> int:
    """How many pixels of an axis of the output some tap meets. A gradient reads no others."""
    count = 0
    for phase in axis.phases:
        first = (phase.index - axis.padding) % axis.stride
        least = (first + axis.padding) // axis.stride
        end = least + -(-(axis.output_size - first) // axis.stride)
        for tap in sorted(phase.taps, key=lambda tap: tap.shift):
            # The pixels least to end of the phase that are left meet this tap where x has some.
            begin, stop = max(least, tap.shift), min(end, tap.shift + axis.size)
            count += max(0, stop - begin)
            least = max(least, stop)
    return count


def floor(problem: Problem, gpu: Ceilings) -> Floor:
    """The floor of the problem on a GPU. A gradient need not read rows of y that no tap meets."""
    moved = problem.bytes
    if problem.direction != "forward":
        batch, channels, height, width = problem.y_shape
        unread = height - rows_read(problem.height)
        moved -= unread * batch * channels * width * ITEM_BYTES[problem.dtype]
    return Floor(moved / gpu.copy, problem.flops / gpu.rates[arithmetic(problem)])
