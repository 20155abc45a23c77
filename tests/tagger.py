"""A small model with every kind of layer that quantize_ knows, tied and not."""

from __future__ import annotations

from torch import Tensor, nn


class Tagger(nn.Module):
    """An embedding tied to the head, two linear layers, and an attention that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32, padding_idx=0)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, indices: Tensor) -> Tensor:
        x = self.embedding(indices)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        made: Tensor = self.head(x + self.down(self.up(x).relu()))
        return made
