"""The launches of `sm90_tf32_wide_forward`: the packing of the weights and the kernel."""

from __future__ import annotations

from tconv.jit.target import Target
from tconv.kernels import family, hopper
from tconv.kernels.launch import (
    Address,
    Argument,
    Launch,
    fields,
    input_image,
    output_rows,
    weights,
)
from tconv.kernels.sm90_tf32_wide_forward.layout import (
    PIXEL_STAGES,
    WEIGHT_STAGES,
    Layout,
    layout,
    vector,
)
from tconv.kernels.sm90_tf32_wide_forward.tiles import CONSUMERS, Tile
from tconv.kernels.source import KernelSource
from tconv.problem import Problem

STEM = "sm90_tf32_wide_forward"
PACK_STEM = "sm90_tf32_wide_pack"
WARPGROUP = 128
PACK_THREADS = 256


def source(problem: Problem, tile: Tile) -> KernelSource:
    """The kernel specialised for the problem's layer."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    return family.once(laid, ("source", index), lambda: _source(laid, index))


def _source(laid: Layout, index: str) -> KernelSource:
    problem = laid.problem
    shared = PIXEL_STAGES * (laid.pixel_bytes + 16) + WEIGHT_STAGES * (laid.weight_bytes + 16)
    shared = -(-shared // 1024) * 1024
    constants = (
        *_layer_constants(problem, laid, index),
        ("shared_bytes", shared),
        ("copied", laid.copied),
        ("pixel_stages", PIXEL_STAGES),
        ("weight_stages", WEIGHT_STAGES),
        ("producer_registers", laid.registers(index)[0]),
        ("consumer_registers", laid.registers(index)[1]),
        ("vector", vector(problem)),
        ("padding_y", problem.height.padding),
        ("padding_x", problem.width.padding),
        *hopper.tap_constants(problem),
        ("first_q_y", problem.height.q_range.start),
        ("first_q_x", problem.width.q_range.start),
        ("bias", problem.bias),
    )
    return KernelSource(
        stem=STEM,
        constants=constants,
        arguments=fields(_arguments(problem, laid), index),
        shared_bytes=shared,
        threads=WARPGROUP * (1 + CONSUMERS),
    )


def _arguments(problem: Problem, laid: Layout) -> dict[str, Argument]:
    """Values of the fields of the kernel's `struct Arguments`."""
    return {
        "tiles": laid.tiles,
        "batch": problem.batch,
        "row_pixels": laid.row_pixels,
        "image_pixels": laid.image_pixels,
        **input_image(problem),
        **weights(),
        "packed": Address("packed"),
        **output_rows(problem),
    }


def _index(problem: Problem, laid: Layout) -> str:
    return family.index_type(problem, laid.weight_elements)


def _layer_constants(problem: Problem, laid: Layout, index: str) -> tuple[tuple, ...]:
    """What the kernel and its packing share."""
    return (
        *hopper.layer_constants(problem, index),
        ("low_phases", laid.low_phases),
        ("part_columns", laid.part_columns),
    )


def _packing_source(laid: Layout, index: str, places: dict[str, Argument]) -> KernelSource:
    """The kernel that packs the weights."""
    return KernelSource(
        stem=PACK_STEM,
        constants=(
            *_layer_constants(laid.problem, laid, index),
            ("shared_bytes", laid.pack_bytes),
            ("item_channels", laid.pack_channels),
        ),
        arguments=fields(places, index, written="packed"),
        shared_bytes=laid.pack_bytes,
        threads=PACK_THREADS,
    )


def launches(problem: Problem, target: Target, tile: Tile) -> tuple[Launch, ...]:
    """The packing of the weights, and the kernel: one block for each SM loops over the tiles."""
    laid = layout(problem, tile)
    index = _index(problem, laid)
    places: dict[str, Argument] = {**weights(), "packed": Address("packed")}
    packing = family.once(laid, ("packing", index), lambda: _packing_source(laid, index, places))
    return (
        Launch(
            "packing",
            packing,
            min(laid.pack_items, family.MAX_GRID),
            places,
            "lays the weights out",
            packed=laid.weight_elements,
        ),
        Launch(
            "kernel",
            source(problem, tile),
            min(target.multiprocessors, laid.tiles),
            _arguments(problem, laid),
        ),
    )
