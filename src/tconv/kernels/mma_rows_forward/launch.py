"""What a call of `mma_rows_forward` launches."""

from tconv.jit.target import Target
from tconv.kernels import image_tiles, mma_tiles
from tconv.kernels.launch import Address, Argument, Launch
from tconv.kernels.mma_rows_forward import tiles
from tconv.kernels.mma_rows_forward.layout import layout
from tconv.kernels.mma_tiles import Tile
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "mma_rows_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel. If it has a dynamic tail, a launch before it clears the counters."""
    laid = layout(problem, tile)
    constants = (
        ("dynamic_tail", laid.dynamic_tail),
        ("buffers", laid.buffers),
        ("rows_ahead", laid.rows_ahead),
        ("blank_elements", laid.blank_elements),
    )
    fields = (("share", laid.index), ("period", "int"), ("counts", "void*"))
    source = mma_tiles.source(STEM, laid, constants, fields if laid.dynamic_tail else ())
    blocks = laid.grid(target)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    kernel = Launch("kernel", source, blocks, arguments, aligned=True, whole_rows=True)
    if not laid.dynamic_tail:
        return (kernel,)
    # Tiles and blocks are as many times the rows and the shares.
    arguments["share"] = max(1, tiles.STATIC_TENTHS * laid.tiles // (10 * blocks))
    arguments["period"] = _period(problem.bytes, laid.tiles / blocks)
    counts: dict[str, Argument] = {"counts": Address("packed")}
    arguments.update(counts)
    clearing = KernelSource(
        stem="clear_counts",
        constants=(("counts", tiles.MOST_GROUP_TILES),),
        arguments=(("counts", "void*"),),
        shared_bytes=0,
        threads=32,
    )
    does = "clears the counters of the dynamic tail"
    return (
        Launch("packing", clearing, 1, counts, does, packed=tiles.MOST_GROUP_TILES),
        kernel,
    )


def _period(moved: int, rows: float) -> int:
    """Nanoseconds of a prefetch period: blocks with `rows` rows each move `moved` bytes in all."""
    return max(1000, int(tiles.ASKED_ROWS * moved / (tiles.BYTES_PER_NANOSECOND * rows)))
