"""What a call of `direct_forward` launches."""

from tconv.jit.target import Target
from tconv.kernels import family, image_tiles
from tconv.kernels.direct_forward.layout import Layout, layout
from tconv.kernels.direct_forward.tiles import THREADS, Tile
from tconv.kernels.launch import Argument, Launch, fields
from tconv.kernels.source import Constant, KernelSource
from tconv.problem import Problem

STEM = "direct_forward"


def _source(laid: Layout, index: str, arguments: dict[str, Argument]) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    problem, tile = laid.problem, laid.tile
    y, x = laid.y, laid.x
    empty = tuple(phase for phase in range(problem.height.stride) if phase not in y.used)
    constants: tuple[tuple[str, Constant], ...] = (
        *family.layer_constants(problem, index),
        ("blocks", laid.bound_blocks),
        ("shared_bytes", laid.shared_bytes),
        ("round_to_tf32", problem.math == "tf32"),
        ("threads_x", tile.threads_x),
        ("threads_o", laid.threads_o),
        ("thread_pixels", tile.pixels),
        ("thread_channels", laid.channels),
        ("thread_rows", laid.thread_rows),
        ("depth", laid.depth),
        ("group_slots", laid.group_slots),
        ("group_products", laid.products // laid.groups_y),
        ("weight_buffers", laid.weight_buffers),
        ("source_vectors", laid.source_vectors),
        ("store_vector", laid.store_vector),
        *family.axis_constants(problem),
        ("first_offset_y", y.first),
        ("first_offset_x", x.first),
        ("span_y", y.span),
        ("span_x", x.span),
        ("skew", laid.skew),
        ("patch_vectors", laid.patch_vectors[0]),
        # Phases in y with taps are slots. Those without are in a list of their own.
        ("slots_y", len(y.used)),
        ("slot_phase", y.used),
        ("empty_phase", empty or (0,)),
        ("tap_slot", tuple(y.used.index(phase) for phase in y.phases)),
        ("tap_row", tuple(offset - y.first for offset in y.offsets)),
        ("tap_phase", x.phases),
        ("tap_column", tuple(offset - x.first for offset in x.offsets)),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(arguments, index, ("tiles",)),
        shared_bytes=laid.shared_bytes,
        threads=THREADS,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The kernel."""
    laid = layout(problem, tile)
    arguments = image_tiles.arguments(problem, laid.tiles, laid.tiles_yx)
    index = family.index_type(problem, laid.tiles)
    source = family.once(laid, ("source", index), lambda: _source(laid, index, arguments))
    return (Launch("kernel", source, laid.grid(target), arguments, aligned=True),)
