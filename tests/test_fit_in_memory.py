"""The tables about memory and half precision in the docs are those that `benchmarks/fit_in_memory.py` prints."""

import contextlib
import importlib.util
import io
from pathlib import Path

import pytest
import torch

from surefoot.diagnose.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def printed():
    """Both tables of the benchmark, as it prints them: {first cell: the other cells}."""
    path = ROOT / "benchmarks" / "fit_in_memory.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    torch.manual_seed(0)
    model, tokens = benchmark.Decoder(), torch.randint(0, benchmark.WORDS, (benchmark.ROWS, benchmark.LENGTH + 1))

    def table(function, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            function(*arguments)
        lines = output.getvalue().splitlines()
        return {line[:40].strip(): line[40:].replace("MiB", "").split() for line in lines}

    return table(benchmark.memory, model, tokens), table(benchmark.precision, model, tokens[:4])


def documented(page, heading):
    text = (ROOT / "docs" / page).read_text()
    rows = text[text.index(heading) :].partition("\n\n")[0].splitlines()[2:]
    return {first: values for first, *values in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)}


def test_recomputed_blocks_and_microbatches_keep_the_documented_share_of_memory(printed):
    counted = {name: cells for name, cells in printed[0].items() if name}
    table = documented("memory.md", "| | kept for the backward pass |")
    assert set(table) == set(counted)
    for name, (share,) in table.items():
        assert float(counted[name][1]) == pytest.approx(float(share), abs=0.03), name
    assert all(float(cells[3]) < 1e-6 for cells in counted.values())  # the gradient is the same in all of them


def test_the_error_of_each_module_in_half_precision_is_the_documented_one(printed):
    table = documented("precision.md", "| only this in half precision |")
    assert len(table) == 4
    for name, errors in table.items():
        measured = [float(each) for each in printed[1][name]]
        assert measured == pytest.approx([float(each) for each in errors], rel=0.5), name


def test_recomputing_is_among_the_fixes_for_running_out_of_memory():
    fixes = CATALOGUE["device.out-of-memory"].fixes
    assert any("run_microbatches" in fix for fix in fixes)
    assert any("torch.utils.checkpoint" in fix for fix in fixes)
