"""The notebooks as a user runs them: every cell in a kernel, and their programs under torchrun too."""

from __future__ import annotations

import base64
import io
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from cp_styles import Checks, head_tail
from cp_styles.testing import run_ranks
from tutorials.site.notebooks import environment, one_kernel

nbformat = pytest.importorskip("nbformat", reason="notebooks need pip install -e '.[notebook]'")
pytest.importorskip("nbclient", reason="notebooks need pip install -e '.[notebook]'")
pytest.importorskip("ipykernel", reason="notebooks need pip install -e '.[notebook]'")


ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))

pytestmark = pytest.mark.process


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # nothing of this goes to the user's home
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        with one_kernel(tmp_path_factory.mktemp) as running:
            yield running


def printed(notebook) -> str:
    return "".join(
        output.text
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == "stdout"
    )


def test_there_are_notebooks():
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 6


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_clean(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.read_text().isascii()
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws_and_does_not_complain(path, kernel):
    import matplotlib.image

    if "from transformers import" in path.read_text():
        pytest.importorskip("transformers", reason="this notebook needs pip install -e '.[clients]'")
    notebook, _ = kernel.executed(path)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
    cells = [cell for cell in code_cells(notebook) if "plt." in cell.source]
    assert cells
    for cell in cells:
        pictures = [output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {})]
        assert len(pictures) == cell.source.count("plt.show()") > 0
        for picture in pictures:
            pixels = matplotlib.image.imread(io.BytesIO(base64.b64decode(picture)))[..., :3]
            # Axes without content are grey and black on white; content has colours, and several of them.
            coloured = pixels[pixels.max(-1) - pixels.min(-1) > 0.2]
            assert len({tuple(pixel) for pixel in coloured.tolist()}) > 2


@pytest.fixture(scope="module")
def attention(kernel):
    notebook, folder = kernel.executed(NOTEBOOKS[0])
    return notebook, folder / "attention_example.py"


def torchrun(script: Path, ranks: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run([*command, script], env=environment(), capture_output=True, text=True, timeout=900)


@pytest.mark.notebook
def test_the_attention_notebook_says_what_it_computed(attention):
    text = printed(attention[0])
    assert "Model on 4 ranks, mesh axes ('cp',): equal to one device" in text
    assert "the same training, up to the order in which numbers are added" in text
    assert "process 0 of 2: " in text
    assert "process 1 of 2: " in text
    for what in ("dropout", "another layout", "rank 1 in float32"):
        assert f"{what}: an error on 4 of 4 ranks" in text


MISTAKES = {
    "gradients unsummed": ("sum_gradients(model, mesh)", "None"),
    "positions from 0": ("layout.positions(rank)", "torch.arange(layout.lengths[rank])"),
    "cut with another layout": ("layout = balancer(LENGTH, ranks)", "layout = contiguous(LENGTH, ranks)"),
}


def with_mistake(script: Path, name: str, folder: Path) -> Path:
    source, (right, wrong) = script.read_text(), MISTAKES[name]
    assert source.count(right) == 1
    changed = folder / script.name
    changed.write_text(
        source.replace(right, wrong).replace("    global_loss,\n", "    contiguous,\n    global_loss,\n")
    )
    return changed


@pytest.mark.notebook
@pytest.mark.filterwarnings("default::cp_styles.UnreducedGradientsWarning")
@pytest.mark.parametrize("name", MISTAKES)
def test_its_comparison_sees_a_mistake(attention, tmp_path, name):
    program = runpy.run_path(str(with_mistake(attention[1], name, tmp_path)))
    expected, layout = program["alone"](), head_tail(program["LENGTH"], 2)
    # Neither refused nor proved for once, so that there is something to compare.
    main = partial(program["main"], proved=True, checks=Checks(only_warn=True))
    for rank, found in enumerate(run_ranks(main, 2)):
        assert max(program["errors"](found, expected, layout, rank).values()) > 1e-3


@pytest.mark.notebook
def test_its_program_under_torchrun(attention, tmp_path):
    """The same loss, and exit codes of mistakes: one after another in the same processes, whose start takes longer."""
    programs = {"as it is": str(attention[1])}
    for index, name in enumerate(("positions from 0", "gradients unsummed")):
        folder = tmp_path / str(index)
        folder.mkdir()
        programs[name] = str(with_mistake(attention[1], name, folder))
    script = tmp_path / "programs.py"
    script.write_text(
        f"""
import os, runpy, sys
import torch.distributed as dist
from tests.process import several

def run(path):
    leave, os._exit = os._exit, sys.exit
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        return end.code
    except Exception as error:
        return type(error).__name__
    finally:
        os._exit = leave
        if dist.is_initialized():  # after an error
            dist.destroy_process_group()

several.run({{name: lambda path=path: run(path) for name, path in {programs!r}.items()}})
"""
    )
    done = torchrun(script, 2)
    assert done.returncode == 0, done.stderr
    statuses = {"as it is": 0, "positions from 0": "VerificationError", "gradients unsummed": "VerificationError"}
    assert done.stdout.splitlines()[-1] == str(statuses), done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("process "))
    assert [line.split(":")[0] for line in lines] == ["process 0 of 2", "process 1 of 2"]
    # The loss is the notebook's, and every process has it.
    losses = {line.split("loss ")[1].split(",")[0] for line in lines}
    assert len(losses) == 1
    assert losses.pop() in printed(attention[0])
