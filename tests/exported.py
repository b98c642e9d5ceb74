"""Exported files in tests: loaded as modules, their kernels run by the emulator."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import re
import struct
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from layer_cases import Case, Operands
from tconv import plan, settings
from tconv.emulator import EmulatedKernel, tensor_map
from tconv.export import Layer, export_file
from tconv.kernels import sm90_split_forward, sm90_tf32_flat_forward, sm90_tf32_forward
from tconv.kernels.source import KERNEL_DIRECTORY, TENSOR_MAP, KernelSource
from tconv.reference import expected, poisoned_memory

PROBLEMS = Path(__file__).resolve().parent / "problems"
KERNELBENCH = (57, 64, 65, 69, 71, 74, 75, 78, 79, 81)


# Kernels, what their half tiles are to be, and a layer.
HALF = {
    "streamed": (
        sm90_tf32_forward,
        {"resident": False},
        Layer(36, 20, (3, 3), batch=2, size=(9, 12)),
    ),
    "resident": (
        sm90_tf32_forward,
        {"resident": True},
        Layer(36, 24, (4, 4), (2, 2), (1, 1), groups=2, bias=False, batch=2, size=(5, 9)),
    ),
    "overlapping": (
        sm90_tf32_forward,
        {"resident": True, "sectors": True},
        Layer(32, 24, (3, 3), batch=2, size=(5, 212)),
    ),
    # Rows are two tiles that have room for a lead.
    "common": (
        sm90_tf32_forward,
        {"resident": True, "sectors": True, "common": True},
        Layer(32, 24, (3, 3), batch=2, size=(11, 188)),
    ),
    # Strict float32, which an export is not planned for by itself: `export_half` asks for it.
    "split, streamed": (
        sm90_split_forward,
        {"resident": False},
        Layer(36, 20, (3, 3), (2, 2), (1, 1), (1, 1), batch=2, size=(9, 12)),
    ),
    "split, resident": (
        sm90_split_forward,
        {"resident": True},
        Layer(32, 24, (3, 3), groups=2, bias=False, batch=2, size=(5, 9)),
    ),
    "flat": (
        sm90_tf32_flat_forward,
        {"storers": False},
        Layer(72, 40, (3, 3), (2, 2), (1, 1), (1, 1), batch=2, size=(6, 9)),
    ),
    "flat, paired": (
        sm90_tf32_flat_forward,
        {"paired": True},
        Layer(72, 40, (4, 4), (2, 2), (1, 1), groups=2, bias=False, batch=2, size=(6, 9)),
    ),
    "flat, apart": (
        sm90_tf32_flat_forward,
        {"apart": True, "storers": True},
        Layer(68, 20, (3, 3), (2, 2), (1, 1), (1, 1), batch=2, size=(5, 8)),
    ),
}


def export_half(
    name: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[types.ModuleType, Layer]:
    """Writes the exported file of one of `HALF`: its kernel and layer."""
    family, wanted, layer = HALF[name]
    wanted = {"half": True, **wanted}
    tiles = [t for t in family.TILES if dataclasses.asdict(t).items() >= wanted.items()]
    assert tiles, f"{family.STEM} has no tiles of {wanted}"
    monkeypatch.setenv("TCONV_KERNEL", family.STEM)
    monkeypatch.setattr(family, "TILES", tiles)
    if family is sm90_split_forward:
        monkeypatch.setattr("tconv.problem.float32_math", lambda *_, **__: "ieee")
    plan._plan.cache_clear()  # plans are kept by problem, whatever the tiles
    export_file(None, layer, path)
    plan._plan.cache_clear()
    return family, layer


def problem(number: int) -> Path:
    """Our file for a level 1 problem of KernelBench."""
    return PROBLEMS / f"kernelbench_{number}.py"


def load(path: Path) -> types.ModuleType:
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(f"exported_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class ExportedSource(KernelSource):
    """One kernel of an exported file, as the emulator takes it."""

    whole: str = ""

    @cached_property
    def _text(self) -> str:
        return self.whole


class EmulatedExtension:
    """Stands in for what `load_inline` compiles: its `launch` runs the emulator."""

    def __init__(self, module: types.ModuleType, schedule: str = "forward") -> None:
        self.module = module
        self.schedule = schedule
        self.launched: list[str] = []

    def launch(self, name: str, device: Any, blocks: int, arguments: bytes) -> None:
        self.launched.append(name)
        kernel = emulated(kernel_source(self.module, name), settings.sanitize())
        allocations = _allocations(arguments) if kernel.sanitize else None
        kernel.launch(blocks, arguments, allocations=allocations, schedule=self.schedule)


@lru_cache(maxsize=256)
def emulated(source: ExportedSource, sanitize: bool) -> EmulatedKernel:
    return EmulatedKernel(source, sanitize=sanitize)


def planned_launches(module: types.ModuleType) -> list[Any]:
    """The launches of all planned calls, in order."""
    return [launch for call in module.PLANNED_CALLS for launch in call.launches]


def _fields(module: types.ModuleType, name: str) -> tuple[tuple[str, str], ...]:
    """Name and kind of each argument of a kernel."""
    for launch in planned_launches(module):
        if launch.name == name:
            kinds = {module.Address: "const void*", module.TensorMap: TENSOR_MAP}
            return tuple((f, kinds.get(type(a), "int")) for f, a in launch.arguments.items())
    weight = name.startswith("any_weight_gradient")
    names = module.general_structure("reduction" if weight else "correlation").names
    return tuple((f, "const void*" if f in GENERAL_POINTERS else "int") for f in names)


GENERAL_POINTERS = ("source", "weight", "bias", "destination", "partial", "x", "y")


def kernel_source(module: types.ModuleType, name: str) -> ExportedSource:
    """One kernel, the emulator's ptx/ in the place of the file's, and no kernel but it."""
    row = re.search(rf"TCONV_ENTRY\((\w+), {name}, (\d+), (\d+)\)", module.CUDA_LAUNCH)
    assert row is not None, name
    namespace, threads, shared_bytes = row[1], int(row[2]), int(row[3])
    if namespace.startswith("planned_"):
        found = re.search(
            rf"^namespace {namespace} \{{\n.*?^\}}  // namespace {namespace}\n",
            module.CUDA_KERNELS,
            re.MULTILINE | re.DOTALL,
        )
        assert found is not None, name
        text = module.COMMON_ELEMENT_CUH + found[0]
    else:
        dtype = name.rpartition("_")[2]
        text = module.COMMON_ELEMENT_CUH + re.sub(
            rf"^TCONV_(CORRELATIONS|REDUCTION)\((?!{dtype},)\w+, \w+\)\n",
            "",
            module.GENERAL_CU,
            flags=re.MULTILINE,
        )
    headers = "".join(
        f"#include <ptx/{path.name}>\n"
        for path in sorted((KERNEL_DIRECTORY / "ptx").glob("*.cuh"))
        if path.name != "wgmma_operands.cuh"
    )
    return ExportedSource(
        stem=name,
        constants=(),
        arguments=_fields(module, name),
        shared_bytes=shared_bytes,
        threads=threads,
        whole=f"{headers}{text}\nusing namespace {namespace};\n",
    )


def _tensor_map(address: int, dims: Any, strides: Any, box: Any, swizzle: int, dtype: str) -> bytes:
    return tensor_map.encode(address, dtype, dims, strides, box, swizzle=swizzle)


def _allocations(arguments: bytes) -> list[tuple[int, int]]:
    """The memory of the tensors that the arguments point into: a sanitized launch works on copies.

    NOTE: of no others: it writes the copies back, and what other tests have left alive may say
    that it lies where by now something else does.
    """
    words = struct.unpack(f"={len(arguments) // 8}Q", arguments[: len(arguments) // 8 * 8])
    plain = (torch.Tensor, torch.nn.Parameter)
    tensors = (value for value in gc.get_objects() if type(value) in plain)
    storages = (t.untyped_storage() for t in tensors if t.layout is torch.strided and not t.is_meta)
    return sorted(
        {
            (start, size)
            for start, size in ((s.data_ptr(), s.nbytes()) for s in storages)
            if any(start <= word < start + size for word in words)
        }
    )


@contextmanager
def on_emulator(
    module: types.ModuleType,
    *,
    multiprocessors: int = 4,
    capability: tuple[int, int] = (9, 0),
    schedule: str = "forward",
) -> Iterator[EmulatedExtension]:
    """The exported module's Python on CPU tensors, its kernels in the emulator."""
    extension = EmulatedExtension(module, schedule)
    names: dict[str, Any] = {
        "load_kernels": lambda: extension,
        "check_device": lambda x: None,
        "device_properties": lambda index: (multiprocessors, capability),
        "has_specific_instructions": lambda: True,
        "tensor_map": _tensor_map,
    }
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield extension
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def assert_right(
    module: types.ModuleType, case: Case, tensors: Operands, *, tf32: bool = False
) -> None:
    """Output and gradients of an exported module's function, within the numerics contract."""
    t = tensors
    x, w = (value.detach().requires_grad_() for value in (t.x, t.w))
    bias = None if t.bias is None else t.bias.detach().requires_grad_()
    stride, padding, output_padding, dilation, groups = case.geometry
    with poisoned_memory():
        y = module.transposed_convolution(
            x, w, bias, stride, padding, output_padding, groups, dilation
        )
        y.backward(t.grad_output)
    results = [y.detach(), x.grad, w.grad]
    for got, want in zip(results, expected(case.layer, t, tf32=tf32), strict=False):
        wrong = want.why_wrong(got)
        assert wrong is None, f"{want.name}: {case}: {wrong}"
    if bias is not None:
        torch.testing.assert_close(bias.grad, t.grad_output.sum((0, 2, 3)))
