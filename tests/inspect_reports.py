"""Reports without a model: as small as needed, with tokens that try to be more than text."""

import base64
import json
import math
import random
import re
import zlib
from collections import Counter

from mercer import inspect

HOSTILE = (
    "</script><script>document.title = 'run'</script>",
    "<img src=x onerror=\"document.title = 'run'\">",
    "'\"`${document.title = 'run'}`",
    "<!--",
    "]]>",
    "\u202eright to left\u202c",
    "\u05e9\u05dc\u05d5\u05dd",
    "\U0001f9ed\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\x00",
    "\ud800",
    " a",
    "\n\n",
    "\t",
    "",
    "w" * 300,
    "&lt;b&gt;",
    "%%DATA%%",
)


def data_of(page):
    """What is embedded in a page."""
    (packed,) = re.findall('<script type="text/plain" id="data">([^<]*)</script>', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def make(layers=2, heads=3, vocabulary=40, text=60, places=20, size=3, title="a model", seed=0):
    """A report with all parts, of random numbers."""
    draw = random.Random(seed)
    words = [*HOSTILE, *(f" word{n}" for n in range(vocabulary))][:vocabulary]
    ids = [n if n < len(words) else draw.randrange(len(words)) for n in range(text)]
    names = [f"blocks.{n}.attention" for n in range(layers)]
    far = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
    pairs = [(name, h) for name in names for h in range(heads)]
    found = inspect.Heads(tuple(_head(draw, name, h, far) for name, h in pairs))
    rows = [
        inspect.LargestRow(
            layer=name, head=h, place=place, keys=tuple(range(place, max(-1, place - 8), -1)),
            weights=tuple(0.6 * 0.5**n for n in range(min(8, place + 1))), rest=0.1,
        )
        for name, h in pairs
        for place in range(text - min(places, text), text)
    ]  # fmt: skip
    counts = Counter(ids)
    tokens = inspect.Tokens(
        tuple(_token(draw, n, word, counts[n], size) for n, word in enumerate(words))
    )
    steps = tuple(range(0, 1000, 10))
    curves = [("loss", "nats per token", 4.0), ("eval_loss", "nats per token", 4.2)]
    curves += [(f"bandwidth {name} {h}", "", 1.0 + h) for name, h in pairs]
    return inspect.Report(
        title=title, facts=(("parameters", "1,234"), ("text", f"{text} tokens")),
        words=tuple(words), ids=tuple(ids), context=text, heads=found if text else None,
        rows=inspect.LargestRows(tuple(rows)) if text else None,
        positions=inspect.DistanceWeights(
            tuple(
                inspect.DistanceWeight(
                    layer=name, head=h, kernel="exp(-m |i-j|)", distances=tuple(range(64)),
                    log_weight=tuple(-0.1 * n for n in range(64)), spread=(0.0,) * 64,
                )
                for name, h in pairs
            )
        ),
        spreads=inspect.Spreads(
            tuple(
                inspect.Spread(
                    layer=name, head=h, quantiles=(1.0, 2.0, 3.0, 4.0, 5.0),
                    widest=((words[0], 6.0),), narrowest=((words[1], 0.5),),
                )
                for name, h in pairs[:1]
            )
        ),
        tokens=tokens,
        tags=inspect.TagSummaries(
            (
                inspect.TagSummary(
                    tag="DET", tokens=9, mean=0.05, spread=0.02, direction=-0.01,
                    published=0.052, most=tuple(words[:8]), least=tuple(words[-8:]),
                ),
                inspect.TagSummary(
                    tag="NOUN", tokens=30, mean=0.01, spread=0.01, direction=0.004,
                    published=0.0009, most=tuple(words[:8]), least=tuple(words[-8:]),
                ),
            )
        ),
        corpus="shakes",
        curves=inspect.Curves(
            tuple(
                inspect.Curve(
                    name=name, unit=unit, steps=steps,
                    values=tuple(base * (1 + math.exp(-n / 300)) for n in steps),
                )
                for name, unit, base in curves
            )
        ),
    )  # fmt: skip


def _head(draw, layer, head, far):
    # Token kernels with taps below 0 make weights below 0.
    shares = [draw.random() - 0.1 for _ in far]
    return inspect.HeadSummary(
        layer=layer, head=head, kernel="exp(-|q - k|^2 / (2 * 1.97^2))",
        bandwidth=1.5 + draw.random(), start=1.68, neighbours=20 * draw.random() + 1, visible=64.5,
        self_weight=draw.random(), first_weight=draw.random() / 9, distance=30 * draw.random(),
        far=far, shares=tuple(x / sum(shares) for x in shares),
    )  # fmt: skip


def _token(draw, id, text, count, size):
    taps = [draw.random() * 0.2 for _ in range(size)]
    taps[size // 2] = 1 - sum(taps) + taps[size // 2]
    p = size // 2
    return inspect.TokenKernel(
        id=id, text=text, count=count, tag=("DET", "NOUN", None)[id % 3], kernel=tuple(taps),
        deviation=math.hypot(*taps[:p], taps[p] - 1, *taps[p + 1 :]),
        direction=sum(taps[p + 1 :]) - sum(taps[:p]),
    )  # fmt: skip
