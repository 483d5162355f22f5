"""README.md and docs/: Python blocks run, links lead to files, error codes have descriptions."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pictures import PICTURES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TOPICS = [page for page in PAGES[1:] if page.stem not in ("index", "glossary", "notebooks")]
WITH_PYTHON = [page for page in PAGES if "\n```python\n" in page.read_text()]


def name_of(page: Path) -> str:
    return page.stem


def test_readme_has_a_program() -> None:
    assert WITH_PYTHON[0] == ROOT / "README.md"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        path = (page.parent / target) if target else page
        assert path.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_are_short(page: Path) -> None:
    """A reader goes through a page in one sitting: at most 200 lines of README and 250 of the other pages."""
    assert len(page.read_text().splitlines()) <= (200 if page.stem == "README" else 250)


def test_table_of_extensions_names_files() -> None:
    """CONTRIBUTING.md has a table of the files, tests and docs to change for each kind of extension."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Where to add\n")[1].split("\n### ")[0]
    rows = [line.split("|")[2:5] for line in section.splitlines() if line.startswith("| a")]
    assert 10 <= len(rows) <= 15
    for row in rows:
        for folder, cell in zip(("meshpar", "tests", "docs"), row, strict=True):
            for path in re.findall(r"`([\w/]+(?:/|\.\w+))`", cell):
                assert (ROOT / folder / path).exists() or (ROOT / path).exists(), path


def test_topics_have_a_picture_that_a_script_draws() -> None:
    """Scripts are docs/pictures.py, tests/tools/report_picture.py and the notebooks."""
    drawn = {"report", "report_page", *PICTURES, *(notebook.stem for notebook in (ROOT / "notebooks").glob("*.ipynb"))}
    for page in TOPICS:
        names = re.findall(r"!\[[^]]+\]\(images/([^)]+)\.\w+\)", page.read_text())
        assert names, page
        assert drawn.issuperset(names), page


def test_error_codes_are_described() -> None:
    pytest.importorskip("mkdocs")
    reference = importlib.import_module("docs.reference")
    assert reference.raised_codes().keys() == reference.error_codes().keys()
    assert all(entry.keys() == {"cause", "fix"} for entry in reference.error_codes().values())


@pytest.mark.matrix
@pytest.mark.parametrize("page", WITH_PYTHON, ids=name_of)
def test_python_blocks_of_a_page_run_in_order(page: Path, child_env: dict[str, str], tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:__main__", "-c", "\n".join(blocks)],
        cwd=tmp_path,
        env=child_env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
