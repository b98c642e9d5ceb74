"""Loading, launching and tensor maps against a fake driver, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tconv.jit import tensor_map

HERE = Path(__file__).parent


@pytest.mark.usefixtures("nvrtc")
def test_on_a_fake_driver(tmp_path: Path, run_alone: Callable[..., str]) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler to build the fake driver")
    library = tmp_path / "libcuda.so.1"
    flags = ["-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(
        [*compiler.split(), *flags, "-o", str(library), str(HERE / "fake_driver.cpp"), "-ldl"],
        check=True,
    )
    script = HERE / "on_fake_driver.py"
    search_path = f"{tmp_path}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
    output = run_alone(script, LD_LIBRARY_PATH=search_path, PYTHONFAULTHANDLER="1")
    assert output.count("passed test_") == script.read_text().count("\ndef test_"), output


def arguments(**changed: object) -> dict[str, object]:
    usual: dict[str, object] = {
        "data_ptr": 0x7000,
        "dtype": "float32",
        "dims": (64, 32),
        "strides_bytes": (256,),
        "box": (8, 4),
        "element_strides": (1, 1),
        "swizzle": 32,
        "oob_fill": "zeros",
        "l2_promotion": 128,
    }
    return {**usual, **changed}


def test_a_tensor_map_that_hardware_takes() -> None:
    tensor_map.check(**arguments())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dtype": "float"}, "dtype must be in .* got 'float'"),
        ({"swizzle": 16}, "swizzle must be in .* got 16"),
        ({"oob_fill": "ones"}, "oob_fill must be in .* got 'ones'"),
        ({"l2_promotion": 512}, "l2_promotion must be in .* got 512"),
        ({"dims": ()}, "1 to 5 dimensions"),
        ({"strides_bytes": (4, 256)}, "takes 1 strides"),
        ({"data_ptr": 0x7008}, "multiple of 16, got 0x7008"),
        ({"dims": (0, 32)}, r"1 to 2\*\*32, got dims=\(0, 32\)"),
        ({"strides_bytes": (260,)}, r"multiples of 16 .* got strides_bytes=\(260,\)"),
        ({"box": (8, 257)}, "1 to 256 in each size"),
        ({"element_strides": (1, 9)}, "1 to 8"),
        ({"box": (6, 4), "swizzle": 0}, r"multiple of 16 bytes, got 6 of float32 \(24 bytes\)"),
        ({"box": (16, 4)}, "fit the swizzle of 32 bytes, got 16 of float32"),
        ({"dtype": "int32", "oob_fill": "nan"}, "floating-point"),
    ],
)
def test_a_tensor_map_that_hardware_refuses(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tensor_map.check(**arguments(**changed))  # type: ignore[arg-type]


def test_tensor_map_numbers_are_cudas() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    types = driver.CUtensorMapDataType
    for name, (number, _) in tensor_map.DTYPES.items():
        assert int(getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}")) == number
    swizzles = driver.CUtensorMapSwizzle
    for span, number in tensor_map.SWIZZLES.items():
        name = f"CU_TENSOR_MAP_SWIZZLE_{f'{span}B' if span else 'NONE'}"
        assert int(getattr(swizzles, name)) == number
    promotions = driver.CUtensorMapL2promotion
    for span, number in tensor_map.L2_PROMOTIONS.items():
        name = f"CU_TENSOR_MAP_L2_PROMOTION_{f'L2_{span}B' if span else 'NONE'}"
        assert int(getattr(promotions, name)) == number
    fills = driver.CUtensorMapFloatOOBfill
    assert int(fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == tensor_map.OOB_FILLS["zeros"]
    nan = fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA
    assert int(nan) == tensor_map.OOB_FILLS["nan"]
