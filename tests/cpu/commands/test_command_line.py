"""What all commands share: errors of one line, exit codes, help; and info, cache, export."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from rich import box
from rich.console import Console
from rich.table import Table

import tconv
from tconv import cli
from tconv.cli.shared import print_whole
from tconv.errors import CompileError, NoKernelError
from tconv.jit.cache import DiskCache
from tconv.layers import Layer

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("command", [command.__name__.split(".")[-1] for command in cli.COMMANDS])
def test_help_has_an_example_that_parses(command, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main([command, "--help"])
    assert raised.value.code == 0
    examples = re.findall(r"^  tconv (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert examples
    for example in examples:
        parsed = parse(example)
        assert parsed.command == command


def parse(line):
    words = shlex.split(line, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    if "|" in words:
        words = words[: words.index("|")]
    return cli.parser().parse_args(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_documentation_parse(page):
    for line in re.findall(r"^ *\$ (?:[A-Z_]+=\S+ )*tconv (.+)$", page.read_text(), re.MULTILINE):
        if "--help" not in line:
            parse(line)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("explain", 2, "which layer? 64,32,4,2,1, or --layers FILE"),
        ("explain --layer 64,32", 2, "needs kernel_size"),
        ("explain --layer 4,4,3 --input 4x4", 2, "BATCHxHEIGHTxWIDTH"),
        ("explain --layer 4,4,3 --arch sm_99", 2, "got 'sm_99'"),
        ("explain --layer 4,4,3 --arch hopper", 2, "got 'hopper'"),
        ("explain --input 1x4x4", 2, "--input goes with --layer"),
        ("explain --only a", 2, "--only chooses from --layers FILE"),
        ("explain --layers /no/such/file", 1, "No such file or directory: /no/such/file"),
        ("explain --layer 4,4,3 --layer 4,4,2 --png a.png", 2, "--png draws one layer, got 2"),
        ("verify --problem a.py", 2, "--problem goes with --exported"),
        ("export -o out.py", 2, "either a file with a Model, or --layer"),
        ("export a.py --layer 4,4,3 -o out.py", 2, "either a file with a Model, or --layer"),
        ("export /no/such.py -o out.py", 1, "/no/such.py is no file"),
        ("export --layer 4,4,3 -o /no/out.py", 1, "/no, where out.py is to go, is no folder"),
        ("export --layer 4,4,3 -o out.py --arch sm_10", 2, "got 'sm_10'"),
    ],
)
def test_errors_are_one_line(line, code, says, capsys):
    assert cli.main(shlex.split(line)) == code
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith(f"tconv {line.split()[0]}: ")
    assert error.count("\n") == 1
    assert ("--help" in error) == (code == 2)


def test_without_a_command_it_prints_the_help(capsys):
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith("usage: tconv") and "  explain " in text


def test_version(capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["--version"])
    assert raised.value.code == 0
    assert capsys.readouterr().out == f"tconv {tconv.__version__}\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("explian", "'explian'; did you mean explain? (see tconv --help)"),
        ("verify --laier 4,4,3", "did you mean --layer? (see tconv verify --help)"),
        ("bench --repaet=40", "did you mean --repeat? (see tconv bench --help)"),
        ("info --zzzz", "unrecognized arguments: --zzzz (see tconv info --help)"),
        ("--verison", "did you mean --version? (see tconv --help)"),
        ("verify --dtype int8", "(see tconv verify --help)"),
    ],
)
def test_misspelled_names_lead_to_the_right_one(line, says, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(shlex.split(line))
    assert raised.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_unknown_layer_lists_the_known(tmp_path, capsys):
    path = tmp_path / "layers.json"
    path.write_text(json.dumps([Layer.parse("4,4,3").record() | {"name": "first"}]))
    assert cli.main(["explain", "--layers", str(path), "--only", "second"]) == 2
    assert "it has first" in capsys.readouterr().err
    path.write_text("[]")
    assert cli.main(["explain", "--layers", str(path)]) == 2
    assert "has no layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (NoKernelError("no kernel can run it:\n  a: no\n  b: neither"), "no kernel can run it: "
         "a: no; b: neither"),
        (CompileError("x did not compile", "note\nx.cu(3): error: no\nerror: 2"),
         "x did not compile; x.cu(3): error: no"),
        (KeyError("lost"), "internal error, KeyError: 'lost'; --debug shows where, for a bug "
         "report"),
        (KeyboardInterrupt(), None),
    ],
)  # fmt: skip
def test_any_error_is_one_line_and_debug_shows_the_traceback(monkeypatch, capsys, error, line):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr("tconv.cli.explain.layers_given", fails)
    arguments = ["explain", "--layer", "4,4,3"]
    assert cli.main(arguments) == (1 if line else 130)
    assert capsys.readouterr().err == (f"tconv explain: {line}\n" if line else "")
    if line:
        assert cli.main([*arguments, "--debug"]) == 1
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_bad_setting_stops_a_command(monkeypatch, capsys):
    monkeypatch.setenv("TCONV_DEBUG", "verbose")
    assert cli.main(["explain", "--layer", "4,4,3"]) == 1
    assert "TCONV_DEBUG must be 0, 1, 2 or 3" in capsys.readouterr().err


def test_closed_pipe_is_no_error():
    done = subprocess.run(
        f"{sys.executable} -m tconv explain --layer 4,4,3 --source | head -n 1",
        shell=True, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.startswith("// ")
    assert "for forward 8x4x64x64" in done.stdout
    assert done.stderr == ""


def test_info_for_machines(monkeypatch, capsys):
    monkeypatch.setenv("TCONV_STRICT", "1")
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    values = {variable["name"]: variable["set_to"] for variable in record["settings"]}
    assert values["TCONV_STRICT"] == "1"
    assert values["TCONV_SANITIZE"] in (None, os.environ.get("TCONV_SANITIZE"))
    found = {finding["what"]: finding["found"] for finding in record["found"]}
    assert found["tconv"].startswith(tconv.__version__)
    for what in ("Python", "torch", "driver", "NVRTC", "C++ compiler", "disassembler"):
        assert found[what]


def test_info_has_keys_to_read(cache_folder, monkeypatch, capsys):
    DiskCache(cache_folder).put(f"other-{'0' * 64}", b"x")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    device = types.SimpleNamespace(
        name="H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda ordinal: device)
    assert cli.main(["info", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["torch"] == torch.__version__
    assert [device["arch"] for device in record["devices"]] == ["sm_90"]
    assert record["cache"]["entries"] == 1
    assert record["cache"]["folder"] == str(cache_folder)

    cache_folder.chmod(0o777)
    assert cli.main(["info", "--json"]) == 0
    cache = json.loads(capsys.readouterr().out)["cache"]
    assert cache["entries"] is None and "written by others" in cache["refusal"]

    monkeypatch.setenv("TCONV_CACHE_LIMIT", "much")
    assert cli.main(["info", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["torch"] == torch.__version__


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TCONV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cache(cache_folder, monkeypatch, capsys):
    assert cli.main(["cache"]) == 0
    assert "0 bytes of 1.0 GiB\n  0 kernels, 0 bytes\n" in capsys.readouterr().out

    monkeypatch.setenv("TCONV_KERNEL", "general_forward")
    assert cli.main(["explain", "--layer", "4,4,3", "--arch", "sm_80"]) == 0
    digest = "0" * 64
    stored = DiskCache(cache_folder)
    stored.put(f"other-{digest}", b"x" * 3000)
    stored.put(f"autotune-forward-{digest}", b"{}", {"kind": "choice", "stem": "autotune-forward"})
    stored.put(f"tiny-emulated-{digest}", b"x" * 2048, {"kind": "emulated", "stem": "tiny"})
    stored.write_source(f"tiny-emulated-{digest}.cpp", "text")
    (cache_folder / f"broken-{digest}.tconv").write_bytes(b"too short")
    (cache_folder / "mine.txt").touch()
    (cache_folder / "sources" / "notes.txt").touch()

    capsys.readouterr()
    assert cli.main(["cache", "list"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"general_forward +sm_80 +\S+ KiB +\d+ +NVRTC", text)
    assert "damaged" in text
    assert "3 kernels, " in text
    assert "1 choice by autotune, " in text
    assert "autotune-forward" in text
    assert "1 build of the emulator, 2." in text

    assert cli.main(["cache", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    entries = {entry["kernel"]: entry for entry in record["entries"]}
    assert [name for name, entry in entries.items() if entry["damaged"]] == [f"broken-{digest}"]
    assert entries["general_forward"]["registers"] > 0
    assert entries["tiny"]["kind"] == "emulated"
    assert record["limit"] == 1 << 30
    assert record["bytes"] == sum(entry["bytes"] for entry in record["entries"]) + len("text")

    assert cli.main(["cache", "clear"]) == 0
    said = capsys.readouterr().out
    assert "Removed 3 kernels, 1 build of the emulator, 1 choice by autotune" in said
    assert "Left what tconv did not write: mine.txt, sources/notes.txt." in said
    left = sorted(str(path.relative_to(cache_folder)) for path in cache_folder.rglob("*"))
    assert left == ["mine.txt", "sources", "sources/notes.txt"]


@pytest.mark.parametrize("action", ["size", "list", "clear"])
def test_cache_that_others_can_write_to(cache_folder, capsys, action):
    path = DiskCache(cache_folder).put(f"other-{'0' * 64}", b"x")
    cache_folder.chmod(0o777)
    assert cli.main(["cache", action]) == 1
    assert f"can be written by others (mode 0777): run `chmod 700 {cache_folder}`" in (
        capsys.readouterr().err
    )
    assert path.exists()
    assert cli.main(["info"]) == 0
    assert "others could put code there" in " ".join(capsys.readouterr().out.split())


def test_cache_that_is_off(monkeypatch, capsys):
    monkeypatch.setenv("TCONV_CACHE", "0")
    assert cli.main(["cache", "clear"]) == 0
    assert "The cache is off" in capsys.readouterr().out


def test_export_passes_its_options_on(monkeypatch, capsys, tmp_path):
    """The shell alone: a stand-in writes the file."""
    asked = []

    class TheirLayer(types.SimpleNamespace):
        pass

    def export_file(*arguments, **options):
        asked.append((arguments, options))
        return "Wrote it."

    stand_in = types.ModuleType("tconv.export")
    stand_in.export_file, stand_in.Layer = export_file, TheirLayer
    monkeypatch.setitem(sys.modules, "tconv.export", stand_in)
    monkeypatch.setattr(tconv, "export", stand_in, raising=False)
    out, problem = tmp_path / "out.py", tmp_path / "problem.py"
    problem.touch()
    assert cli.main(["export", str(problem), "-o", str(out), "--arch", "sm_80"]) == 0
    line = ["export", "--layer", "6,8,3x5,2", "--input", "2x7x9", "-o", str(out)]
    assert cli.main([*line, "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == "Wrote it.\nWrote it.\n"
    assert asked[0] == ((problem, None, out), {"arch": "sm_80", "dtype": None})
    (_, layer, _), options = asked[1]
    assert options == {"arch": "sm_90a", "dtype": "bfloat16"}
    assert (layer.kernel_size, layer.stride, layer.batch, layer.size) == ((3, 5), (2, 2), 2, (7, 9))


def test_export_writes_a_file(tmp_path, capsys):
    out = tmp_path / "out.py"
    assert cli.main(["export", "--layer", "4,4,3", "--input", "1x4x4", "-o", str(out)]) == 0
    assert "class ModelNew" in out.read_text()
    assert str(out) in capsys.readouterr().out


def test_export_of_a_file_without_a_layer(tmp_path, capsys):
    problem, out = tmp_path / "problem.py", tmp_path / "out.py"
    problem.write_text("x = 1\n")
    assert cli.main(["export", str(problem), "-o", str(out)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize("width", range(20, 80, 6))
def test_a_narrow_terminal_gets_fewer_columns_and_no_cell_cut(width):
    table = Table(box=box.SIMPLE_HEAD)
    for number in range(6):
        table.add_column(f"head {number}", justify="right", no_wrap=True)
    rows = [[f"{row}.{column}e-{row + column}" for column in range(6)] for row in range(3)]
    for row in rows:
        table.add_row(*row)
    text = io.StringIO()
    terminal = Console(file=text, force_terminal=True, width=width, color_system=None)
    print_whole(table, terminal, spare=(4, 2, 5))
    said = re.search(r"Left out, for want of room: (.*)\.", " ".join(text.getvalue().split()))
    left_out = [int(name.split()[1]) for name in said[1].split(", ")] if said else []
    assert left_out in ([], [4], [2, 4], [2, 4, 5])
    for row in rows:
        kept = [cell for number, cell in enumerate(row) if number not in left_out]
        assert "  ".join(kept).split() in [line.split() for line in text.getvalue().splitlines()]
    if len(left_out) < 3:
        assert all(len(line) <= width for line in text.getvalue().splitlines())
    assert bool(left_out) == (width < 55)


def test_a_file_gets_all_columns():
    table = Table("left", "right")
    table.add_row("a" * 50, "b" * 90)
    text = io.StringIO()
    print_whole(table, Console(file=text, width=40), spare=(0, 1))
    assert "a" * 50 in text.getvalue() and "b" * 90 in text.getvalue()
