"""The kernel families that an exported file can hold as planned kernels.

One entry a family: the function of `planned_launches.py` that prepares its launch, and what that
function reads from the plan. A family without an entry is left out of exported files; the general
kernel serves there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from tconv.kernels.general_weight_gradient import layout as weight_gradient
from tconv.kernels.mma_rows_forward import tiles as rows_tiles
from tconv.kernels.source import KernelSource
from tconv.plan import Plan, family

LEAST_CP_ASYNC = (8, 0)


@dataclass(frozen=True)
class Export:
    """How an exported file holds one kernel family.

    Attributes:
        prepare: the function of `planned_launches.py`, by name.
        constants: what it takes from the plan, by name; numbers and tuples of numbers.
        architecture: (major, minor) of the only architecture that has its instructions; None
            where all have.
        least: (major, minor) of the first architecture that has them; None where all have.
    """

    prepare: str
    constants: Callable[[Plan], dict[str, Any]]
    architecture: tuple[int, int] | None = None
    least: tuple[int, int] | None = None

    def architecture_of(self, plan: Plan) -> tuple[int, int] | None:
        """`architecture` of a plan.

        A tile that walks down rows has bulk copies: sm_90 and CUDA 12 brought both these and the
        architectures that stand alone, so it is held as one of those.
        """
        walks_rows = self.constants(plan).get("walks_rows", False)
        return plan.target.capability if walks_rows else self.architecture


def _constant(source: KernelSource, name: str) -> Any:
    return dict(source.constants)[name]


def _is_wide(plan: Plan) -> bool:
    """Whether every launch has 64-bit offsets."""
    return all(_constant(launch.source, "Index") == "long long" for launch in plan.launches)


def _implicit_gemm(plan: Plan) -> dict[str, Any]:
    block_pixels = plan.tile.block_pixels
    forward = plan.problem.direction == "forward"
    y, x = plan.problem.height, plan.problem.width
    pixels = plan.problem.batch
    pixels *= len(y.q_range) * len(x.q_range) if forward else y.size * x.size
    # All tiles that share their pixels: the plan's own count, over the tiles along the pixels.
    return {
        "wide": _constant(plan.kernel.source, "Index") == "long long",
        "used_phases": (y.used_phases, x.used_phases) if forward else None,
        "tiles": plan.kernel.grid // -(-pixels // block_pixels),
        "block_pixels": block_pixels,
    }


def _weight_gradient(plan: Plan) -> dict[str, Any]:
    size = 1
    for count in plan.problem.w_shape:
        size *= count
    most = max(1, weight_gradient.MOST_PARTIAL_BYTES // (4 * size))
    return {
        "wide": _constant(plan.kernel.source, "Index") == "long long",
        "tiles": plan.kernel.grid // plan.splits,
        "depth": plan.tile.depth,
        "most_chain": weight_gradient.MOST_CHAIN,
        "most_splits": min(weight_gradient.MOST_SPLITS, most),
        "shape": plan.problem.w_shape,
    }


def _sm90_tf32_forward(plan: Plan) -> dict[str, Any]:
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    (packing,) = plan.of_role("packing")
    return {
        "wide": _is_wide(plan),
        "half": plan.tile.half,
        "row_groups": plan.problem.groups * len(laid.m_class),
        "row_step": laid.row_step,
        # What blocks end with, not in float16, has these and the patches in common with the rest.
        # Sizes of a tile, and from its start to the next one's.
        "tile": (laid.tile_rows, plan.tile.columns),
        "tile_step": (laid.tile_rows, laid.tile_step),
        "lead": laid.lead,
        "rings": laid.rings,
        "patch_row": laid.patch_row,
        "map_box": (laid.patch_columns, laid.patch_rows, 8, 1) if plan.problem.x_aligned else None,
        "packed_blocks": packing.grid,
        "packed_items": laid.all_items,
        "packed_words": laid.packed_bytes // 4,
        "half_items": laid.half_items,
        "weight_words": laid.weight_words,
    }


def _sm90_tf32_flat_forward(plan: Plan) -> dict[str, Any]:
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    (packing,) = plan.of_role("packing")
    return {
        "wide": _is_wide(plan),
        "x_shape": plan.problem.x_shape,
        "y_shape": plan.problem.y_shape,
        "images": laid.images,
        "tiles": laid.tiles,
        "rows": laid.rows if plan.tile.paired else None,
        "packed_blocks": packing.grid,
        "packed_elements": packing.packed,
        "note_words": laid.note_words,
        "most_slight": laid.most_slight,
        "operands": _flat_operands(plan, laid),
        "again": _flat_operands(plan, laid.repairing) if plan.tile.half else None,
    }


def _flat_operands(plan: Plan, laid: Any) -> dict[str, Any]:
    """Where one of the packed forms of weights and pixels lies."""
    return {
        "weight_elements": laid.weight_elements,
        "elements": laid.operand_elements,
        "positions": laid.positions,
        "items": laid.pack_items,
        "map_sizes": (32, laid.positions, plan.problem.groups * laid.chunks),
        "map_box": (32, laid.patch_positions // laid.boxes, 1),
    }


def _sm90_tf32_wide_forward(plan: Plan) -> dict[str, Any]:
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    (packing,) = plan.of_role("packing")
    tile = plan.tile
    return {
        "wide": _is_wide(plan),
        # In a line, the pitches follow from the image's size, and the reach from the pitches.
        "sizes": None if tile.rows else (plan.problem.x_shape[2:], plan.problem.y_shape[2:]),
        "pitches": (laid.pitch, laid.image_positions),
        "tile": (tile.rows or 1, laid.tile_columns),
        "column_tiles": plan.problem.groups * len(laid.column_class),
        "source_vectors": laid.copied == 4,
        "store_vector": _constant(plan.kernel.source, "vector"),
        "packed_blocks": packing.grid,
        "packed_elements": packing.packed,
    }


def _tiled(plan: Plan) -> dict[str, Any]:
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    return {**_launched_tiles(plan), "tile": (laid.tile_rows, laid.tile_columns)}


def _mma_forward(plan: Plan) -> dict[str, Any]:
    return {
        **_tiled(plan),
        "walks_rows": plan.stem == "mma_rows_forward",
        "counts": plan.packed,
        "share_tenths": rows_tiles.STATIC_TENTHS,
        "asked_rows": rows_tiles.ASKED_ROWS,
        "bytes_per_nanosecond": rows_tiles.BYTES_PER_NANOSECOND,
    }


def _launched_tiles(plan: Plan) -> dict[str, Any]:
    """What `tiled_launch` reads."""
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    return {
        "wide": _constant(plan.kernel.source, "Index") == "long long",
        "group_tiles": laid.group_tiles,
        "source_vectors": laid.source_vectors,
        "store_vector": laid.store_vector,
        "blocks": laid.blocks(plan.target),
        "least": LEAST_CP_ASYNC,
    }


def _sm90_tf32_overlap_forward(plan: Plan) -> dict[str, Any]:
    laid = cast(Any, family(plan.stem)).layout(plan.problem, plan.tile)
    return {
        "wide": _is_wide(plan),
        "widths": (plan.problem.width.size, plan.problem.width.output_size),
        "groups": plan.problem.groups,
        "strips": laid.strips,
        "rows_above": plan.problem.height.q_range.start - laid.first_row,
        "warpgroups": plan.tile.warpgroups,
        "least_share": cast(Any, family(plan.stem)).LEAST_SHARE_ABREAST,
        "source_vectors": laid.source_vectors,
    }


EXPORTS = {
    "sm90_tf32_flat_forward": Export(
        "prepare_sm90_tf32_flat_forward", _sm90_tf32_flat_forward, (9, 0)
    ),
    "sm90_tf32_forward": Export("prepare_sm90_tf32_forward", _sm90_tf32_forward, (9, 0)),
    "sm90_tf32_wide_forward": Export(
        "prepare_sm90_tf32_wide_forward", _sm90_tf32_wide_forward, (9, 0)
    ),
    "sm90_tf32_overlap_forward": Export(
        "prepare_sm90_tf32_overlap_forward", _sm90_tf32_overlap_forward, (9, 0)
    ),
    "sm90_split_forward": Export("prepare_sm90_tf32_forward", _sm90_tf32_forward, (9, 0)),
    "mma_rows_forward": Export("prepare_mma_forward", _mma_forward, least=LEAST_CP_ASYNC),
    "mma_forward": Export("prepare_mma_forward", _mma_forward, least=LEAST_CP_ASYNC),
    "direct_forward": Export("prepare_direct_forward", _tiled, least=LEAST_CP_ASYNC),
    "general_forward": Export("prepare_general_forward", _implicit_gemm),
    "general_input_gradient": Export("prepare_general_input_gradient", _implicit_gemm),
    "general_weight_gradient": Export("prepare_general_weight_gradient", _weight_gradient),
}
