"""Can author, period and genre be told from the token kernels of a novel alone?

One language model of all novels is the backbone. For each novel only the kernels learn: the rest
has a rate of 1e-9. Corpora are compared over the tokens that all novels have, and classified
leaving one novel out for authors, and all novels of an author out for period and genre. The
baselines are what a linguist would ask for: word frequencies (Burrows's Delta), and the perplexity
of each novel under the n-grams of the others.

Genres are our own labels, one for each novel, by its best known description.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mercer.studies import Metric, Row, Study, Trained, Variant, roughen
from mercer.studies.twikers import BACKBONE, OPTIONS, backbone, lm_budget

# S: social or domestic; A: adventure; H: history or fantasy; M: mystery or sensation; C: children.
NOVELS = {
    "Anon_Clara_1864": "S", "Barclay_Ladies_1917": "S", "Barclay_Postern_1911": "S",
    "Bennet_Babylon_1902": "M", "Bennet_Helen_1910": "S", "Blackmore_Erema_1877": "M",
    "Blackmore_Lorna_1869": "H", "Braddon_Audley_1862": "M", "Braddon_Phantom_1883": "S",
    "Burnett_Garden_1911": "C", "Burnett_Lord_1886": "C", "Cbronte_Jane_1847": "S",
    "Cbronte_Shirley_1849": "S", "Chesterton_Innocence_1911": "M",
    "Chesterton_Napoleon_1904": "H", "Conrad_Almayer_1895": "A", "Conrad_Nostromo_1904": "A",
    "Corelli_Innocent_1914": "S", "Corelli_Romance_1886": "H", "Dickens_Bleak_1853": "S",
    "Dickens_Expectations_1861": "S", "Doyle_Hound_1902": "M", "Doyle_Lost_1912": "A",
    "Eliot_Adam_1859": "S", "Eliot_Daniel_1876": "S", "Ford_Girl_1907": "S",
    "Ford_Post_1926": "S", "Forster_Angels_1905": "S", "Forster_Howards_1910": "S",
    "Galsworthy_Man_1906": "S", "Galsworthy_Saints_1919": "S", "Gaskell_Lovers_1863": "H",
    "Gaskell_Ruth_1855": "S", "Gissing_Unclassed_1884": "S", "Gissing_Warburton_1903": "S",
    "Gissing_Women_1893": "S", "Haggard_Mines_1885": "A", "Haggard_She_1887": "A",
    "Haggard_Sheallan_1921": "A", "Hardy_Jude_1895": "S", "Hardy_Madding_1874": "S",
    "Hardy_Tess_1891": "S", "James_Ambassadors_1903": "S", "James_Roderick_1875": "S",
    "James_Tragic_1890": "S", "Kipling_Captains_1896": "A", "Kipling_Kim_1901": "A",
    "Kipling_Light_1891": "S", "Lawrence_Peacock_1911": "S", "Lawrence_Serpent_1926": "S",
    "Lawrence_Women_1920": "S", "Lee_Albany_1884": "H", "Lee_Brown_1884": "S",
    "Lee_Penelope_1903": "H", "Lytton_Kenelm_1873": "S", "Lytton_Novel_1853": "S",
    "Lytton_What_1858": "S", "Meredith_Feverel_1859": "S", "Meredith_Marriage_1895": "S",
    "Meredith_Richmond_1871": "S", "Morris_Roots_1890": "H", "Morris_Water_1897": "H",
    "Morris_Wood_1894": "H", "Schreiner_Farm_1883": "S", "Schreiner_Trooper_1897": "S",
    "Stevenson_Arrow_1888": "H", "Stevenson_Catriona_1893": "H", "Stevenson_Treasure_1883": "A",
    "Thackeray_Esmond_1852": "H", "Thackeray_Pendennis_1850": "S",
    "Thackeray_Virginians_1859": "H", "Trollope_Angel_1881": "S", "Trollope_Phineas_1869": "S",
    "Trollope_Warden_1855": "S", "Ward_Ashe_1905": "S", "Ward_Harvest_1920": "S",
    "Ward_Milly_1881": "C", "Wcollins_Basil_1852": "M", "Wcollins_Legacy_1889": "M",
    "Wcollins_Woman_1860": "M", "Woolf_Lighthouse_1927": "S", "Woolf_Night_1919": "S",
}  # fmt: skip
TURN = 1880
LEAST = 20
FROZEN = 1e-9
IDS = "ids.npy"


def labels() -> dict[str, dict[str, str]]:
    """author, period and genre of each novel."""
    found: dict[str, dict[str, str]] = {"author": {}, "period": {}, "genre": {}}
    for name, genre in NOVELS.items():
        author, _, year = name.split("_")
        found["author"][name] = author
        found["period"][name] = "before" if int(year) < TURN else "after"
        found["genre"][name] = genre
    return found


def keep_ids(trained: Trained) -> Mapping[str, float | None]:
    """Keep the ids of the novel beside its model, for the baselines; its mean deviation."""
    import os

    import numpy as np

    path = trained.folder / IDS
    temporary = path.with_name(f".{os.getpid()}.npy")
    np.save(temporary, np.asarray(trained.task.text.train.ids))
    os.replace(temporary, path)
    return {"deviation": float(trained.model.token_kernels.deviation().mean())}


def analyse(rows: Sequence[Row], folder: Path) -> str:
    """Classification by kernels and by the baselines, a matrix of distances and a dendrogram."""
    import numpy as np
    from safetensors.torch import load_file

    from mercer import inspect
    from mercer.nn import TokenKernels

    tables, ids = {}, {}
    for row in rows:
        for record in row.records[:1]:
            place = folder / "jobs" / f"{row.variant}-seed{record.seed}-{record.key[:8]}"
            file = place / "model" / "model.safetensors"
            if not file.exists() or not (place / IDS).exists():
                continue
            (weight,) = (
                x for name, x in load_file(file).items() if name.endswith("token_kernels.weight")
            )
            kernels = TokenKernels(weight.shape[0], weight.shape[-1], on="v", layers=1)
            kernels.weight.data.copy_(weight)
            tables[row.variant] = kernels
            ids[row.variant] = np.load(place / IDS, allow_pickle=False)
    if not tables:
        return ""
    if len(tables) < max(3, len(rows)):
        return f"The kernels of {len(tables)} of {len(rows)} novels are in this folder.\n"
    vocabulary = next(iter(tables.values())).vocab_size
    counts = {name: inspect.count_ids(x, vocabulary) for name, x in ids.items()}
    shared = inspect.shared_ids(counts, LEAST)
    of_kernels = inspect.kernel_features(tables, shared)
    words = inspect.word_frequencies(counts)
    given: dict[str, Any] = {
        "token kernels": of_kernels,
        "word frequencies": inspect.distances(words, "manhattan"),
        "word frequencies, as features": words,
        "bigram perplexity": inspect.ngram_distances(ids, vocabulary),
    }
    lines = [
        f"## From {len(tables)} novels, {len(shared)} shared tokens", "",
        "| what | label | by | accuracy | chance | p |", "|---|---|---|---:|---:|---:|",
    ]  # fmt: skip
    known = {
        what: {n: x for n, x in told.items() if n in tables} for what, told in labels().items()
    }
    for what, truth in known.items():
        chosen = _with_company(truth, None if what == "author" else known["author"])
        if len(set(chosen.values())) < 2:
            lines.append(f"| all | {what}: fewer than two labels of two authors | | | | |")
            continue
        groups = None if what == "author" else known["author"]
        cut = {name: _only(one, chosen) for name, one in given.items()}
        for score in inspect.compare(cut, chosen, groups=groups, permutations=199):
            lines.append(
                f"| {score.what} | {what}, {len(chosen)} novels | {score.method} | "
                f"{score.accuracy:.2f} | {score.chance:.2f} | {score.p:.3f} |"
            )
    matrix = inspect.distances(of_kernels)
    for kind in ("png", "svg"):
        inspect.draw_dendrogram(
            matrix, folder / f"dendrogram.{kind}", labels=known["author"],
            title="Novels by their token kernels",
        )  # fmt: skip
    draw_matrix(matrix.names, matrix.matrix.numpy(), folder / "distances.png")
    lines += ["", "Pictures: dendrogram.png, distances.png.", ""]
    return "\n".join(lines)


def _with_company(truth: Mapping[str, str], groups: Mapping[str, str] | None) -> dict[str, str]:
    """Labels that stand in two groups or more: others cannot be told without their own."""
    holders = Counter(
        label for label, _ in {(x, n if groups is None else groups[n]) for n, x in truth.items()}
    )
    return {name: label for name, label in truth.items() if holders[label] > 1}


def _only(given: Any, names: Mapping[str, str]) -> Any:
    """The rows (and columns) of some novels."""
    keep = [n for n, name in enumerate(given.names) if name in names]
    kept = tuple(given.names[n] for n in keep)
    if hasattr(given, "matrix"):
        return type(given)(kept, given.matrix[keep][:, keep])
    return type(given)(kept, given.values[keep])


def draw_matrix(names: Sequence[str], matrix: Any, path: Path) -> None:
    """Distances of all pairs as a picture; the file is replaced in one step."""
    import os

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    side = max(4.0, 0.14 * len(names) + 2)
    figure, axes = plt.subplots(figsize=(side, side), layout="constrained")
    try:
        axes.imshow(matrix, cmap="viridis")
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
        axes.set_yticks(range(len(names)), names, fontsize=6)
        axes.set_title("distance of token kernels: dark is near", fontsize=9, loc="left")
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        figure.savefig(temporary, dpi=130, format="png")
        os.replace(temporary, path)
    finally:
        plt.close(figure)


def make(size: str) -> Study:
    """A job for each novel; the small one has nine novels."""
    small = size == "small"
    chosen = list(NOVELS)
    if small:
        chosen = [name for name in NOVELS if name.split("_")[0] in ("Haggard", "Hardy", "Trollope")]
    systems = [
        Variant(
            name, system="leng2026", system_options=OPTIONS,
            budget={"data": f"style/novels.zip::{name}.txt"},
        )
        for name in chosen
    ]  # fmt: skip
    # One tokenizer for all novels.
    words: dict[str, Any] = {"tokenizer": "gpt2"}
    if small:
        words |= {"batch": 4, "length": 64, "eval_items": 2000}
    start = backbone(size) | words | {"data": "style/novels.zip"}
    return Study(
        title="Novels by their token kernels",
        question="Can author, period and genre be told from token kernels alone?",
        cost="10 minutes on two cores, with --data, by estimate"
        if small
        else "about 20 minutes on one H200, by estimate",
        systems=systems,
        budget={**lm_budget(size, 300), **words, "learning_rate": FROZEN, "token_rate": 0.2,
                "weight_decay": 0.0},
        backbone=start,
        differ=("data",),
        seeds=(0,),
        corpus="style/novels.zip",
        main=Metric("eval_loss", "loss", True, 3),
        measure=keep_ids,
        columns=(Metric("deviation", "deviation", False, 4),),
        analyse=analyse,
    )  # fmt: skip


studies: dict[str, Mapping[str, Callable[[], Study]]] = {
    "twikers-style": {
        "full": lambda: make("full"),
        "rough": lambda: roughen(make("full"), steps=150, backbone=BACKBONE),
        "small": lambda: make("small"),
    },
}
