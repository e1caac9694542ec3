"""The picture of the home page, docs/smoother.svg: what a kernel smoother does, on one axis.

python dev/site/picture.py
"""

from __future__ import annotations

from pathlib import Path

import torch

import mercer as mc

WIDTH, TOP, LOW, BASE = 760, 44, 240, 325
BANDWIDTHS = {0.35: "#2f7fd6", 2.0: "#d9661f"}
QUERY = 6.2


def x(place: float) -> float:
    return 20 + place * (WIDTH - 40) / 10


def y(value: float) -> float:
    return (TOP + LOW) / 2 - value * 62


def line(points: list[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)


def main() -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.rand(46, generator=generator).mul(10).sort().values
    values = keys.sin() + 0.35 * torch.randn(46, generator=generator)
    queries = torch.linspace(0, 10, 241)
    at_query = torch.tensor([QUERY])
    shape = (1, 1, -1, 1)
    parts = [
        f'<line x1="{x(QUERY):.1f}" x2="{x(QUERY):.1f}" y1="{TOP - 36}" y2="{BASE}" '
        'stroke="currentColor" stroke-dasharray="2 4" opacity="0.6"/>',
        f'<line x1="20" x2="{WIDTH - 20}" y1="{BASE}" y2="{BASE}" stroke="currentColor"/>',
    ]
    parts += [
        f'<circle cx="{x(k):.1f}" cy="{y(v):.1f}" r="3.5" fill="currentColor" opacity="0.45"/>'
        for k, v in zip(keys.tolist(), values.tolist(), strict=True)
    ]
    for s, colour in BANDWIDTHS.items():
        kernel = mc.RBF(s)
        k, v = keys.view(shape), values.view(shape)
        out = mc.smooth(kernel, queries.view(shape), k, v).flatten()
        path = line([(x(a), y(b)) for a, b in zip(queries.tolist(), out.tolist(), strict=True)])
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        weight = kernel(queries.view(shape), at_query.view(shape)).flatten()
        bump = [
            (x(a), BASE - 60 * b) for a, b in zip(queries.tolist(), weight.tolist(), strict=True)
        ]
        closed = line([(x(0), BASE), *bump, (x(10), BASE)])
        parts.append(f'<path d="{closed}Z" fill="{colour}" opacity="0.3"/>')
        got = mc.smooth(kernel, at_query.view(shape), k, v).item()
        parts.append(f'<circle cx="{x(QUERY):.1f}" cy="{y(got):.1f}" r="6" fill="{colour}"/>')
    parts += [
        f'<text x="{x(QUERY) + 8:.1f}" y="20">a query q</text>',
        '<text x="20" y="20">keys k (place) with values v (height)</text>',
        f'<text x="20" y="{BASE + 28}">weights w(q, k): RBF, bandwidth '
        + " and ".join(
            f'<tspan fill="{c}" font-weight="600">{s}</tspan>' for s, c in BANDWIDTHS.items()
        )
        + "</text>",
    ]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {BASE + 40}" '
        'font-family="system-ui, sans-serif" font-size="21" fill="currentColor" color="#667">'
        + "".join(f"\n  {part}" for part in parts)
        + "\n</svg>\n"
    )
    (Path(__file__).parent.parent.parent / "docs" / "smoother.svg").write_text(svg)


if __name__ == "__main__":
    main()
