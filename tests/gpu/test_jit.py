"""Loading and launching on a real device."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from tconv.errors import LaunchError
from tconv.functional import conv_transpose2d
from tconv.jit import runtime, tensor_map
from tconv.jit.compile import compile_cuda
from tconv.jit.module import Kernel
from tconv.jit.series import GRAPH_AFTER, Series
from tconv.jit.target import Target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

THREADS = 128


@dataclass(frozen=True)
class Source:
    """output[i] = input[i] * scale + offset, through dynamic shared memory where there is any."""

    stem: str = "scale"
    threads: int = THREADS
    shared_bytes: int = 0
    spin: int = 0

    def text(self) -> str:
        return f"""
            struct Arguments {{
                const float* input; float* output; int count; float scale; double offset;
            }};
            extern "C" __global__ void __launch_bounds__({self.threads})
            {self.stem}(const __grid_constant__ Arguments arguments) {{
                extern __shared__ __align__(1024) unsigned char dynamic[];
                float* tile = reinterpret_cast<float*>(dynamic);
                int i = blockIdx.x * {self.threads} + threadIdx.x;
                for (long long start = clock64(); clock64() - start < {self.spin};) {{}}
                float value = i < arguments.count ? arguments.input[i] : 0.0f;
                if ({self.shared_bytes}) {{
                    int last = {self.shared_bytes // 4} - 1 - threadIdx.x;
                    tile[last] = value;
                    __syncthreads();
                    value = tile[last];
                }}
                if (i < arguments.count)
                    arguments.output[i] = value * arguments.scale + arguments.offset;
            }}"""


def pack(input: torch.Tensor, output: torch.Tensor, scale: float, offset: float) -> bytes:
    return struct.pack("QQifd", input.data_ptr(), output.data_ptr(), input.numel(), scale, offset)


def run(kernel: Kernel, input: torch.Tensor, scale: float, offset: float) -> torch.Tensor:
    output = torch.full_like(input, float("nan"))
    stream = torch.cuda.current_stream().cuda_stream
    grid = -(-input.numel() // THREADS)
    kernel.launch(grid, pack(input, output, scale, offset), stream)
    return output


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(10_001, device="cuda")


def test_target() -> None:
    target = Target.for_device(0)
    properties = torch.cuda.get_device_properties(0)
    assert target.capability == (properties.major, properties.minor)
    assert target.multiprocessors == properties.multi_processor_count
    assert target.shared_per_block == properties.shared_memory_per_block_optin
    assert target.l2_bytes == properties.L2_cache_size
    with pytest.raises(ValueError, match="device ordinal"):
        Target.for_device(torch.cuda.device_count())


def test_load_and_launch(values: torch.Tensor) -> None:
    kernel = runtime.load(Source(), 0)
    assert runtime.load(Source(), 0) is kernel
    assert kernel.argument_bytes in (32, None)
    assert kernel.resources.registers > 0
    assert kernel.blocks_per_multiprocessor() >= 8
    torch.testing.assert_close(run(kernel, values, 2.0, 0.5), values * 2 + 0.5)


def test_all_of_the_shared_memory(values: torch.Tensor) -> None:
    most = Target.for_device(0).shared_per_block
    kernel = runtime.load(Source(shared_bytes=most), 0)
    assert kernel.blocks_per_multiprocessor() == 1
    torch.testing.assert_close(run(kernel, values, 3.0, 0.0), values * 3)


def test_too_much_shared_memory() -> None:
    most = Target.for_device(0).shared_per_block
    with pytest.raises(LaunchError, match=f"0 static, {most + 16} dynamic.* has {most}"):
        runtime.load(Source(shared_bytes=most + 16), 0)


def test_refused_launches(values: torch.Tensor) -> None:
    kernel = runtime.load(Source(), 0)
    arguments = pack(values, values, 1.0, 0.0)
    for grid in (0, -1, 2**31):
        with pytest.raises(LaunchError, match=rf"failed to launch scale .* {grid=}, block=128"):
            kernel.launch(grid, arguments)
    if kernel.argument_bytes is not None:
        with pytest.raises(LaunchError, match="take 32 bytes, got 31"):
            kernel.launch(1, arguments[:-1])
    torch.testing.assert_close(run(kernel, values, 2.0, 0.5), values * 2 + 0.5)


def test_an_error_of_the_driver(values: torch.Tensor) -> None:
    kernel = runtime.load(Source(stem="too_wide"), 0)
    kernel.threads = 4096
    with pytest.raises(LaunchError, match=r"block=4096.*: CUDA_ERROR_INVALID_VALUE \(1\): "):
        kernel.launch(1, pack(values, values, 1.0, 0.0))
    torch.cuda.synchronize()


def test_a_cubin_for_another_architecture() -> None:
    other = "sm_80" if Target.for_device(0).major != 8 else "sm_90a"
    compiled = compile_cuda(Source(), other)
    with pytest.raises(LaunchError, match=rf"failed to load scale \({other}\) on device 0"):
        Kernel(compiled, threads=THREADS, shared_bytes=0, device=0)


def test_two_streams(values: torch.Tensor) -> None:
    slow = runtime.load(Source(stem="slow", spin=200_000_000), 0)  # about 0.1 s
    quick = runtime.load(Source(), 0)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        small = values[:THREADS].clone()
        waited = run(slow, small, 2.0, 0.0)
    with torch.cuda.stream(second):
        free = run(quick, values, 2.0, 0.5)
    second.synchronize()
    assert not first.query(), "the slow kernel has the first stream to itself"
    torch.testing.assert_close(free, values * 2 + 0.5)
    first.synchronize()
    torch.testing.assert_close(waited, small * 2)


def capture(work: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()
    return graph, output


@pytest.mark.parametrize("loaded", [True, False])
def test_graph_capture(values: torch.Tensor, loaded: bool) -> None:
    source = Source(stem=f"captured_{loaded}".lower())
    if loaded:
        runtime.keep(runtime.load(source, 0))

    def work() -> torch.Tensor:
        kernel = runtime.load(source, 0)
        runtime.keep(kernel)
        return run(kernel, values, 2.0, 0.5)

    graph, output = capture(work)
    for _ in range(2):
        values.normal_()
        graph.replay()
        torch.testing.assert_close(output, values * 2 + 0.5)


def test_a_kernel_that_goes_while_others_run_or_are_captured(values: torch.Tensor) -> None:
    small = values[:THREADS].clone()
    slow = runtime.load(Source(stem="slow", spin=200_000_000), 0)  # about 0.1 s
    output = run(slow, small, 2.0, 0.0)
    del slow
    torch.testing.assert_close(output, small * 2)

    gone = runtime.load(Source(stem="gone"), 0)
    run(gone, values, 2.0, 0.5)
    kept = runtime.load(Source(stem="kept"), 0)
    runtime.keep(kept)

    def work() -> torch.Tensor:
        nonlocal gone
        gone = None  # type: ignore[assignment]
        return run(kept, values, 2.0, 0.5)

    graph, output = capture(work)
    graph.replay()
    torch.testing.assert_close(output, values * 2 + 0.5)


def test_a_thread_that_has_no_context(values: torch.Tensor) -> None:
    kernel = runtime.load(Source(), 0)
    output = torch.empty_like(values)
    arguments = pack(values, output, 2.0, 0.5)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            kernel.launch(-(-values.numel() // THREADS), arguments, 0)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    torch.testing.assert_close(output, values * 2 + 0.5)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two devices"
)
def test_another_device_is_current(values: torch.Tensor) -> None:
    other = values.to("cuda:1")
    output = torch.empty_like(other)
    kernel = runtime.load(Source(), 1)
    stream = torch.cuda.current_stream(1).cuda_stream
    for device in (0, 1):
        output.fill_(float("nan"))
        torch.cuda.synchronize(1)
        with torch.cuda.device(device):
            kernel.launch(-(-other.numel() // THREADS), pack(other, output, 2.0, 0.5), stream)
        torch.cuda.synchronize(1)
        torch.testing.assert_close(output, other * 2 + 0.5)


@dataclass(frozen=True)
class TensorCopy:
    """One box of a 2-d tensor, by the bulk tensor copy engine, as it lies in shared memory."""

    rows: int
    columns: int
    stem: str = "tensor_copy"
    threads: int = 32
    shared_bytes: int = 0

    def text(self) -> str:
        count = self.rows * self.columns
        return f"""
            struct alignas(64) TensorMap {{ unsigned char bytes[128]; }};
            struct Arguments {{ float* output; TensorMap map; int x; int y; }};
            extern "C" __global__ void __launch_bounds__(32)
            tensor_copy(const __grid_constant__ Arguments arguments) {{
                __shared__ __align__(1024) float tile[{count}];
                __shared__ unsigned long long barrier;
                unsigned bar = __cvta_generic_to_shared(&barrier);
                if (threadIdx.x == 0) {{
                    asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(bar) : "memory");
                    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
                    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;"
                                 :: "r"(bar), "r"({count * 4}) : "memory");
                    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile"
                                 ".mbarrier::complete_tx::bytes [%0], [%1, {{%2, %3}}], [%4];"
                                 :: "r"((unsigned)__cvta_generic_to_shared(tile)),
                                    "l"(&arguments.map), "r"(arguments.x), "r"(arguments.y),
                                    "r"(bar) : "memory");
                }}
                __syncwarp();
                asm volatile("{{ .reg .pred done; again: "
                             "mbarrier.try_wait.parity.shared.b64 done, [%0], 0; "
                             "@!done bra again; }}" :: "r"(bar) : "memory");
                for (int i = threadIdx.x; i < {count}; i += 32) arguments.output[i] = tile[i];
            }}"""


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a device of capability 9.0 or newer",
)
@pytest.mark.parametrize("oob_fill", ["zeros", "nan"])
def test_tensor_map(oob_fill: str) -> None:
    tensor = torch.randn(20, 24, device="cuda")
    rows, columns, x, y = 6, 8, -4, 17
    output = torch.zeros(rows, columns, device="cuda")
    encoded = tensor_map.encode(
        tensor.data_ptr(), "float32", (24, 20), (96,), (columns, rows), oob_fill=oob_fill
    )
    kernel = runtime.load(TensorCopy(rows, columns), 0)
    arguments = struct.pack("Q56x128sii56x", output.data_ptr(), encoded, x, y)
    kernel.launch(1, arguments, torch.cuda.current_stream().cuda_stream)
    outside = float("nan") if oob_fill == "nan" else 0.0
    expected = torch.full_like(output, outside)
    expected[: 20 - y, 4:] = tensor[y:, :4]
    torch.testing.assert_close(output, expected, rtol=0, atol=0, equal_nan=True)


@dataclass(frozen=True)
class Stage:
    """A launch of two: the first scales the input, the second waits for it and adds an offset.

    The first is slow, and says at once that the second may start.
    """

    stem: str
    threads: int = THREADS
    shared_bytes: int = 0
    spin: int = 20_000

    def text(self) -> str:
        wait = "griddepcontrol.wait;"
        start = "griddepcontrol.launch_dependents;"
        first = self.stem == "first"
        return f"""
            struct Arguments {{
                const float* input; float* output; int count; float scale; double offset;
            }};
            extern "C" __global__ void __launch_bounds__({self.threads})
            {self.stem}(const __grid_constant__ Arguments arguments) {{
                asm volatile("{start if first else wait}" ::: "memory");
                if ({int(first)})
                    for (long long from = clock64(); clock64() - from < {self.spin};) {{}}
                int i = blockIdx.x * {self.threads} + threadIdx.x;
                if (i < arguments.count)
                    arguments.output[i] = arguments.input[i] * arguments.scale + arguments.offset;
            }}"""


needs_dependent_launches = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a device of capability 9.0 or newer",
)


def dependent_pairs(values: torch.Tensor, between: torch.Tensor, count: int) -> torch.Tensor:
    """values * (1 + pair) + pair for each pair; all of them through the same memory."""
    first, second = (runtime.load(Stage(stem), 0) for stem in ("first", "second"))
    for kernel in (first, second):
        runtime.keep(kernel)  # a graph may launch them
    outputs = values.new_full((count, *values.shape), float("nan"))
    stream = torch.cuda.current_stream().cuda_stream
    grid = -(-values.numel() // THREADS)
    for pair in range(count):
        first.launch(grid, pack(values, between, 1.0 + pair, 0.0), stream)
        second.launch(grid, pack(between, outputs[pair], 1.0, pair), stream, dependent=True)
    return outputs


@needs_dependent_launches
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("size", [100, 10_001, 1_000_003])
def test_dependent_launches(captured: bool, size: int) -> None:
    values = torch.randn(size, device="cuda")
    between = torch.empty_like(values)
    count = 20
    pair = torch.arange(count, device="cuda")[:, None]
    if not captured:
        outputs = dependent_pairs(values, between, count)
        torch.testing.assert_close(outputs, values * (1 + pair) + pair)
        return
    graph, outputs = capture(lambda: dependent_pairs(values, between, count))
    for _ in range(3):
        values.normal_()
        graph.replay()
        torch.testing.assert_close(outputs, values * (1 + pair) + pair)


@needs_dependent_launches
@pytest.mark.parametrize("size", [100, 1_000_003])
def test_a_series_that_is_started_often(size: int) -> None:
    """By single launches first, then as a graph, on more than one stream."""
    values = torch.randn(size, device="cuda")
    between, output = torch.empty_like(values), torch.empty_like(values)
    first, second = (runtime.load(Stage(stem), 0) for stem in ("first", "second"))
    grid = -(-size // THREADS)
    series = Series(
        (
            first.prepare(grid, pack(values, between, 2.0, 0.0)),
            second.prepare(grid, pack(between, output, 1.0, 0.5)),
        )
    )
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(2 * GRAPH_AFTER):
                values.normal_()
                output.fill_(float("nan"))
                series.start(stream.cuda_stream)
                torch.testing.assert_close(output, values * 2 + 0.5)
    assert series._graph is not None


@needs_dependent_launches
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    "stem", ["sm90_tf32_forward", "sm90_tf32_flat_forward", "sm90_tf32_wide_forward"]
)
def test_packed_weights_that_change(
    captured: bool, stem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls back to back, whose packed weights lie in the same memory."""
    monkeypatch.setenv("TCONV_KERNEL", stem)
    count = 50
    input = torch.randn(2, 64, 24, 24, device="cuda")
    kernel, padding = (2, 0) if stem == "sm90_tf32_wide_forward" else (4, 1)
    weights = torch.randn(count, 64, 64, kernel, kernel, device="cuda")

    def calls() -> torch.Tensor:
        made = [conv_transpose2d(input, weight, None, 2, padding) for weight in weights]
        return torch.stack(made)

    with torch.no_grad():
        outputs = calls()
        for turn in range(3):
            if captured and turn == 0:
                graph, outputs = capture(calls)
            input.normal_()
            weights.normal_()
            if captured:
                graph.replay()
            else:
                outputs = calls()
            # The same kernels, one call at a time.
            for weight, output in zip(weights, outputs, strict=True):
                torch.cuda.synchronize()
                alone = conv_transpose2d(input, weight, None, 2, padding)
                torch.testing.assert_close(output, alone, rtol=0, atol=0)
            want = torch.nn.functional.conv_transpose2d(
                input.double(), weights[-1].double(), None, 2, padding
            )
            error = (outputs[-1].double() - want).norm() / want.norm()
            assert error < 1e-3, "TF32 products"


@needs_dependent_launches
def test_a_dependent_launch_in_a_thread_that_has_no_context(values: torch.Tensor) -> None:
    first, second = (runtime.load(Stage(stem), 0) for stem in ("first", "second"))
    between, output = torch.empty_like(values), torch.empty_like(values)
    grid = -(-values.numel() // THREADS)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            first.launch(grid, pack(values, between, 3.0, 0.0), 0)
            second.launch(grid, pack(between, output, 1.0, 2.0), 0, dependent=True)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert failures == []
    torch.testing.assert_close(output, values * 3 + 2)
