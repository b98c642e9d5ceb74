"""What a call does on a device, with recordings in the place of its kernels."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tconv import private, run
from tconv.counts import counter
from tconv.jit import runtime
from tconv.jit.series import Series
from tconv.jit.target import Target
from tconv.kernels.launch import Address, Launch, TensorMap
from tconv.kernels.source import TENSOR_MAP, KernelSource
from tconv.layers import Layer
from tconv.memory_format import is_channels_last, memory_format
from tconv.problem import dense_strides
from tconv.run import binding, calls, execution

STREAM = 0x1000
G = ((1, 1), (0, 0), (0, 0), (1, 1), 1)
NO_SETTINGS = binding.Settings(None, "", False, True, False, False, "")


class Recorded:
    """A kernel, and each of its launches, that notes what is started."""

    def __init__(self, launched: list[tuple[Any, ...]], of: tuple[Any, ...] = ()) -> None:
        self.launched = launched
        self.of = of
        self.kernel: Recorded | None = None

    def prepare(self, grid: int, arguments: bytes) -> Recorded:
        prepared = Recorded(self.launched, (grid, arguments))
        prepared.kernel = self
        return prepared

    def start(self, stream: int = 0, dependent: bool = False) -> None:
        self.launched.append((*self.of, stream, dependent))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_kernel_behind_its_packing_is_a_dependent_launch(
    monkeypatch: pytest.MonkeyPatch, packed: bool, captured: bool
) -> None:
    launched: list[tuple[Any, ...]] = []
    kernel = Recorded(launched)
    launches = [kernel.prepare(7, b"packing"), kernel.prepare(8, b"kernel")][0 if packed else 1 :]

    class Filled(binding.Filled):
        def __missing__(self, addresses: object) -> Any:
            return Series(launches)  # type: ignore[arg-type]

    call = SimpleNamespace(
        device=0,
        bound=SimpleNamespace(
            partial_shape=None,
            packed_elements=5 if packed else 0,
            kernels=[Recorded(launched)],  # which were loaded again since
        ),
        filled=Filled(None),  # type: ignore[arg-type]
    )
    kept: list[object] = []
    monkeypatch.setattr(private, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(private, "is_stream_capturing", lambda: captured)
    monkeypatch.setattr(private, "current_device", lambda: 0)
    monkeypatch.setattr(runtime, "keep", kept.append)
    real = torch.zeros(1, 16, 4, 4)
    for _ in range(2):  # the second call's packing is no dependent launch either
        execution._launch(call, real, real, real, None)  # type: ignore[arg-type]
    expected = [(8, b"kernel", STREAM, packed)]
    if packed:
        expected.insert(0, (7, b"packing", STREAM, False))
    assert launched == expected * 2
    assert kept == [kernel] * 2 * len(launches) * captured, "a graph launches it again"


def test_calls_let_go_of_kernels_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have not been used for longest do, and load them again when they are used."""

    class Loaded(Recorded):
        pass

    def load(source: object, device: int) -> Any:
        key: Any = (source, device, None)
        kernel: Any = runtime._kernels.get(key) or Loaded([])
        return runtime._kernels.setdefault(key, kernel)

    def call_of(number: int) -> binding.Call:
        problem: Any = number
        return binding.Call(problem, (), (), ((), (), ()), NO_SETTINGS, 0)

    def prepare(problem: Any, *_: object) -> tuple[Any, tuple[Any, ...]]:
        bind = SimpleNamespace(grid=1, arguments=lambda *_: b"")
        launches = [SimpleNamespace(bind=lambda _: bind)] * 2
        plan = SimpleNamespace(
            launches=launches, addition=None, packed=0, splits=0, partial_strides=()
        )
        return plan, (load("packing", 0), load(problem, 0))

    monkeypatch.setattr(binding, "_prepare", prepare)
    monkeypatch.setattr(binding.Call, "target", None)
    monkeypatch.setattr(runtime, "_kernels", weakref.WeakValueDictionary())
    monkeypatch.setattr(runtime, "_kept", set())
    monkeypatch.setattr(runtime, "_holders", {})
    monkeypatch.setattr(runtime, "MOST_LOADED", 5)
    every = [call_of(number) for number in range(12)]  # as `_known` holds them
    for call in every:
        for one in (call, every[0]):
            one.filled.uses += 1
            assert len(one.filled[()].launches) == 2
        assert runtime.loaded() <= 5
    held = [number for number, call in enumerate(every) if "filled" in vars(call)]
    assert held == [0, 9, 10, 11]
    assert len(every[3].bound.launches) == 2 and len(every[3].filled[()].launches) == 2
    assert runtime.loaded() <= 5
    del call, one
    every.clear()
    assert runtime.loaded() == 0 and not runtime._holders


def test_a_call_keeps_what_it_launches_and_not_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer of many sizes would keep as many plans, each of dozens of objects."""
    target = Target.named("sm_90a")
    monkeypatch.setattr(binding.Target, "for_device", lambda device: target)
    monkeypatch.setattr(binding.sizes, "expect", lambda *_: None)
    monkeypatch.setattr(runtime, "find", lambda source, device: Recorded([]))
    problem = Layer.parse("256,128,3,2,1,1", "1x23x19").problem("forward")
    x, w, y = map(dense_strides, (problem.x_shape, problem.w_shape, problem.y_shape))
    call = binding.Call(problem, problem.y_shape, y, (x, w, y), NO_SETTINGS, 0)
    plan = weakref.ref(call.planned)
    assert len(call.bound.launches) == len(call.plan.launches) and plan() is call.plan
    binding.sizes._planned.cache_clear()
    gc.collect()
    assert plan() is None
    assert call.bound.packed_elements == call.plan.packed


@pytest.mark.parametrize(
    ("shape", "weight_shape"),
    [((2, 4, 5, 7), (4, 6, 3, 2)), ((1, 4, 1, 1), (4, 6, 1, 1)), ((3, 1, 4, 1), (1, 1, 2, 1))],
)
@pytest.mark.parametrize("channels_last", ["neither", "input", "weight"])
def test_the_output_has_the_strides_that_torch_would_give_it(
    shape: tuple[int, ...], weight_shape: tuple[int, ...], channels_last: str
) -> None:
    x, w = torch.zeros(shape), torch.zeros(weight_shape)
    if channels_last == "input":
        x = x.to(memory_format=torch.channels_last)
    if channels_last == "weight":
        w = w.to(memory_format=torch.channels_last)
    geometry = ((2, 1), (0, 0), (1, 0), (1, 1), 1)
    call = calls._find_forward(x, w, None, geometry)
    size = torch.nn.functional.conv_transpose2d(x, w, None, *geometry[:3], 1, geometry[3]).shape
    format_ = memory_format(is_channels_last(x) or is_channels_last(w))
    expected = torch.empty(size, memory_format=format_)
    assert (call.shape, call.result_strides) == (expected.shape, expected.stride())


def test_arguments_are_filled_in_once_for_the_same_addresses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fields = (("source_map", TENSOR_MAP), ("weight", "const void*"), ("destination", "void*"))
    source = KernelSource("test", (), fields, 0, 32)
    encoded: list[int] = []

    def encode(address: int, dtype: str, *_: object, **__: object) -> bytes:
        encoded.append(address)
        return address.to_bytes(128, "little")

    monkeypatch.setattr(binding.tensor_map, "encode", encode)

    launch = Launch(
        "kernel",
        source,
        3,
        {
            "source_map": TensorMap(Address("x", 16), (4,), (), (4,)),
            "weight": Address("w"),
            "destination": Address("y", 8),
        },
    )
    kernel: Any = Recorded([])
    call = binding.Call(None, (), (), ((), (), ()), NO_SETTINGS, 0)  # type: ignore[arg-type]
    call.__dict__["bound"] = binding.Bound((kernel,), (launch.bind({}),), 0, None, (), False)
    for _ in range(2):
        for base in (0x1000, 0x2000):
            (filled,) = call.filled[base, base + 1, base + 2, 0, 0, 0].launches
            assert isinstance(filled, Recorded)
            grid, written = filled.of
            assert grid == 3
            offsets = source.offsets
            at = offsets["source_map"]
            assert written[at : at + 128] == (base + 16).to_bytes(128, "little")
            for name, value in (("weight", base + 1), ("destination", base + 10)):
                assert written[offsets[name] :][:8] == value.to_bytes(8, "little")
    assert encoded == [0x1010, 0x2010]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("axes", [1, 2])
def test_a_ready_forward_launches_what_a_forward_does(
    monkeypatch: pytest.MonkeyPatch, axes: int, with_bias: bool, device: int
) -> None:
    """Also where another device is the current one."""
    launched: list[tuple[int, ...]] = []
    made: dict[object, torch.Tensor] = {}

    def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        found = made.setdefault(len(size) == 1, torch.empty_strided(size, strides, dtype=dtype))
        return found.as_strided(size, strides)

    monkeypatch.setattr(execution, "_start", lambda call, device, where: launched.append(where))
    monkeypatch.setattr(
        execution, "_empty_strided", lambda like, size, strides, dtype: empty(size, strides, dtype)
    )
    monkeypatch.setattr(private, "empty_strided_cuda", empty)
    monkeypatch.setattr(private, "is_deterministic", lambda: False)  # the tests fill memory
    monkeypatch.setattr(private, "current_device", lambda: device)
    shape, weight_shape = ((2, 4, 1, 6), (4, 3, 1, 5))
    x, w = torch.randn(shape), torch.randn(weight_shape)
    bias = torch.randn(3) if with_bias else None
    geometry = ((1, 2), (0, 1), (0, 0), (1, 1), 1)
    call = calls._find_forward(x, w, bias, geometry)
    call = binding.Call(
        call.problem, call.shape, call.result_strides, call.strides, call.settings, 0
    )
    call.__dict__["bound"] = binding.Bound((), (), 7, None, (), False)
    expected = execution._forward(call, x, w, bias, geometry)
    way = binding.Way(None, "timed", counter("forward", "a kernel", "timed"))
    before = way.served.calls
    ready = execution.ready_forward(call, way, axes)
    out = ready(*((x, w) if axes == 2 else (x.squeeze(2), w.squeeze(2))), bias)
    assert launched[0] == launched[1] and launched[0][2] == out.data_ptr()
    assert out.shape == (expected.shape if axes == 2 else expected.squeeze(2).shape)
    assert out.is_contiguous() and way.served.calls == before + 1


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("wanted", ["x", "w", "xw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ready_gradients_launch_what_the_gradients_do(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, wanted: str, device: int
) -> None:
    """In one start; each by itself where another device is the current one."""
    started: list[tuple[tuple[int, ...], object]] = []
    made: dict[object, torch.Tensor] = {}

    def empty(size: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        count = torch.Size(size).numel()
        tensor = made.setdefault((count, dtype), torch.empty(count, dtype=dtype))
        return tensor.as_strided(size, strides)

    def start(_: object, device: int, addresses: tuple[int, ...], behind: object = None) -> None:
        started.append((addresses, behind))

    monkeypatch.setattr(execution, "_start", start)
    monkeypatch.setattr(
        execution, "_empty_strided", lambda like, size, strides, dtype: empty(size, strides, dtype)
    )
    monkeypatch.setattr(private, "empty_strided_cuda", empty)
    monkeypatch.setattr(private, "is_deterministic", lambda: False)  # the tests fill memory
    monkeypatch.setattr(private, "current_device", lambda: device)
    shapes = (2, 4, 5, 6), (4, 3, 3, 5), (2, 3, 7, 13)
    x, w, y = (torch.randn(shape, dtype=dtype) for shape in shapes)
    geometry = ((1, 2), (0, 1), (0, 0), (1, 1), 1)
    forward = calls._find_forward(x, w, None, geometry)
    found = calls._find_gradients(forward, geometry, forward.strides[2], True)
    on_gpu = []
    for call, bound in zip(found, ((7, None), (5, (3, *shapes[1]))), strict=True):
        on_gpu.append(dataclasses.replace(call, device=0))
        strides = bound[1] and torch.empty(bound[1]).stride()
        vars(on_gpu[-1])["bound"] = binding.Bound((), (), *bound, strides, bound[1] is not None)
    rest = (shapes[0][2:], geometry), (shapes[1][2:], geometry, False)
    expected = (
        execution._input_gradient(on_gpu[0], y, w, *rest[0]),
        execution._weight_gradient(on_gpu[1], x, y, *rest[1]),
    )
    plain = [addresses for addresses, _ in started]
    del started[:]
    counted = [counter(call.problem.direction, "a kernel", "timed") for call in on_gpu]
    before = [one.calls for one in counted]
    which = ["x" in wanted, "w" in wanted]
    run = execution.ready_gradients(
        *(
            execution.Ready(call, False, one.add, last) if is_wanted else None
            for call, one, last, is_wanted in zip(on_gpu, counted, rest, which, strict=True)
        )
    )
    for result, right, is_wanted in zip(run(y, x, w), expected, which, strict=True):
        assert (result is not None) == is_wanted
        if result is not None:
            assert result.shape == right.shape and result.dtype is dtype
            assert result.is_contiguous()
    assert [one.calls - b for one, b in zip(counted, before, strict=True)] == which
    plain = [addresses for addresses, is_wanted in zip(plain, which, strict=True) if is_wanted]
    if device or len(plain) == 1:
        assert started == [(addresses, None) for addresses in plain]
    else:
        assert started == [(plain[0] + plain[1], on_gpu[1])]
    if "w" in wanted:
        assert plain[-1][5] == made[3 * w.numel(), dtype].data_ptr()


def test_launches_behind_another_calls_are_filled_in_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched: list[tuple[Any, ...]] = []

    class Filling:
        def __init__(self, grid: int) -> None:
            self.grid = grid

        def arguments(self, addresses: tuple[int, ...], _: object) -> bytes:
            return bytes(addresses)

    def a_call(number: int) -> binding.Call:
        call = calls._find_forward(torch.zeros(number, 4, 5, 8), torch.zeros(4, 6, 3, 3), None, G)
        call = dataclasses.replace(call, device=0)
        vars(call)["bound"] = binding.Bound(
            (Recorded(launched),) * number,  # type: ignore[arg-type]
            tuple(Filling(10 * number + i) for i in range(number)),  # type: ignore[arg-type]
            0,
            None,
            (),
            False,
        )
        return call

    monkeypatch.setattr(private, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(private, "is_capturing", lambda device: False)
    first, second = a_call(1), a_call(2)
    for _ in range(2):
        execution._start(first, 0, (1, 2, 3, 4), second)
    once = [
        (10, bytes((1, 2)), STREAM, False),
        (20, bytes((3, 4)), STREAM, False),
        (21, bytes((3, 4)), STREAM, True),
    ]
    assert launched == once * 2
    assert first.uses() == second.uses() == 2
    third = a_call(3)
    joined, other = first.filled_before(second), first.filled_before(third)
    assert len(joined) == 1 and not other
    for _ in range(2):  # in turns
        assert first.filled_before(second) is joined and first.filled_before(third) is other
    for number in range(4, 30):
        first.filled_before(a_call(number))
    assert len(first._joined) <= binding._MOST_JOINED


def test_a_call_that_lets_go_of_its_kernels_lets_go_of_those_behind_anothers() -> None:
    class AKernel:
        pass

    def a_call(number: int) -> tuple[binding.Call, weakref.ref[Any]]:
        kernel = AKernel()
        call = calls._find_forward(torch.zeros(number, 4, 5, 8), torch.zeros(4, 6, 3, 3), None, G)
        call = dataclasses.replace(call, device=0)
        vars(call)["bound"] = binding.Bound((kernel,), (), 0, None, (), False)  # type: ignore[arg-type]
        return call, weakref.ref(kernel)

    (first, of_first), (second, of_second) = a_call(1), a_call(2)
    first.filled_before(second)
    second.release()
    gc.collect()
    assert of_second() is None and of_first() is not None
    first.release()
    assert of_first() is None


CHANGES: dict[str, dict[str, Any]] = {
    "geometry": {"geometry": ((2, 2), (1, 1), (0, 0), (1, 1), 1)},
    "batch": {"input": torch.zeros(3, 4, 5, 8)},
    "strides": {"input": torch.zeros(2, 4, 8, 5).mT},
    "channels_last": {"input": torch.zeros(2, 5, 8, 4).permute(0, 3, 1, 2)},
    "input's dtype": {"input": torch.zeros(2, 4, 5, 8).double()},
    "input's device": {"input": torch.zeros(2, 4, 5, 8, device="meta")},
    "input's alignment": {"input": torch.zeros(2 * 4 * 5 * 8 + 4)[1:-3].view(2, 4, 5, 8)},
    "weight's sizes": {"weight": torch.zeros(4, 6, 3, 2)},
    "weight's strides": {"weight": torch.zeros(4, 6, 3, 3).mT},
    "weight's dtype": {"weight": torch.zeros(4, 6, 3, 3).half()},
    "weight's device": {"weight": torch.zeros(4, 6, 3, 3, device="meta")},
    "no bias": {"bias": None},
    "bias's size": {"bias": torch.zeros(1)},
    "bias's dtype": {"bias": torch.zeros(6).half()},
    "bias's device": {"bias": torch.zeros(6, device="meta")},
}


@pytest.mark.parametrize("name", CHANGES)
def test_calls_that_differ_are_not_alike(name: str) -> None:
    call: dict[str, Any] = {
        "input": torch.zeros(2, 4, 5, 8),
        "weight": torch.zeros(4, 6, 3, 3),
        "bias": torch.zeros(6),
        "geometry": ((1, 1), (1, 1), (0, 0), (1, 1), 1),
    }
    other = {"input": torch.ones(2, 4, 5, 8)}
    assert run.signature(**call) == run.signature(**(call | other))
    assert run.signature(**call) != run.signature(**(call | CHANGES[name]))


@pytest.mark.parametrize("variable", ["TCONV_KERNEL", "TCONV_EMULATE_ARCH", "TCONV_SANITIZE"])
def test_calls_under_another_setting_are_not_alike(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    call: Any = (torch.zeros(2, 4, 5, 8), torch.zeros(4, 6, 3, 3), None, ((1, 1),) * 4 + (1,))
    before = run.signature(*call)
    values = {"TCONV_KERNEL": "forward", "TCONV_EMULATE_ARCH": "sm_80", "TCONV_SANITIZE": "1"}
    monkeypatch.setenv(variable, values[variable])
    assert run.signature(*call) != before


def test_calls_with_and_without_tf32_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    call: Any = (torch.zeros(2, 4, 5, 8), torch.zeros(4, 6, 3, 3), None, ((1, 1),) * 4 + (1,))
    before = run.signature(*call)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not run.tf32_allowed())
    assert run.signature(*call) != before


def test_tf32_is_not_allowed_without_cudnn() -> None:
    assert run.tf32_allowed()
    with torch.backends.cudnn.flags(enabled=False, allow_tf32=True):
        assert not run.tf32_allowed()
    assert run.tf32_allowed()


@pytest.mark.parametrize(("value", "allowed"), [("0", True), ("1", False), ("", True)])
def test_nvidias_override_can_forbid_tf32_but_not_allow_it(value: str, allowed: bool) -> None:
    """As cuDNN takes it: 0 forbids, and nothing else says anything."""
    asked = "import torch, tconv.run; torch.backends.cudnn.allow_tf32 = {}; print({})"
    done = subprocess.run(
        [sys.executable, "-c", asked.format(allowed, "tconv.run.tf32_allowed()")],
        env={**os.environ, "NVIDIA_TF32_OVERRIDE": value},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{allowed and value != '0'}\n"


def test_known_calls_are_no_more_than_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_known", {})
    monkeypatch.setattr(calls, "_MOST_KNOWN", 3)
    weight, geometry = torch.zeros(4, 6, 3, 3), ((1, 1), (1, 1), (0, 0), (1, 1), 1)
    for batch in range(1, 9):
        call: Any = (torch.zeros(batch, 4, 5, 8), weight, None, geometry)
        assert run.known(*call) is None
        run.remember((run.signature(*call), None), *call)
        assert run.known(*call) is not None
        assert len(calls._known) <= 3


def test_strides_of_axes_of_size_1_may_be_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCONV_EMULATE", "1")
    x, w, y = torch.randn(1, 2, 3, 4), torch.randn(2, 3, 3, 3), torch.randn(1, 3, 5, 6)
    long_x, long_y = (t.as_strided(t.shape, (2**31, *t.stride()[1:])) for t in (x, y))
    geometry = ((1, 1), (0, 0), (0, 0), (1, 1), 1)
    for compute, given, long in (
        (run.forward, (x, w, None), (long_x, w, None)),
        (run.input_gradient, (y, w, (3, 4)), (long_y, w, (3, 4))),
        (run.weight_gradient, (x, y, (3, 3)), (long_x, long_y, (3, 3))),
    ):
        rest = (geometry, False) if compute is run.weight_gradient else (geometry,)
        torch.testing.assert_close(compute(*long, *rest), compute(*given, *rest))
