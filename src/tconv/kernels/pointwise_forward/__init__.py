"""`pointwise_forward`: a kernel of 1x1 and few input channels (`pointwise_forward.cu`)."""

from __future__ import annotations

from dataclasses import dataclass

from tconv.jit.target import Target
from tconv.kernels import costs, family, hopper, image_tiles
from tconv.kernels.launch import Argument, Launch, fields, input_image, output_rows, weights
from tconv.kernels.source import KernelSource
from tconv.problem import Direction, Problem

__all__ = ["DIRECTION", "GENERAL", "STEM", "TILES", "cost", "launches", "tile_why_not", "why_not"]

STEM = "pointwise_forward"
DIRECTION: Direction = "forward"
GENERAL = False

THREADS = 256

MOST_CHANNELS = 8
"""Most input channels of a group. Each output reads its own pixels, which others read as well."""

MOST_VECTORS = 1 << 30
"""The kernel's division is exact below."""

COSTS = costs.load(__file__)


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


def cost(problem: Problem, target: Target, tile: Tile) -> float:
    """Modelled seconds: bytes or issued accesses, and a part of the shorter of the two."""
    read = problem.batch * problem.height.size * problem.width.size
    # A pixel is read by each output channel. Lanes are a vector of y apart.
    lines = read * problem.out_channels * problem.in_channels_per_group / 32
    lines *= max(1.0, 4 / problem.width.stride)
    issued = COSTS.load * lines + COSTS.vector * vectors(problem) / 32
    busy = issued / target.multiprocessors / COSTS.clock
    moved = problem.bytes / COSTS.memory_rate
    # One vector of a thread keeps less in flight; two leave small layers with few warps.
    warps = vectors(problem) / tile.vectors / 32 / target.multiprocessors
    few = COSTS.few if (tile.vectors > 1) == (warps < COSTS.warps) else 0
    return max(busy, moved) + COSTS.overlap * min(busy, moved) + few + COSTS.launch


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    count = vectors(problem)
    plane = problem.height.output_size * problem.width.output_size
    of_plane = hopper.division(plane_vectors(problem))
    width = hopper.division(problem.width.output_size)
    arguments: dict[str, Argument] = {
        **input_image(problem),
        **weights(),
        **output_rows(problem),
        "vectors": count,
        "plane": plane,
        "plane_vectors": plane_vectors(problem),
        "vectors_multiplier": of_plane[0],
        "vectors_shift": of_plane[1],
        "width_multiplier": width[0],
        "width_shift": width[1],
    }
    index = family.index_type(problem)
    source = KernelSource(
        stem=STEM,
        constants=(
            ("Index", index),
            ("blocks", 4),
            ("groups", problem.groups),
            ("in_channels", problem.in_channels_per_group),
            ("out_channels", problem.out_channels_per_group),
            ("bias", problem.bias),
            ("stride_y", problem.height.stride),
            ("stride_x", problem.width.stride),
            ("vectors", tile.vectors),
        ),
        arguments=fields(arguments, index),
        shared_bytes=0,
        threads=THREADS,
    )
    blocks = -(-count // (THREADS * tile.vectors))
    return (Launch("kernel", source, blocks, arguments, aligned=True, whole_rows=True),)
