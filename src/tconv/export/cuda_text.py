"""The CUDA source of an exported file: kernels without their includes, and the host's launch.

    words           what kernels/ptx has of what the kernels use; the emulator has its own
    element types   kernels/common/element.cuh
    general         general.cu
    planned         each in a namespace of its own, with its constants
    launch          launch.cu

In `KernelSource` a kernel's constants are the members of `struct Layer`. Here `Layer` is a
namespace: nvcc, unlike NVRTC, lets device code index a constant array in a namespace and not in a
struct.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from tconv import includes
from tconv.jit.target import Target
from tconv.kernels.source import KERNEL_DIRECTORY, Constant, KernelSource, file_of

DIRECTORY = Path(__file__).resolve().parent

ELEMENT_HEADER = "common/element.cuh"

# Identifiers that are also Python keywords. KernelBench's static checks refuse these anywhere.
_RENAMED = {"pass": "part_number", "try": "attempt", "except": "but"}


@dataclass(frozen=True)
class NamedKernel:
    """A planned kernel under the name it has in the file.

    Attributes:
        name: its stem, to which a repair adds, and a number if the file has several of that name.
        source: the specialised kernel.
        capabilities: compute capabilities (major, minor) of the GPUs that can run it.
    """

    name: str
    source: KernelSource
    capabilities: tuple[tuple[int, int], ...]

    @property
    def specific(self) -> bool:
        """Whether it is compiled for architectures such as sm_90a, and not for sm_90.

        What compute capability 9.0 brought is: CUDA 11.8 compiles for sm_90 without it, and CUDA
        12 brought both it and these architectures.
        """
        return min(self.capabilities) >= (9, 0)

    @property
    def namespace(self) -> str:
        """The namespace that holds it."""
        return f"planned_{self.name}"


@dataclass(frozen=True)
class CudaText:
    """The parts of the CUDA source, in order, and the host's C++.

    Attributes:
        words: of ptx/, with the asm of each instruction.
        files: name -> text of what the kernels are written in, without includes.
        launch: the host's side.
        binding: the C++ source.
    """

    words: str
    files: dict[str, str]
    launch: str
    binding: str


# The general kernels by entry point, in the order of the launch table.
GENERAL_KERNELS: tuple[tuple[str, str], ...] = tuple(
    (f"{entry}_{dtype}", namespace)
    for entry, namespace in (
        ("any_forward", "correlation"),
        ("any_forward_narrow", "correlation"),
        ("any_input_gradient", "correlation"),
        ("any_input_gradient_narrow", "correlation"),
        ("any_weight_gradient", "reduction"),
    )
    for dtype in ("float32", "float64", "float16", "bfloat16")
)
GENERAL_THREADS = 256


def cuda_text(planned: list[NamedKernel]) -> CudaText:
    """The CUDA source for these planned kernels."""
    general = (DIRECTORY / "general.cu").read_text(encoding="utf-8")
    words: dict[str, str] = {}
    files: dict[str, str] = {}
    for name in (ELEMENT_HEADER, *(file_of(kernel.source.stem) for kernel in planned)):
        for reached, text in includes.files(name, KERNEL_DIRECTORY).items():
            (words if reached.startswith("ptx/") else files).setdefault(reached, text)
    files["general.cu"] = general
    rows = [
        f"    TCONV_ENTRY({namespace}, {name}, {GENERAL_THREADS}, 0)\n"
        for name, namespace in GENERAL_KERNELS
    ]
    rows += [
        f"    TCONV_ENTRY({kernel.namespace}, {kernel.name}, {kernel.source.threads}, "
        f"{kernel.source.shared_bytes})\n"
        for kernel in planned
    ]
    entries = "\n" + "".join(rows)
    launch = (DIRECTORY / "launch.cu").read_text(encoding="utf-8")
    return CudaText(
        words=_needed("\n".join(words.values()), "".join(files.values())),
        files={name: _renamed(text) for name, text in files.items()},
        launch=launch.replace("TCONV_ENTRIES", entries),
        binding=(DIRECTORY / "binding.cpp").read_text(encoding="utf-8"),
    )


def kernel_files(source: KernelSource) -> list[str]:
    """The files that a planned kernel's namespace holds, each after those that it includes."""
    reached = includes.files(file_of(source.stem), KERNEL_DIRECTORY)
    return [name for name in reached if name != ELEMENT_HEADER and not name.startswith("ptx/")]


def arguments(source: KernelSource) -> str:
    """A planned kernel's arguments."""
    fields = "".join(f"    {type_} {name};\n" for name, type_ in source.arguments)
    return f"struct Arguments {{\n{fields}}};\n\n"


def layer(source: KernelSource) -> str:
    """Its constants."""
    constants = "".join(
        f"{_declaration(name, value)}\n"
        for name, value in (("threads", source.threads), *source.constants)
    )
    return f"namespace Layer {{\n{constants}}}\n"


def guarded(kernel: NamedKernel) -> tuple[list[str], list[str]]:
    """The lines before and after a kernel's files.

    If the compiled architecture lacks the kernel's instructions, a kernel that traps replaces it.
    The host code is compiled once for all architectures and needs the name.
    """
    least = min(kernel.capabilities)
    if kernel.specific:
        lacking = " && ".join(
            f"!defined(__CUDA_ARCH_FEAT_SM{major}{minor}_ALL)"
            for major, minor in kernel.capabilities
        )
    elif least > Target.named(Target.names()[0]).capability:
        lacking = f"__CUDA_ARCH__ < {100 * least[0] + 10 * least[1]}"
    else:
        return [], []
    return (
        [
            f"#if defined(__CUDA_ARCH__) && {lacking}\n",
            f"TCONV_KERNEL({kernel.name}, {kernel.source.threads}, 1) {{ __trap(); }}\n",
            "#else\n",
        ],
        ["#endif\n"],
    )


def _declaration(name: str, value: Constant) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if isinstance(value, int):
        return f"constexpr int {name} = {value};"
    if isinstance(value, float):
        return f"constexpr double {name} = {value!r};"
    elements = ", ".join(map(str, value))
    text = f"__device__ constexpr int {name}[{len(value)}] = {{{elements}}};"
    return "\n".join(textwrap.wrap(text, 100, subsequent_indent="    "))


_COMMENT = re.compile(r"//[^\n]*")
_WORD = re.compile(r"\w+")
_PASTED = re.compile(r"\b(\w+)##")
# What a paragraph of ptx/ declares: functions, macros, and functions that a macro makes.
_DECLARED = re.compile(
    r"\bTCONV_DEVICE (?:[\w:<>&*]+ )+(\w+)\(|^#define (\w+)|^TCONV_\w+\((\w+),"
    r"|\b(?:struct|using) (?:alignas\(\w+\) )?(\w+)|\bconstexpr \w+ (\w+)",
    re.MULTILINE,
)


def _needed(words: str, used_by: str) -> str:
    """The paragraphs of ptx/ that the kernels need: what they name, and what that names in turn.

    A paragraph that declares nothing is kept if it is more than a comment.
    """
    paragraphs = re.split(r"\n{2,}", words.strip("\n"))
    code = [_COMMENT.sub("", paragraph) for paragraph in paragraphs]
    declared = [{name for found in _DECLARED.findall(c) for name in found if name} for c in code]
    kept = [bool(c.strip()) and not names for c, names in zip(code, declared, strict=True)]
    used = set(_WORD.findall(_COMMENT.sub("", used_by)))
    while True:
        chosen = "\n".join(c for c, keep in zip(code, kept, strict=True) if keep)
        used |= set(_WORD.findall(chosen))
        begun = tuple(set(_PASTED.findall(chosen)))  # names that a macro puts together
        more = [
            keep or any(name in used or name.startswith(begun) for name in names)
            for keep, names in zip(kept, declared, strict=True)
        ]
        if more == kept:
            return "\n\n".join(p for p, keep in zip(paragraphs, kept, strict=True) if keep)
        kept = more


def _renamed(text: str) -> str:
    """The text with other names for `_RENAMED`; comments are unchanged."""
    pattern = re.compile(r"//[^\n]*|\b(" + "|".join(_RENAMED) + r")\b")
    return pattern.sub(lambda m: _RENAMED[m[1]] if m[1] else m[0], text)
