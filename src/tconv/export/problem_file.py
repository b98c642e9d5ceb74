"""A file with a `Model`: finds its transposed convolutions, and replaces them by ours in its text.

The text is edited at positions from `ast`, so that comments and layout stay as they are.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import types
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tconv.errors import TconvError

Pair = tuple[int, int]

_NAMES = {
    1: ("TransposedConvolution1d", "transposed_convolution_1d"),
    2: ("TransposedConvolution", "transposed_convolution"),
}
"""The class and the function that take the place of PyTorch's, by the number of dimensions."""

_REPLACEMENTS = {
    name: ours
    for dimensions, (layer, function) in _NAMES.items()
    for name, ours in (
        (f"torch.nn.ConvTranspose{dimensions}d", layer),
        (f"torch.nn.modules.ConvTranspose{dimensions}d", layer),
        (f"torch.nn.modules.conv.ConvTranspose{dimensions}d", layer),
        (f"torch.nn.functional.conv_transpose{dimensions}d", function),
        (f"torch.conv_transpose{dimensions}d", function),
    )
}
_NOT_SERVED = {
    "torch.nn.ConvTranspose3d",
    "torch.nn.LazyConvTranspose1d",
    "torch.nn.LazyConvTranspose2d",
    "torch.nn.LazyConvTranspose3d",
}
_SERVED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ExportError(TconvError):
    """The given file or layer cannot be exported; one line says why."""


@dataclass(frozen=True)
class Call:
    """One call of a transposed convolution, as the model made it on its own inputs.

    One dimension is two with a height of 1.

    Attributes:
        input_shape: [N, Cin, H, W].
        weight_shape: [Cin, Cout/groups, kH, kW].
        stride, padding, output_padding, dilation: (height, width).
    """

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: Pair
    padding: Pair
    output_padding: Pair
    dilation: Pair
    groups: int
    bias: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Rewritten:
    """The file's text for `ModelNew`.

    Attributes:
        future: its `from __future__` lines, which must stay first.
        text: the rest.
        names: what it binds at its top level, imports of whole modules left out.
        foreign: modules that it imports besides torch and the standard library.
    """

    future: str
    text: str
    names: frozenset[str]
    foreign: tuple[str, ...]


def rewrite(text: str, name: str) -> Rewritten:
    """Replace PyTorch's layer by ours, and call the class `ModelNew`.

    Args:
        text: the file's text.
        name: what messages call the file.

    Raises:
        ExportError: the text is not Python, has no `Model`, or no layer that is served.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ExportError(f"{name}, line {error.lineno}: {error.msg}") from None
    models = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Model"]
    if not models:
        raise ExportError(f"{name} has no class Model")
    names = frozenset(_bound_names(tree))
    if "ModelNew" in names:
        raise ExportError(f"{name} has a ModelNew already")
    aliases = _aliases(tree)
    edits = list(_model_edits(tree, text))
    replaced, unserved = 0, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            edit = _import_edit(node)
            if edit is not None:
                edits.append(edit)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            continue
        dotted = _dotted(node, aliases)
        if dotted in _REPLACEMENTS:
            edits.append((node, _REPLACEMENTS[dotted]))
            replaced += 1
        elif dotted in _NOT_SERVED:
            unserved.add(dotted.rpartition(".")[2])
    for dimensions in _NAMES:
        if f"LazyConvTranspose{dimensions}d" in unserved:
            raise ExportError(
                f"{name} has a LazyConvTranspose{dimensions}d, whose parameters are not known when "
                f"it is made; write it as a ConvTranspose{dimensions}d"
            )
    if not replaced:
        other = f", only {', '.join(sorted(unserved))}" if unserved else ""
        raise ExportError(f"{name} has no ConvTranspose1d or ConvTranspose2d{other}")
    future, rest = _split_future(tree, _edited(text, edits))
    return Rewritten(future, rest, names, tuple(_foreign_imports(tree)))


def calls(text: str, name: str) -> list[Call]:
    """Run the model once, without data, and note its transposed convolutions in order, each once.

    The file is executed, its tensors on the meta device; a model that cannot run there runs on
    the CPU.

    Raises:
        ExportError: the file, the model or its inputs raise an error, or a layer is not served.
    """
    try:
        found = _recorded(text, name, "meta")
    except Exception:
        try:
            found = _recorded(text, name, "cpu")
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            raise ExportError(f"{name} does not run: {type(error).__name__}: {first}") from error
    for call in found:
        if call.dtype not in _SERVED_DTYPES:
            served = ", ".join(str(dtype).removeprefix("torch.") for dtype in _SERVED_DTYPES)
            raise ExportError(
                f"{name}: the kernels serve {served}, the layer computes in "
                f"{str(call.dtype).removeprefix('torch.')}"
            )
    return list(dict.fromkeys(found))


# --- running -----------------------------------------------------------------------------------


class _Recorder(TorchFunctionMode):
    """Notes the arguments of every transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for dimensions, function in ((1, torch.conv_transpose1d), (2, torch.conv_transpose2d)):
            if func is function:
                self.calls.append(_call(dimensions, *args, **kwargs))
        return func(*args, **kwargs)


def _call(
    dimensions: int,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Call:
    height = (1,) * (2 - dimensions)
    batch, channels, *image = (1,) * (dimensions + 2 - input.dim()) + tuple(input.shape)
    in_channels, out_channels, *kernel = weight.shape
    return Call(
        input_shape=(batch, channels, *height, *image),
        weight_shape=(in_channels, out_channels, *height, *kernel),
        stride=_pair(stride, dimensions, 1),
        padding=_pair(padding, dimensions, 0),
        output_padding=_pair(output_padding, dimensions, 0),
        dilation=_pair(dilation, dimensions, 1),
        groups=groups,
        bias=bias is not None,
        dtype=input.dtype,
    )


def _pair(value: Any, dimensions: int, of_height: int) -> Pair:
    """(height, width); `of_height` where there is one dimension."""
    first, *rest = value if isinstance(value, (tuple, list)) else (value,)
    last = int(rest[0] if rest else first)
    return (of_height if dimensions == 1 else int(first)), last


def _recorded(text: str, name: str, device: str) -> list[Call]:
    # NOTE: PyTorch imports this at the first use of some of its functions, and with another default
    # device the import breaks off in the middle, for good.
    with contextlib.suppress(ImportError):
        import torch._dynamo

    module = types.ModuleType("tconv_exported_problem")
    with (
        unittest.mock.patch.dict(sys.modules, {module.__name__: module}),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.device(device),
    ):
        exec(compile(text, name, "exec"), module.__dict__)
        for needed in ("get_inputs", "get_init_inputs"):
            if not callable(getattr(module, needed, None)):
                raise ExportError(f"it has no function {needed}")
        model = module.Model(*module.get_init_inputs())
        inputs = module.get_inputs()
        with _Recorder() as recorder:
            model(*inputs)
    for call in recorder.calls:
        if call.input_shape[1] != call.weight_shape[0]:  # which the meta device lets through
            raise ExportError(f"{call.input_shape} does not fit {call.weight_shape}")
    return recorder.calls


# --- rewriting ---------------------------------------------------------------------------------

_Edit = tuple[Any, str]  # a node with its place in the text, and what stands there instead


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Name -> what the file's imports say that it is."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    aliases[alias.asname] = alias.name
                else:
                    top = alias.name.partition(".")[0]
                    aliases[top] = top
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                if alias.name == "*":
                    for dotted in (*_REPLACEMENTS, *_NOT_SERVED):
                        module, _, member = dotted.rpartition(".")
                        if module == node.module:
                            aliases[member] = dotted
                else:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return aliases


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str | None:
    """The full name of `nn.ConvTranspose2d` and the like; None for any other expression."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, aliases)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _model_edits(tree: ast.Module, text: str) -> Iterator[_Edit]:
    """`Model` -> `ModelNew`, the class and every use of its name."""
    lines = text.encode().splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Model":
            yield node, "ModelNew"
        elif isinstance(node, ast.ClassDef) and node.name == "Model":
            match = re.search(rb"class\s+(Model)\b", lines[node.lineno - 1])
            if match is None:
                raise ExportError(f"line {node.lineno}: cannot find the name of class Model")
            yield _Place(node.lineno, match.start(1), node.lineno, match.end(1)), "ModelNew"


@dataclass(frozen=True)
class _Place:
    """Where an edit goes, named as in a node; columns count bytes."""

    lineno: int
    col_offset: int
    end_lineno: int
    end_col_offset: int


def _import_edit(node: ast.ImportFrom) -> _Edit | None:
    """The import without the names that are replaced."""
    kept = [a for a in node.names if f"{node.module}.{a.name}" not in _REPLACEMENTS]
    if len(kept) == len(node.names):
        return None
    if not kept:
        return node, "# (its kernels stand above)"
    return node, ast.unparse(ast.ImportFrom(module=node.module, names=kept, level=node.level))


def _edited(text: str, edits: list[_Edit]) -> str:
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: Any) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[node.end_lineno - 1] + node.end_col_offset,
        )

    for (start, end), new in sorted(((span(node), new) for node, new in edits), reverse=True):
        data = data[:start] + new.encode() + data[end:]
    return data.decode()


def _split_future(tree: ast.Module, text: str) -> tuple[str, str]:
    """The `from __future__` lines and the rest; edits never change the number of lines above."""
    lines = text.splitlines(keepends=True)
    future = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            assert node.end_lineno is not None
            for number in range(node.lineno - 1, node.end_lineno):
                future.append(lines[number])
                lines[number] = ""
    return "".join(future), "".join(lines)


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        for inner in [node, *ast.walk(node)] if isinstance(node, (ast.If, ast.With)) else [node]:
            if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield inner.name
            elif isinstance(inner, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
                for target in ast.walk(inner):
                    if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                        yield target.id
            elif isinstance(inner, ast.ImportFrom):
                yield from (alias.asname or alias.name for alias in inner.names)
            elif isinstance(inner, ast.Import):
                yield from (alias.asname for alias in inner.names if alias.asname)


def _foreign_imports(tree: ast.Module) -> list[str]:
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("." * node.level + (node.module or "").partition(".")[0])
    return sorted(modules - {"torch"} - set(sys.stdlib_module_names))
