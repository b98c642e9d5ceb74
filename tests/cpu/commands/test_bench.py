"""`tconv bench` on CPU tensors: what it times, checks and writes, and what it puts back."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
import time
import types

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from tconv import cli, tuning
from tconv.bench import check, contestants, environment, floors, measure, rows, timing
from tconv.bench.summary import geometric_mean, groups, ratio
from tconv.cli.bench import _means
from tconv.emulator.compile import compiler
from tconv.errors import MissingDependencyError
from tconv.layers import DIRECTIONS, Layer
from tconv.plan import candidates, plan
from tconv.problem import Axis
from tconv.reference import random_layers, round_to_tf32

ISSUE_KEYS = (
    "layer dtype layout math direction device commit "
    "ours_ms eager_ms best_ms floor_ms error error_cudnn"
).split()
ENVIRONMENT = "gpu driver torch cuda cudnn python platform".split()

LAYERS = [
    {"name": "up", "batch": 2, "in_channels": 4, "out_channels": 3, "height": 5, "width": 6,
     "kernel_size": 4, "stride": 2, "padding": 1},
    {"name": "grouped", "batch": 3, "in_channels": 4, "out_channels": 6, "height": 4, "width": 3,
     "kernel_size": 3, "groups": 2},
]  # fmt: skip


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps(LAYERS))
    return path


@pytest.fixture
def bench(layers, tmp_path, capsys):
    def run(*arguments, code=0):
        out = tmp_path / "out"
        given = ["--layers", str(layers), "--device", "cpu", "--out", str(out), "--repeat", "3"]
        got = cli.main(["bench", *given, "--commit", "abc", *arguments])
        captured = capsys.readouterr()
        assert got == code, captured
        return captured.out, out

    return run


def records(out):
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


def test_rows_have_the_columns_that_were_asked_for(bench):
    text, out = bench("--direction", "all")
    found = records(out)
    assert isinstance(found, list)
    assert [(r["layer"], r["direction"]) for r in found] == [
        (layer["name"], direction) for direction in DIRECTIONS for layer in LAYERS
    ]
    for row in found:
        assert set(ISSUE_KEYS) | set(ENVIRONMENT) <= set(row)
        for name in ("ours", "eager", "best"):
            low, middle, high = (row[f"{name}_{p}ms"] for p in ("p20_", "", "p80_"))
            assert 0 < low <= middle <= high
        assert row["best_ms"] <= row["eager_ms"]
        assert row["best_setting"] in row["settings"]
        assert row["commit"] == "abc"
        assert row["floor_ms"] is None
        assert row["compile_ms"] is None
        assert row["error"] < 1e-6
        assert row["error"] == row["error_cudnn"]
        assert row["wrong"] is None
        assert row["repeats"] == 3
        assert row["torch"] == torch.__version__
    assert "Geometric means" in text
    assert "All 6 results are right" in text
    assert "No floor: the ceilings of cpu were not measured" in text
    assert "Fewer than 30 timings" in text


def test_csv_holds_the_same(bench):
    _, out = bench()
    (path,) = out.glob("*.csv")
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    for line, record in zip(table, records(out), strict=True):
        assert line == {k: "" if v is None else str(v) for k, v in record.items()}


def test_files_of_other_calls_have_other_names(bench):
    for options in ((), ("--dtype", "float64"), ("--layout", "channels_last")):
        _, out = bench("--only", "up", "--against", "eager", *options)
    names = sorted(path.name for path in out.glob("*.json"))
    assert names == [
        "bench-float32-channels-last.json",
        "bench-float32-contiguous.json",
        "bench-float64-contiguous.json",
    ]


def test_both_layouts_in_one_run(bench):
    text, out = bench("--only", "up", "--against", "eager", "--layout", "channels_last,contiguous")
    assert [path.name for path in sorted(out.glob("*.json"))] == [
        "bench-float32-channels-last.json",
        "bench-float32-contiguous.json",
    ]
    assert text.index("float32, contiguous, without bias") < text.index(
        "Then float32, channels_last"
    )


@given(
    size=st.integers(1, 12),
    kernel=st.integers(1, 7),
    stride=st.integers(1, 6),
    padding=st.integers(0, 5),
    output_padding=st.integers(0, 5),
    dilation=st.integers(1, 4),
)
def test_rows_that_a_gradient_reads(size, kernel, stride, padding, output_padding, dilation):
    assume((size - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 + output_padding > 0)
    axis = Axis(size, kernel, stride, padding, output_padding, dilation)
    met = {i * stride - padding + k * dilation for i in range(size) for k in range(kernel)}
    assert floors.rows_read(axis) == len(met & set(range(axis.output_size)))


def test_floor_of_a_gradient_has_no_row_that_no_tap_meets():
    layer = Layer.parse("32,64,3,stride=5,padding=1,dilation=2", "16x64x128")
    y = 16 * 64 * 318 * 638 * 2
    of_forward, of_gradient = (
        floors.floor(layer.problem(direction, "bfloat16"), floors.H200).memory * floors.H200.copy
        for direction in ("forward", "input_gradient")
    )
    read = floors.rows_read(layer.problem("forward").height)
    assert read < 318
    assert of_forward - of_gradient == pytest.approx(y * (318 - read) / 318 + 64 * 2, rel=1e-6)


def test_means_name_the_rows_behind(capsys):
    none = dict.fromkeys(field.name for field in dataclasses.fields(rows.Row))
    one = {**none, "direction": "forward", "dtype": "bfloat16", "layout": "contiguous"}
    one |= {"device": "h200", "bias": False, "autotune": False, "failed": ""}

    def row(layer, ours, best, floor):
        return rows.Row(
            **one | {"layer": layer, "ours_ms": ours, "best_ms": best, "floor_ms": floor}
        )

    (group,) = groups([row("a", 1.0, 2.0, 0.5), row("b", 0.03, 0.02, 0.01)])
    lines = list(_means(group, ["best"], True))
    assert "    behind on 1: b 0.67" in lines
    assert "    where the floor is over 20 us: 2.00" in lines


def test_default_folder_is_named_after_the_device(layers, tmp_path, monkeypatch, capsys):
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = ["--layers", str(layers), "--only", "up", "--device", "cpu", "--repeat", "1"]
    assert cli.main(["bench", *given, "--against", "eager"]) == 0
    assert (tmp_path / "benchmarks/results/cpu/bench-float32-contiguous.json").exists()


@pytest.mark.parametrize("sweep", [(), ("--sweep",)], ids=["rows", "sweep"])
def test_elsewhere_nothing_is_written_without_a_folder(
    layers, tmp_path, monkeypatch, capsys, sweep
):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    given = ["--layers", str(layers), "--only", "up", "--device", "cpu", "--repeat", "1"]
    assert cli.main(["bench", *given, "--against", "eager"]) == 0
    assert "-o DIR keeps them" in capsys.readouterr().out
    assert not list(empty.iterdir())
    assert cli.main(["bench", *given, "--against", "eager", "-o", "kept"]) == 0
    assert len(list((empty / "kept").iterdir())) == 2
    assert cli.main(["bench", *given, "--resume"]) == 2
    assert "--resume needs the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H200 NVL", "h200-nvl"),
    ],
)
def test_device_in_one_word(monkeypatch, name, word):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    assert environment.short_name("cuda") == word
    problem = Layer.parse("4,4,3").problem("forward")
    assert (measure.floor_of(problem, word) is not None) == (name == "NVIDIA H200")


def test_floor_includes_the_empty_kernel(monkeypatch):
    class Fake(timing.CpuTimer):
        def empty(self):
            return lambda: None

        def time(self, calls, repeats):
            return [timing.Times((0.5,)) for call in calls]

    options = measure.Options(device="cpu", short_name="h200", against=())
    layer = Layer.parse("4,4,3", "1x8x8")
    row = measure.Bench(options, Fake()).row(layer, "forward")
    least = floors.floor(layer.problem("forward"), floors.H200)
    assert row.empty_ms == 0.5
    assert row.floor_ms == pytest.approx(least.seconds * 1e3 + 0.5)
    assert row.bound == least.bound


def test_only_takes_names_with_commas(bench):
    _, out = bench("--only", "grouped,up")
    assert [row["layer"] for row in records(out)] == ["up", "grouped"]


def test_against(bench, monkeypatch):
    monkeypatch.setattr(contestants, "compiled", lambda *a: contestants.pytorch(*a))
    text, out = bench("--only", "up", "--against", "eager,compile")
    (row,) = records(out)
    assert row["best_ms"] is None
    assert row["best_setting"] == ""
    assert row["eager_ms"] > 0
    assert row["compile_p20_ms"] <= row["compile_ms"]
    assert "compile / tconv" in text


def test_a_rival_that_fails_says_why(bench, monkeypatch):
    def compiled(*arguments):
        def call():
            raise RuntimeError("no backend\nand more")

        return call

    monkeypatch.setattr(contestants, "compiled", compiled)
    text, out = bench("--against", "eager,compile")
    assert "Not timed for up, grouped: compile: RuntimeError: no backend; and more" in text
    assert [row["compile_ms"] for row in records(out)] == [None, None]
    assert all(row["eager_ms"] > 0 for row in records(out))


@pytest.fixture
def flag_gems(monkeypatch):
    """FlagGems as far as we may use it: two functions, with its own signatures.

    Its `transform` is put on each result, so that a test can make it another package's mistake.
    """
    package = types.ModuleType("flag_gems")
    package.calls, package.transform = [], lambda result: result

    def patches_torch(*arguments, **options):
        raise AssertionError("it would put itself in the place of PyTorch's operators")

    def function(name):
        honest = getattr(F, name)

        def call(
            input, weight, bias=None, stride=1, padding=0, output_padding=0, groups=1, dilation=1
        ):
            given = stride, padding, output_padding, groups, dilation
            package.calls.append((name, tuple(input.shape), bias is not None, *given))
            return package.transform(honest(input, weight, bias, *given))

        return call

    package.conv_transpose1d, package.conv_transpose2d = map(
        function, ("conv_transpose1d", "conv_transpose2d")
    )
    package.enable = package.only_enable = package.use_gems = patches_torch
    monkeypatch.setitem(sys.modules, "flag_gems", package)
    return package


def test_flaggems(bench, flag_gems):
    text, out = bench("--against", "eager,flaggems")
    for row in records(out):
        assert row["flaggems_p20_ms"] <= row["flaggems_ms"] <= row["flaggems_p80_ms"]
        assert row["error_flaggems"] < 1e-6
        assert row["failed"] == ""
    assert "flaggems / tconv" in text
    assert "FlagGems heeds no TF32 flag" in text
    assert "Not timed" not in text


@pytest.mark.parametrize(
    ("text", "size", "expected"),
    [
        (
            "6,4,3x5,stride=3x2,padding=1x2,output_padding=2x1,groups=2,dilation=1x2",
            "2x5x4",
            ("conv_transpose2d", (2, 6, 5, 4), True, (3, 2), (1, 2), (2, 1), 2, (1, 2)),
        ),
        (
            "1d:6,4,8,stride=4,padding=2,output_padding=1,groups=2,dilation=3",
            "2x7",
            ("conv_transpose1d", (2, 6, 7), True, (4,), (2,), (1,), 2, (3,)),
        ),
    ],
)
def test_flaggems_gets_the_layer(flag_gems, tmp_path, text, size, expected):
    """Every argument in its place, in both dimensions, and the bias where it is asked for."""
    given = ["--layer", text, "--input", size, "--device", "cpu", "--repeat", "1", "--bias"]
    assert cli.main(["bench", *given, "--against", "flaggems", "--out", str(tmp_path)]) == 0
    (row,) = records(tmp_path)
    assert row["error_flaggems"] < 1e-6 and row["flaggems_ms"] > 0
    assert set(flag_gems.calls) == {expected}


def test_a_layer_that_flaggems_does_not_serve_is_a_row(bench, flag_gems, monkeypatch):
    honest = flag_gems.conv_transpose2d

    def only_some(*arguments):
        if arguments[6] != 1:
            raise NotImplementedError("no groups")
        return honest(*arguments)

    flag_gems.conv_transpose2d = only_some
    text, out = bench("--against", "eager,flaggems", "--direction", "forward,weight_gradient")
    up, grouped, *gradients = records(out)
    assert up["flaggems_ms"] > 0 and up["failed"] == ""
    assert grouped["flaggems_ms"] is None and grouped["eager_ms"] > 0
    assert "Not timed for grouped: flaggems: NotImplementedError: no groups" in text
    assert "Not timed for up, grouped: flaggems: NotImplementedError: FlagGems has no grad" in text
    assert [(row["flaggems_ms"], row["eager_ms"] > 0) for row in gradients] == [(None, True)] * 2
    assert "All 4 results are right" in text
    # What it does not serve need not be tried again.
    given = ("--against", "eager,flaggems", "--direction", "forward,weight_gradient")
    assert "4 of 4 rows are in" in bench(*given, "--resume")[0]


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (lambda result: result * 1.01, "its relative error is 1.00e-02, the bound is 9.77e-04"),
        (lambda result: torch.empty(result.shape), "were not written"),
        (lambda result: result[:, :, 1:], r"must be torch.float32 of (2, 3, 10, 12), got"),
        (lambda result: result.double(), "got torch.float64"),
    ],
)
def test_a_wrong_result_of_flaggems_has_no_time(bench, flag_gems, transform, says):
    flag_gems.transform = transform
    text, out = bench("--only", "up", "--against", "flaggems")
    (row,) = records(out)
    assert row["flaggems_ms"] is None and row["wrong"] is None
    assert says in row["failed"]
    assert says in text


def test_the_exactness_of_tf32_is_right_for_a_rival(bench, flag_gems):
    """Its operands may be rounded, though ours may not: PyTorch on a CPU has no TF32."""
    honest = flag_gems.conv_transpose2d

    def rounds(x, w, *rest):
        return honest(round_to_tf32(x), round_to_tf32(w), *rest)

    flag_gems.conv_transpose2d = rounds
    _, out = bench("--only", "up", "--against", "flaggems")
    (row,) = records(out)
    assert 1e-5 < row["error_flaggems"] < 1e-3
    assert row["flaggems_ms"] > 0


def test_of_all_what_is_missing_is_left_out(layers, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "flag_gems", None)
    against = []
    monkeypatch.setattr(
        "tconv.cli.bench._bench", lambda asked, options, *a: against.extend(options.against) or 0
    )
    given = ["--layers", str(layers), "--device", "cpu", "--against", "all"]
    assert cli.main(["bench", *given]) == 0
    assert against == ["eager", "best", "compile"]
    assert "flaggems is left out: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (None, "there is no module flag_gems"),
        ("import a_module_of_its_own", "there is no module a_module_of_its_own"),
        ("raise RuntimeError('No device')", "its import fails with RuntimeError: No device"),
        ("__version__ = '5.0.2'", "FlagGems 5.0.2 has no conv_transpose2d"),
    ],
)
def test_without_flaggems_nothing_runs(layers, tmp_path, monkeypatch, capsys, source, says):
    monkeypatch.delitem(sys.modules, "flag_gems", raising=False)
    if source is None:
        monkeypatch.setitem(sys.modules, "flag_gems", None)
    else:
        (tmp_path / "flag_gems.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(measure.Bench, "row", lambda *a: pytest.fail("it ran"))
    given = ["--layers", str(layers), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert cli.main(["bench", *given, "--against", "eager,flaggems"]) == 1
    captured = capsys.readouterr()
    assert says in captured.err
    assert "FlagGems 5.3.0 or newer" in captured.err and "pip install git+https" in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    sys.modules.pop("flag_gems", None)


def test_no_contestant_adds_a_bias_unless_asked(bench, monkeypatch):
    seen = []
    honest = F.conv_transpose2d
    monkeypatch.setattr(F, "conv_transpose2d", lambda *a: seen.append(a[2]) or honest(*a))
    _, out = bench("--only", "up", "--against", "eager")
    assert seen
    assert all(bias is None for bias in seen)
    assert records(out)[0]["bias"] is False
    seen.clear()
    bench("--only", "up", "--against", "eager", "--bias")
    assert all(bias is not None for bias in seen)
    assert records(out)[0]["bias"] is True


def test_flags_are_as_before(bench):
    for benchmark in (False, True):
        for tf32 in (False, True):
            cudnn = torch.backends.cudnn
            before = cudnn.benchmark, cudnn.allow_tf32
            try:
                cudnn.benchmark, cudnn.allow_tf32 = benchmark, tf32
                bench("--no-tf32", "--direction", "all")
                assert (cudnn.benchmark, cudnn.allow_tf32) == (benchmark, tf32)
            finally:
                cudnn.benchmark, cudnn.allow_tf32 = before
    assert not torch.are_deterministic_algorithms_enabled()


def test_flags_are_set_within_and_put_back_after_an_error():
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    with pytest.raises(KeyError), contestants.flags(benchmark=not before[0], tf32=not before[1]):
        assert (cudnn.benchmark, cudnn.allow_tf32) == (not before[0], not before[1])
        raise KeyError
    assert (cudnn.benchmark, cudnn.allow_tf32) == before


def test_an_interrupted_run_keeps_its_rows_and_resumes(bench, monkeypatch):
    honest = measure.Bench.row
    timed = []

    def row(self, layer, direction):
        if len(timed) == 1:
            raise KeyboardInterrupt
        timed.append(layer.name)
        return honest(self, layer, direction)

    with monkeypatch.context() as patched:
        patched.setattr(measure.Bench, "row", row)
        text, out = bench(code=130)
    assert "Interrupted after 1 of 2" in text
    assert "--resume" in text
    (first,) = records(out)
    assert first["layer"] == "up"

    timed.clear()
    monkeypatch.setattr(measure.Bench, "row", lambda *a: timed.append(a[1].name) or honest(*a))
    text, out = bench("--resume")
    assert timed == ["grouped"]
    assert "1 of 2 rows are in" in text
    assert records(out)[0] == first
    assert [row["layer"] for row in records(out)] == ["up", "grouped"]
    # Another commit is timed again, in the old one's place.
    timed.clear()
    bench("--resume", "--commit", "def")
    assert timed == ["up", "grouped"]
    assert [row["commit"] for row in records(out)] == ["def", "def"]


def test_a_wrong_result_fails_and_the_rest_goes_on(bench, monkeypatch):
    honest = contestants.ours

    def ours(layer, direction, tensors):
        call = honest(layer, direction, tensors)
        return (lambda: call() * (1 + 1e-4)) if layer.name == "up" else call

    monkeypatch.setattr(contestants, "ours", ours)
    text, out = bench("--against", "eager", code=1)
    assert "FAILED up, forward: relative error 1.00e-04" in text
    assert "1 of 2 results are wrong" in text
    assert [row["wrong"] is None for row in records(out)] == [False, True]


def test_a_call_that_fails_is_a_row(bench, monkeypatch):
    def breaks_down(layer, direction, tensors):
        def call():
            raise RuntimeError("no kernel for it\nand more")

        return call

    monkeypatch.setattr(contestants, "ours", breaks_down)
    text, out = bench("--only", "up", code=1)
    assert "FAILED up, forward: RuntimeError: no kernel for it" in text
    (row,) = records(out)
    assert row["ours_ms"] is None
    assert row["eager_ms"] > 0
    text, _ = bench("--only", "up", "--resume", code=1)  # it is not kept
    assert "rows are in" not in text


def test_a_contestant_that_fails_leaves_its_columns_empty(bench, monkeypatch):
    def refuses(*arguments):
        def call():
            raise RuntimeError("not implemented for this dtype")

        return call

    monkeypatch.setattr(contestants, "pytorch", refuses)
    _text, out = bench("--only", "up")
    (row,) = records(out)
    assert row["eager_ms"] is None and row["error_cudnn"] is None
    assert row["ours_ms"] > 0
    assert "not implemented for this dtype" in row["settings"]


def test_when_the_default_fails_another_setting_is_no_eager(bench, monkeypatch):
    honest = contestants.settings

    def settings(*arguments):
        first, *rest = honest(*arguments)

        def fails():
            raise RuntimeError("no engine")

        yield dataclasses.replace(first, call=fails)
        yield from rest

    monkeypatch.setattr(contestants, "settings", settings)
    _, out = bench("--only", "up")
    (row,) = records(out)
    assert row["eager_ms"] is None
    assert row["best_ms"] > 0
    assert row["best_setting"] == "conv_transpose2d, channels_last"


def test_without_memory_for_all_they_are_timed_one_by_one(bench, monkeypatch):
    honest = timing.CpuTimer.time

    def time_them(self, calls, repeats):
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no room")
        return honest(self, calls, repeats)

    monkeypatch.setattr(timing.CpuTimer, "time", time_them)
    _, out = bench("--only", "up")
    (row,) = records(out)
    assert row["ours_ms"] > 0 and row["eager_ms"] > 0 and row["best_ms"] <= row["eager_ms"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--only", "nope"], 2, "is named 'nope'; it has up, grouped"),
        (["--sweep"], 2, "it needs a GPU; without one `tconv explain`"),
        (["--sweep", "--resume"], 2, "--only chooses layers"),
    ],
)
def test_errors_are_one_line(layers, capsys, arguments, code, says):
    given = ["bench", "--layers", str(layers), "--device", "cpu", *arguments]
    assert cli.main(given) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_two_layers_of_one_name_are_refused(tmp_path, capsys):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([LAYERS[0], LAYERS[0]]))
    assert cli.main(["bench", "--layers", str(path), "--device", "cpu"]) == 2
    assert "got more than once: up" in capsys.readouterr().err


def test_no_layer_and_no_such_choice_are_usage_errors(capsys):
    assert cli.main(["bench", "--device", "cpu"]) == 2
    assert "which layers? --layers FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", "--layer", "4,4,3", "--direction", "forward,sideways"])
    assert raised.value.code == 2
    assert "got 'sideways'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_said(layers, capsys):
    assert cli.main(["bench", "--layers", str(layers), "--device", "cuda"]) == 1
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_setting_computes_the_same(direction):
    """Each contestant, for strides and groups of every kind, in both layouts."""
    seen = set()
    some = [*random_layers(12, seed=5), *random_layers(40, seed=6)]
    some += [
        Layer(6, 4, (3, 2), groups=2, dilation=(2, 1), padding=(2, 1), batch=2, height=5, width=4)
    ]
    for layer in some:
        for layout in ("contiguous", "channels_last"):
            t = contestants.random_tensors(layer, direction, torch.float64, layout, "cpu", 0)
            ours = contestants.ours(layer, direction, t)()
            ways = list(contestants.settings(layer, direction, t, layout))
            assert layout in ways[0].name
            for way in ways:
                torch.testing.assert_close(way.call(), ours, rtol=1e-12, atol=1e-12)
            seen |= {way.name.partition(",")[0] for way in ways}
    assert seen == ({"conv_transpose2d", "conv2d"} if direction == "forward" else {direction})


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_setting_of_one_dimension_computes_the_same(direction):
    """PyTorch's contestants are its functions of one dimension, on tensors without a height."""
    seen = set()
    for text in ("1d:6,4,8,4,2", "1d:6,4,3,1,1,0,2", "1d:6,4,3,dilation=2,padding=4"):
        layer = Layer.parse(text, "2x7")
        t = contestants.random_tensors(layer, direction, torch.float64, "contiguous", "cpu", 0)
        reference = check.Reference(layer, direction, t, tf32=False)
        ours = contestants.ours(layer, direction, t)()
        ways = list(contestants.settings(layer, direction, t, "contiguous"))
        for way in ways:
            verdict = reference.verdict(ours, way.call())
            assert verdict.wrong is None and verdict.apart <= 1e-12
            assert way.call().dim() == 3
        seen |= {way.name for way in ways}
    named = {"conv_transpose1d", "conv1d"} if direction == "forward" else {direction}
    assert seen == {f"{name}, contiguous" for name in named}


def test_rows_of_one_dimension(tmp_path):
    given = ["--layer", "1d:6,4,8,4,2", "--input", "2x7", "--device", "cpu", "--repeat", "1"]
    code = cli.main(["bench", *given, "--direction", "all", "--bias", "--out", str(tmp_path)])
    assert code == 0
    rows = records(tmp_path)
    assert [(row["text"], row["input"], row["wrong"]) for row in rows] == [
        ("1d:6,4,8,stride=4,padding=2", "2x7", None)
    ] * 3
    assert cli.main(["bench", *given, "--layout", "channels_last", "--out", str(tmp_path)]) == 1


def test_flipped_convolution_only_where_it_is_one():
    def flipped(text):
        layer = Layer.parse(text, "1x6x6")
        t = contestants.random_tensors(layer, "forward", torch.float32, "contiguous", "cpu", 0)
        return contestants.flipped_convolution(layer, t)

    assert flipped("4,4,3") is not None
    assert flipped("4,4,3,padding=2") is not None
    assert flipped("4,4,3,padding=3") is None
    assert flipped("4,4,3,stride=2") is None
    assert flipped("4,4,3,output_padding=1,dilation=2") is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_part_is_the_part_of_the_whole(direction):
    for number, layer in enumerate(random_layers(20, seed=9)):
        layer = dataclasses.replace(layer, batch=4, height=7, width=7)
        t = contestants.random_tensors(layer, direction, torch.float64, "contiguous", "cpu", number)
        whole = contestants.pytorch(layer, direction, t)()
        part = check.choose_part(layer, direction, flops=2000, elements=10**9, seed=number)
        least = part.layer.problem(direction).flops <= 2000
        y = None if t.y is None else part.y(t.y)
        bias = None if t.bias is None else part.bias(t.bias)
        result = check._map(part.layer, direction, part.x(t.x), part.w(t.w), bias, y)
        take = {"forward": part.y, "input_gradient": part.x, "weight_gradient": part.w}[direction]
        torch.testing.assert_close(take(whole), result, rtol=1e-10, atol=1e-10)
        if direction != "weight_gradient":
            assert part.images[-1] == layer.batch - 1
        smallest = part.layer.groups * (
            len(part.out_channels) if direction == "forward" else len(part.in_channels)
        )
        assert least or smallest == 1 or direction == "weight_gradient"
        assert part.text == "all" or " of " in part.text


def test_an_element_that_was_not_written_is_found_outside_the_part(monkeypatch):
    monkeypatch.setitem(check.MOST_FLOPS, "cpu", 100)
    layer = Layer.parse("4,4,3,bias=no", "6x5x5")
    t = contestants.random_tensors(layer, "forward", torch.float32, "contiguous", "cpu", 0)
    reference = check.Reference(layer, "forward", t, tf32=False)
    right = contestants.pytorch(layer, "forward", t)()
    assert reference.verdict(right, right).wrong is None
    assert reference.verdict(right, None).wrong is None
    inside = set(reference.part.images)
    outside = next(n for n in range(6) if n not in inside)
    for value, says in ((float("nan"), "outside the part"), (100.0, "outside the part")):
        bad = right.clone()
        bad[outside, 0, 0, 0] = value
        assert says in reference.verdict(bad, right).wrong
    bad = right.clone()
    bad[outside, 0, 0, 0] = float("nan")
    assert "not finite" in reference.verdict(bad, None).wrong
    bad = right.clone()
    bad[5, reference.part.out_channels[-1], 0, 0] += 1
    assert "relative error" in reference.verdict(bad, right).wrong


def test_a_stale_result_in_reused_memory_is_no_right_result(monkeypatch):
    """Memory that an earlier contestant left a right result in must not pass for ours."""
    honest = contestants.ours
    layer = Layer.parse("4,4,3,bias=no", "2x5x5")

    def writes_nothing(of_layer, direction, t):
        return lambda: torch.empty(of_layer.y_shape)

    monkeypatch.setattr(contestants, "ours", writes_nothing)
    options = measure.Options(device="cpu", short_name="cpu", repeats=1)
    row = measure.Bench(options, timing.CpuTimer()).row(layer, "forward")
    assert "not finite" in row.wrong
    monkeypatch.setattr(contestants, "ours", honest)


def test_quantiles():
    times = timing.Times(tuple(float(n) for n in range(11)))
    assert (times.p20, times.median, times.p80) == (2, 5, 8)
    assert timing.Times((3.0,)).median == 3
    with pytest.raises(ValueError, match="at least one timing"):
        timing.Times(())


def test_cpu_timer_times_each_call_alone_and_in_turns():
    calls = []

    def slow():
        calls.append("b")
        time.sleep(2e-3)

    times = timing.CpuTimer().time([lambda: calls.append("a"), slow], 7)
    assert calls == ["a", "b"] * 7
    assert [len(of_call.each) for of_call in times] == [7, 7]
    assert times[0].median < 1 < 2 <= times[1].median


def test_each_call_in_turn_has_its_own_flags(monkeypatch):
    """Ours, whose kernels cudnn.benchmark would tune, between calls that switch it on."""
    seen = []

    def noting(name):
        return lambda: seen.append((name, torch.backends.cudnn.benchmark)) or torch.zeros(1)

    def settings(*arguments):
        yield contestants.Setting("off", False, noting("off"))
        yield contestants.Setting("on", True, noting("on"))

    monkeypatch.setattr(contestants, "settings", settings)
    monkeypatch.setattr(contestants, "ours", lambda *a: noting("ours"))
    monkeypatch.setattr(measure.Bench, "_verdict", lambda *a: {})
    monkeypatch.setattr(measure, "NEAR", 1e9)
    options = measure.Options(device="cpu", short_name="cpu", repeats=4)
    measure.Bench(options, timing.CpuTimer()).row(Layer.parse("4,4,3", "1x5x5"), "forward")
    assert seen[-3:] == [("ours", False), ("off", False), ("on", True)]
    assert set(seen) == set(seen[-3:])
    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("second", (3.0, 9.0))
def test_what_was_disturbed_is_timed_once_more(second):
    """All contestants, and the race whose widest spread is less counts."""
    races = []

    class Fake(timing.CpuTimer):
        def time(self, calls, repeats):
            races.append(len(calls))
            wide = {1: 5.0, 2: second}[len(races)]
            return [timing.Times((1.0 + len(races),) * 5)] + [
                timing.Times((2.0, 2.0, 2.0, 2.0 * wide, 2.0 * wide)) for _ in calls[1:]
            ]

    bench = measure.Bench(measure.Options(device="cpu", short_name="cpu", repeats=5), Fake())
    times = bench._race({"ours": int, "best": int})
    assert races == [2, 2]
    assert times["ours"].median == (3.0 if second == 3.0 else 2.0)


def test_slow_settings_are_probed_only(monkeypatch):
    """A setting far from the fastest is not timed in full, and never the best."""
    cost = {"conv_transpose2d, contiguous": 4.0, "conv2d, contiguous": 9.0,
            "conv_transpose2d, channels_last": 1.0, "conv2d, channels_last": 1.1}  # fmt: skip
    asked = []

    class Fake(timing.CpuTimer):
        def time(self, calls, repeats):
            names = [call() for call in calls]
            asked.extend((name, repeats) for name in names if isinstance(name, str))
            return [timing.Times((cost.get(str(name), 2.0),)) for name in names]

    def settings(layer, direction, t, layout):
        for name in cost:
            yield contestants.Setting(name, False, lambda name=name: name)

    monkeypatch.setattr(contestants, "settings", settings)
    options = measure.Options(device="cpu", short_name="cpu", repeats=30)
    row = measure.Bench(options, Fake()).row(Layer.parse("4,4,3", "1x5x5"), "forward")
    assert (row.ours_ms, row.eager_ms, row.best_ms) == (2.0, 4.0, 1.0)
    assert row.best_setting == "conv_transpose2d, channels_last"
    full = [name for name, repeats in asked if repeats == 30]
    assert full == [name for name in cost if name != "conv2d, contiguous"]
    assert "conv2d, contiguous: 9.0000 (5 timings)" in row.settings


def test_sweep_times_every_candidate_and_marks_the_plans(monkeypatch):
    """In the emulator, whose times mean nothing, but whose results are the kernels'."""
    try:
        compiler()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TCONV_EMULATE", "1")
    layer = Layer.parse("3,2,3,stride=2,bias=no", "1x4x4")
    options = measure.Options(device="cpu", short_name="cpu", repeats=1, commit="abc")
    monkeypatch.setattr(measure, "WARM_UP", 0)
    problem, target = options.problem(layer, "input_gradient"), options.target
    able = [c for c in candidates(problem, target) if c.refusal is None][:2]
    monkeypatch.setattr(measure, "candidates", lambda *a: able)
    found = measure.Bench(options, timing.CpuTimer()).sweep(layer, "input_gradient")
    assert [(row.kernel, row.tile) for row in found] == [(c.stem, str(c.tile)) for c in able]
    assert [row.chosen for row in found] == [True, False]
    assert plan(problem, target).tile == able[0].tile
    assert [row.modelled_ms for row in found] == [c.cost * 1e3 for c in able]
    assert all(row.wrong is None and row.error < 1e-6 and row.kernel_ms > 0 for row in found)
    assert tuning._forced.get() is None


def test_sweep_writes_its_own_file(monkeypatch, bench, tmp_path):
    monkeypatch.setattr(measure.Options, "plans", True)
    made = rows.SweepRow(
        layer="up", dtype="float32", layout="contiguous", math="ieee", direction="forward",
        device="cpu", commit="abc", kernel="general_forward", tile="t", chosen=True,
        modelled_ms=2.0, kernel_ms=1.0, error=1e-7,
    )  # fmt: skip
    failed = dataclasses.replace(
        made, tile="u", kernel_ms=None, wrong="LaunchError: no", chosen=False
    )
    monkeypatch.setattr(measure.Bench, "sweep", lambda *a: [failed, made])
    text, out = bench("--only", "up", "--sweep", code=1)
    (path,) = out.glob("sweep-*.json")
    assert json.loads(path.read_text())[1]["modelled_ms"] == 2.0
    assert "the plan's" in text
    assert "FAILED up, forward, general_forward u: LaunchError: no" in text


def test_means_leave_out_what_is_missing():
    base = dict(dtype="float32", layout="contiguous", math="tf32", direction="forward",
                device="h200", commit="")  # fmt: skip
    given = [
        rows.Row(**base, layer="a", ours_ms=1.0, eager_ms=2.0),
        rows.Row(**base, layer="b", ours_ms=1.0, eager_ms=8.0),
        rows.Row(**base, layer="c", ours_ms=1.0),
        rows.Row(**(base | {"direction": "input_gradient"}), layer="a", ours_ms=1.0, eager_ms=1.0),
    ]
    first, second = groups(given)
    mean = first.mean("eager", "ours")
    assert mean.value == pytest.approx(4.0)
    assert (mean.count, mean.least, mean.most) == (2, (2.0, "a"), (8.0, "b"))
    assert first.mean("best", "ours").value is None
    assert second.name.startswith("input_gradient")
    assert geometric_mean([]) is None
    assert ratio(1.0, None) is None


def test_commit_is_of_our_own_repository_only(monkeypatch, tmp_path):
    monkeypatch.setattr(
        environment, "_output", lambda *a: {"--show-toplevel": str(tmp_path)}.get(a[-1], "1234")
    )
    assert environment.commit() == ""
    root = environment.Path(environment.tconv.__file__).resolve().parents[2]
    answers = {"--show-toplevel": str(root), "HEAD": "1234", "src/tconv": ""}
    monkeypatch.setattr(environment, "_output", lambda *a: answers[a[-1]])
    assert environment.commit() == "1234"
    answers["src/tconv"] = " M src/tconv/run.py"
    assert environment.commit() == "1234-dirty"
