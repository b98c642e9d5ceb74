"""Runs in its own process, with the fake libcuda in front: loading, launching, tensor maps."""

import contextlib
import ctypes
import struct
import sys
import threading
import timeit
from dataclasses import dataclass

from tconv.errors import CompileError, LaunchError
from tconv.jit import module, runtime, series, target, tensor_map
from tconv.jit.compile import compile_cuda
from tconv.jit.module import MAX_GRID, Kernel
from tconv.jit.series import GRAPH_AFTER, Series
from tconv.jit.target import Target

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_last_launch.restype = ctypes.c_void_p
fake.fake_last_attributes.restype = ctypes.c_void_p
fake.fake_set_context.restype = ctypes.c_void_p
fake.fake_graph_stream.restype = ctypes.c_void_p

DEPENDENT = (1, 6, 1)
"""One attribute, programmatic stream serialization, allowed."""
PLAIN = (0, 0, 0)


@dataclass(frozen=True)
class Source:
    stem: str = "tiny"
    threads: int = 128
    shared_bytes: int = 1024
    static_bytes: int = 256

    def text(self) -> str:
        return f"""
            struct Arguments {{ const float* input; float* output; long long count; }};
            extern "C" __global__ void __launch_bounds__({self.threads})
            tiny(const __grid_constant__ Arguments arguments) {{
                __shared__ float tile[{self.static_bytes // 4}];
                tile[threadIdx.x % {self.static_bytes // 4}] = arguments.input[threadIdx.x];
                __syncthreads();
                arguments.output[threadIdx.x] = tile[0];
            }}"""


def last_launch():
    """grid, block, shared, function, stream, context depth, arguments"""
    return struct.unpack("=3I4xQQi24s4x", ctypes.string_at(fake.fake_last_launch(), 64))


def attributes():
    """count, number and value of the last launch's attributes, once"""
    found = struct.unpack("3i", ctypes.string_at(fake.fake_last_attributes(), 12))
    fake.fake_forget_attributes()
    return found


def refusal(error, function, *arguments, **keywords):
    try:
        function(*arguments, **keywords)
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}")


def test_target():
    expected = Target("sm_90a", 132, 232448, 62914560)
    assert Target.for_device(0) == expected == Target.named("sm_90a")
    assert Target.for_device(1) is Target.for_device(1)
    assert "0 to 1" in refusal(ValueError, Target.for_device, 2)


def test_load_and_launch():
    kernel = runtime.load(Source(), 0)
    assert runtime.load(Source(), 0) is kernel
    assert runtime.load(Source(), 1) is not kernel
    assert fake.fake_dynamic_shared() == 1024
    assert fake.fake_load_capture_mode() == 2, "loaded with relaxed capture"
    assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0), "both put back"
    assert kernel.argument_bytes == 24
    assert kernel.resources.static_shared == 256
    assert kernel.blocks_per_multiprocessor() == 3
    assert "tiny for sm_90a on device 0: 128 threads" in repr(kernel)

    arguments = struct.pack("QQq", 2**63 + 1, 0, -5)  # with zero bytes inside
    kernel.launch(MAX_GRID, arguments, 2**47 + 8)
    assert last_launch() == (MAX_GRID, 128, 1024, 0xF0, 2**47 + 8, 0, arguments)
    kernel.launch(1, arguments)
    assert last_launch()[4] == 0


def test_unloading():
    def load(number):
        return runtime.load(Source(static_bytes=4 * number), 0)

    before = fake.fake_unloads()
    kernel = load(100)
    launch = kernel.prepare(1, bytes(24))
    del kernel
    launch.start()
    assert fake.fake_unloads() == before, "the launch refers to it"
    del launch
    assert fake.fake_unloads() == before + 1
    assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0), "both put back"
    load(100)
    assert fake.fake_unloads() == before + 2, "it was loaded again"
    runtime.keep(load(101))
    assert fake.fake_unloads() == before + 2


class Holder:
    """As a call: it loads its kernels where it runs and they are not loaded."""

    def __init__(self, *numbers):
        self.numbers, self.launches, self.count = numbers, [], 0

    def run(self):
        if not self.launches:
            kernels = [runtime.load(Source(static_bytes=4 * n), 0) for n in self.numbers]
            self.launches, self.count = [kernel.prepare(1, bytes(24)) for kernel in kernels], 0
            del kernels
            runtime.hold(self)
        self.count += 1
        for launch in self.launches:
            launch.start()

    def uses(self):
        return self.count

    def release(self):
        self.launches = []


def test_few_kernels_stay_loaded():
    most, runtime.MOST_LOADED = runtime.MOST_LOADED, runtime.loaded() + 3
    try:
        holders = [Holder(n) for n in range(1, 9)]
        often, before = holders[0], fake.fake_unloads()
        for count, holder in enumerate(holders, 1):
            holder.run()
            often.run()
            assert runtime.loaded() <= runtime.MOST_LOADED
            assert fake.fake_unloads() - before == max(0, count - 3)
        assert often.launches, "it has been used since, so others let go"
        assert [holder.numbers[0] for holder in holders if holder.launches] == [1, 7, 8]
        holders[3].run()  # loaded again
        assert runtime.loaded() <= runtime.MOST_LOADED
        before, left = fake.fake_unloads(), sum(bool(holder.launches) for holder in holders)
        holder = often = None
        holders.clear()  # whoever has gone lets go
        assert fake.fake_unloads() == before + left
        assert not runtime._holders
        # What a CUDA graph launches stays, and is not counted.
        captured = Holder(*range(11, 17))
        captured.run()
        loaded = runtime.loaded()
        for launch in captured.launches:
            runtime.keep(launch.kernel)
        assert runtime.loaded() == loaded - 6
        # Kernels that two hold stay as long as the one that is used.
        shared, other = Holder(21, 22), Holder(21)
        for holder in (shared, other):
            holder.run()
        for n in range(31, 35):
            other.run()
            Holder(n).run()
        assert other.launches and runtime.loaded() <= runtime.MOST_LOADED
    finally:
        runtime.MOST_LOADED = most


def test_dependent_launches():
    kernel = runtime.load(Source(), 0)
    for turn in range(2):  # the second by what the first has kept
        for grid, stream in ((7, 0x1000), (7, 2**47 + 8), (8, 0x1000), (MAX_GRID, 0)):
            arguments = struct.pack("QQq", turn, stream, grid)
            kernel.launch(grid, arguments, stream, True)
            assert last_launch() == (grid, 128, 1024, 0xF0, stream, 0, arguments)
            assert attributes() == DEPENDENT
            kernel.launch(grid, arguments, stream)
            assert last_launch() == (grid, 128, 1024, 0xF0, stream, 0, arguments)
            assert attributes() == PLAIN
    for stream in range(0x1000, 0x1000 + 8 * 1000, 8):
        kernel.launch(1, arguments, stream, dependent=True)
        assert (last_launch()[4], attributes()) == (stream, DEPENDENT)
    assert len(kernel._configurations) <= 64
    before = fake.fake_launches()
    assert "the grid must have" in refusal(LaunchError, kernel.launch, 0, bytes(24), 0, True)
    assert "take 24 bytes" in refusal(LaunchError, kernel.launch, 1, bytes(23), 0, True)
    assert fake.fake_launches() == before


def test_dependent_launches_that_fail():
    kernel = runtime.load(Source(), 0)
    arguments = bytes(range(24))
    fake.fake_thread_context(ctypes.c_void_p(0xC1))
    for error in (201, 400, 801):
        fake.fake_next_result(error)
        kernel.launch(3, arguments, 0x1000, dependent=True)
        assert last_launch() == (3, 128, 1024, 0xF0, 0x1000, 1, arguments), error
        attributes()
    fake.fake_next_result(801)
    assert "CUDA_ERROR_FAKE (801)" in refusal(LaunchError, kernel.launch, 3, arguments, 0x1000)
    fake.fake_next_result(1)
    message = refusal(LaunchError, kernel.launch, 3, arguments, 0x1000, True)
    assert "grid=3" in message and "CUDA_ERROR_FAKE (1)" in message, message
    fake.fake_next_result(201)
    fake.fake_next_result(1)
    message = refusal(LaunchError, kernel.launch, 3, arguments, 0x1000, True)
    assert "CUDA_ERROR_FAKE (1)" in message, message
    assert fake.fake_context_depth() == 0


def test_dependent_launches_are_plain_where_they_are_not_known():
    arguments = bytes(24)
    module._knows_dependent_launches.cache_clear()
    fake.fake_driver_version(12020)
    old_driver = runtime.load(Source(threads=64), 0)
    module._knows_dependent_launches.cache_clear()
    fake.fake_driver_version(13000)
    fake.fake_capability(8)
    target._for_device.cache_clear()
    older_device = runtime.load(Source(threads=160), 0)
    assert older_device.target.arch == "sm_80"
    target._for_device.cache_clear()
    fake.fake_capability(9)
    for kernel in (old_driver, older_device):
        attributes()
        kernel.launch(3, arguments, 0x1000, dependent=True)
        assert (last_launch()[0], attributes()) == (3, PLAIN)
    assert runtime.load(Source(threads=32), 0)._launch_dependent is not None


def test_refusals():
    kernel = runtime.load(Source(), 0)
    before = fake.fake_launches()
    for grid in (0, -1, MAX_GRID + 1):
        message = refusal(LaunchError, kernel.launch, grid, bytes(24))
        assert f"{grid=}, block=128, dynamic shared memory=1024 bytes" in message, message
    assert "take 24 bytes, got 23" in refusal(LaunchError, kernel.launch, 1, bytes(23))
    refusal((TypeError, ctypes.ArgumentError), kernel.launch, 1, bytearray(24))
    assert fake.fake_launches() == before


def test_driver_errors():
    kernel = runtime.load(Source(), 0)
    fake.fake_next_result(1)
    message = refusal(LaunchError, kernel.launch, 7, bytes(24))
    for part in ("tiny (sm_90a) on device 0", "grid=7", "CUDA_ERROR_FAKE (1): words of the driver"):
        assert part in message, message
    fake.fake_next_result(700)
    assert "CUDA_LAUNCH_BLOCKING=1" in refusal(LaunchError, kernel.launch, 7, bytes(24))


def test_a_thread_without_context():
    kernel = runtime.load(Source(), 0)
    for error in (201, 400):
        fake.fake_thread_context(ctypes.c_void_p(None))
        fake.fake_next_result(error)
        kernel.launch(3, bytes(range(24)))
        assert last_launch()[5:] == (0, bytes(range(24)))
        assert fake.fake_set_context() == 0xC0, "the primary context is the thread's from now on"


def test_a_thread_that_works_on_another_device():
    kernel = runtime.load(Source(), 0)
    fake.fake_thread_context(ctypes.c_void_p(0xC1))
    for error in (201, 400):
        fake.fake_next_result(error)
        kernel.launch(3, bytes(range(24)))
        assert last_launch()[5:] == (1, bytes(range(24))), "launched inside the primary context"
        assert fake.fake_set_context() == 0xC1, "the thread keeps its own"
    fake.fake_next_result(201)
    fake.fake_next_result(201)
    message = refusal(LaunchError, kernel.launch, 3, bytes(24))
    assert "CUDA_ERROR_INVALID_CONTEXT" in message
    assert fake.fake_context_depth() == 0


def test_what_a_device_cannot_run():
    message = refusal(LaunchError, runtime.load, Source(shared_bytes=232448), 0)
    assert "needs 232704 bytes" in message and "has 232448" in message, message
    message = refusal(LaunchError, runtime.load, Source(threads=1024), 0)
    assert "1024 threads" in message and "at most 512" in message, message
    compiled = compile_cuda(Source(), "sm_80")
    options = {"threads": 128, "shared_bytes": 0, "device": 0}
    for changed, part in (
        ({"cubin": b"no cubin"}, "failed to load tiny (sm_80) on device 0 (sm_90a)"),
        ({"stem": "absent"}, "find the entry point"),
    ):
        broken = type(compiled)(**{**compiled.__dict__, **changed})
        message = refusal(LaunchError, Kernel, broken, **options)
        assert part in message, message
    for count in (0, 2):
        fake.fake_parameters(count)
        assert "one parameter" in refusal(LaunchError, Kernel, compiled, **options)
    fake.fake_parameters(1)
    assert "sm_20" in refusal(CompileError, runtime.load, Source(), 0, arch="sm_20")
    assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0)


def test_threads_load_once_and_launch_together():
    source = Source(threads=96)
    kernels, count = set(), 200

    def work():
        kernel = runtime.load(source, 0)
        kernels.add(kernel)
        for _ in range(count):
            kernel.launch(1, bytes(24), 5)

    before = fake.fake_launches()
    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(kernels) == 1
    # The fake's counter is not atomic, and launches do run side by side.
    assert 0 < fake.fake_launches() - before <= 4 * count


def test_tensor_map():
    encoded = tensor_map.encode(
        0x7000, "tfloat32", (40, 30, 20), (160, 4800), (8, 4, 2), (1, 1, 2), 32, "nan", 256
    )
    assert len(encoded) == 128
    assert tuple(encoded[:6]) == (11, 3, 1, 3, 1, 0)
    assert struct.unpack_from("Q", encoded, 8) == (0x7000,)
    assert tuple(encoded[16:19]) == (40, 30, 20)
    assert tuple(encoded[32:35]) == (8, 4, 2)
    assert tuple(encoded[48:51]) == (1, 1, 2)
    assert struct.unpack_from("QQ", encoded, 64) == (160, 4800)
    message = refusal(LaunchError, tensor_map.encode, 0xBAD0, "float32", (8,), (), (8,))
    assert "dims=(8,)" in message and "CUDA_ERROR_FAKE" in message, message


def a_series(launches=3, device=0):
    kernel = runtime.load(Source(), device)
    return Series([kernel.prepare(grid, bytes(24)) for grid in range(1, launches + 1)])


def test_a_series_becomes_a_graph():
    made = a_series()
    for turn in range(GRAPH_AFTER):
        before = fake.fake_launches()
        attributes()
        made.start(0x1000)
        assert fake.fake_launches() == before + 3, turn
        assert attributes() == DEPENDENT and last_launch()[4] == 0x1000
    assert fake.fake_captured() == 3, "captured once, and dependent as they were"
    assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0), "both put back"
    before = fake.fake_launches(), fake.fake_graph_launches()
    for stream in (0x1000, 0, 2**47 + 8, *range(0x2000, 0x2000 + 8 * 100, 8), 0x1000):
        made.start(stream)
        assert (fake.fake_graph_stream() or 0) == stream
    assert fake.fake_launches() == before[0]
    assert fake.fake_graph_launches() == before[1] + 104
    assert len(series._handles) <= 64
    made.start_each(0x1000)
    assert fake.fake_launches() == before[0] + 3, "as where the stream captures"
    destroyed = fake.fake_executables_destroyed()
    del made
    assert fake.fake_executables_destroyed() == destroyed + 1
    assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0), "both put back"


def test_the_first_of_each_group_waits_for_all_before_it():
    kernel = runtime.load(Source(), 0)
    alone = [[kernel.prepare(grid, bytes(24))] for grid in (1, 2)]
    for made, dependent in ((Series(*alone), PLAIN), (Series(alone[0] + alone[1]), DEPENDENT)):
        attributes()
        made.start(0x1000)
        assert attributes() == dependent
        assert last_launch()[0] == 2 and len(made.launches) == 2


def test_one_launch_is_no_graph():
    made, before = a_series(1), fake.fake_launches()
    for _ in range(3 * GRAPH_AFTER):
        made.start()
    assert fake.fake_launches() == before + 3 * GRAPH_AFTER
    assert made._graph is None


def test_a_graph_that_fails():
    made = a_series(2)
    for _ in range(GRAPH_AFTER):
        made.start(0x1000)
    before = fake.fake_launches()
    fake.fake_next_result(201)  # this thread has no context
    made.start(0x1000)
    assert fake.fake_launches() == before + 2, "each launch by itself"
    for _ in range(2):
        fake.fake_next_result(700)
    assert "CUDA_LAUNCH_BLOCKING=1" in refusal(LaunchError, made.start, 0x1000)
    made.start(0x1000)
    assert fake.fake_launches() == before + 2
    with made._graph._lock:  # another thread launches it
        made.start(0x1000)
    assert fake.fake_launches() == before + 4


def test_a_series_that_makes_no_graph():
    for name, results in (
        ("the capture is refused", (801,)),
        ("a captured launch fails", (0, 0, 1)),
        ("no graph is made", (0, 0, 0, 2)),
    ):
        made, destroyed = a_series(2), fake.fake_graphs_destroyed()
        for _ in range(GRAPH_AFTER - 1):
            made.start(0x1000)
        for result in (0, 0, *results):  # behind the two launches of this start
            fake.fake_next_result(result)
        made.start(0x1000)
        assert made._graph is None and not fake.fake_is_capturing(), name
        assert fake.fake_graphs_destroyed() - destroyed == (len(results) > 1), name
        before = fake.fake_launches()
        for _ in range(2 * GRAPH_AFTER):
            made.start(0x1000)
        assert fake.fake_launches() == before + 4 * GRAPH_AFTER, name
        assert (fake.fake_capture_mode(), fake.fake_context_depth()) == (0, 0), name


def test_threads_start_a_series_together():
    made, count = a_series(), 200
    threads = [
        threading.Thread(target=lambda: [made.start(0x1000) for _ in range(count)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made._graph is not None and not fake.fake_is_capturing()


def test_overhead():
    """Not a measurement of record: catches a launch path that has become slow by a lot."""
    kernel = runtime.load(Source(), 0)
    arguments = bytes(24)
    launch = kernel.launch
    seconds = min(timeit.repeat(lambda: launch(5, arguments, 0x1000), number=2000, repeat=5))
    print(f"launch: {seconds / 2000 * 1e6:.2f} us")
    assert seconds / 2000 < 20e-6
    dependent = timeit.repeat(lambda: launch(5, arguments, 0x1000, True), number=2000, repeat=5)
    print(f"dependent launch: {min(dependent) / 2000 * 1e6:.2f} us")
    assert min(dependent) / 2000 < 20e-6


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and (len(sys.argv) == 1 or name in sys.argv):
            with contextlib.redirect_stderr(sys.stdout):
                test()
            print("passed", name)
