"""The plot of docs/gaussian-attention.md: what the heads of GaussianAttention see before training.

It needs matplotlib besides the package itself.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
import torch.nn.functional as F

import mercer as mc

TEXT = """Alice was beginning to get very tired of sitting by her sister on the bank and of having
nothing to do once or twice she had peeped into the book her sister was reading but it had no
pictures or conversations in it and what is the use of a book thought Alice without pictures or
conversations"""
DIM = 128
PAGE = Path(__file__).parent.parent / "docs" / "gaussian-start.png"


def last_row(words: list[str], bandwidth: float) -> torch.Tensor:
    """The weights of the last word on all words, with an untrained embedding."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = sorted(set(words))
    table = torch.randn(len(vocabulary), DIM, generator=generator)
    x = F.rms_norm(table[[vocabulary.index(word) for word in words]], (DIM,))[None, None]
    # Smoothing the unit vectors gives the weights themselves.
    every = torch.eye(len(words))[None, None]
    return mc.smooth(mc.RBF(bandwidth), x[:, :, -1:], x, every)[0, 0, 0].detach()


def neighbours(ratios: list[float], length: int) -> list[float]:
    """The effective neighbourhood at s = ratio * sqrt(D), among unrelated tokens."""
    sizes = [ratio * math.sqrt(DIM) for ratio in ratios]
    layer = mc.nn.GaussianAttention(DIM * len(sizes), len(sizes), bandwidth=sizes)
    x = torch.randn(1, length, layer.d_model, generator=torch.Generator().manual_seed(0))
    return [head.neighbours for head in layer.report(F.rms_norm(x, (layer.d_model,)))]


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    words = TEXT.split()
    root = math.sqrt(DIM)
    rows = {
        "s = 1": 1.0,
        "s = √D / 2 (narrowest head)": root / 2,
        "s = √D": root,
        "s = 2√D (widest head)": 2 * root,
    }
    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(10, 5), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=[1.7, 1])
    panels = left.subplots(len(rows), 1, sharex=True)
    left.suptitle("weights of the last word, before training (D = 128)")
    for n, (panel, (name, s)) in enumerate(zip(panels, rows.items(), strict=True)):
        panel.bar(range(len(words)), last_row(words, s), color="tab:red" if n == 0 else "tab:blue")
        panel.set_ylim(0, None)
        panel.set_title(name, loc="left", fontsize=8)
    panels[-1].set_xticks(range(len(words)), words, rotation=90, fontsize=6)

    ratios = [2 ** (n / 4) for n in range(-10, 10)]
    axes = right.subplots()
    axes.axvspan(0.5, 2, color="tab:blue", alpha=0.15, label="where heads start")
    for length in (256, 1024, 4096):
        axes.plot(ratios, neighbours(ratios, length), marker=".", label=f"{length} tokens")
    axes.axvline(1 / root, color="tab:red", linewidth=1, label="s = 1")
    axes.set(xscale="log", yscale="log", xlabel="s / √D", ylabel="exp of the row entropy")
    axes.set_xticks([0.125, 0.25, 0.5, 1, 2, 4], ["1/8", "1/4", "1/2", "1", "2", "4"])
    axes.minorticks_off()
    axes.set_title("neighbours among unrelated tokens", fontsize=9)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PAGE, dpi=100)
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
