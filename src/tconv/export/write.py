"""Writes the exported file: the parts in order, and a report of what it holds."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tconv.errors import NoKernelError
from tconv.export import cuda_text, problem_file, static_checks
from tconv.export.cuda_text import CudaText, NamedKernel
from tconv.export.layer import Layer
from tconv.export.problem_file import Call, ExportError, Rewritten
from tconv.jit.target import Target
from tconv.kernels.launch import Launch, TensorMap
from tconv.kernels.source import KernelSource
from tconv.plan import Plan, family, plan
from tconv.problem import Direction, DType, Problem

PLANNED_DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16")
"""The types that kernels are planned for."""

DEFAULT_ARCH = "sm_90a"
"""The architecture that an export is planned for by default."""

_DASHES = "# " + "-" * 94 + "\n"


@dataclass(frozen=True)
class Planned:
    """One planned call, and the kernels of its launches in order."""

    plan: Plan
    kernels: tuple[NamedKernel, ...]

    @property
    def name(self) -> str:
        """The plan's own kernel's name."""
        return self.kernels[self.plan.launches.index(self.plan.kernel)].name


Capabilities = tuple[tuple[int, int], ...]

_DIRECTIONS: tuple[Direction, ...] = ("forward", "input_gradient", "weight_gradient")


@dataclass(frozen=True)
class Report:
    """What was written.

    Attributes:
        path: the exported file.
        source: the given file's name, or "the given layer".
        arch: the architecture planned for.
        plans: the planned kernels, one line each.
        notes: what the reader should know; one sentence each.
    """

    path: Path
    source: str
    arch: str
    plans: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"{self.path}: ModelNew from {self.source}, planned for {self.arch}"]
        lines += [f"  {line}" for line in self.plans]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def export_file(
    problem_path: Path | None,
    layer: Layer | None,
    output_path: Path,
    *,
    arch: str = DEFAULT_ARCH,
    dtype: DType | None = None,
) -> Report:
    """Write a self-contained file with `ModelNew`.

    Exactly one of `problem_path` and `layer` is given. A given file is executed, to see which
    layers its model calls on which inputs.

    Args:
        problem_path: a file with `Model`, `get_inputs` and `get_init_inputs`.
        layer: a layer in its place.
        output_path: the file to write. An existing file is replaced.
        arch: the architecture to plan for, "sm_90a". The file runs on the others too.
        dtype: of the calls to plan for, "float32" or a 16-bit type; by default that of the file's
            inputs. Calls of other types run the general kernels.

    Raises:
        ExportError: the file or layer cannot be exported; nothing is written.
        OSError: a file cannot be read or written.
        ValueError: `arch` is not known.
    """
    if (problem_path is None) == (layer is None):
        raise ExportError("export takes a file or a layer, and not both")
    if layer is not None:
        text, name = layer.problem_text(), "the given layer"
    else:
        assert problem_path is not None
        text, name = problem_path.read_text(encoding="utf-8"), problem_path.name
    target = Target.named(arch)
    rewritten = problem_file.rewrite(text, name)
    calls = problem_file.calls(text, name)
    planned, notes = _plan(calls, target, dtype)
    # Quoted: a file's name may hold a line's end, behind which there is no comment any more.
    exported = _render(rewritten, repr(name) if layer is None else name, planned, target)
    notes += _notes(rewritten, exported)
    scratch = output_path.with_name(f".{output_path.name}.{os.getpid()}")
    try:
        scratch.write_text(exported, encoding="utf-8")
        os.replace(scratch, output_path)
    finally:
        scratch.unlink(missing_ok=True)
    return Report(
        path=output_path,
        source=name,
        arch=arch,
        plans=tuple(str(chosen.plan) for chosen in planned),
        notes=tuple(notes),
    )


def _plan(
    calls: list[Call], target: Target, dtype: DType | None
) -> tuple[list[Planned], list[str]]:
    """The planned kernels of all directions, under distinct names, and notes."""
    planned: list[Planned] = []
    notes: list[str] = []
    seen = set()
    named: dict[tuple[KernelSource, Capabilities], NamedKernel] = {}
    used: dict[str, int] = {}

    def kernel_of(launch: Launch, capabilities: Capabilities) -> NamedKernel:
        key = launch.source, capabilities
        if key not in named:
            # A repair may have the stem of the kernel that it repairs.
            base = launch.source.stem + "_repair" * (launch.role == "repair")
            count = used[base] = used.get(base, 0) + 1
            named[key] = NamedKernel(base if count == 1 else f"{base}_{count}", *key)
        return named[key]

    if not calls:
        notes.append("the model called no transposed convolution; only general kernels are held")
    for call in calls:
        own = str(call.dtype).removeprefix("torch.")
        of_call = dtype or next((name for name in PLANNED_DTYPES if name == own), None)
        if of_call is None:
            served = ", ".join(PLANNED_DTYPES)
            notes.append(f"planned kernels are for {served}; {own} runs the general kernels")
            continue
        for direction in _DIRECTIONS:
            problem = _problem(call, direction, of_call)
            if problem in seen:
                continue
            seen.add(problem)
            try:
                chosen = plan(problem, target)
            except NoKernelError as error:
                first = str(error).splitlines()[0].rstrip(":")
                notes.append(f"{first}; the general kernel serves")
                continue
            capabilities = _capabilities(chosen)
            kernels = tuple(kernel_of(launch, capabilities) for launch in chosen.launches)
            planned.append(Planned(chosen, kernels))
    return planned, notes


def _capabilities(chosen: Plan) -> Capabilities:
    """Compute capabilities of the GPUs that can run the plan, of those that `Target` names."""
    kernel, problem, tile = family(chosen.stem), chosen.problem, chosen.tile
    return tuple(
        target.capability
        for target in map(Target.named, Target.names())
        if kernel.why_not(problem, target) is None
        and kernel.tile_why_not(problem, target, tile) is None
    )


def _problem(call: Call, direction: Direction, dtype: DType) -> Problem:
    """The problem of one direction on contiguous tensors, as PyTorch's default flags make it."""
    return Problem.of(
        direction,
        call.input_shape,
        call.weight_shape,
        (call.stride, call.padding, call.output_padding, call.dilation, call.groups),
        dtype=dtype,
        bias=call.bias,
    )


# --- the text ----------------------------------------------------------------------------------


def _render(rewritten: Rewritten, name: str, planned: list[Planned], target: Target) -> str:
    text = cuda_text.cuda_text(list(_kernels(planned)))
    imports, python = _python()
    ours = "".join(
        (
            imports,
            _sources(text, planned),
            python,
            f"\n\nPLANNED_CALLS = [\n{''.join(map(_planned_call, planned))}]\n",
            "\n\nif torch.cuda.is_available():\n"
            "    load_kernels()  # now, which takes a while, rather than in the first call\n",
        )
    )
    collisions = sorted(_top_level(ours) & rewritten.names)
    if collisions:
        raise ExportError(
            f"{name} binds names that the exported kernels use too, rename them: "
            f"{', '.join(collisions)}"
        )
    return "".join(
        (
            _header(name, planned, target),
            rewritten.future,
            ours,
            "\n\n",
            _DASHES,
            f"# What {name} says, with the kernels' layer in the place of PyTorch's.\n",
            _DASHES,
            "\n",
            rewritten.text.strip("\n"),
            "\n",
        )
    )


def _header(name: str, planned: list[Planned], target: Target) -> str:
    lines = [
        f"ModelNew: the Model of {name} with its transposed convolution on own CUDA kernels.",
        "Written by `tconv export`; needs PyTorch 1.13 or later, nvcc (CUDA 11.8 or later), ninja "
        "and a C++ compiler, and nothing else. The kernels are compiled when the file is loaded, "
        "or at the first call where there is no CUDA device then, and kept for the next time.",
    ]
    if planned:
        lines.append(
            f"Specialised kernels, planned for {target.arch} of {target.multiprocessors} "
            "multiprocessors, used where layer, sizes, type and PyTorch's default flags agree; "
            "every other call runs the general ones:"
        )
    lines += [f"  {chosen.name} {chosen.plan.tile} for {chosen.plan.problem}" for chosen in planned]
    return _comment(lines) + "\n"


def _comment(lines: list[str]) -> str:
    """Lines of text as comments, what is indented kept so."""
    wrapped = []
    for line in lines:
        indent = "# " + " " * (len(line) - len(line.lstrip()))
        rest = indent if line == line.lstrip() else indent + "  "
        wrapped += textwrap.wrap(line.lstrip(), 100, initial_indent=indent, subsequent_indent=rest)
    return "".join(f"{line}\n" for line in wrapped)


def _python() -> tuple[str, str]:
    """The imports of an exported file's Python, and what follows the line of dashes.

    Without the linters' and type checkers' remarks.
    """
    path = cuda_text.DIRECTORY / "transposed_convolution.py"
    head, _, part = path.read_text(encoding="utf-8").partition(_DASHES)
    imports = head[head.index("import ") : head.index("CPP_SOURCE")]
    return imports, re.sub(r"  # (type: ignore|noqa|fmt:)[^\n]*", "", part).lstrip("\n")


def _kernels(planned: list[Planned]) -> dict[NamedKernel, Plan]:
    """The kernels, each once, with the first plan that has it."""
    kernels: dict[NamedKernel, Plan] = {}
    for chosen in planned:
        for kernel in chosen.kernels:
            kernels.setdefault(kernel, chosen.plan)
    return kernels


INNER_BEGIN = "#define TCONV_INNER\nnamespace repair {\n"
INNER_END = "}  // namespace repair\n#undef TCONV_INNER\n#define TCONV_REPAIR\n"
"""Around the functions with which another kernel's blocks end: `KernelSource.repair_source`."""


def _sources(text: CudaText, planned: list[Planned]) -> str:
    parts = [
        "# The kernels' own few words, each instruction that C++ has no name for among them.\n"
        + _constant("CUDA_WORDS", text.words)
    ]
    names = []
    for file, content in text.files.items():
        parts.append(_constant(_variable(file), content))
        if file in (cuda_text.ELEMENT_HEADER, "general.cu"):
            names.append(_variable(file))
    assembled = [*names]
    said = None
    for kernel, chosen in _kernels(planned).items():
        if chosen is not said:
            parts.append(_comment([str(chosen)]))
            said = chosen
        source, structs = kernel.source, _structs_name(kernel)
        files = list(map(_variable, cuda_text.kernel_files(source)))
        text_of_structs = cuda_text.arguments(source)
        inside = [structs, *files]
        if source.repair_source is None:
            text_of_structs += cuda_text.layer(source)
        else:
            inner, outer = (structs.replace("_LAYER", end) for end in ("_INNER", "_OUTER"))
            parts[-1] += _constant(inner, INNER_BEGIN + cuda_text.layer(source.repair_source))
            parts[-1] += _constant(outer, INNER_END + cuda_text.layer(source))
            inside = [structs, inner, *files, outer, *files]
        parts[-1] += _constant(structs, text_of_structs)
        if kernel.name != kernel.source.stem:
            inside[-1] += f'.replace("({kernel.source.stem}, ", "({kernel.name}, ")'
        if source.repair_source is not None:
            inside.append(_string("#undef TCONV_REPAIR\n"))
        before, after = cuda_text.guarded(kernel)
        inside[1:1] = map(_string, before)
        inside += map(_string, after)
        opening = _string(f"\nnamespace {kernel.namespace} {{\n")
        closing = _string(f"}}  // namespace {kernel.namespace}\n")
        assembled.append("\n    + ".join((opening, *inside, closing)))
    parts.append(
        "# All kernels; each planned one in a namespace, with its arguments and constants.\n"
        "CUDA_KERNELS = (\n    " + "\n    + ".join(assembled) + "\n)\n"
    )
    parts.append(_constant("CUDA_LAUNCH", text.launch))
    parts.append("CUDA_SOURCE = CUDA_WORDS + CUDA_KERNELS + CUDA_LAUNCH\n")
    parts.append(_constant("CPP_SOURCE", text.binding))
    return "\n".join(parts) + "\n"


def _structs_name(kernel: NamedKernel) -> str:
    return f"{kernel.name.upper()}_LAYER"


def _string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _variable(file: str) -> str:
    """A header is named with its folder; the names of .cu files are enough by themselves."""
    name = file if file.endswith(".cuh") else file.rpartition("/")[2]
    return re.sub(r"\W", "_", name).upper()


def _constant(name: str, text: str) -> str:
    assert '"""' not in text and not text.endswith("\\"), name
    return f'{name} = r"""\n{text.strip(chr(10))}\n"""\n'


def _is_for_dense_tensors(chosen: Plan) -> bool:
    """Whether a plan counts on tensors that are dense, as those it was made for.

    Of 16 bits any does; of float32 those of gradients whose tensor maps describe a tensor. The x
    that forward's describe is checked for itself.
    """
    if chosen.problem.dtype != "float32":
        return True
    maps = (
        argument
        for launch in chosen.launches
        for argument in launch.arguments.values()
        if isinstance(argument, TensorMap)
    )
    described = any(one.address.operand != "packed" for one in maps)
    return described and chosen.problem.direction != "forward"


def _planned_call(planned: Planned) -> str:
    """The call and its launches, as Python."""
    chosen, problem = planned.plan, planned.plan.problem
    y, x = problem.height, problem.width
    fields = {
        "direction": problem.direction,
        "dtype": problem.dtype,
        "shapes": (problem.x_shape, problem.w_shape, problem.y_shape),
        "layer": (
            (y.stride, x.stride),
            (y.padding, x.padding),
            (y.dilation, x.dilation),
            problem.groups,
        ),
        "has_bias": problem.bias,
        "tf32": problem.math == "tf32",
        "wide_offsets": problem.wide_offsets,
        "dense": _is_for_dense_tensors(chosen),
        "x_aligned": problem.dtype == "float32" and problem.rows_aligned,
        "y_aligned": any(launch.aligned for launch in chosen.launches),
        "whole_rows": any(launch.whole_rows for launch in chosen.launches),
        "capabilities": planned.kernels[0].capabilities,
        "specific": planned.kernels[0].specific,
        "packed": chosen.packed,
        "splits": chosen.splits,
        "partial_strides": chosen.partial_strides if chosen.splits else (),
    }
    launches = "".join(map(_planned_launch, planned.kernels, chosen.launches))
    return (
        "    PlannedCall(\n"
        + "".join(_wrapped(f"{name}={_literal(value)},", 8) for name, value in fields.items())
        + f"        launches=[\n{launches}        ],\n    ),\n"
    )


def _planned_launch(kernel: NamedKernel, launch: Launch) -> str:
    arguments = "".join(
        _wrapped(f"{_literal(name)}: {_literal(launch.arguments[name])},", 20)
        for name, _ in kernel.source.arguments
    )
    return (
        "            PlannedLaunch(\n"
        f"                {_literal(kernel.name)},\n"
        f"                {_structs_name(kernel)},\n"
        f"                blocks={launch.grid},\n"
        f"                arguments={{\n{arguments}                }},\n"
        "            ),\n"
    )


# Fields of the symbols that are left out where they have their defaults.
_FIELDS_LEFT_OUT = ("times", "dtype", "first")


def _literal(value: Any) -> str:
    """A value as Python: a number, a string, a tuple, or a symbol of `kernels/launch.py`."""
    if dataclasses.is_dataclass(value):
        values = []
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            if field.name not in _FIELDS_LEFT_OUT:
                values.append(_literal(found))
            elif found != field.default:
                values.append(f"{field.name}={_literal(found)}")
        return f"{type(value).__name__}({', '.join(values)})"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))}{',' * (len(value) == 1)})"
    return _string(value) if isinstance(value, str) else repr(value)


def _wrapped(text: str, indent: int) -> str:
    first = " " * indent
    return textwrap.fill(text, 100, initial_indent=first, subsequent_indent=first + "    ") + "\n"


def _top_level(text: str) -> set[str]:
    """What our part binds, modules left out."""
    names: set[str] = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
    return names


def _notes(rewritten: Rewritten, exported: str) -> list[str]:
    notes = []
    if rewritten.foreign:
        notes.append(f"the file keeps its imports of {', '.join(rewritten.foreign)}")
    if rewritten.future:
        notes.append(
            "the file keeps its `from __future__` line; KernelBench's evaluation puts a line "
            "before it where it is given a build folder, which Python then refuses"
        )
    for finding in static_checks.check_text(exported):
        what = "refuse" if finding.refused else "warn of"
        notes.append(f"KernelBench's static checks {what} {finding}")
    return notes
