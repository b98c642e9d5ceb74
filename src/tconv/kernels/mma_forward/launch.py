"""What a call of `mma_forward` launches."""

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.launch import Argument, Launch, fields
from tconv.kernels.mma_forward.layout import Layout, layout
from tconv.kernels.mma_forward.tiles import Tile
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "mma_forward"


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel. Each block computes the tile of its own index, then every grid-size-th tile."""
    laid = layout(problem, tile)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    source = family.once(laid, ("source", laid.index), lambda: _source(laid, arguments))
    return (Launch("kernel", source, laid.grid(target), arguments, aligned=True),)


def _source(laid: Layout, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    problem, tile = laid.problem, laid.tile
    y, x = laid.y, laid.x
    height, width = problem.height, problem.width
    empty_y = tuple(phase for phase in range(height.stride) if phase not in y.used)
    empty_x = tuple(phase for phase in range(width.stride) if phase not in x.used)
    constants: tuple[tuple[str, Constant], ...] = (
        *family.layer_constants(problem, laid.index),
        ("blocks", laid.bound_blocks),
        ("shared_bytes", laid.shared_bytes),
        ("unit_channels", laid.unit_channels),
        ("unit_phases", laid.unit_phases),
        ("phase_groups", laid.phase_groups),
        ("fragments", laid.fragments),
        ("parts", laid.parts),
        ("channel_blocks", laid.channel_blocks),
        ("row_groups", laid.row_groups),
        ("depth", laid.depth),
        ("slot_fragments", laid.slot_fragments),
        ("round_on_load", laid.round_on_load),
        ("split", tile.split),
        ("team", tile.team),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        ("output_pitch", laid.output_pitch),
        ("head", laid.head),
        *family.axis_constants(problem),
        ("first_row", laid.first_row),
        ("first_column", laid.first_column),
        ("skew", laid.skew),
        ("patch_vectors", laid.patch_vectors),
        ("first_output_y", -(height.padding % height.stride)),
        ("first_output_x", -(width.padding % width.stride)),
        ("span_y", y.span),
        ("span_x", x.span),
        ("slots_y", len(y.offsets)),
        ("slots_x", len(x.offsets)),
        ("offset_y", y.offsets),
        ("offset_x", x.offsets),
        # Phases with taps are numbered. Those without are in lists of their own.
        ("phases_y", len(y.used)),
        ("phases_x", len(x.used)),
        ("phase_y", y.used),
        ("phase_x", x.used),
        ("empty_y", empty_y or (0,)),
        ("empty_x", empty_x or (0,)),
        ("tap_phase_y", tuple(y.used.index(phase) for phase in y.phases)),
        ("tap_phase_x", tuple(x.used.index(phase) for phase in x.phases)),
        ("tap_slot_y", y.slots),
        ("tap_slot_x", x.slots),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(arguments, laid.index, ("tiles",)),
        shared_bytes=laid.shared_bytes,
        threads=tile.threads,
    )
