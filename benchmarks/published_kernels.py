"""Part of speech or frequency? The token kernels that Leng et al. published, read with a control.

    python benchmarks/published_kernels.py DATA [--output results/token-kernels]

DATA has style/twikers-published, style/ud-ewt-*.conllu.xz and tokenizer/gpt2, as docs/data.md says.
The deviation of a token's kernel from the Dirac is explained by the token's part of speech and by
its frequency in the published evaluation text, among all tokens and among those that occur about
as often. Nothing is trained, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import mercer as mc
from mercer import inspect
from mercer.bench.machine import commit
from mercer.inspect.effects import rank

CORPORA = ("shakes", "victorian")
# How often a token occurs: at least, and at most.
ALL = (1, None)
BANDS = ((1, 4), (5, 19), (20, 99), (100, None))
# Tags are told apart among tokens that were seen often enough to learn.
OFTEN = (20, None)
# Neither is a part of speech.
OTHER = ("X", "SYM")

Band = tuple[int, int | None]


def name(band: Band) -> str:
    low, high = band
    return "all" if band == ALL else f"{low} and more" if high is None else f"{low} to {high}"


def within(counts: torch.Tensor, words: dict[int, str], band: Band) -> dict[int, str]:
    """The words whose token occurs so often."""
    low, high = band[0], float("inf") if band[1] is None else band[1]
    return {id: word for id, word in words.items() if low <= counts[id] <= high}


def correlations(
    deviation: torch.Tensor,
    counts: torch.Tensor,
    words: dict[int, str],
    tagger: Any,
    resamples: int = 1000,
) -> dict[str, dict[str, Any]]:
    """For each tag, its rank correlation with deviation: alone, and given frequency.

    The interval is of the second: 95 % of the resamples of tokens.
    """
    tags = {id: max(x, key=x.get) for id, x in inspect.tag_words(words, tagger).items() if x}
    ids = torch.tensor(sorted(tags))
    values, seen = deviation[ids].double(), counts[ids].double()
    sizes = Counter(tags.values())
    names = sorted(tag for tag, size in sizes.items() if size >= 5 and tag not in OTHER)
    here = torch.tensor([[tags[int(id)] == tag for tag in names] for id in ids]).double()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(ids), (resamples, len(ids)), generator=generator)
    resampled = torch.stack([partial(values[n], here[n], seen[n]) for n in drawn])
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    alone, given = partial(values, here, None), partial(values, here, seen)
    return {
        tag: {
            "tokens": sizes[tag],
            "mean": float(values[here[:, n] > 0].mean()),
            "alone": float(alone[n]),
            "given": float(given[n]),
            "interval": [float(low[n]), float(high[n])],
        }
        for n, tag in enumerate(names)
    }


def partial(values: torch.Tensor, here: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
    """`inspect.partial_rank_correlation` of values and each column of zeros and ones, at once."""
    columns = torch.cat([rank(values)[:, None], here], 1)
    columns = columns - columns.mean(0)
    if seen is not None:
        line = rank(seen) - rank(seen).mean()
        columns = columns - line[:, None] * (line @ columns / line.square().sum())
    y, rest = columns[:, 0], columns[:, 1:]
    # A tag that a resample lacks has no correlation.
    return y @ rest / (y.norm() * rest.norm(dim=0)).clamp(min=1e-9)


def read(
    data: Path, corpus: str, tagger: Any, *, permutations: int = 999, resamples: int = 1000
) -> dict[str, Any]:
    """What the kernels of a corpus say."""
    from tokenizers import ByteLevelBPETokenizer

    place, gpt2 = data / "style" / "twikers-published", data / "tokenizer" / "gpt2"
    deviation = mc.nn.TokenKernels.load_published(place / f"{corpus}.pt").deviation().detach()
    with lzma.open(place / f"{corpus}.eval.txt.xz", "rt", encoding="utf-8") as file:
        text = file.read()
    vocabulary = gpt2 / "vocab.json"
    ids = ByteLevelBPETokenizer(str(vocabulary), str(gpt2 / "merges.txt")).encode(text).ids
    counts = inspect.count_ids(ids, len(deviation))
    words = inspect.words_in(text, vocabulary)
    effects = {}
    for band in (ALL, *BANDS):
        chosen = within(counts, words, band)
        effect = inspect.tag_effect(deviation, counts, chosen, tagger, permutations=permutations)
        mean = float(deviation[sorted(chosen)].mean())
        effects[name(band)] = {**asdict(effect), "mean": mean}
    often = within(counts, words, OFTEN)
    return {"effects": effects, "tags": correlations(deviation, counts, often, tagger, resamples)}


def table(found: dict[str, Any]) -> str:
    """Both tables, as Markdown."""
    lines = [
        "| corpus | a token occurs | tokens | mean deviation | R² of frequency "
        "| R² of parts of speech | parts of speech beyond frequency | p "
        "| frequency beyond parts of speech | p |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for corpus, one in found.items():
        for band, x in one["effects"].items():
            lines.append(
                f"| {corpus} | {band} | {x['tokens']} | {x['mean']:.4f} | {x['r2_frequency']:.3f} "
                f"| {x['r2_tags']:.3f} | {x['tags_beyond']:.1%} | {x['p_tags']:.3f} "
                f"| {x['frequency_beyond']:.1%} | {x['p_frequency']:.3f} |"
            )
    lines += [
        "",
        f"Rank correlation of deviation and tag, among tokens that occur {name(OFTEN)} times:",
        "",
        "| corpus | tag | tokens | mean deviation | alone | given frequency | 95% interval |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for corpus, one in found.items():
        for tag, x in sorted(one["tags"].items(), key=lambda item: -item[1]["given"]):
            low, high = x["interval"]
            lines.append(
                f"| {corpus} | {tag} | {x['tokens']} | {x['mean']:.4f} | {x['alone']:+.2f} "
                f"| {x['given']:+.2f} | {low:+.2f} to {high:+.2f} |"
            )
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """What explains deviation by frequency, and the tags given frequency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9.5, 3.8), layout="constrained", width_ratios=[1, 1.15]
    )
    colours = dict(zip(CORPORA, ("tab:blue", "tab:orange"), strict=True))
    bands = [name(band) for band in BANDS]
    for n, (corpus, one) in enumerate(found.items()):
        for key, style in (("tags_beyond", "o-"), ("frequency_beyond", "o--")):
            shares = [100 * one["effects"][band][key] for band in bands]
            both = ("part of speech", "frequency")
            what, other = both if key == "tags_beyond" else both[::-1]
            left.plot(bands, shares, style, color=colours[corpus], markersize=4,
                      markerfacecolor=colours[corpus] if key == "tags_beyond" else "white",
                      label=f"{corpus}: {what}, given {other}")  # fmt: skip
        tags = sorted(
            found[CORPORA[0]]["tags"], key=lambda t: found[CORPORA[0]]["tags"][t]["given"]
        )
        for row, tag in enumerate(tags):
            if (x := one["tags"].get(tag)) is None:
                continue
            y = row + 0.3 * n - 0.15
            right.plot(x["interval"], [y, y], color=colours[corpus], linewidth=1)
            right.plot(x["given"], y, "o", color=colours[corpus], markersize=4)
            right.plot(x["alone"], y, "o", color=colours[corpus], markersize=4,
                       markerfacecolor="white")  # fmt: skip
        right.set_yticks(range(len(tags)), tags)
    left.set_xlabel("how often a token occurs")
    left.set_ylabel("explained, % of the variance of ranks")
    left.set_title("What explains the deviation of a kernel", loc="left", fontsize=9)
    left.legend(frameon=False, fontsize=7)
    right.axvline(0, color="0.7", linewidth=0.8)
    right.set_xlabel("rank correlation with deviation")
    right.set_title(
        f"Tags, of tokens that occur {name(OFTEN)} times:\nfilled given frequency, hollow alone",
        loc="left", fontsize=9,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("data", type=Path, metavar="DATA", help="the folder of data")
    parser.add_argument("--output", type=Path, default=Path("results/token-kernels"))
    given = parser.parse_args()
    files = [given.data / "style" / f"ud-ewt-{s}.conllu.xz" for s in ("train", "dev", "test")]
    if missing := [str(file) for file in files if not file.exists()]:
        parser.error(f"there is no {missing[0]}")
    tagger = inspect.read_conllu(*files)
    found = {corpus: read(given.data, corpus, tagger) for corpus in CORPORA}
    given.output.mkdir(parents=True, exist_ok=True)
    about = {"torch": torch.__version__, "commit": commit(),
             "command": "python benchmarks/published_kernels.py DATA"}  # fmt: skip
    text = json.dumps({"about": about, **found}, indent=1)
    (given.output / "published.json").write_text(text + "\n", encoding="utf-8")
    said = ", ".join(f"{key} {value}" for key, value in about.items() if key != "command")
    head = "# Published token kernels: part of speech or frequency?\n\n"
    head += f"`{about['command']}`; {said}.\n\n"
    (given.output / "published.md").write_text(head + table(found), encoding="utf-8")
    draw(found, given.output / "published.png")
    print(table(found))


if __name__ == "__main__":
    main()
