"""Puts the committed benchmark's rows into the documentation: tables, sentences, the picture.

    python docs/refresh.py            # rewrite
    python docs/refresh.py --check    # exit code 1 where a page is not current; writes nothing

Reads benchmarks/results/h200/bench-*.json. What it writes stands between the lines
`<!-- results: NAME -->` and `<!-- end -->` of the pages below, and in docs/images. The picture
needs matplotlib.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PICTURE = ROOT / "docs" / "images" / "speedup-h200.png"
PAGES = (ROOT / "README.md", ROOT / "docs" / "results.md")
SECTION = re.compile(r"(<!-- results: ([a-z0-9-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

SHOWN = {
    "kb57": "KernelBench #57",
    "kb71": "KernelBench #71",
    "kb75": "KernelBench #75",
    "bilinear_dw": "bilinear upsampling, depthwise",
    "fcn8s": "FCN-8s",
    "fsrcnn_x3": "FSRCNN x3",
    "pix2pix_mid": "pix2pix, middle",
    "sam_up1": "SAM, first upscaling",
    "hd_k4s2": "1080 x 1920, kernel 4, stride 2",
    "hifigan_k16s8": "HiFi-GAN, kernel 16, stride 8",
}
"""Layers of the README's table, and what it calls them."""

sys.path[:0] = [str(ROOT / "src")]

from tconv.bench import plots  # noqa: E402
from tconv.bench.rows import Row  # noqa: E402
from tconv.bench.summary import Group, groups  # noqa: E402


def main() -> int:
    """Rewrites, or checks. The exit code."""
    stale = [page for page in PAGES if current(page) != page.read_text()]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"{page.relative_to(ROOT)} is not current")
        return bool(stale)
    # The picture first: where it cannot be drawn, the pages stay stale, and the test says so.
    with tempfile.TemporaryDirectory() as folder:
        written = plots.write(measured("tf32"), Path(folder))
        (speedup,) = (path for path in written.values() if path.name.startswith("speedup"))
        PICTURE.write_bytes(speedup.read_bytes())
    for page in stale:
        page.write_text(current(page))
        print(f"{page.relative_to(ROOT)} is rewritten")
    return 0


def current(page: Path) -> str:
    """The page as it should be.

    Raises:
        KeyError: a section has a name that is not in SECTIONS.
    """
    return SECTION.sub(lambda s: f"{s[1]}\n{SECTIONS[s[2]]()}\n\n{s[3]}", page.read_text())


def measured(math: str) -> Group:
    """The rows of one benchmark, "tf32" or "no-tf32", forward and contiguous in float32."""
    text = (RESULTS / f"bench-float32-{math}-contiguous.json").read_text()
    (forward,) = groups([Row(**row) for row in json.loads(text) if row["direction"] == "forward"])
    return forward


def kernelbench(group: Group) -> Group:
    """Its layers of KernelBench alone."""
    rows = tuple(row for row in group.rows if row.layer.startswith("kb"))
    return Group(group.name, group.slug, rows)


def machine(group: Group) -> str:
    """What the rows were measured on, and when; commas apart."""
    told = {
        f"{row.gpu}, driver {row.driver}, torch {row.torch}, cuDNN {row.cudnn}, "
        f"commit {row.commit}, medians of {row.repeats}"
        for row in group.rows
    }
    return "; ".join(sorted(told))


def means(group: Group) -> str:
    """Geometric means as a table's row: PyTorch's default, cuDNN's best, the floor."""
    cells = [group.mean(*columns) for columns in (("eager", "ours"), ("best", "ours"))]
    cells.append(group.mean("ours", "floor"))
    return " | ".join("" if mean.value is None else f"{mean.value:.2f}" for mean in cells)


def means_table() -> str:
    """Geometric means of both benchmarks."""
    fast, strict = measured("tf32"), measured("no-tf32")
    lines = [
        "| geometric mean | layers | default / tconv | best / tconv | tconv / floor |",
        "|---|---|---|---|---|",
    ]
    for name, group in (
        ("TF32 allowed", fast),
        ("TF32 allowed, KernelBench", kernelbench(fast)),
        ("strict float32, KernelBench", kernelbench(strict)),
    ):
        lines.append(f"| {name} | {len(group.rows)} | {means(group)} |")
    return "\n".join(lines)


def layers_table(math: str) -> str:
    """Every layer of a benchmark: kernel, times, ratios, error."""
    group = measured(math)
    lines = [
        f"{machine(group)}.",
        "",
        "| layer | kernel and tile | default | best | tconv | default / tconv | best / tconv "
        "| tconv / floor | error | PyTorch's |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in group.rows:
        floor = f"{row.ours_ms / row.floor_ms:.2f}" if row.floor_ms else ""
        errors = f"{row.error:.1e} | {row.error_cudnn:.1e}"
        lines.append(f"| {row.layer} | {row.kernel} | {times(row)} | {floor} | {errors} |")
    return "\n".join(lines)


def times(row: Row) -> str:
    """Milliseconds and ratios of one layer, as cells."""
    shown = " | ".join(f"{ms:.3f}" for ms in (row.eager_ms, row.best_ms, row.ours_ms))
    ratios = f"{row.eager_ms / row.ours_ms:.2f} | {row.best_ms / row.ours_ms:.2f}"
    return f"{shown} | {ratios}"


def readme_table() -> str:
    """Ten layers, for the README."""
    rows = {row.layer: row for row in measured("tf32").rows}
    lines = [
        "| layer | PyTorch's default | cuDNN's best | tconv | default / tconv | best / tconv |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {name} | {times(rows[layer])} |" for layer, name in SHOWN.items()]
    return "\n".join(lines)


def readme_speed() -> str:
    """What the README says of the means, in three sentences."""
    fast, strict = measured("tf32"), kernelbench(measured("no-tf32"))
    eager, best = fast.mean("eager", "ours"), fast.mean("best", "ours")
    behind = sum(row.best_ms < row.ours_ms for row in fast.rows)
    row = fast.rows[0]
    return (
        f"Over {eager.count} layers, forward in contiguous float32 with TF32 allowed is "
        f"{eager.value:.2f} times as fast as PyTorch's default and {best.value:.2f} times as fast "
        f"as cuDNN's best setting, in the geometric mean; {behind or 'none'} of them "
        f"{'is' if behind < 2 else 'are'} behind that best. In strict float32 the "
        f"{len(strict.rows)} layers of KernelBench are {strict.mean('eager', 'ours').value:.2f} "
        f"and {strict.mean('best', 'ours').value:.2f} times as fast. Milliseconds on one "
        f"{row.gpu}, commit {row.commit}; cuDNN's best is the least over `cudnn.benchmark`, "
        "memory formats and `conv2d` with flipped weights:"
    )


def readme_gain() -> str:
    """Who gains today and who does not, for the first screen."""
    fast = measured("tf32")
    eager, best = fast.mean("eager", "ours"), fast.mean("best", "ours")
    return "\n".join(
        (
            "| on a Hopper GPU | today |",
            "|---|---|",
            "| **forward, float32, contiguous** | **gains**: "
            f"{eager.value:.1f} times PyTorch's default, {best.value:.1f} times cuDNN's best "
            f"setting (geometric means over {eager.count} layers, {fast.rows[0].gpu}) |",
            "| training: both gradients | the faster, as timed, a step as one |",
            "| float16, bfloat16, channels_last | inference: the faster, as timed; training: "
            "the faster, a step as one |",
        )
    )


SECTIONS = {
    "means": means_table,
    "layers-tf32": lambda: layers_table("tf32"),
    "layers-strict": lambda: layers_table("no-tf32"),
    "readme-table": readme_table,
    "readme-speed": readme_speed,
    "readme-gain": readme_gain,
}

if __name__ == "__main__":
    sys.exit(main())
