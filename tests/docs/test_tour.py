"""The tour: its cells run as they are, and its outputs are committed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
matplotlib = pytest.importorskip("matplotlib")

TOUR = Path(__file__).parents[2] / "examples" / "tour.ipynb"
CELLS = [cell for cell in json.loads(TOUR.read_text())["cells"] if cell["cell_type"] == "code"]


def test_the_tour_runs(capsys):
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = {"__name__": "__main__"}
    try:
        for cell in CELLS:
            code = "".join(cell["source"])
            exec(compile(code, "cell", "exec"), names)
            printed = capsys.readouterr().out
            said = "".join("".join(out.get("text", "")) for out in cell["outputs"])
            # The numbers of a run may differ a little between machines.
            assert len(printed.splitlines()) == len(said.splitlines()), code
        assert names["losses"][-1] < 0.7 * names["losses"][0]
        # The last token looks most at the one that followed its last copy.
        looks = names["inspect"].rows(names["model"], {"input_ids": names["ids"][:1]}, [31])
        assert looks[1].top(1, 0, 1)[0][0] == 24
    finally:
        matplotlib.rcParams.update(matplotlib.rcParamsDefault)
        pyplot.close("all")


def test_its_outputs_are_committed_and_name_no_folder():
    shown = [out for cell in CELLS for out in cell["outputs"]]
    assert sum("image/png" in out.get("data", {}) for out in shown) == 3
    assert not any(out.get("name") == "stderr" or out["output_type"] == "error" for out in shown)
    assert "site-packages" not in TOUR.read_text()
