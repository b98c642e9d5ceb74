"""The tiles of `pointwise_forward`, and what they serve."""

from __future__ import annotations

from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import image_tiles
from tconv.problem import Problem

THREADS = 256

MOST_CHANNELS = 8
"""Most input channels of a group. Each output reads its own pixels, which others read as well."""

MOST_VECTORS = 1 << 30
"""The kernel's division is exact below."""


@dataclass(frozen=True)
class Tile:
    """What a thread computes.

    Attributes:
        vectors: vectors of 16 bytes of y.
    """

    vectors: int

    def __str__(self) -> str:
        """Outputs of a thread."""
        return f"{4 * self.vectors}"


TILES = (Tile(2), Tile(1))


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
    if vectors(problem) >= MOST_VECTORS:
        return f"counts {MOST_VECTORS} vectors at most, there are {vectors(problem)}"
    return image_tiles.pointwise_why_not(problem)


def tile_why_not(problem: Problem, target: Target, tile: Tile) -> str | None:
    """None: a tile serves what the kernel serves."""
    return None


def plane_vectors(problem: Problem) -> int:
    """Vectors that a plane of y takes, wherever it begins."""
    return (problem.height.output_size * problem.width.output_size + 6) // 4


def vectors(problem: Problem) -> int:
    """Vectors of y."""
    return problem.batch * problem.out_channels * plane_vectors(problem)
