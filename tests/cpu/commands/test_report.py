"""`tconv report`: a page that needs nothing else, with every layer on it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import pytest

from tconv import cli
from tconv.bench.rows import REQUIRED, Row, merged, read_rows, write_rows

WHAT = dict(dtype="float32", layout="contiguous", math="tf32", direction="forward",
            device="h200", commit="abc")  # fmt: skip


def rows():
    return [
        Row(
            **WHAT, layer=f"layer <{number}>", ours_ms=1.0, ours_p20_ms=0.9, ours_p80_ms=1.1,
            eager_ms=2.0 * number, best_ms=1.5, floor_ms=0.5, bound="memory", error=3e-4,
            error_cudnn=3e-4, flops=10**9 * number, bytes=10**7, repeats=30, gpu="NVIDIA H200",
            torch="2.11", kernel="general_forward 8x8", measured=f"2026-01-0{number}",
        )
        for number in (1, 2, 4)
    ]  # fmt: skip


@pytest.fixture
def report(tmp_path, capsys):
    pytest.importorskip("matplotlib")

    def run(*files, code=0):
        got = cli.main(["report", *map(str, files), "-o", str(tmp_path / "page")])
        captured = capsys.readouterr()
        assert got == code, captured
        if code:
            return captured.err
        return (tmp_path / "page" / "index.html").read_text()

    return run


def test_page_is_self_contained_and_has_every_layer(report, tmp_path):
    write_rows(tmp_path / "rows", rows())
    page = report(tmp_path / "rows.json")
    for number in (1, 2, 4):
        assert f"layer &lt;{number}&gt;" in page
    assert "layer <1>" not in page
    # (2 * 4 * 8) ** (1/3) is 4, and the floor is half of ours everywhere.
    assert re.search(r"PyTorch&#x27;s default / tconv</td><td[^>]*>4.00</td>", page)
    assert re.search(r"tconv / floor</td><td[^>]*>2.00</td>", page)
    assert "NVIDIA H200" in page and "abc" in page and "p20 0.9000, p80 1.1000" in page
    assert "2026-01-01 to 2026-01-04" in page
    assert page.count("data:image/png;base64,") == 3
    assert "$" not in re.sub(r"base64,[^\"]*", "", page)
    outside = re.findall(r"(?:src|href)\s*=\s*[\"']?(?!data:)[^\"' >]+|url\(|@import|<script", page)
    assert outside == []
    pictures = sorted((tmp_path / "page").glob("*.png"))
    assert [path.name.partition("-")[0] for path in pictures] == ["floor", "roofline", "speedup"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_every_rival_that_was_timed_has_a_column(report, tmp_path):
    write_rows(tmp_path / "rows", rows())
    assert "FlagGems / tconv" not in report(tmp_path / "rows.json")
    timed = [dataclasses.replace(row, flaggems_ms=3.0) for row in rows()]
    write_rows(tmp_path / "rows", timed)
    page = report(tmp_path / "rows.json")
    assert re.search(r"FlagGems / tconv</td><td[^>]*>3.00</td>", page)


def test_rows_of_a_cpu_have_no_floor_and_it_is_said(report, tmp_path, capsys):
    layers = tmp_path / "layers.json"
    layers.write_text(
        json.dumps(
            [
                {
                    "name": "one",
                    "in_channels": 2,
                    "out_channels": 2,
                    "kernel_size": 2,
                    "height": 3,
                    "width": 3,
                }
            ]
        )
    )
    given = ["--layers", str(layers), "--device", "cpu", "--repeat", "2", "--out", str(tmp_path)]
    assert cli.main(["bench", *given, "--direction", "forward,weight_gradient"]) == 0
    capsys.readouterr()
    page = report(tmp_path / "bench-float32-contiguous.json")
    assert page.count("No floor: the ceilings of cpu were not measured") == 2
    assert page.count("data:image/png;base64,") == 4
    assert ">one<" in page
    assert "a look, not a figure that counts" in page


def test_the_last_file_of_a_row_counts(report, tmp_path):
    write_rows(tmp_path / "old", rows())
    new = [Row(**(WHAT | {"commit": "new"}), layer="layer <1>", ours_ms=1.0, eager_ms=64.0)]
    write_rows(tmp_path / "new", new)
    page = report(tmp_path / "old.json", tmp_path / "new.json")
    assert "abc, new" in page
    assert re.search(r"default / tconv</td><td[^>]*>12.70</td>", page)  # (64 * 4 * 8) ** (1/3)


def test_a_wrong_row_is_said(report, tmp_path):
    bad = [*rows(), Row(**WHAT, layer="bad", wrong="LaunchError: out of <luck>")]
    write_rows(tmp_path / "rows", bad)
    page = report(tmp_path / "rows.json")
    assert "1 of 4 results are wrong" in page
    assert "3 of 4 results were compared with float64" in page
    assert "out of &lt;luck&gt;" in page


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "must hold a list of rows, as `tconv bench` writes it; got an object"),
        ("[1]", "must hold a list of rows"),
        ("no", "is no JSON file"),
        ('[{"layer": "a"}]', "row 0 lacks dtype, layout, "),
    ],
)
def test_files_without_rows(report, tmp_path, text, says):
    path = tmp_path / "rows.json"
    path.write_text(text)
    error = report(path, code=1)
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_no_rows_at_all(report, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("[]")
    assert "`tconv bench` makes some" in report(path, code=2)
    assert "No such file" in report(tmp_path / "missing.json", code=1)


def test_rows_come_back_as_they_were_written(tmp_path):
    given = [*rows(), Row(**WHAT, layer="nan", ours_ms=float("nan"))]
    write_rows(tmp_path / "rows", given)
    back = read_rows(tmp_path / "rows.json")
    assert back[:3] == given[:3]
    assert back[3].ours_ms is None
    path = tmp_path / "rows.json"
    record = json.loads(path.read_text())[0]
    assert set(REQUIRED) <= set(record)
    path.write_text(json.dumps([record | {"column_of_a_later_version": 1}]))
    assert read_rows(path) == given[:1]
    assert merged(given, []) == given
    with pytest.raises(ValueError, match="at least one row"):
        write_rows(tmp_path / "none", [])


def test_without_matplotlib_the_command_is_named(capsys, monkeypatch, tmp_path):
    write_rows(tmp_path / "rows", rows())
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "page"
    assert cli.main(["report", str(tmp_path / "rows.json"), "-o", str(page)]) == 1
    error = capsys.readouterr().err
    assert error.endswith("which does not import here: pip install matplotlib\n")
    assert error.count("\n") == 1
    assert not page.exists()
