"""The tiles of `sm90_tf32_flat_forward`."""

from __future__ import annotations

from dataclasses import dataclass

CONSUMERS = 2
GROUP_ROWS = 64


@dataclass(frozen=True)
class Tile:
    """What one block computes at a time.

    Attributes:
        columns: positions, the wgmma's N.
        apart: whether the two phases of a stride of 2 in x are separate row groups, each with its
            own slots. Otherwise phases are adjacent in a warp's rows and share their slots.
        storers: whether a separate warpgroup writes the outputs. Otherwise the consumers do.
        half: whether it multiplies in float16, at twice the rate of TF32. The significand has as
            many bits. A repair launch recomputes the images that float16 cannot hold.
        paired: whether the two consumers compute two phases in y of the same channels. The stride
            in y must be even. A tile is then whole rows of positions, and storers write the rows
            of both phases in the order of memory.
    """

    columns: int
    apart: bool = False
    storers: bool = False
    half: bool = False
    paired: bool = False

    def __str__(self) -> str:
        """Rows of a block x positions, then the options."""
        apart = "/apart" if self.apart else ""
        storers = "/storers" if self.storers else ""
        half = "/half" if self.half else ""
        paired = "/paired" if self.paired else ""
        return f"{CONSUMERS * GROUP_ROWS}x{self.columns}{apart}{storers}{paired}{half}"


TILES = (
    *(Tile(columns, half=True) for columns in (256, 208, 144, 88)),
    *(Tile(columns, storers=True, half=True) for columns in (160, 128, 96)),
    *(Tile(columns, storers=True, half=True, paired=True) for columns in (192, 160, 144, 128)),
    *(Tile(columns, apart=True, half=True) for columns in (216, 208)),
    Tile(160, apart=True, storers=True, half=True),
    # For few channels, which fill only half of a stage in float16, and for values that float16
    # cannot hold.
    *(Tile(columns) for columns in (208, 96)),
    *(Tile(columns, storers=True) for columns in (160, 96)),
    Tile(208, apart=True),
)

REPAIR, REPAIR_APART = Tile(160, storers=True), Tile(208, apart=True)
"""The tiles of the launch that repairs, the second where the phases in x are better apart."""
