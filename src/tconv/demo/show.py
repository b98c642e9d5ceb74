"""Runs the demonstration and shows it: `run(options)`."""

from __future__ import annotations

import copy
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

import tconv
from tconv.demo import compare, heads, picture
from tconv.demo.compare import Comparison
from tconv.errors import MissingDependencyError

SEED = 20

_LEGEND = (
    "In the tables, PyTorch and tconv: distance from the same computed in float64, as a share of "
    "its norm; bound: what tconv's may be; apart: tconv's distance from PyTorch's result."
)


@dataclass(frozen=True)
class Options:
    """What `tconv demo` can be told."""

    output: Path = Path("demo-output")
    picture: Path | None = None
    size: int | None = None
    """Height and width, a multiple of 32; None takes 512 on a GPU and 256 on a CPU."""
    steps: int = 200
    """Training steps of the U-Net."""
    device: str | None = None
    """One of "cuda" and "cpu"; None takes a GPU if there is one."""
    tf32: bool = True
    """False computes in full float32, as `torch.backends.cudnn.allow_tf32 = False` asks for."""


def run(options: Options, console: Console | None = None) -> int:
    """Run the demonstration.

    Returns:
        The exit code: 0 if every tensor compared was within its bound, else 1.

    Raises:
        OSError: the picture cannot be read or the output folder not be written.
    """
    console = console or Console(highlight=False)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    size = options.size or (512 if device.type == "cuda" else 256)
    options.output.mkdir(parents=True, exist_ok=True)
    with _precision(options.tf32), _emulation(False):
        console.rule("[bold]tconv: transposed convolution, beside PyTorch's own")
        console.print(_where(device, options.tf32))
        console.print(_LEGEND)
        photograph = picture.photograph(options.picture, size).to(device)
        bands = heads.picture_bands(photograph)
        # Three channels are too few for TF32, whether it is allowed or not.
        tf32 = device.type == "cuda" and options.tf32
        unet_floor = compare.TF32_FLOOR if tf32 else compare.FLOAT32_FLOOR

        console.rule("1. An FCN-8s head: bilinear layers k4 s2, k4 s2, k16 s8", align="left")
        torch.manual_seed(SEED)
        fcn = _convert(heads.FcnHead().to(device), console)
        fcn_outputs, fcn_rows = _examine(fcn, bands, compare.FLOAT32_FLOOR)
        console.print(_comparison_table("FCN-8s head", fcn_rows))

        console.rule("2. A U-Net: layers k2 s2 and k4 s2, trained on the picture", align="left")
        torch.manual_seed(SEED)
        unet = _convert(heads.UNet().to(device), console)
        _train(unet, photograph, options.steps, console)
        unet_outputs, unet_rows = _examine(unet, (photograph,), unet_floor)
        console.print(_comparison_table(f"U-Net, after {options.steps} steps", unet_rows))

        console.rule("Time, forward and backward", align="left")
        with console.status("measuring ..."):
            times = [
                ("FCN-8s head", *_times(fcn, bands)),
                ("U-Net", *_times(unet, (photograph,))),
            ]
        console.print(_time_table(times))
        if device.type == "cpu":
            console.print("CPU tensors go to PyTorch's own operators: equal times are expected.")
        else:
            console.print("Medians of 30, with a warm cache; docs/measuring.md says what counts.")

    rows = fcn_rows + unet_rows
    if device.type == "cpu":
        console.rule("3. Both again, by the CUDA kernels in the emulator", align="left")
        emulated = _emulated(fcn, bands, unet, photograph, console)
        if emulated is not None:
            fcn_outputs, unet_outputs, emulated_rows = emulated
            rows += emulated_rows

    small = F.interpolate(F.avg_pool2d(photograph, 8), scale_factor=8, mode="nearest")
    sheets = [
        ("fcn", "FCN-8s head", small, fcn_outputs),
        ("unet", "U-Net", photograph, unet_outputs),
    ]
    console.rule("Pictures", align="left")
    written = _write_pictures(options.output, photograph, sheets)
    _preview(console, [photograph, fcn_outputs.ours, unet_outputs.ours])
    names = ", ".join(path.name for path in written)
    console.print(f"In {options.output}: {names}", markup=False)
    return _verdict(rows, console)


@dataclass(frozen=True)
class Outputs:
    """What one network painted: with PyTorch's layers, and with tconv's."""

    theirs: Tensor
    ours: Tensor


@contextmanager
def _precision(tf32: bool) -> Iterator[None]:
    if tf32:
        yield
    else:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            yield


def _where(device: torch.device, tf32: bool) -> Text:
    text = Text()
    if device.type == "cuda":
        text.append(f"{torch.cuda.get_device_name(device)}, ", "green")
        text.append(f"float32 with TF32 {'allowed' if tf32 else 'not allowed'}, ")
    else:
        text.append(f"CPU ({platform.machine()}, {torch.get_num_threads()} threads), ", "yellow")
        text.append("where tconv hands tensors to PyTorch's own operators, ")
    text.append(f"torch {torch.__version__}, Python {platform.python_version()}")
    return text


def _convert(model: nn.Module, console: Console) -> nn.Module:
    replaced = tconv.convert(model)
    console.print(f"tconv.convert(model) replaced {replaced} torch.nn.ConvTranspose2d layers.")
    return model


def _reverted(model: nn.Module) -> nn.Module:
    original = copy.deepcopy(model)
    tconv.revert(original)
    return original


def _train(model: nn.Module, photograph: Tensor, steps: int, console: Console) -> None:
    """Fit the model to the photograph, through tconv's layers."""
    if steps == 0:
        return
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    columns = (
        TextColumn("training through tconv"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  {task.fields[quality]}"),
        TimeRemainingColumn(),
    )
    first = ""
    quality = ""
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps, quality="")
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            loss = F.mse_loss(model(photograph), photograph)
            loss.backward()
            optimizer.step()
            if step % 10 == 0 or step == steps - 1:
                quality = f"{-10 * math.log10(max(loss.item(), 1e-12)):.1f} dB"
                first = first or quality
            progress.update(task, advance=1, quality=quality)
    console.print(f"Peak signal-to-noise ratio: {first} at the first step, {quality} at the last.")


def _examine(
    model: nn.Module,
    inputs: Sequence[Tensor],
    floor: float,
    around_tconv: AbstractContextManager[None] | None = None,
) -> tuple[Outputs, list[Comparison]]:
    """Compare a converted model with PyTorch's layers and with float64, gradients included.

    Args:
        model: a model that `tconv.convert` has converted.
        inputs: its inputs, float32.
        floor: the relative error below which a result counts as right.
        around_tconv: entered while the converted model runs.
    """
    original = _reverted(model)
    with torch.no_grad():
        shape = original(*inputs).shape
    # NOTE: not of both signs: sums over a whole picture would cancel and magnify rounding.
    cotangent = torch.rand(shape, generator=torch.Generator().manual_seed(SEED)).to(inputs[0])
    with around_tconv or nullcontext():
        ours = compare.results(model, inputs, cotangent)
    theirs = compare.results(original, inputs, cotangent)
    exact = compare.results(
        copy.deepcopy(original).double(), [tensor.double() for tensor in inputs], cotangent.double()
    )
    transposed = [
        name for name, part in model.named_modules() if isinstance(part, nn.ConvTranspose2d)
    ]
    rows: list[Comparison] = []
    others: list[Comparison] = []
    for name in exact:
        row = compare.compare(name, theirs[name], ours[name], exact[name], floor)
        shown = name.startswith(("output", "input", *transposed))
        (rows if shown else others).append(row)
    if others:
        rows.append(compare.worst(f"{len(others)} others, worst", others))
    return Outputs(theirs["output"], ours["output"]), rows


def _emulated(
    fcn: nn.Module,
    bands: Sequence[Tensor],
    unet: nn.Module,
    photograph: Tensor,
    console: Console,
) -> tuple[Outputs, Outputs, list[Comparison]] | None:
    """Both networks with every transposed convolution run by the CUDA kernels, on the CPU.

    Returns:
        what the FCN-8s head painted, what the U-Net painted, and all comparisons; None where
        there is no C++ compiler.
    """
    start = time.perf_counter()
    try:
        with _precision(tf32=False), console.status("building the kernels and running them ..."):
            fcn_outputs, fcn_rows = _examine(fcn, bands, compare.FLOAT32_FLOOR, _emulation(True))
            unet_outputs, unet_rows = _examine(
                unet, (photograph,), compare.FLOAT32_FLOOR, _emulation(True)
            )
    except MissingDependencyError as error:
        console.print(Text(f"Left out: {error}", "yellow"))
        return None
    console.print(
        "The same .cu files that NVRTC compiles for a GPU, built by the host's C++ compiler (or "
        f"taken from the cache) and run in full float32, in {time.perf_counter() - start:.1f} s."
    )
    console.print(_comparison_table("FCN-8s head, emulated kernels", fcn_rows))
    console.print(_comparison_table("U-Net, emulated kernels", unet_rows))
    return fcn_outputs, unet_outputs, fcn_rows + unet_rows


@contextmanager
def _emulation(on: bool) -> Iterator[None]:
    """Whether CPU tensors run our kernels in the emulator, whatever the caller has set."""
    before = os.environ.get("TCONV_EMULATE")
    os.environ["TCONV_EMULATE"] = "1" if on else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TCONV_EMULATE"]
        else:
            os.environ["TCONV_EMULATE"] = before


def _times(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and backward: PyTorch's layers, tconv's."""
    cuda = inputs[0].is_cuda

    def step_of(module: nn.Module) -> Callable[[], object]:
        def step() -> None:
            module.zero_grad(set_to_none=True)
            module(*inputs).sum().backward()

        return step

    theirs, ours = compare.median_times(
        [step_of(_reverted(model)), step_of(model)], repeats=30 if cuda else 7, cuda=cuda
    )
    return theirs, ours


def _comparison_table(title: str, rows: Sequence[Comparison]) -> Table:
    table = _table(title, "tensor", "shape", "PyTorch", "tconv", "bound", "apart", "")
    for row in rows:
        table.add_row(
            row.name,
            "x".join(map(str, row.shape)),
            f"{row.torch_error:.1e}",
            f"{row.tconv_error:.1e}",
            f"{row.bound:.1e}",
            f"{row.difference:.1e}" if row.difference else "0",
            "[green]ok" if row.ok else "[bold red]FAILED",
        )
    return table


def _time_table(times: Sequence[tuple[str, float, float]]) -> Table:
    table = _table(None, "network", "", "PyTorch", "tconv", "PyTorch / tconv")
    for name, theirs, ours in times:
        table.add_row(name, "", f"{theirs:.2f} ms", f"{ours:.2f} ms", f"{theirs / ours:.2f}")
    return table


def _table(title: str | None, *headings: str) -> Table:
    """Two columns of text, the others of numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.title_style = "bold"
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    return table


def _write_pictures(
    folder: Path, photograph: Tensor, sheets: Sequence[tuple[str, str, Tensor, Outputs]]
) -> list[Path]:
    named = {"input": photograph}
    contact = []
    for stem, network, given, sheet in sheets:
        difference, factor = picture.amplified_difference(sheet.ours, sheet.theirs)
        named[f"{stem}-pytorch"] = sheet.theirs
        named[f"{stem}-tconv"] = sheet.ours
        named[f"{stem}-difference"] = difference
        equal = not bool(difference.any())
        caption = "difference: none" if equal else f"difference, times {factor:,.0f}"
        contact.append(
            [
                (f"{network}: input", given),
                (f"{network}: PyTorch", sheet.theirs),
                (f"{network}: tconv", sheet.ours),
                (caption, difference),
            ]
        )
    written = [folder / "overview.png"]
    picture.contact_sheet(contact).save(written[0])
    for name, pixels in named.items():
        written.append(folder / f"{name}.png")
        picture.to_image(pixels).save(written[-1])
    return written


def _preview(console: Console, pictures: Sequence[Tensor]) -> None:
    """The pictures side by side in the terminal, two pixels a character, where colours allow."""
    if not console.is_terminal or console.color_system not in ("truecolor", "256"):
        return
    side = min(40, (console.width - 2 * len(pictures)) // len(pictures) // 2 * 2)
    small = [
        (F.interpolate(p.detach().cpu(), size=(side, side), mode="area")[0].clamp(0, 1) * 255).int()
        for p in pictures
    ]
    for line in range(0, side, 2):
        text = Text()
        for pixels in small:
            for column in range(side):
                above, below = (pixels[:, line + k, column].tolist() for k in (0, 1))
                text.append(
                    "▀", f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})"
                )
            text.append("  ")
        console.print(text)
    console.print("the photograph, the FCN-8s head's output, the trained U-Net's output (tconv)")


def _verdict(rows: Sequence[Comparison], console: Console) -> int:
    failed = [row for row in rows if not row.ok]
    if failed:
        names = ", ".join(row.name for row in failed)
        console.print(f"[bold red]{len(failed)} of {len(rows)} comparisons failed: {names}")
        return 1
    console.print(f"[bold green]All {len(rows)} comparisons within their bounds.")
    return 0
