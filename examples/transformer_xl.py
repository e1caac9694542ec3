"""Transformer-XL in miniature: the effect of a memory of earlier segments.

Every sequence repeats a random pattern of 12 tokens, but a segment holds only 6. Without memory
nothing in a segment tells what comes next; with 12 remembered states the pattern can be copied.
"""

import torch
import torch.nn.functional as F
from torch import nn

import mercer as mc
from mercer.nn import SegmentMemory

VOCAB, PERIOD, SEGMENT, WIDTH, HEADS = 16, 12, 6, 32, 2


class Model(nn.Module):
    def __init__(self, memory: int) -> None:
        super().__init__()
        self.memory = memory
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.attention = mc.systems.build("dai2019", WIDTH, HEADS, memory=memory)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of all tokens, one segment after another."""
        memory = SegmentMemory(self.memory)
        logits = []
        for segment in tokens.split(SEGMENT, dim=1):
            x = self.embed(segment)
            x = x + self.attention(x, cache=memory)
            logits.append(self.head(self.norm(x)))
        return torch.cat(logits, 1)


def train(memory: int, steps: int = 80) -> float:
    """The mean loss of the last steps, on tokens that repeat; ln(16) = 2.77 is blind guessing."""
    torch.manual_seed(0)
    model = Model(memory)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(VOCAB, (16, PERIOD)).repeat(1, 3)
        logits = model(tokens[:, :-1])[:, PERIOD:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, PERIOD + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


if __name__ == "__main__":
    for memory in (0, PERIOD):
        print(f"memory of {memory:2d} states: loss {train(memory):.2f}")
    print(Model(PERIOD).attention.explain(torch.zeros(1, SEGMENT, WIDTH)))
