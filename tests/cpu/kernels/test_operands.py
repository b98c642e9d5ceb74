"""Kernels whose products read operands from registers, in SASS: nothing writes them too early."""

from __future__ import annotations

import pytest

from sass_operands import overwritten
from tconv import disassemble
from tconv.jit.compile import compile_cuda
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import FAMILIES, candidates, make_plan
from tiers import quick

HOPPER = Target.named("sm_90a")


LAYERS = [
    Layer.parse(text, size)
    for text, size in (
        ("256,128,3,2,1,1", "16x64x64"),
        ("64,64,4,2,1", "8x32x32"),
        ("64,64,3", "8x56x58"),
    )
]
CASES = [
    # Forward has raw tiles for strides alone.
    *(
        (direction, layer.problem(direction, "bfloat16"))
        for direction in DIRECTIONS
        for layer in (LAYERS[:2] if direction == "forward" else LAYERS)
    ),
    ("weight_gradient", LAYERS[1].problem("weight_gradient", "float16", "channels_last")),
    ("float32", LAYERS[1].problem("weight_gradient", "float32")),
    ("float32", LAYERS[1].problem("weight_gradient", "float32", "channels_last")),
    ("float32", LAYERS[2].problem("weight_gradient", "float32", "channels_last")),
    ("float32 raw", LAYERS[1].problem("input_gradient", "float32")),
    ("float32 raw", Layer.parse("64,64,3", "8x33x34").problem("input_gradient", "float32")),
    ("float32 raw", Layer.parse("64,32,8,4,2", "8x32x32").problem("input_gradient", "float32")),
    ("overlap", Layer.parse("56,1,9,3,4,2", "16x64x64").problem("forward")),
    ("split", LAYERS[2].problem("forward", tf32=False)),
    ("tf32", LAYERS[2].problem("forward")),
    ("wide", Layer.parse("256,64,2,2", "8x64x64").problem("forward")),
    ("full float32", LAYERS[1].problem("input_gradient", "float32", tf32=False)),
    ("full float32", LAYERS[2].problem("input_gradient", "float32", tf32=False)),
]
OF_REGISTERS = {
    "forward": "/raw/",
    "input_gradient": "/raw/",
    "weight_gradient": "",
    "float32": "",
    "float32 raw": "/raw/",
    "overlap": "sm90_tf32_overlap_forward",
    "split": "sm90_split_forward",
    "tf32": "sm90_tf32_forward",
    "wide": "sm90_tf32_wide_forward",
    "full float32": "/raw/",
}
"""Words of those candidates that read operands from registers."""


# In `make test` one layer of each direction in 16 bits, and float32.
@pytest.mark.parametrize(("kind", "given"), quick(CASES, 1, 3, 6, *range(9, 13), -1), ids=str)
def test_no_register_is_written_that_products_still_read(kind, given):
    if disassemble.find() is None:
        pytest.skip("no disassembler: pip install nvidia-cuda-nvdisasm")
    read = 0
    families = tuple(f for f in FAMILIES if f.STEM.startswith("sm90_"))
    for candidate in candidates(given, HOPPER, families):
        name = f"{candidate.stem} {candidate.tile}"
        if candidate.refusal is not None:
            continue
        if OF_REGISTERS[kind] not in name:
            continue
        source = make_plan(given, HOPPER, candidate).kernel.source
        products, found = overwritten(disassemble.sass(compile_cuda(source, "sm_90a").cubin))
        assert not found, f"{name}: {found[:4]}"
        read += products
    assert read > 0


RACE = """
        /*1bb0*/  HGMMA.64x64x16.F32.BF16 R56, R96, gdesc[UR4].tnspB, R56 ;
        /*1bc0*/  HGMMA.64x64x16.F32.BF16 R56, R100, gdesc[UR4].tnspB, R56, gsb0 ;
        /*1be0*/  @!P0 BRA `(.L_x_13) ;
        /*1bf0*/  STS.128 [R96], R100 ;
        /*1c80*/  LDSM.16.MT88.4 R{}, [R88] ;
        /*1ce0*/  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*1cf0*/  IMAD.WIDE R96, R4, 0x2, R8 ;
"""


@pytest.mark.parametrize(("register", "count"), ((96, 4), (98, 4), (94, 2), (104, 0), (92, 0)))
def test_a_write_before_the_wait_is_found(register, count):
    products, found = overwritten(RACE.format(register))
    assert products == 2
    assert len(found) == count


def test_a_write_behind_a_jump_backwards_is_found():
    loop = """
.L_x_5:
        /*1a00*/  LDS.64 R{}, [R4] ;
        /*1a10*/  HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR4], R24, gsb0 ;
        /*1a20*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*1a30*/  HGMMA.64x64x16.F32.BF16 R24, R96, gdesc[UR4], R24, gsb0 ;
        /*1a40*/  WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*1a50*/  @P0 BRA `(.L_x_5) ;
"""
    assert [one.register for one in overwritten(loop.format(96))[1]] == [96, 97]
    assert overwritten(loop.format(88)) == (2, [])


def test_a_wait_that_leaves_a_group_frees_the_ones_before():
    two = RACE.format(104).replace("R100, gdesc", "R108, gdesc").replace("gsb0, 0x0", "gsb0, 0x1")
    products, found = overwritten(RACE.format(104).split("/*1ce0*/")[0] + two)
    assert products == 4
    assert {one.register for one in found} == {96, 97}
