"""The documentation says what is so: its examples run, its tables are the code's."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from tconv import settings

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def variables_table() -> str:
    """The settings as CONTRIBUTING.md shows them."""
    rows = ["| variable | default | allowed | meaning |", "|---|---|---|---|"]
    for variable in settings.VARIABLES:
        default = f"`{variable.default}`" if variable.default else ""
        rows.append(f"| `{variable.name}` | {default} | {variable.allowed} | {variable.meaning} |")
    return "\n".join(rows)


def test_contributing_lists_the_environment_variables():
    # If this fails, put the table that it prints into CONTRIBUTING.md.
    assert variables_table() in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_variable_named_exists(page):
    known = {variable.name for variable in settings.VARIABLES}
    named = set(re.findall(r"\bTCONV_[A-Z_]+\b", page.read_text()))
    macros = {"TCONV_KERNEL", "TCONV_SHARED", "TCONV_DYNAMIC_SHARED", "TCONV_DEVICE", "TCONV_CHECK"}
    assert named - macros <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_doctests(page):
    failures, _ = doctest.testfile(str(page), module_relative=False)
    assert failures == 0


def test_readme_example(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out == "1 layer replaced\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
