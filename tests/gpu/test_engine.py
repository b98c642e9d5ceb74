"""The engine's kernels on the device: every tile, against float64."""

from __future__ import annotations

import pytest
import torch

from tconv.kernels import sm90_forward, sm90_input_gradient, sm90_weight_gradient
from tile_cases import FORMATS, SAME_FORMATS, Formats, candidates_of, check_candidates

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a device of capability 9.0",
)

FAMILIES = (sm90_forward, sm90_input_gradient, sm90_weight_gradient)
DTYPES = (torch.bfloat16, torch.float16)

CASES = (
    ("72,40,4,2,1", "2x6x7"),
    ("32,48,3x2,stride=2x3,padding=1x0,groups=2", "3x5x6"),
    ("64,64,3,1,1", "40x31x33"),
    ("64,64,3,1,1", "8x64x200"),
    ("64,64,4,2,1", "4x60x104"),
    ("136,64,3,2,1,1", "9x14x14"),
    ("16,3,4,2,1", "5x20x21"),
    ("256,128,2,2", "30x28x28"),
    # Rows and columns of y that no tap reads.
    ("32,64,3,stride=5,padding=1,dilation=2", "3x18x40"),
    ("24,40,2,2", "6x13x72"),
    # Four phases of a row.
    ("24,24,4x8,stride=2x4,padding=1x2", "2x6x16"),
    # Folded: of few channels, with whole rows and with pieces of them.
    ("56,1,9,3,4,2", "3x40x70"),
    ("21,21,16,8,4", "2x13x21"),
    # Read as they lie if contiguous: x of a folded result, y for the weight's gradient.
    ("70,3,4,2,1", "3x20x24"),
    ("72,40,4,2,1", "2x17x32"),
    # Words of an odd stride.
    ("16,24,5,3,1,1", "2x6x29"),
    ("16,24,5,3,1,1", "2x6x40"),
    # Rows off 16 bytes, read by flat maps of 2, 4 and 8 planes; boxes wider than a row of 24.
    ("24,72,4,2,1", "2x5x7"),
    ("32,24,3,1,1", "2x5x14"),
    ("64,64,3", "3x4x64"),
    ("64,64,3,2", "2x4x64"),
    ("40,70,4,2,1", "3x7x24"),
    # Whole rows of lines of a swizzle.
    ("40,24,2,2", "3x4x64"),
)


@pytest.fixture(scope="module")
def served():
    def every(dtype: torch.dtype, made: Formats) -> bool:
        return dtype is torch.bfloat16 and made == FORMATS[0]

    return candidates_of(CASES, FAMILIES, DTYPES, FORMATS, every)


@pytest.fixture(scope="module")
def served_in_tf32():
    dtypes = (torch.float32,)
    return candidates_of(CASES, FAMILIES, dtypes, SAME_FORMATS, lambda dtype, made: True)


@pytest.fixture(scope="module")
def no_tf32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(scope="module")
def served_in_full_float32(no_tf32):
    dtypes = (torch.float32,)
    return candidates_of(CASES, FAMILIES, dtypes, SAME_FORMATS, lambda dtype, made: True)


@pytest.mark.parametrize("made", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile(case, family, dtype, made, served):
    able = served[case, family.STEM, dtype, made]
    assert able
    check_candidates(case, family, dtype, made, able)


@pytest.mark.parametrize("made", SAME_FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile_in_tf32(case, family, made, served_in_tf32):
    dtype = torch.float32
    able = served_in_tf32[case, family.STEM, dtype, made]
    # Forward of contiguous tensors has other kernels, and 1 output channel its own in any layout.
    others = made[0] is torch.contiguous_format or case[0].startswith("56,1,")
    assert bool(able) != (family is sm90_forward and others)
    check_candidates(case, family, dtype, made, able)


# NOTE: the last, as TF32 stays off until the module's end.
@pytest.mark.parametrize("made", SAME_FORMATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.STEM)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_every_tile_in_full_float32(case, family, made, served_in_full_float32):
    dtype = torch.float32
    able = served_in_full_float32[case, family.STEM, dtype, made]
    # Forward of contiguous tensors has other kernels, and 1 output channel its own in any layout.
    # No tile of the gradients reads 64 phases of y.
    others = made[0] is torch.contiguous_format or case[0].startswith("56,1,")
    none = others if family is sm90_forward else case[0] == "21,21,16,8,4"
    assert bool(able) != none
    check_candidates(case, family, dtype, made, able)
