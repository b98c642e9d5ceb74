"""Host side of kernels whose persistent blocks compute image tiles (`image_tiles.cuh`)."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from tconv.jit.target import Target
from tconv.kernels import family
from tconv.kernels.launch import Argument, input_image, output_rows, weights
from tconv.problem import Problem

POSITIONS_BYTES = 64
"""Bytes of shared memory that hold the positions of a block's tiles."""

AIMED_SHARED = 228 << 10
"""Shared memory, in bytes, of the SM that tiles are sized for."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that the system reserves for each block."""


def source_vectors(problem: Problem) -> bool:
    """Whether the input is copied in vectors of 16 bytes."""
    pattern = problem.pattern
    return pattern.rows_aligned and pattern.width.size % 4 == 0


@functools.lru_cache(maxsize=1024)
def output_pitch(used: int, stride: int, is_channel: bool) -> int:
    """The pitch of rows of `used` elements that has the fewest bank conflicts.

    Conflicts occur where lanes of a fragment hold 8 channels (`is_channel`): lane 4*c + p then
    writes element p*stride of row c. The result is a multiple of 4, in elements.
    """
    first = -(-used // 4) * 4
    if not is_channel:
        return first

    def conflicts(pitch: int) -> int:
        banks = [(c * pitch + p * stride) % 32 for c in range(8) for p in range(4)]
        return max(map(banks.count, banks))

    return min(range(first, first + 32, 4), key=lambda pitch: (conflicts(pitch), pitch))


def mma_why_not(problem: Problem, target: Target, strict: bool = False) -> str | None:
    """One sentence where products on `mma.sync` with TF32 cannot serve, else None.

    Args:
        problem: the call.
        target: the GPU.
        strict: whether the kernel also has products for strict float32.
    """
    if target.capability < (8, 0):
        return f"multiplies TF32 by mma.sync, which sm_80 brought, the target is {target.arch}"
    if problem.dtype != "float32" or (problem.math != "tf32" and not strict):
        return f"multiplies TF32, the layer's math is {problem.math} of {problem.dtype}"
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    return None


def pointwise_why_not(problem: Problem) -> str | None:
    """One sentence where a kernel of 1x1 on planes cannot serve, else None."""
    if problem.y_layout != "contiguous":
        return f"writes contiguous outputs, not {problem.y_layout}"
    for name, axis in (("height", problem.height), ("width", problem.width)):
        if axis.kernel > 1 or axis.padding:
            found = f"{axis.kernel} and {axis.padding}"
            return f"has a kernel of 1 and no padding along {name}, not {found}"
        if axis.output_size > axis.size * axis.stride:
            return f"has no outputs beyond the last pixel's along {name}, as of a dilation"
    return family.coordinates_why_not(problem)


def shared_why_not(shared_bytes: int, target: Target) -> str | None:
    """One sentence where a block does not fit, else None."""
    if shared_bytes <= target.shared_per_block:
        return None
    return (
        f"a block needs {shared_bytes} bytes of shared memory, "
        f"{target.arch} has {target.shared_per_block}"
    )


def blocks_held(shared_bytes: int, bound: int, target: Target) -> int:
    """Blocks that an SM holds, at most `bound`."""
    of_sm = target.shared_per_block + RESERVED_SHARED
    return min(bound, of_sm // (shared_bytes + RESERVED_SHARED))


class Layout:
    """What the layouts of such kernels share.

    Attributes:
        problem: the layer.
        depth: input channels of a step.
        tile_channels: output channels of a block.
        tiles_yx: tiles along y and x.
        shared_bytes: bytes of shared memory of a block.
        bound_blocks: the launch bound, in blocks of an SM.
        remembered: what all sizes of a kernel share (`family.of_kernel`, `family.once`).
    """

    problem: Problem
    depth: int
    tile_channels: Any
    tiles_yx: Any
    shared_bytes: Any
    bound_blocks: Any
    remembered: dict[Hashable, Any]

    @family.of_kernel
    def chunks(self) -> int:
        """Number of steps over the input channels."""
        return -(-self.problem.in_channels_per_group // self.depth)

    @family.of_kernel
    def group_tiles(self) -> int:
        """Tiles that share their pixels, each with weights of its own."""
        return self.problem.groups * -(-self.problem.out_channels_per_group // self.tile_channels)

    @functools.cached_property
    def tiles(self) -> int:
        """Tiles of the launch."""
        tiles_y, tiles_x = self.tiles_yx
        of_image: int = self.group_tiles * tiles_y * tiles_x
        return self.problem.batch * of_image

    def blocks(self, target: Target) -> int:
        """Blocks that an SM holds."""
        return max(1, blocks_held(self.shared_bytes, self.bound_blocks, target))

    def grid(self, target: Target) -> int:
        """Number of blocks: as many as the SMs hold, but not more than tiles.

        The number is rounded down to a multiple of `group_tiles` if that loses few blocks. Each
        block then keeps its weights from tile to tile.
        """
        most = target.multiprocessors * self.blocks(target)
        if self.group_tiles * 8 <= most:
            most -= most % self.group_tiles
        return min(self.tiles, most)

    @family.of_kernel
    def source_vectors(self) -> bool:
        """Whether the input is copied in vectors of 16 bytes."""
        return source_vectors(self.problem)

    @family.of_kernel
    def store_vector(self) -> int:
        """Floats of the widest store that every output row is aligned for."""
        width = self.problem.pattern.width.output_size
        return 4 if width % 4 == 0 else 2 if width % 2 == 0 else 1


def arguments(problem: Problem, tiles: int, tiles_yx: tuple[int, int]) -> dict[str, Argument]:
    """Values of the fields of `struct Arguments`. The output must start on 16 bytes."""
    tiles_y, tiles_x = tiles_yx
    return {
        "tiles": tiles,
        "tiles_y": tiles_y,
        "tiles_x": tiles_x,
        **input_image(problem),
        **weights(),
        **output_rows(problem),
    }
