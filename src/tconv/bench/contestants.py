"""The contestants of a benchmark: what is called, on which tensors, under which flags.

Each is a call without arguments. Its tensors are made beforehand, in the right memory format, so
that only the call itself is timed. All compute the same map of the same values at the same TF32
setting.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv import functional, ops
from tconv.errors import MissingDependencyError
from tconv.layers import Layer
from tconv.memory_format import is_channels_last, memory_format
from tconv.messages import one_line
from tconv.problem import Direction
from tconv.reference import applied, without_ties
from tconv.verify import tf32_flag


@dataclass(frozen=True)
class Tensors:
    """The operands of one direction of a layer, on one device.

    Attributes:
        x: [N, Cin, H, W].
        w: [Cin, Cout/groups, kH, kW].
        bias: [Cout] or None.
        y: the output's gradient [N, Cout, OH, OW]; None in forward, which computes it.
    """

    x: Tensor
    w: Tensor
    bias: Tensor | None
    y: Tensor | None

    def laid_out(self, channels_last: bool) -> Tensors:
        """The same values in a memory format; the same tensors if they already have it."""

        def to(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            return tensor.contiguous(memory_format=memory_format(channels_last))

        x, w = to(self.x), to(self.w)
        assert x is not None and w is not None
        return Tensors(x, w, self.bias, to(self.y))


@dataclass(frozen=True)
class Setting:
    """One way to have PyTorch compute a map.

    Attributes:
        name: "conv_transpose2d, contiguous, benchmark off".
        benchmark: value of `torch.backends.cudnn.benchmark`.
        call: computes the map.
    """

    name: str
    benchmark: bool
    call: Callable[[], Tensor]


def random_tensors(
    layer: Layer, direction: Direction, dtype: torch.dtype, layout: str, device: str, seed: int
) -> Tensors:
    """Random normal operands, generated on the device; the layer's bias where it has one.

    None lies in the middle between two values of TF32 (`reference.without_ties`).
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        return without_ties(values) if dtype is torch.float32 else values

    forward = direction == "forward"
    tensors = Tensors(
        x=normal(*layer.x_shape),
        w=normal(*layer.w_shape),
        bias=normal(layer.out_channels) if layer.bias and forward else None,
        y=None if forward else normal(*layer.y_shape),
    )
    return tensors.laid_out(layout == "channels_last")


@contextlib.contextmanager
def flags(*, benchmark: bool, tf32: bool) -> Iterator[None]:
    """PyTorch's flags for the time of the block; both are as before afterwards."""
    before = torch.backends.cudnn.benchmark
    with tf32_flag(tf32):
        torch.backends.cudnn.benchmark = benchmark
        try:
            yield
        finally:
            torch.backends.cudnn.benchmark = before


def ours(layer: Layer, direction: Direction, t: Tensors) -> Callable[[], Tensor]:
    """The call to tconv: the public function, or the operator of a gradient.

    Within `own_kernels` it runs our kernels.
    """
    if direction == "forward":
        return applied(layer, functional, t.x, t.w, t.bias)
    y = _gradient(t)
    if direction == "input_gradient":
        return lambda: ops.input_gradient(y, t.w, layer.size, layer.geometry)
    last = is_channels_last(t.w)
    return lambda: ops.weight_gradient(t.x, y, layer.kernel_size, layer.geometry, last)


def pytorch(layer: Layer, direction: Direction, t: Tensors) -> Callable[[], Tensor]:
    """PyTorch's own operator on the same tensors, as autograd calls it for the gradients."""
    if direction == "forward":
        return applied(layer, F, t.x, t.w, t.bias)
    x, w, y = t.x, t.w, _gradient(t)
    if layer.dimensions == 1:
        x, w, y = x.squeeze(2), w.squeeze(2), y.squeeze(2)
    *pairs, groups = layer.geometry
    stride, padding, output_padding, dilation = map(layer.sizes, pairs)
    which = 0 if direction == "input_gradient" else 1
    mask = [which == 0, which == 1, False]
    return lambda: torch.ops.aten.convolution_backward.default(
        y, x, w, None, stride, padding, dilation, True, output_padding, groups, mask
    )[which]


def flipped_convolution(layer: Layer, t: Tensors) -> Callable[[], Tensor] | None:
    """For stride 1, the forward map as an ordinary convolution; None if it is not one.

    The weights are flipped and transposed once, before timing, as in a model rewritten this way.
    """
    padding = tuple(
        dilation * (kernel - 1) - padding
        for kernel, padding, dilation in zip(
            layer.kernel_size, layer.padding, layer.dilation, strict=True
        )
    )
    if layer.stride != (1, 1) or layer.output_padding != (0, 0) or min(padding) < 0:
        return None
    groups = layer.groups
    w = t.w.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flip(2, 3)
    w = w.contiguous(memory_format=memory_format(is_channels_last(t.x)))
    dilation = layer.sizes(layer.dilation)
    if layer.dimensions == 1:
        x, w = t.x.squeeze(2), w.squeeze(2)
        return lambda: F.conv1d(x, w, t.bias, 1, layer.sizes(padding), dilation, groups)
    return lambda: F.conv2d(t.x, w, t.bias, 1, padding, dilation, groups)


def settings(layer: Layer, direction: Direction, t: Tensors, layout: str) -> Iterator[Setting]:
    """Every setting among which `best` is the fastest. The first is a user's default.

    They are yielded one by one, so that the tensors of one memory format can be freed before the
    next are made.

    NOTE: Settings with cudnn.benchmark on run in a separate thread. For each thread, PyTorch keeps
    the plan that it first found for a layer, and uses it whatever the flag says later.
    """
    searching = ThreadPoolExecutor(max_workers=1)
    others = [name for name in ("contiguous", "channels_last") if name != layout]
    if layer.dimensions == 1:
        others = []  # 3-d tensors have no memory format
    for name in (layout, *others):
        here = t.laid_out(name == "channels_last")
        calls = {f"conv_transpose{layer.dimensions}d": pytorch(layer, direction, here)}
        if direction == "forward":
            flipped = flipped_convolution(layer, here)
            if flipped is not None:
                calls[f"conv{layer.dimensions}d"] = flipped
        # cudnn.benchmark means nothing to a CPU.
        for benchmark in (False, True) if t.x.is_cuda else (False,):
            for operator, call in calls.items():
                what = operator if direction == "forward" else direction
                switch = f", benchmark {'on' if benchmark else 'off'}" if t.x.is_cuda else ""
                if benchmark:
                    call = functools.partial(_in_thread, searching, call)
                yield Setting(f"{what}, {name}{switch}", benchmark, call)


def _in_thread(pool: ThreadPoolExecutor, call: Callable[[], Tensor]) -> Tensor:
    """The call's result, launched by the pool's thread on the stream of this one."""
    stream = torch.cuda.current_stream()

    def launch() -> Tensor:
        with torch.cuda.stream(stream):
            return call()

    return pool.submit(launch).result()


def compiled(layer: Layer, direction: Direction, t: Tensors) -> Callable[[], Tensor]:
    """PyTorch's call under torch.compile, in its default mode."""
    torch.compiler.reset()
    return torch.compile(pytorch(layer, direction, t), dynamic=False)


def flag_gems() -> Any:
    """The package FlagGems, for its functions alone.

    NOTE: Never call its `enable` or `use_gems` here: they put its kernels in the place of PyTorch's
    operators, which are contestants too. Its import alone replaces none.

    Raises:
        MissingDependencyError: it cannot be imported here, or is too old.
    """
    try:
        package = importlib.import_module("flag_gems")
    except ModuleNotFoundError as error:
        found = f"there is no module {error.name}"
    except Exception as error:  # it looks for its GPU, and for Triton's driver, when imported
        found = f"its import fails with {type(error).__name__}: {one_line(error)}"
    else:
        if hasattr(package, "conv_transpose2d"):
            return package
        version = getattr(package, "__version__", "of an unknown version")
        found = f"FlagGems {version} has no conv_transpose2d"
    raise MissingDependencyError(
        "--against flaggems needs a GPU and FlagGems 5.3.0 or newer, the first with a "
        f"conv_transpose2d, but {found}; `pip install git+https://github.com/flagos-ai/FlagGems` "
        "installs it, and --against eager,best,compile does without"
    )


def flaggems(layer: Layer, direction: Direction, t: Tensors) -> Callable[[], Tensor]:
    """FlagGems' own function, which runs its Triton kernels on contiguous tensors.

    It copies others, within the call.

    Raises:
        NotImplementedError: of a gradient: it has no kernel for one.
        MissingDependencyError: see `flag_gems`.
    """
    if direction != "forward":
        raise NotImplementedError("FlagGems has no gradients of a transposed convolution")
    return applied(layer, flag_gems(), t.x, t.w, t.bias)


def _gradient(t: Tensors) -> Tensor:
    if t.y is None:
        raise ValueError("a gradient needs the output's gradient, got y=None")
    return t.y
