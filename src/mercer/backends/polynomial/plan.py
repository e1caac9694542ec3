"""The geometry of a call of the fused polynomial kernels: chunks, states, block sizes, memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime.device import HOPPER, INSTALLED, INTERPRETED, settles, shared_memory

# Features and values at most; wider blocks of float32 do not fit into the registers.
MAX_WIDTH = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 64}
# The most bytes of states at a time.
WORKSPACE = 2**30
# Places are padded to a multiple of this, which every block of places divides.
ALIGN = 128
KINDS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "float32"}


class Sizes(NamedTuple):
    """A block: places by places, or features by places for `build`."""

    rows: int
    columns: int
    warps: int
    stages: int
    # Whether two features of a state are read at once, in one wider matrix product.
    pair: bool = False


# Per kernel: the largest widths of features and values, and whether blocks must be small, as with
# operands of 4 bytes.
SIZES: dict[tuple[str, int, bool], Sizes] = {
    ("build", 64, False): Sizes(8, 64, 8, 3),
    ("build", 128, False): Sizes(2, 64, 8, 3),
    ("build", 64, True): Sizes(2, 32, 8, 2),
    ("build", 128, True): Sizes(1, 32, 8, 2),
    ("forward", 64, False): Sizes(128, 64, 8, 3, pair=True),
    ("forward", 128, False): Sizes(128, 64, 8, 2),
    ("forward", 64, True): Sizes(64, 32, 8, 2),
    ("forward", 128, True): Sizes(64, 32, 8, 1),
    ("queries", 64, False): Sizes(128, 64, 8, 3, pair=True),
    ("queries", 128, False): Sizes(64, 32, 8, 2),
    ("queries", 64, True): Sizes(64, 32, 8, 1),
    ("queries", 128, True): Sizes(64, 32, 8, 1),
    ("keys", 64, False): Sizes(128, 32, 8, 3, pair=True),
    ("keys", 128, False): Sizes(64, 32, 8, 2),
    ("keys", 64, True): Sizes(64, 32, 8, 1),
    ("keys", 128, True): Sizes(64, 32, 8, 1),
}


def runs(device: torch.device, dtype: torch.dtype, dim: int, values: int) -> bool:
    """Whether these kernels take such tensors."""
    there = INSTALLED and (device.type == "cuda" or INTERPRETED)
    return there and min(dim, values) > 0 and max(dim, values) <= MAX_WIDTH.get(dtype, 0)


def chunk_size(dim: int, values: int) -> int:
    """Places of a chunk: in a shorter one, moving the state costs more than forming the weights."""
    return max(256, 16 * max(_power(dim), _power(values)))


def _power(width: int) -> int:
    # Not below 32: with 16, kernels of Triton 3.6 read out of bounds.
    return max(32, 1 << (width - 1).bit_length())


def round_up(length: int, size: int) -> int:
    return -(-length // size) * size


@dataclass(frozen=True)
class Plan:
    """The geometry of one call."""

    batch: int
    heads: int
    k_heads: int
    v_heads: int
    num_queries: int
    num_keys: int
    width: int
    values: int
    causal: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def joint(self) -> int:
        """Heads that have a state."""
        return math.lcm(self.k_heads, self.v_heads)

    @property
    def group(self) -> int:
        return self.heads // self.joint

    @property
    def dim(self) -> int:
        return _power(self.width)

    @property
    def wide(self) -> int:
        return _power(self.values)

    @property
    def far(self) -> bool:
        """Whether there are states: with few queries or keys, forming all weights is less work."""
        few = self.num_queries if self.causal else min(self.num_queries, self.num_keys)
        return few > chunk_size(self.width, self.values)

    @property
    def near(self) -> bool:
        return self.causal or not self.far

    @property
    def chunk(self) -> int:
        whole = round_up(max(self.num_queries, self.num_keys), ALIGN)
        return chunk_size(self.width, self.values) if self.far else whole

    @property
    def start(self) -> int:
        """The place of the first query."""
        return self.num_keys - self.num_queries if self.causal else 0

    @property
    def origin(self) -> int:
        """The place of the first row in the copies of queries."""
        size = self.chunk if self.far else ALIGN
        return self.start // size * size

    @property
    def padded_keys(self) -> int:
        return round_up(self.num_keys, self.chunk if self.far else ALIGN)

    @property
    def padded_queries(self) -> int:
        if self.causal:
            return self.padded_keys - self.origin
        return round_up(self.num_queries, self.chunk if self.far else ALIGN)

    @property
    def kind(self) -> str:
        return KINDS[self.dtype]

    @property
    def operand(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def chunks(self, padded: int) -> int:
        return padded // self.chunk

    def state_bytes(self) -> int:
        """Bytes of one head: sums in float32, states as operands."""
        chunks = max(self.chunks(self.padded_keys), self.chunks(self.padded_queries))
        return self.far * chunks * self.dim**2 * self.wide * (4 + self.operand.itemsize)

    def at_once(self) -> int:
        """How many heads have their states at once."""
        many, room = self.batch * self.joint, max(1, WORKSPACE // max(self.state_bytes(), 1))
        return -(-many // -(-many // room))

    def workspace(self) -> int:
        """Bytes beyond inputs, outputs and gradients, at most."""
        rows = self.batch * self.heads * self.padded_queries
        copies = rows * (self.dim + 3 * self.wide) + self.batch * self.padded_keys * (
            self.k_heads * self.dim + self.v_heads * self.wide
        )
        return copies * self.dtype.itemsize + 16 * rows + self.at_once() * self.state_bytes()

    def sizes(self, kernel: str) -> dict[str, Any]:
        bucket = 64 if max(self.dim, self.wide) <= 64 else 128
        # With less shared memory than on Hopper, half precision takes the smaller blocks, too.
        small = self.operand == torch.float32 or shared_memory(self.device) < HOPPER
        sizes = SIZES[kernel, bucket, small]
        if kernel == "build":
            own = {"G": sizes.rows, "BT": min(sizes.columns, self.chunk)}
            own["SETTLE"] = settles(self.device)
        else:
            rows = min(sizes.rows, self.chunk)
            own = {"BM": rows, "BN": min(sizes.columns, rows), "PAIR": sizes.pair}
            own["STAGES"] = sizes.stages
        return own | {"num_warps": sizes.warps, "num_stages": sizes.stages}

    def shape(self) -> dict[str, Any]:
        return {"D": self.dim, "V": self.wide, "KIND": self.kind}

    def parts(self) -> dict[str, bool]:
        return {"CAUSAL": self.causal, "NEAR": self.near, "FAR": self.far}


def plan_of(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Plan:
    return Plan(
        batch=max(q.shape[0], k.shape[0], v.shape[0]), heads=q.shape[1], k_heads=k.shape[1],
        v_heads=v.shape[1], num_queries=q.shape[2], num_keys=k.shape[2], width=q.shape[3],
        values=v.shape[3], causal=causal, dtype=v.dtype, device=v.device,
    )  # fmt: skip
