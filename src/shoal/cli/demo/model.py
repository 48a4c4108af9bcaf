"""A small decoder-only transformer over characters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.cli.demo.text import VOCABULARY_SIZE

CONTEXT = 16
WIDTH = 128
HEADS = 4
BLOCKS = 1


class Block(nn.Module):
    """Causal self-attention, then two layers applied to every position; both added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x_btw: Tensor) -> Tensor:
        batch, length, width = x_btw.shape
        split = self.query_key_value(self.norm_attention(x_btw)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width / heads)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_btw = x_btw + self.attention_out(attended.transpose(1, 2).reshape(batch, length, width))
        mixed: Tensor = x_btw + self.mlp(self.norm_mlp(x_btw))
        return mixed


class CharacterModel(nn.Module):
    """Predicts the next character: numbers (batch, length) to scores (batch, length, vocabulary)."""

    def __init__(self, context: int = CONTEXT, width: int = WIDTH, heads: int = HEADS, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, VOCABULARY_SIZE)

    def forward(self, inputs_bt: Tensor) -> Tensor:
        x_btw = self.characters(inputs_bt) + self.positions(torch.arange(inputs_bt.shape[1]))
        scores: Tensor = self.scores(self.norm(self.blocks(x_btw)))
        return scores


def loss_of(model: nn.Module, inputs_bt: Tensor, targets_bt: Tensor) -> Tensor:
    """Mean cross-entropy in nats per character."""
    scores = model(inputs_bt)
    return F.cross_entropy(scores.flatten(0, 1), targets_bt.flatten())
