"""Notebooks run from top to bottom in a fresh kernel and are stored with their outputs.

`make notebooks` runs this file as a script. It executes all notebooks, stores their outputs, and copies the picture of
the cell with the tag `cover` to docs/images, where the introduction of the notebook shows it.
"""

from __future__ import annotations

import base64
import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
IMAGES = FOLDER.parent / "docs" / "images"
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|Users|root|tmp|var|opt|work)/\w")
MAX_BYTES = 1_000_000


def run(path: Path, env: dict[str, str]) -> nbformat.NotebookNode:
    """The notebook at `path` executed in a kernel of this interpreter. Raises where a cell does."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,  # times and widgets differ in each run
        resources={"metadata": {"path": str(path.parent)}},
    )
    # A notebook requests its devices itself.
    return client.execute(env={name: value for name, value in env.items() if name != "XLA_FLAGS"})


def cover(notebook: nbformat.NotebookNode) -> bytes:
    """Return the picture of the cell with the tag `cover`."""
    (cell,) = [cell for cell in notebook.cells if "cover" in cell.metadata.get("tags", ())]
    images = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
    return base64.b64decode(images[0])


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.matrix
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, child_env: dict[str, str]) -> None:
    run(path, child_env)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_kept_small_and_clean(path: Path) -> None:
    cells = code_cells(path)
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs, f"{path.name} has no outputs: run `make notebooks`"
    assert not [output for output in outputs if output.output_type == "error"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "run from top to bottom, once"
    text = path.read_text()
    assert len(text) < MAX_BYTES
    images = re.compile(r'"image/\w+": "[^"]*"')  # base64 spells anything sooner or later
    found = MACHINE_PATH.findall(images.sub("", text))
    assert not found, f"{path.name} names places of one machine: {found[:3]}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_introduction_shows_the_cover(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert f"(../docs/images/{path.stem}.png)" in notebook.cells[0].source
    assert (IMAGES / f"{path.stem}.png").read_bytes() == cover(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_ends_with_two_exercises(path: Path) -> None:
    last = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"][-1].source
    assert re.findall(r"^(\d)\. ", last.partition("## Exercises")[2], flags=re.MULTILINE) == ["1", "2"]


if __name__ == "__main__":
    for notebook_path in NOTEBOOKS:
        print(f"running {notebook_path.relative_to(FOLDER.parent)}", flush=True)
        executed = run(notebook_path, {**os.environ, "JAX_PLATFORMS": "cpu"})
        executed.metadata.pop("widgets", None)  # their ids would change with every run
        for cell in executed.cells:  # messages on stderr depend on the machine
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
                for output in cell.outputs:
                    output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
        nbformat.write(executed, notebook_path)
        (IMAGES / f"{notebook_path.stem}.png").write_bytes(cover(executed))
    sys.exit(None if NOTEBOOKS else f"no notebooks in {FOLDER}")
