"""`mma_frames_forward`: a long kernel and stride along x, on `mma.sync` with TF32.

An inverse STFT as a transposed convolution is such a layer: each input column is a frame, which is
added into the output `stride` further on (`mma_frames_forward.cu`).
"""

from tconv.kernels.mma_frames_forward.cost import cost
from tconv.kernels.mma_frames_forward.launch import STEM, launches
from tconv.kernels.mma_frames_forward.layout import TILES, Tile, layout, tile_why_not, why_not
from tconv.problem import Direction

DIRECTION: Direction = "forward"
GENERAL = False
