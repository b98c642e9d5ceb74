"""The tiles of `pointwise_forward`, and what they serve."""

from __future__ import annotations

from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import image_tiles
from tconv.problem import Problem

THREADS = 256

MOST_CHANNELS = 8
"""Most input channels of a group, over which products are unrolled."""

MOST_READ = 4
"""Most pixels that an output reads on average. It reads them by itself, as others do."""

MOST_ITEMS = 1 << 30
"""The kernel's division is exact below."""


@dataclass(frozen=True)
class Tile:
    """What a thread computes.

    Attributes:
        planes: planes of y, four channels apart, of each of which it has a vector.
    """

    planes: int

    def __str__(self) -> str:
        """Planes x outputs."""
        return f"{self.planes}x4"


TILES = (Tile(planes=4),)


def why_not(problem: Problem, target: Target) -> str | None:
    """One sentence if no tile can serve, else None."""
    if target.capability < (8, 0):
        return f"is compiled for sm_80 on, the target is {target.arch}"
    if problem.dtype != "float32" or problem.math != "ieee":
        return f"adds float32 without TF32, not {problem.dtype}/{problem.math}"
    if problem.in_channels_per_group > MOST_CHANNELS:
        return (
            f"is for {MOST_CHANNELS} input channels in a group at most, "
            f"not {problem.in_channels_per_group}"
        )
    gaps = problem.height.stride * problem.width.stride
    if problem.in_channels_per_group > MOST_READ * gaps:
        return (
            f"an output reads {MOST_READ} pixels at most on average, "
            f"not {problem.in_channels_per_group / gaps}"
        )
    return image_tiles.pointwise_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """One sentence if this tile cannot serve, else None."""
    if items(problem, tile) >= MOST_ITEMS:
        return f"counts {MOST_ITEMS} threads at most, there would be {items(problem, tile)}"
    return None


def plane_vectors(problem: Problem) -> int:
    """Vectors that a plane of y takes, wherever it begins."""
    return (problem.height.output_size * problem.width.output_size + 6) // 4


def items(problem: Problem, tile: Tile) -> int:
    """Threads that have a vector."""
    blocks = -(-problem.out_channels // (4 * tile.planes))
    return problem.batch * 4 * blocks * plane_vectors(problem)
