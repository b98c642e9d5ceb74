"""The Python half of an exported file: what follows the line of dashes is copied into it.

It runs at the user's end, from Python 3.7 and PyTorch 1.13 on, with nothing of tconv around it.
Nothing here imports it but the tests and the type checker. KernelBench's static checks read the
text and its docstrings, so some words of Python must not stand in either: see `static_checks`.
It is longer than other modules because an exported file is one file, and this is its Python.
"""

# For Python 3.7: no functools.cache, no zip(strict=); and torch documents autograd's methods.
# ruff: noqa: B905, D102, UP033

import collections
import ctypes
import functools
import hashlib
import inspect
import math
import os
import re
import struct

import torch
from torch.utils.cpp_extension import load_inline

CPP_SOURCE = ""
CUDA_SOURCE = ""
GENERAL_CU = ""
PLANNED_CALLS: "list" = []  # of PlannedCall

# ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def load_kernels():  # type: ignore[no-untyped-def]
    """Compiles the CUDA source, or finds it compiled: a module with the function `launch`."""
    options: dict = {}
    if "no_implicit_headers" in inspect.signature(load_inline).parameters:
        options["no_implicit_headers"] = True  # neither source needs PyTorch's long headers
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    standard = ["-std=c++17"] if version < (2, 1) else []  # later versions name their own
    digest = hashlib.sha256((CPP_SOURCE + CUDA_SOURCE).encode()).hexdigest()
    return load_inline(
        name="transposed_convolution_" + digest[:12],
        cpp_sources=CPP_SOURCE,
        cuda_sources=CUDA_SOURCE,
        functions=["launch"],
        extra_cflags=["-O2", *standard],
        extra_cuda_cflags=["-O3", *standard, *architecture_flags()],
        with_pytorch_error_handling=False,
        **options,
    )


def architecture_flags() -> "list":
    """nvcc's flags where a planned kernel wants instructions of one architecture alone."""
    wanted = {one for call in PLANNED_CALLS if call.specific for one in call.capabilities}
    if not wanted or not has_specific_instructions():
        return []
    flags = []
    for device in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(device)
        name = str(major) + str(minor) + ("a" if (major, minor) in wanted else "")
        flags.append("-gencode=arch=compute_" + name + ",code=sm_" + name)
    return sorted(set(flags))


def has_specific_instructions() -> bool:
    """Whether nvcc knows architectures such as sm_90a; before CUDA 12 the general kernel serves."""
    return int(str(torch.version.cuda).split(".")[0]) >= 12


@functools.lru_cache(maxsize=None)
def device_properties(index: int) -> "tuple":
    """Number of multiprocessors and compute capability (major, minor) of a device."""
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, (properties.major, properties.minor)


def launch_kernel(
    name: str, device: torch.device, blocks: int, structure: "ArgumentStructure", values: "dict"
) -> None:
    """Runs a kernel on the device's current stream; `values` are its arguments by name."""
    load_kernels().launch(name, device.index, blocks, structure.pack(values))


class ArgumentStructure:
    """The first `struct Arguments` in a CUDA source, laid out in memory as a C++ compiler does."""

    def __init__(self, source: str) -> None:
        # The struct module's code, the size and the alignment of each C type.
        codes = {"int": ("i", 4, 4), "long long": ("q", 8, 8), "ptx::TensorMap": ("128s", 128, 64)}
        body = source.split("struct Arguments {", 1)[1].split("};", 1)[0]
        self.names: list = []
        format, offset, widest = "=", 0, 1
        for kind, names in re.findall(r"^ +([\w: ]+?\*?) (\w+(?:,\s+\w+)*);", body, re.MULTILINE):
            code, size, alignment = ("Q", 8, 8) if "*" in kind else codes[kind]
            for name in re.findall(r"\w+", names):
                padding = -offset % alignment
                format += str(padding) + "x" + code
                offset += padding + size
                widest = max(widest, alignment)
                self.names.append(name)
        self.layout = struct.Struct(format + str(-offset % widest) + "x")

    def pack(self, values: "dict") -> bytes:
        """The bytes of the arguments, given by name."""
        return self.layout.pack(*[values[name] for name in self.names])


@functools.lru_cache(maxsize=None)
def general_structure(namespace: str) -> ArgumentStructure:
    """The arguments of the general kernels of a namespace."""
    return ArgumentStructure(GENERAL_CU.split("namespace " + namespace + " {", 1)[1])


def stride_arguments(prefix: str, axes: "str | list", tensor: torch.Tensor) -> "dict":
    """The tensor's strides as kernel arguments: prefix_stride_n, ..."""
    return {prefix + "_stride_" + axis: step for axis, step in zip(axes, tensor.stride())}


def ceiling_divide(count: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-count // divisor)


class Parameters:
    """What does not change from call to call; each of the first four is (height, width).

    One dimension is two with a height of 1; `dimensions` is how many the caller has.
    """

    def __init__(
        self,
        stride: "tuple",
        padding: "tuple",
        output_padding: "tuple",
        dilation: "tuple",
        groups: int,
        dimensions: int = 2,
    ) -> None:
        self.stride = stride
        self.padding = padding
        self.output_padding = output_padding
        self.dilation = dilation
        self.groups = groups
        self.dimensions = dimensions

    def memory_format(self, *tensors: torch.Tensor) -> torch.memory_format:
        """channels_last if one of the tensors is, in two dimensions; one has no such format."""
        for tensor in tensors if self.dimensions == 2 else ():
            last = tensor.is_contiguous(memory_format=torch.channels_last)
            if last and not tensor.is_contiguous():
                return torch.channels_last
        return torch.contiguous_format

    def phase_taps(self, kernel: "tuple") -> int:
        """The most taps of an output."""
        steps = (s // math.gcd(s, d) for s, d in zip(self.stride, self.dilation))
        return math.prod(-(-k // step) for k, step in zip(kernel, steps))

    def output_size(self, size: "tuple", kernel: "tuple") -> "tuple":
        """(height, width) of the output for an input and a kernel of these sizes."""
        return tuple(
            (size[i] - 1) * self.stride[i]
            - 2 * self.padding[i]
            + self.dilation[i] * (kernel[i] - 1)
            + self.output_padding[i]
            + 1
            for i in (0, 1)
        )

    def layer(self) -> "tuple":
        """What planned calls know a layer by, beside its sizes."""
        return self.stride, self.padding, self.dilation, self.groups

    def arguments(self) -> "dict":
        """As arguments of the general kernels."""
        pairs = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return {
            name + suffix: pair[i]
            for name, pair in pairs.items()
            for i, suffix in ((0, "_y"), (1, "_x"))
        }


# What an argument of a planned launch stands for: the address of an operand's first element and so
# many bytes more; a stride, in elements, or a multiple of it; a tensor map, its innermost dimension
# first. Its strides are those of all other dimensions, each a `Stride` or a number of bytes; those
# of `first` lead to its first element.
Address = collections.namedtuple("Address", "operand offset")
Stride = collections.namedtuple("Stride", "operand axis times", defaults=(1,))
TensorMap = collections.namedtuple(
    "TensorMap", "address dims strides box swizzle dtype first", defaults=("float32", ())
)


def argument_value(argument, operands: "dict"):  # type: ignore[no-untyped-def]
    """What an argument of a planned launch is for these tensors; None stands for no tensor."""
    if isinstance(argument, Address):
        tensor = operands[argument.operand]
        return 0 if tensor is None else tensor.data_ptr() + argument.offset
    if isinstance(argument, Stride):
        return operands[argument.operand].stride(argument.axis) * argument.times
    if isinstance(argument, TensorMap):
        item = 4 if argument.dtype in ("float32", "tfloat32") else 2
        strides = tuple(
            step if isinstance(step, int) else item * argument_value(step, operands)
            for step in argument.strides
        )
        address = argument_value(argument.address, operands)
        address += item * sum(argument_value(step, operands) for step in argument.first)
        dtype = argument.dtype
        return tensor_map(address, argument.dims, strides, argument.box, argument.swizzle, dtype)
    return argument


MAP_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9, "tfloat32": 11}  # the driver's numbers


@functools.lru_cache(maxsize=1024)
def tensor_map(
    address: int, dims: "tuple", strides: "tuple", box: "tuple", swizzle: int, dtype: str
) -> bytes:
    """The driver's description of a tensor, for the copy engine.

    Sizes, strides in bytes (of all but the first) and the box that one instruction copies are
    given with the innermost dimension first; the swizzle is 0, 32, 64 or 128 bytes.
    """
    rank = len(dims)
    result = ctypes.create_string_buffer(128 + 64)
    aligned = -(-ctypes.addressof(result) // 64) * 64
    error = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        MAP_TYPES[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*dims),
        (ctypes.c_uint64 * rank)(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),  # every element
        0,  # not interleaved
        (swizzle // 32).bit_length(),  # the driver numbers them
        2,  # 128 bytes at a time into L2
        0,  # zero outside
    )
    if error != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with CUDA error {error}")
    return ctypes.string_at(aligned, 128)


class PlannedLaunch:
    """One launch of a planned call: the kernel, its blocks, and each of its arguments."""

    def __init__(self, name: str, structure: str, blocks: int, arguments: "dict") -> None:
        self.name = name
        self.structure = ArgumentStructure(structure)
        self.blocks = blocks
        self.arguments = arguments

    def run(self, operands: "dict") -> None:
        """Launches it on these tensors."""
        values = {name: argument_value(a, operands) for name, a in self.arguments.items()}
        launch_kernel(self.name, operands["x"].device, self.blocks, self.structure, values)


class PlannedCall:
    """A call that kernels were planned for, and their launches in order.

    Direction, sizes and layer say which call it is. The kernels are for x and y that are not
    channels_last. The other conditions are what the kernels count on.
    """

    def __init__(  # type: ignore[no-untyped-def]
        self, direction, dtype, shapes, layer, has_bias, tf32, wide_offsets, dense, x_aligned,
        y_aligned, whole_rows, capabilities, specific, packed, splits, partial_strides, launches,
    ) -> None:  # fmt: skip
        self.direction = direction
        self.dtype = dtype
        self.shapes = shapes  # of x, the weight and y
        self.layer = layer  # stride, padding, dilation, groups
        self.has_bias = has_bias
        self.tf32 = tf32
        self.wide_offsets = wide_offsets  # whether elements may lie 2**31 from the first one
        self.dense = dense  # whether tensors are contiguous and on 16 bytes
        self.x_aligned = x_aligned
        self.y_aligned = y_aligned  # on 16 bytes
        self.whole_rows = whole_rows  # whether the rows of y follow each other without a gap
        self.capabilities = capabilities  # of the GPUs that can run it
        self.specific = specific  # to one architecture, sm_90a and not sm_90
        self.packed = packed  # float32 values that the launches hand on; 0: none
        self.splits = splits  # partial results; 0: none
        self.partial_strides = partial_strides  # of [splits, *the weight's shape]
        self.launches = launches

    def serves(  # type: ignore[no-untyped-def]
        self, direction, operands, weight_shape, parameters, tf32
    ) -> bool:
        """Whether a call is this one."""
        x, y = operands["x"], operands["y"]
        return (
            self.direction == direction
            and self.shapes == (tuple(x.shape), tuple(weight_shape), tuple(y.shape))
            and self.layer == parameters.layer()
            and self.has_bias == (operands["bias"] is not None)
            and self.tf32 == tf32
            and self.dtype == KERNEL_SUFFIXES.get(x.dtype)
            and device_properties(x.device.index)[1] in self.capabilities
            and (not self.specific or has_specific_instructions())
            and not (is_channels_last(x) or is_channels_last(y))
            and (self.wide_offsets or not any(map(has_wide_offsets, operands.values())))
            and (not self.dense or all(map(is_dense, operands.values())))
            and (not self.x_aligned or is_aligned(x))
            and (not self.y_aligned or y.data_ptr() % 16 == 0)
            and (not self.whole_rows or y.stride()[2:] == (y.shape[3], 1))
        )

    def run(self, operands: "dict") -> "torch.Tensor | None":
        """Launches the kernels; gives the partial results [splits, *weight's shape] if any."""
        packed = partial = None
        if self.packed:
            packed = torch.empty(self.packed, dtype=torch.float32, device=operands["x"].device)
        if self.splits:
            shape = (self.splits, *self.shapes[1])
            partial = torch.empty_strided(
                shape, self.partial_strides, dtype=torch.float32, device=operands["x"].device
            )
        for launch in self.launches:
            launch.run(dict(operands, packed=packed, partial=partial))
        return partial


def planned_call(  # type: ignore[no-untyped-def]
    direction, operands, weight_shape, parameters, tf32
) -> "PlannedCall | None":
    """The planned call that this one is; None: the general kernels serve."""
    for planned in PLANNED_CALLS:
        if planned.serves(direction, operands, weight_shape, parameters, tf32):
            return planned
    return None


def is_channels_last(tensor: torch.Tensor) -> bool:
    """Whether channels, and not columns, are neighbours in memory."""
    return tensor.stride(1) == 1 and tensor.stride(3) > 1


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether a tensor map can describe it: adjacent columns, all else on 16 bytes."""
    steps = tensor.stride()
    return (
        steps[3] == 1
        and tensor.data_ptr() % 16 == 0
        and all(step > 0 and step * 4 % 16 == 0 for step in steps[:3])
    )


def is_dense(tensor: "torch.Tensor | None") -> bool:
    """Whether there is no tensor, or a contiguous one on 16 bytes."""
    return tensor is None or (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)


def has_wide_offsets(tensor: "torch.Tensor | None") -> bool:
    """Whether an element's distance from the first one, or a stride, is more than 32 bits count."""
    if tensor is None:
        return False
    steps = tensor.stride()
    return max(sum((n - 1) * step for n, step in zip(tensor.shape, steps)), *steps) > INT_LIMIT


# The maps below take float32 operands as TF32 where PyTorch's flags allow it and there are at least
# this many channels to sum over. Forward and the input's gradient also take it with fewer, if there
# are enough products to sum for a value.
TF32_LEAST_CHANNELS = 16
TF32_FEWEST_CHANNELS = 4
TF32_LEAST_PRODUCTS = 96
TF32_LEAST_GRADIENT_PRODUCTS = 48

# Read once, as cuDNN and cuBLAS do.
TF32_FORBIDDEN = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"


def tf32_allowed() -> bool:
    """Whether PyTorch's flags let float32 convolutions use TF32; not where cuDNN is off."""
    if TF32_FORBIDDEN or not torch.backends.cudnn.enabled:
        return False
    flags = getattr(torch.backends.cudnn, "conv", None)
    if flags is None:  # PyTorch before 2.9
        return torch.backends.cudnn.allow_tf32
    return flags.fp32_precision == "tf32"


def use_tf32(
    x: torch.Tensor,
    channels: int,
    taps: int = 0,
    fewest: int = TF32_FEWEST_CHANNELS,
    least: int = TF32_LEAST_PRODUCTS,
) -> bool:
    """Whether operands are rounded to TF32.

    Args:
        x: one of them.
        channels: those that are summed over; of the weight's gradient the more of both sides.
        taps: of a value, at most; 0 if they do not count.
        fewest, least: channels, and products of a value, from which fewer channels are enough.
    """
    enough = channels >= TF32_LEAST_CHANNELS or (channels >= fewest and channels * taps >= least)
    return x.dtype == torch.float32 and enough and tf32_allowed()


KERNEL_SUFFIXES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

INT_LIMIT = 2**31 - 1


def run_correlation(  # type: ignore[no-untyped-def]
    output, source, weight, bias, destination, parameters, tf32
) -> None:
    """The general kernel for the output, or else for the gradient of the input."""
    in_channels, out_channels = weight.shape[0] // parameters.groups, weight.shape[1]
    rows, channels = (out_channels, in_channels) if output else (in_channels, out_channels)
    stride_in, stride_out, stride_h, stride_w = weight.stride()
    if output:
        # The values of (o + padding) // stride, the same for every phase.
        pixels = [
            (destination.shape[2 + i] - 1 + parameters.padding[i]) // parameters.stride[i]
            - parameters.padding[i] // parameters.stride[i]
            + 1
            for i in (0, 1)
        ]
        # Those that have outputs.
        phases = tuple(min(parameters.stride[i], destination.shape[2 + i]) for i in (0, 1))
    else:
        pixels = list(destination.shape[2:])
        phases = (1, 1)
    narrow = rows <= 8
    block_rows, block_pixels = (4, 256) if narrow else (64, 64)
    count = destination.shape[0] * pixels[0] * pixels[1]
    tiles = (
        phases[0]
        * phases[1]
        * ceiling_divide(rows, block_rows)
        * parameters.groups
        * ceiling_divide(count, block_pixels)
    )
    kind = "any_forward_" if output else "any_input_gradient_"
    launch_kernel(
        kind + ("narrow_" if narrow else "") + KERNEL_SUFFIXES[source.dtype],
        source.device,
        min(tiles, INT_LIMIT),
        general_structure("correlation"),
        {
            "source": source.data_ptr(),
            "weight": weight.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "destination": destination.data_ptr(),
            **stride_arguments("source", "nchw", source),
            "weight_stride_group": in_channels * stride_in,
            "weight_stride_row": stride_out if output else stride_in,
            "weight_stride_channel": stride_in if output else stride_out,
            "weight_stride_h": stride_h,
            "weight_stride_w": stride_w,
            **stride_arguments("destination", "nchw", destination),
            "tiles": tiles,
            "batch": destination.shape[0],
            "groups": parameters.groups,
            "rows": rows,
            "channels": channels,
            "source_height": source.shape[2],
            "source_width": source.shape[3],
            "destination_height": destination.shape[2],
            "destination_width": destination.shape[3],
            "kernel_y": weight.shape[2],
            "kernel_x": weight.shape[3],
            **parameters.arguments(),
            "pixels_y": pixels[0],
            "pixels_x": pixels[1],
            "phases_y": phases[0],
            "phases_x": phases[1],
            "round_to_tf32": int(tf32),
        },
    )


def run_reduction(  # type: ignore[no-untyped-def]
    x, grad_output, weight_shape, parameters, tf32
) -> torch.Tensor:
    """The general kernel for the weight's gradient: [splits, *weight_shape], to be added up."""
    rows, channels = weight_shape[0] // parameters.groups, weight_shape[1]
    size = weight_shape[0] * channels * weight_shape[2] * weight_shape[3]
    columns = channels * weight_shape[2] * weight_shape[3]
    tiles = ceiling_divide(rows, 64) * ceiling_divide(columns, 64) * parameters.groups
    pixels = x.shape[0] * x.shape[2] * x.shape[3]
    # Blocks enough for four on each multiprocessor, of 8 steps each or more.
    wanted = ceiling_divide(4 * device_properties(x.device.index)[0], tiles)
    splits = max(1, min(wanted, 1024, 2**24 // size, pixels // 128))
    split_pixels = ceiling_divide(pixels, splits * 16) * 16
    splits = ceiling_divide(pixels, split_pixels)
    partial = torch.empty(
        (splits, *tuple(weight_shape)),
        dtype=torch.float64 if x.dtype == torch.float64 else torch.float32,
        device=x.device,
    )
    launch_kernel(
        "any_weight_gradient_" + KERNEL_SUFFIXES[x.dtype],
        x.device,
        min(tiles * splits, INT_LIMIT),
        general_structure("reduction"),
        {
            "x": x.data_ptr(),
            "y": grad_output.data_ptr(),
            "partial": partial.data_ptr(),
            **stride_arguments("x", "nchw", x),
            **stride_arguments("y", "nchw", grad_output),
            "tiles": tiles * splits,
            "pixels": pixels,
            "split_pixels": split_pixels,
            "groups": parameters.groups,
            "rows": rows,
            "channels": channels,
            "height": x.shape[2],
            "width": x.shape[3],
            "out_height": grad_output.shape[2],
            "out_width": grad_output.shape[3],
            "kernel_y": weight_shape[2],
            "kernel_x": weight_shape[3],
            **parameters.arguments(),
            "round_to_tf32": int(tf32),
        },
    )
    return partial


# The three maps: the output [N, Cout, OH, OW], the gradient of the input [N, Cin, H, W] and that of
# the weight [Cin, Cout/groups, kH, kW]. Each is linear in its two operands, and each one's
# derivatives are the other two, so that derivatives of every order need no further kernel.


def as_stored(*tensors):  # type: ignore[no-untyped-def]
    """The tensors as a kernel may read them: a negation that was only noted (of a view such as
    `z.conj().imag`) is done.
    """
    return [None if tensor is None else tensor.resolve_neg() for tensor in tensors]


class OutputMap(torch.autograd.Function):
    """The layer's output, from the input, the weight and the bias (or None)."""

    @staticmethod
    def forward(ctx, x, weight, bias, parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.parameters = parameters
        x, weight, bias = as_stored(x, weight, bias)
        size = parameters.output_size(x.shape[2:], weight.shape[2:])
        y = torch.empty(
            (x.shape[0], weight.shape[1] * parameters.groups, *size),
            dtype=x.dtype,
            device=x.device,
            memory_format=parameters.memory_format(x, weight),
        )
        if y.numel() == 0:
            return y
        bias = None if bias is None else bias.contiguous()
        taps = parameters.phase_taps(weight.shape[2:])
        tf32 = use_tf32(x, weight.shape[0] // parameters.groups, taps)
        operands = {"x": x, "w": weight, "y": y, "bias": bias}
        planned = planned_call("forward", operands, weight.shape, parameters, tf32)
        if planned is None:
            run_correlation(True, x, weight, bias, y, parameters, tf32)
        else:
            planned.run(operands)
        return y

    @staticmethod
    def backward(ctx, grad_output):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = InputGradientMap.apply(grad_output, weight, x.shape[2:], ctx.parameters)
        if ctx.needs_input_grad[1]:
            grad_weight = WeightGradientMap.apply(
                x, grad_output, weight.shape, ctx.parameters.memory_format(weight), ctx.parameters
            )
        if ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum((0, 2, 3))
        return grad_x, grad_weight, grad_bias, None


class InputGradientMap(torch.autograd.Function):
    """The gradient of the input, from that of the output and the weight."""

    @staticmethod
    def forward(ctx, grad_output, weight, size, parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(grad_output, weight)
        ctx.parameters = parameters
        grad_output, weight = as_stored(grad_output, weight)
        grad_x = torch.empty(
            (grad_output.shape[0], weight.shape[0], *tuple(size)),
            dtype=grad_output.dtype,
            device=grad_output.device,
            memory_format=parameters.memory_format(grad_output, weight),
        )
        if grad_x.numel() == 0:
            return grad_x
        made = weight.shape[0] // parameters.groups
        tf32 = use_tf32(
            grad_output,
            weight.shape[1],
            weight[0, 0].numel() if made >= TF32_LEAST_CHANNELS else 0,
            1,
            TF32_LEAST_GRADIENT_PRODUCTS,
        )
        operands = {"x": grad_x, "w": weight, "y": grad_output, "bias": None}
        planned = planned_call("input_gradient", operands, weight.shape, parameters, tf32)
        if planned is None:
            run_correlation(False, grad_output, weight, None, grad_x, parameters, tf32)
        else:
            planned.run(operands)
        return grad_x

    @staticmethod
    def backward(ctx, v):  # type: ignore[no-untyped-def]
        grad_output, weight = ctx.saved_tensors
        grad_grad = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_grad = OutputMap.apply(v, weight, None, ctx.parameters)
        if ctx.needs_input_grad[1]:
            grad_weight = WeightGradientMap.apply(
                v, grad_output, weight.shape, ctx.parameters.memory_format(weight), ctx.parameters
            )
        return grad_grad, grad_weight, None, None


class WeightGradientMap(torch.autograd.Function):
    """The gradient of the weight, from the input and the output's gradient."""

    @staticmethod
    def forward(ctx, x, grad_output, shape, layout, parameters):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, grad_output)
        ctx.parameters = parameters
        x, grad_output = as_stored(x, grad_output)
        if grad_output.numel() == 0:
            zeros = torch.zeros(tuple(shape), dtype=x.dtype, device=x.device)
            return zeros.contiguous(memory_format=layout)
        tf32 = use_tf32(x, max(shape[0] // parameters.groups, shape[1]))
        operands = {"x": x, "w": None, "y": grad_output, "bias": None}
        planned = planned_call("weight_gradient", operands, shape, parameters, tf32)
        if planned is None:
            partial = run_reduction(x, grad_output, shape, parameters, tf32)
        else:
            gradient = torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
            sums = planned.run(dict(operands, w=gradient))
            if sums is None:
                return gradient.contiguous(memory_format=layout)
            partial = sums
        total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
        return total.to(x.dtype).contiguous(memory_format=layout)

    @staticmethod
    def backward(ctx, v):  # type: ignore[no-untyped-def]
        x, grad_output = ctx.saved_tensors
        grad_x = grad_grad = None
        if ctx.needs_input_grad[0]:
            grad_x = InputGradientMap.apply(grad_output, v, x.shape[2:], ctx.parameters)
        if ctx.needs_input_grad[1]:
            grad_grad = OutputMap.apply(x, v, None, ctx.parameters)
        return grad_x, grad_grad, None, None, None


def as_tuple(value, dimensions: int, name: str) -> "tuple":  # type: ignore[no-untyped-def]
    """One number for each dimension, from as many or one for all."""
    given = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(given) not in (1, dimensions):
        raise RuntimeError(
            f"expected {name} to be a single integer value or a list of {dimensions} values to "
            f"match the convolution dimensions, but got {name}={given}"
        )
    return tuple(int(number) for number in (given if len(given) == dimensions else given * 2))


def check_device(x: torch.Tensor) -> None:
    """Refuses tensors that no CUDA kernel can read."""
    if not x.is_cuda:
        raise RuntimeError(
            "this layer runs on CUDA kernels: expected an input on a CUDA device, got one on "
            + str(x.device)
        )


def check_operands(x, weight, bias, parameters) -> None:  # type: ignore[no-untyped-def]
    """Raises what PyTorch raises for operands that do not fit each other."""
    check_device(x)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and (other.dtype != x.dtype or other.device != x.device):
            raise RuntimeError(
                f"Input type ({x.type()}) and {name} type ({other.type()}) should be the same"
            )
    if x.dtype not in KERNEL_SUFFIXES:
        raise RuntimeError(f"there are no kernels for tensors of {x.dtype}")
    stride, padding = parameters.stride, parameters.padding
    output_padding, dilation = parameters.output_padding, parameters.dilation
    if min(padding) < 0:
        raise RuntimeError("negative padding is not supported")
    if min(output_padding) < 0:
        raise RuntimeError("negative output_padding is not supported")
    if min(stride) <= 0:
        raise RuntimeError("non-positive stride is not supported")
    if min(dilation) <= 0:
        raise RuntimeError("dilation should be greater than zero")
    if max(stride + dilation) > INT_LIMIT:
        raise RuntimeError(
            f"stride and dilation must be below 2**31, got stride={stride} dilation={dilation}"
        )
    if any(output_padding[i] >= max(stride[i], dilation[i]) for i in (0, 1)):
        raise RuntimeError(
            "output padding must be smaller than either stride or dilation, but got "
            "output_padding_height: {} output_padding_width: {} stride_height: {} "
            "stride_width: {} dilation_height: {} dilation_width: {}".format(
                *(output_padding + stride + dilation)
            )
        )
    if parameters.groups <= 0 or weight.shape[0] % parameters.groups:
        raise RuntimeError(
            f"Given groups={parameters.groups}, expected weight to be divisible by "
            f"{parameters.groups} at dimension 0, but got weight of size [{list(weight.shape)}] "
            "instead"
        )
    x_size, weight_size = (
        [*tensor.shape[:2], *tensor.shape[4 - parameters.dimensions :]] for tensor in (x, weight)
    )
    given = f"Given transposed=1, weight of size {weight_size}, "
    if x.shape[1] != weight.shape[0]:
        raise RuntimeError(
            given + f"expected input{x_size} to have {weight.shape[0]} channels, but got "
            f"{x.shape[1]} channels instead"
        )
    channels = weight.shape[1] * parameters.groups
    if bias is not None and tuple(bias.shape) != (channels,):
        raise RuntimeError(
            given
            + f"expected bias to be 1-dimensional with {channels} elements, but got bias of size "
            f"{list(bias.shape)} instead"
        )
    if min(x.shape[2:]) < 1:
        raise RuntimeError(
            "Only zero batch or zero channel inputs are supported, but got input shape: "
            + str(list(x.shape))
        )
    size = parameters.output_size(x.shape[2:], weight.shape[2:])
    if min(size) < 1:
        raise RuntimeError(
            "Given input size per channel: ({} x {}). Calculated output size per channel: "
            "({} x {}). Output size is too small".format(*(tuple(x.shape[2:]) + size))
        )
    for i in (0, 1):
        if size[i] + 2 * padding[i] + dilation[i] * weight.shape[2 + i] > INT_LIMIT:
            raise RuntimeError(f"an image of {size} is too large for the kernels")


def autocast_dtype(device: str) -> "torch.dtype | None":
    """What autocast, where it is on, computes convolutions in."""
    if not torch.is_autocast_enabled():
        return None
    if hasattr(torch, "get_autocast_dtype"):
        return torch.get_autocast_dtype(device)
    return torch.get_autocast_gpu_dtype()


def transposed_convolution(  # type: ignore[no-untyped-def]
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> torch.Tensor:
    """[N, Cin, H, W] or [Cin, H, W] to [N, Cout, OH, OW] or [Cout, OH, OW], as PyTorch's own."""
    return transposed_convolution_nd(
        2, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def transposed_convolution_1d(  # type: ignore[no-untyped-def]
    input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
) -> torch.Tensor:
    """[N, Cin, L] or [Cin, L] to [N, Cout, OL] or [Cout, OL], as PyTorch's own."""
    return transposed_convolution_nd(
        1, input, weight, bias, stride, padding, output_padding, groups, dilation
    )


def transposed_convolution_nd(  # type: ignore[no-untyped-def]
    dimensions, input, weight, bias, stride, padding, output_padding, groups, dilation
) -> torch.Tensor:
    """The two functions above. A height of 1 is a view: no data is copied for it."""
    batched = input.dim() == dimensions + 2
    if not batched and input.dim() != dimensions + 1:
        raise RuntimeError(
            f"Expected {dimensions + 1}D (unbatched) or {dimensions + 2}D (batched) input to "
            f"conv_transpose{dimensions}d, but got input of size: {list(input.shape)}"
        )
    x = input if batched else input.unsqueeze(0)
    if weight.dim() != x.dim():
        raise RuntimeError(
            f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight "
            f"{list(weight.shape)}, but got {x.dim()}-dimensional input of size {list(x.shape)} "
            "instead"
        )
    dtype = autocast_dtype(input.device.type)
    if dtype is not None and input.is_floating_point() and input.dtype != torch.float64:
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)

    def pair(name: str, value, of_height: int) -> "tuple":  # type: ignore[no-untyped-def]
        return ((of_height,) * (2 - dimensions)) + as_tuple(value, dimensions, name)

    parameters = Parameters(
        pair("stride", stride, 1),
        pair("padding", padding, 0),
        pair("output_padding", output_padding, 0),
        pair("dilation", dilation, 1),
        groups,
        dimensions,
    )
    if dimensions == 1:
        x, weight = x.unsqueeze(2), weight.unsqueeze(2)
    check_operands(x, weight, bias, parameters)
    y = OutputMap.apply(x, weight, bias, parameters)
    y = y.squeeze(2) if dimensions == 1 else y
    return y if batched else y.squeeze(0)


class TransposedConvolution(torch.nn.Module):
    """Takes the place of PyTorch's layer: its arguments, parameters, initial values and results."""

    dimensions = 2

    def __init__(  # type: ignore[no-untyped-def]
        self,
        in_channels,
        out_channels,
        kernel_size,
        stride=1,
        padding=0,
        output_padding=0,
        groups=1,
        bias=True,
        dilation=1,
        padding_mode="zeros",
        device=None,
        dtype=None,
    ) -> None:
        super().__init__()
        if padding_mode != "zeros":
            raise ValueError(
                f'Only "zeros" padding mode is supported for ConvTranspose{self.dimensions}d'
            )
        if groups <= 0:
            raise ValueError("groups must be a positive integer")
        if in_channels % groups != 0:
            raise ValueError("in_channels must be divisible by groups")
        if out_channels % groups != 0:
            raise ValueError("out_channels must be divisible by groups")
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = as_tuple(kernel_size, self.dimensions, "kernel_size")
        self.stride = as_tuple(stride, self.dimensions, "stride")
        self.padding = as_tuple(padding, self.dimensions, "padding")
        self.output_padding = as_tuple(output_padding, self.dimensions, "output_padding")
        self.dilation = as_tuple(dilation, self.dimensions, "dilation")
        self.groups = groups
        self.padding_mode = padding_mode
        shape = (in_channels, out_channels // groups, *self.kernel_size)
        self.weight = torch.nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        if bias:
            empty = torch.empty(out_channels, device=device, dtype=dtype)
            self.bias = torch.nn.Parameter(empty)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters anew, with the random numbers that PyTorch's layer draws."""
        torch.nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            fan_in = self.weight[0].numel()
            bound = 1 / math.sqrt(fan_in) if fan_in > 0 else 0
            torch.nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input, output_size=None):  # type: ignore[no-untyped-def]
        """As the function does; `output_size` chooses among the sizes possible."""
        output_padding = self.output_padding
        if output_size is not None and input.dim() in (self.dimensions + 1, self.dimensions + 2):
            output_padding = self.output_padding_for(input, list(output_size))
        return transposed_convolution_nd(
            self.dimensions,
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            output_padding,
            self.groups,
            self.dilation,
        )

    def output_padding_for(self, input, output_size: "list") -> "tuple":  # type: ignore[no-untyped-def]
        """The output padding that gives an output of this size."""
        axes = range(self.dimensions)
        if len(output_size) == input.dim():
            output_size = output_size[-self.dimensions :]
        if len(output_size) != self.dimensions:
            raise ValueError(
                f"ConvTranspose{self.dimensions}D: for {input.dim()}D input, output_size must have "
                f"{self.dimensions} or {input.dim()} elements (got {len(output_size)})"
            )
        image = input.shape[-self.dimensions :]
        least = [
            (image[i] - 1) * self.stride[i]
            - 2 * self.padding[i]
            + self.dilation[i] * (self.kernel_size[i] - 1)
            + 1
            for i in axes
        ]
        most = [least[i] + self.stride[i] - 1 for i in axes]
        if any(not least[i] <= output_size[i] <= most[i] for i in axes):
            raise ValueError(
                f"requested an output size of {output_size}, but valid sizes range from {least} "
                f"to {most} (for an input of {input.size()[2:]})"
            )
        return tuple(output_size[i] - least[i] for i in axes)

    def extra_repr(self) -> str:
        """What `print` shows of the layer."""
        text = "{in_channels}, {out_channels}, kernel_size={kernel_size}, stride={stride}"
        for name, plain in (("padding", 0), ("dilation", 1), ("output_padding", 0)):
            if getattr(self, name) != (plain,) * self.dimensions:
                text += ", " + name + "={" + name + "}"
        if self.groups != 1:
            text += ", groups={groups}"
        if self.bias is None:
            text += ", bias=False"
        return text.format(**self.__dict__)


class TransposedConvolution1d(TransposedConvolution):
    """The same for PyTorch's layer of one dimension: [N, Cin, L] to [N, Cout, OL]."""

    dimensions = 1
