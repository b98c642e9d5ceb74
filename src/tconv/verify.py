"""Checks a layer's results against the numerics contract and PyTorch's own: `tconv verify`.

The output and every gradient are computed through the public function and autograd, and compared
with float64 by `tconv.reference`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from tconv import functional, settings
from tconv.choice import own_kernels
from tconv.errors import MissingDependencyError, NoKernelError
from tconv.jit.target import Target
from tconv.layers import DIRECTIONS, Layer
from tconv.messages import one_line
from tconv.plan import candidates, plan
from tconv.problem import DType, Layout
from tconv.reference import (
    MAPS,
    Expected,
    Operands,
    applied,
    expected,
    operands,
    poisoned_memory,
    with_height,
)

Device = Literal["cuda", "cpu", "emulator"]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

EMULATED_PRODUCTS = 2_000_000
"""Products of a map that the emulator computes in about a second."""


@dataclass(frozen=True)
class Row:
    """One result of one layer.

    Attributes:
        layer, dtype, layout: what was computed.
        name: one of `reference.MAPS`, or of the results of an exported model.
        kernel: the stem of our kernel that computed it; "" if PyTorch did, or if the choice depends
            on the strides.
        error: relative error of the norm, against float64.
        torch_error: PyTorch's own error, on the same device with the same flags; NaN if PyTorch
            has no result.
        worst, torch_worst: the largest error of an element.
        checked: relative error of the norm against float64, of operands rounded as the contract
            says. The rounding matters if TF32 is allowed.
        bound: the most that the contract allows for `checked`.
        wrong: one sentence if the contract is broken, else None.
    """

    layer: str
    dtype: str
    layout: str
    name: str
    kernel: str
    error: float
    torch_error: float
    worst: float
    torch_worst: float
    checked: float
    bound: float
    wrong: str | None

    def record(self) -> dict[str, Any]:
        """The row as JSON values, None for what is not known."""
        return {
            key: None if isinstance(value, float) and value != value else value
            for key, value in dataclasses.asdict(self).items()
        }


def check_layer(
    layer: Layer,
    *,
    device: Device,
    dtype: str = "float32",
    layout: str = "contiguous",
    tf32: bool = True,
    seed: int = 0,
    like: Layer | None = None,
) -> list[Row]:
    """Compute the output and every gradient of random operands, and compare them with float64.

    On "cuda" and "emulator" each result must be within the contract's bounds. On "cpu", where
    PyTorch's own operators run, it must be within them or equal PyTorch's to the bit.

    Args:
        layer: the layer to run.
        device: "emulator" runs our kernels on CPU tensors.
        dtype: one of `TORCH_DTYPES`.
        layout: one of `reference.LAYOUTS`.
        tf32: whether PyTorch's flags shall allow TF32.
        seed: seed of the operands.
        like: the layer that this one represents. The kernels that its plans choose are used if
            they can run this one, unless TCONV_KERNEL names another.

    Returns:
        A row for each result; a single one, named "call", if the call itself failed.

    Raises:
        MissingDependencyError: a compiler, a driver or a device is missing.
    """
    t = operands(layer, TORCH_DTYPES[dtype], layout, "cuda" if device == "cuda" else "cpu", seed)
    name = layer.name or str(layer)
    with tf32_flag(tf32):
        try:
            kernels = _kernels(layer, device, dtype, layout, tf32)
            with own_kernels(), _emulation(device == "emulator"), poisoned_memory():
                ours = _results(functional, layer, t)
                for direction, stem in _kernels_like(
                    layer, like, device, dtype, layout, tf32
                ).items():
                    with _environment("TCONV_KERNEL", stem):
                        again = _results(functional, layer, t)
                    ours[MAPS.index(direction)] = again[MAPS.index(direction)]
                    kernels[direction] = stem
        except MissingDependencyError:
            raise
        except Exception as error:
            return [_failed_call(name, dtype, layout, error)]
        try:
            theirs: list[Tensor | None] = [*_results(F, layer, t)]
        except RuntimeError:  # PyTorch has no such operator here, or no memory for it
            theirs = [None] * len(ours)
        try:
            wanted = expected(layer, t, tf32=tf32 and device != "cpu")
        except torch.OutOfMemoryError as error:  # neither right nor wrong
            return [_failed_call(name, dtype, layout, error)]
    return [
        _row(name, dtype, layout, kernels.get(want.name, ""), want, got, other, device == "cpu")
        for want, got, other in zip(wanted, ours, theirs, strict=True)
    ]


def shrunk(layer: Layer, most_products: int = EMULATED_PRODUCTS) -> Layer:
    """A layer small enough for the emulator: the same kernel, stride, padding and dilation.

    Batch and groups are cut to two. Pixels and channels are then halved until the products are few.
    16 channels of a group, from which on TF32 is used, are kept as long as possible.
    """
    groups = min(layer.groups, 2)
    # As many channels as any tile has in one step, and some that do not fill the next.
    channels = [min(count // layer.groups, 40) for count in (layer.in_channels, layer.out_channels)]
    size = [min(layer.height, 40), min(layer.width, 40)]

    def made() -> Layer:
        return dataclasses.replace(
            layer,
            batch=min(layer.batch, 2),
            groups=groups,
            in_channels=channels[0] * groups,
            out_channels=channels[1] * groups,
            height=size[0],
            width=size[1],
        )

    def halved(values: list[int], least: int) -> bool:
        """Halves the largest value that may be halved; False if none may."""
        position = values.index(max(values))
        if values[position] <= least:
            return False
        before = values[position]
        values[position] = max(least, -(-before // 2))
        try:
            made()
        except ValueError:  # no output is left
            values[position] = before
            return False
        return True

    while made().problem("forward").flops // 2 > most_products and (
        halved(size, 12) or halved(channels, 20) or halved(size, 3) or halved(channels, 3)
    ):
        pass
    return made()


@contextlib.contextmanager
def tf32_flag(allowed: bool) -> Iterator[None]:
    """Sets PyTorch's flag for TF32 in convolutions within a `with` block."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _emulation(on: bool) -> contextlib.AbstractContextManager[None]:
    """Sets TCONV_EMULATE within a `with` block."""
    return _environment("TCONV_EMULATE", "1" if on else "0")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within a `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _results(functions: Any, layer: Layer, t: Operands) -> list[Tensor]:
    """Output and gradients, in the order of `reference.MAPS`, by our functions or PyTorch's."""
    x, w = (tensor.detach().requires_grad_() for tensor in (t.x, t.w))
    bias = None if t.bias is None else t.bias.detach().requires_grad_()
    out = with_height(layer, applied(layer, functions, x, w, bias)())
    leaves = (x, w) if bias is None else (x, w, bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, t.grad_output)]


def _kernels(layer: Layer, device: Device, dtype: str, layout: str, tf32: bool) -> dict[str, str]:
    """The kernel of each map, if the operands are dense."""
    dense = ("contiguous",) if layer.dimensions == 1 else ("contiguous", "channels_last")
    if device == "cpu" or layout not in dense:
        return {}
    stems = {}
    for direction in DIRECTIONS:
        problem = layer.problem(direction, cast(DType, dtype), cast(Layout, layout), tf32)
        with contextlib.suppress(NoKernelError):
            stems[direction] = plan(problem, _target(device)).stem
    return {str(direction): stem for direction, stem in stems.items()}


def _kernels_like(
    layer: Layer, like: Layer | None, device: Device, dtype: str, layout: str, tf32: bool
) -> dict[str, str]:
    """The kernels of `like`'s plans that `layer`'s plans lack, if they can run `layer`."""
    if like is None or settings.kernel() is not None:
        return {}
    own = _kernels(layer, device, dtype, layout, tf32)
    found = {}
    for direction in DIRECTIONS:
        stem = _kernels(like, device, dtype, layout, tf32).get(direction)
        if stem is None or stem == own.get(direction):
            continue
        problem = layer.problem(direction, cast(DType, dtype), cast(Layout, layout), tf32)
        if any(c.stem == stem and c.refusal is None for c in candidates(problem, _target(device))):
            found[str(direction)] = stem
    return found


def _target(device: Device) -> Target:
    if device == "cuda":
        return Target.for_device(torch.cuda.current_device())
    return Target.named(settings.emulate_arch())


def _row(
    layer: str,
    dtype: str,
    layout: str,
    kernel: str,
    want: Expected,
    got: Tensor,
    other: Tensor | None,
    may_be_pytorchs: bool,
) -> Row:
    wrong = want.why_wrong(got)
    if wrong is not None and may_be_pytorchs and other is not None:
        # NOTE: torch.equal compares values, whatever their dtypes.
        same = got.dtype == other.dtype and torch.equal(got, other)
        wrong = None if same else wrong
    error, worst = _errors(got, want.exact)
    checked, _ = _errors(got, want.contract)
    torch_error, torch_worst = _errors(other, want.exact)
    return Row(
        layer=layer,
        dtype=dtype,
        layout=layout,
        name=want.name,
        kernel=kernel,
        error=error,
        torch_error=torch_error,
        worst=worst,
        torch_worst=torch_worst,
        checked=checked,
        bound=want.norm_bound,
        wrong=wrong,
    )


def _errors(got: Tensor | None, exact: Tensor) -> tuple[float, float]:
    """The relative error of the norm, and the largest of an element."""
    if got is None or got.shape != exact.shape:
        return float("nan"), float("nan")
    error = (got.double() - exact).abs()
    return float(error.norm() / exact.norm().clamp_min(1e-300)), float(error.max())


def _failed_call(layer: str, dtype: str, layout: str, error: Exception) -> Row:
    nan = float("nan")
    wrong = f"{type(error).__name__}: {one_line(error)}"
    return Row(layer, dtype, layout, "call", "", nan, nan, nan, nan, nan, nan, wrong)


FLOORS = {False: 1e-6, True: 1e-3}
"""A whole model's float32 error passes below this, without and with TF32, whatever PyTorch's is."""

TOLERANCE = 1e-4
"""KernelBench's atol and rtol."""


def check_exported(
    path: Path, problem: Path, *, seed: int = 0, tf32: bool = True, device: str = "cuda"
) -> list[Row]:
    """Compare an exported `ModelNew` with the `Model` that it was made from.

    Both have the same seed and weights, and the state_dict loads strictly. The output must be
    within KernelBench's tolerance of Model's. Errors are measured against Model in float64. Those
    of the output and of every gradient may be at most twice Model's own, or below `FLOORS`.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file lacks what it must have, or cannot be loaded.
    """
    given = _load(problem, "Model", "get_inputs", "get_init_inputs")
    made = _load(path, "ModelNew")
    with tf32_flag(tf32):
        torch.manual_seed(seed)
        arguments = given.get_init_inputs()
        inputs = [
            value.to(device) if isinstance(value, Tensor) else value for value in given.get_inputs()
        ]
        torch.manual_seed(seed)
        model = given.Model(*arguments).to(device)
        torch.manual_seed(seed)
        new = made.ModelNew(*arguments).to(device)
        label = path.name
        try:
            state, own = model.state_dict(), new.state_dict()
            drawn = list(state) == list(own) and all(torch.equal(own[k], state[k]) for k in state)
            new.load_state_dict(state, strict=True)
            exact = _model_results(copy.deepcopy(model).double(), inputs, seed, torch.float64)
            theirs = _model_results(model, inputs, seed)
            ours = _model_results(new, inputs, seed)
        except Exception as error:
            return [_failed_call(label, "float32", "contiguous", error)]
    rows = []
    if not drawn:
        different = "the same seed gives other weights than Model's"
        rows.append(dataclasses.replace(_failed_call(label, "", "", ValueError()), wrong=different))
    for name, want in exact.items():
        got, other = ours[name], theirs[name]
        apart, worst = _errors(got, want)
        torch_error, torch_worst = _errors(other, want)
        bound = max(2 * torch_error, FLOORS[tf32])
        wrong = None
        if got.shape != other.shape or got.dtype != other.dtype:
            wrong = f"must be {other.dtype} of {tuple(other.shape)}, got {got.dtype} of "
            wrong += f"{tuple(got.shape)}"
        elif not apart <= bound:
            wrong = f"relative error {apart:.2e}, the bound is {bound:.2e}"
        elif name == "output" and not torch.allclose(got, other, rtol=TOLERANCE, atol=TOLERANCE):
            most = float((got - other).abs().max())
            wrong = f"up to {most:.2e} from Model's output, beyond atol = rtol = {TOLERANCE:.0e}"
        dtype = str(other.dtype).removeprefix("torch.")
        rows.append(
            Row(
                layer=label,
                dtype=dtype,
                layout="",
                name=name,
                kernel="",
                error=apart,
                torch_error=torch_error,
                worst=worst,
                torch_worst=torch_worst,
                checked=apart,
                bound=bound,
                wrong=wrong,
            )
        )
    return rows


def _load(path: Path, *names: str) -> Any:
    """A Python file as a module. It must define these names."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file")
    name = f"tconv_verified_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    missing = [name for name in names if not hasattr(module, name)]
    if missing:
        raise ValueError(f"{path} must have {', '.join(names)}; it lacks {', '.join(missing)}")
    return module


def _model_results(
    model: torch.nn.Module, inputs: list[Any], seed: int, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Output, and the gradients of the inputs and parameters under a random cotangent."""
    leaves = []
    for value in inputs:
        if isinstance(value, Tensor) and value.is_floating_point():
            value = value.detach().to(dtype or value.dtype).requires_grad_()
        leaves.append(value)
    output = model(*leaves)
    generator = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(output.shape, generator=generator).to(output.device, output.dtype)
    named = {
        f"input{number}.grad": leaf
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.requires_grad
    }
    named |= {f"{name}.grad": value for name, value in model.named_parameters()}
    gradients = torch.autograd.grad(output, list(named.values()), cotangent)
    return {"output": output.detach(), **dict(zip(named, gradients, strict=True))}
