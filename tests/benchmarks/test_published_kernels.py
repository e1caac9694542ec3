"""The table of published token kernels: the page has the committed figures, and these are right."""

import json
import os
import runpy
from pathlib import Path

import pytest

from mercer import inspect

pytest.importorskip("tokenizers")

ROOT = Path(__file__).parents[2]
COMMITTED = ROOT / "results" / "token-kernels"
DATA = Path(os.environ.get("MERCER_DATA", ROOT.parent / "shared" / "data"))
# Exact from run to run; p-values and intervals depend on how often is drawn.
EXACT = ("tokens", "mean", "r2_frequency", "r2_tags", "tags_beyond", "frequency_beyond")


def test_the_page_has_the_committed_rows():
    page = (ROOT / "docs" / "token-kernels.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (COMMITTED / "published.md").read_text().splitlines()
        if line.startswith(("| shakes", "| victorian")) and line.count("|") == 11
    ]
    assert len(rows) == 10
    for row in rows:
        # The page leaves out the two R² of one cause alone.
        assert "| " + " | ".join(row[:4] + row[6:]) + " |" in page


@pytest.mark.skipif(
    not (DATA / "style" / "twikers-published").is_dir(),
    reason="the published weights are not here; MERCER_DATA may name the folder that has them",
)
def test_the_committed_figures_are_those_of_the_published_weights():
    script = runpy.run_path(str(ROOT / "benchmarks" / "published_kernels.py"))
    tagger = inspect.read_conllu(
        *(DATA / "style" / f"ud-ewt-{part}.conllu.xz" for part in ("train", "dev", "test"))
    )
    found = script["read"](DATA, "shakes", tagger, permutations=1, resamples=2)
    committed = json.loads((COMMITTED / "published.json").read_text())["shakes"]
    for band, effect in committed["effects"].items():
        for key in EXACT:
            assert found["effects"][band][key] == pytest.approx(effect[key], rel=1e-6), (band, key)
    assert set(found["tags"]) == set(committed["tags"])
    for tag, one in committed["tags"].items():
        assert found["tags"][tag]["given"] == pytest.approx(one["given"], rel=1e-6)
        assert one["interval"][0] <= one["given"] <= one["interval"][1]


def test_all_tags_at_once_are_partial_rank_correlations():
    import torch

    script = runpy.run_path(str(ROOT / "benchmarks" / "published_kernels.py"))
    torch.manual_seed(0)
    values, seen = torch.randn(50).double(), torch.randint(1, 9, (50,)).double()
    here = (torch.rand(50, 3) > 0.6).double()
    both = script["partial"](values, here, seen)
    alone = script["partial"](values, here, None)
    for n in range(3):
        want = inspect.partial_rank_correlation(values, here[:, n], seen)
        assert float(both[n]) == pytest.approx(want, abs=1e-12)
        want = inspect.partial_rank_correlation(values, here[:, n])
        assert float(alone[n]) == pytest.approx(want, abs=1e-12)
