"""The documentation says what is so: its examples run, its tables are the code's."""

from __future__ import annotations

import doctest
import re
import runpy
from pathlib import Path

import pytest

import tconv
from tconv import settings
from tconv.kernels import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DOCS, RESULTS = ROOT / "docs", ROOT / "benchmarks" / "results" / "h200"
PAGES = sorted([*ROOT.glob("*.md"), RESULTS / "README.md", *DOCS.rglob("*.md")])


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


def anchors(page: Path) -> set[str]:
    """What a link may name behind its #: the headings, as the site and a repository's pages do."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_prose_exist(page):
    # Paths of this repository, from its root: docs/x.md, benchmarks/results/h200/y.csv.
    for path in re.findall(
        r"`((?:docs|benchmarks|examples|tests)/[\w./-]+\.\w+)`", page.read_text()
    ):
        made = path.startswith("benchmarks/results/cpu/")
        assert made or (ROOT / path).exists(), path


def test_results_are_those_of_the_committed_rows():
    # If this fails: python docs/refresh.py
    refresh = runpy.run_path(str(DOCS / "refresh.py"))
    for page in refresh["PAGES"]:
        assert refresh["SECTION"].search(page.read_text()), "no section to fill"
        assert refresh["current"](page) == page.read_text(), page.name


ENGINE = ("sm90_forward", "sm90_input_gradient", "sm90_weight_gradient")
SM80 = ("sm80_forward", "sm80_input_gradient", "sm80_weight_gradient")
DEPTHWISE = ("depthwise_forward", "depthwise_input_gradient", "depthwise_weight_gradient")
POINTWISE = ("pointwise_forward", "pointwise_mma_forward")
PAGES_OF_SEVERAL = {
    "engine": ("The engine", ENGINE),
    "sm80": ("16-bit types from sm_80 on", SM80),
    "depthwise": ("Depthwise layers", DEPTHWISE),
    "pointwise": ("Kernels of 1x1", POINTWISE),
}
"""The families that share a page."""


@pytest.mark.parametrize(
    "stem", sorted({*(family.STEM for family in FAMILIES), *ENGINE, *DEPTHWISE})
)
def test_every_family_has_a_page_of_two_screens(stem):
    name = title = stem
    for page, (of_page, stems) in PAGES_OF_SEVERAL.items():
        if stem in stems:
            name, title = page, f"{of_page}: {', '.join(stems)}"
    page = DOCS / "kernels" / f"{name}.md"
    assert page.read_text().startswith(f"# {title}\n")
    assert len(page.read_text().splitlines()) <= 100
    assert f"| [{stem}]({name}.md) |" in (DOCS / "kernels" / "index.md").read_text()


def test_the_site_leads_to_every_page():
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    named = set(re.findall(r"[\w./-]+\.md", nav))
    assert named == {page.relative_to(ROOT).as_posix() for page in PAGES}


def test_the_citation_is_of_this_version():
    assert f"\nversion: {tconv.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_every_kept_row_is_explained_and_there():
    table = (RESULTS / "README.md").read_text()
    kept = {file.name for file in RESULTS.iterdir()} - {"README.md"}
    named = set()
    for cell in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", cell)
        # `a_v1.log`, `_v2.log` and `a.json`, `.csv`: what differs.
        stem = re.sub(r"(_v\d)?\.\w+$", "", first)
        named |= {first, *(stem + o if o[0] in "._" else o for o in others)}
    assert kept == named


def test_a_document_or_the_fit_reads_every_kept_row():
    # A file that neither quotes goes.
    pages = [page for page in PAGES if page != RESULTS / "README.md"]
    readers = [*pages, ROOT / "benchmarks" / "fit_costs.py", DOCS / "refresh.py"]
    text = "\n".join(file.read_text() for file in readers)
    for file in RESULTS.iterdir():
        assert file.name.startswith("bench-") or file.name in text, file.name
