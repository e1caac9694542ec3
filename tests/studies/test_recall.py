"""The study of recall: its sizes, its variants, and what it says of the results."""

import pytest

import mercer as mc
from mercer.studies import Row, load
from mercer.studies.recall import (
    KERNELS,
    POSITION,
    SIZES,
    accuracies,
    analyse,
    make,
    most_recalled,
)
from mercer.studies.study import METRICS

pytest.importorskip("transformers")


def test_kernels_differ_in_the_kernel_alone():
    study = make("full")
    assert [variant.name for variant in study.variants][:2] == ["exponential-16", "rbf-16"]
    for variant in study.variants:
        name, _, width = variant.name.rpartition("-")
        assert variant.parts["overrides"] == {"d_model": int(width), "d_ff": 2 * int(width)}
        if name in KERNELS:
            assert variant.parts["position"] == POSITION
            assert set(variant.parts) == {"kernel", "position", "overrides"}


def test_every_kernel_of_the_library_is_in_it():
    text = " ".join(KERNELS.values()) + POSITION + str(make("full").variants)
    # Buckets is made of a tensor alone, and is a kernel of the position as Lookup is.
    # Scaled and Power change another kernel. Bridge leads from one of them to another.
    others = {"Buckets", "Scaled", "Power", "Bridge"}
    names = {kernel.__name__ for kernel in mc.kernels.KERNELS} - others
    assert not {name for name in names if f"{name}(" not in text and name != "Lookup"}


@pytest.mark.parametrize("size", SIZES)
def test_every_job_can_be_built(size):
    from mercer.train import Settings, plan

    study = make(size)
    assert load("recall", size).title == study.title
    width = SIZES[size]["widths"][0]
    for variant in study.variants:
        if variant.name.endswith(f"-{width}"):
            job = study.job(variant, 0)
            counted = plan(Settings(**job.chosen)).counted
            assert counted.total > 0


def test_the_plan_counts_what_a_run_counts():
    from mercer.studies.plan import estimate
    from mercer.train import Settings, plan

    study = make("small")
    found = estimate(study)[0]
    run = plan(Settings(**study.job(study.variants[0], 0).chosen))
    tokens = run.tokens_per_step * 400
    assert found.jobs == 4
    assert found.parameters == run.counted.total
    assert found.tokens == 4 * tokens
    assert found.flops == 4 * tokens * run.counted.flops_per_token


def test_there_is_no_other_size():
    with pytest.raises(ValueError, match="size must be one of full, small, got 'huge'"):
        make("huge")


def test_the_most_pairs_are_those_up_to_which_all_are_recalled():
    assert most_recalled({4: 0.99, 8: 0.9, 16: 0.89, 32: 0.95}) == 8
    assert most_recalled({4: 0.5, 8: 0.95}) == 0
    assert most_recalled({}) == 0


def test_the_analysis_has_both_tables(tmp_path):
    study = make("small")

    def row(name, *seeds, status="done"):
        records = tuple(_record(study, name, n, shares, status) for n, shares in enumerate(seeds))
        return Row(name, len(seeds), records, METRICS["recall"])

    rows = [
        row("rbf-32", {2: 1.0, 4: 0.98, 8: 0.4}, {2: 0.9, 4: 0.94, 8: 0.6}),
        row("lookup-32", {2: 0.1, 4: 0.1, 8: 0.0}),
        row("linear-32", {2: 1.0, 4: 1.0, 8: 1.0}, status="not converged at step 3"),
        row("rbf-64", {2: 1.0, 4: 1.0, 8: 0.95}),
    ]
    assert accuracies(rows[0]) == {2: pytest.approx(0.95), 4: pytest.approx(0.96), 8: 0.5}
    text = analyse(rows, tmp_path)
    assert "| rbf-32 | 0.95 | 0.96 | 0.50 |" in text
    assert "| rbf | 4 | 8 |" in text
    assert "| lookup | 0 |  |" in text
    # The other seeds of a run that did not converge have no mean.
    assert "linear" not in text
    assert analyse([row("rbf-32")], tmp_path) == ""


def _record(study, name, seed, shares, status):
    from mercer.studies import Record

    metrics = {f"accuracy_{pairs}": share for pairs, share in shares.items()}
    metrics["accuracy"] = sum(shares.values()) / len(shares)
    return Record(
        key=f"{name}{seed}", study=study.name, variant=name, seed=seed, status=status,
        metrics=metrics, parameters=1, flops_per_token=1.0, tokens_per_second=None, steps=1,
        seconds=1.0, finished="", settings={}, environment={}, history=[],
    )  # fmt: skip
