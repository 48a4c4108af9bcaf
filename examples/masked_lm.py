"""A small ALBERT guesses masked characters of Python's own standard library; the swarm takes each step together.

    python examples/masked_lm.py                                alone
    shoal run examples/masked_lm.py --peers 4 -- --pace 0.05    four local peers of unequal speed, one model
    shoal run examples/masked_lm.py --join shoal://...

However unequal the peers, they gather TARGET_BATCH samples together, then all step with the mean gradient. The recipe
is that of Moshpit SGD for ALBERT-large (Ryabinin et al. 2021, and its released code), scaled down: their numbers are in
the comments. The loop is the usual one; the lines with `swarm` are shoal's.
"""

import argparse
import os
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import shoal

CONTEXT = 16  # 512
BATCH = 16  # 8: a micro-batch of 4, accumulated twice
TARGET_BATCH = 256  # 4096
EMBEDDING, WIDTH, HEADS, LAYERS = 32, 64, 4, 3  # 128, 1024, 16, 24 (Lan et al. 2020, table 1)
MASK, VOCABULARY = 128, 129  # ASCII, and the mask; 30,000 word pieces

STRATEGY = shoal.Moshpit(average="gradients", target_batch=TARGET_BATCH, max_grad_norm=10)


class Albert(nn.Module):
    """Characters (batch, CONTEXT) to scores (batch, CONTEXT, VOCABULARY): a narrow embedding, one layer for all LAYERS.

    Unlike the original it normalises before the layer, not after it: so small a one learns faster then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, EMBEDDING)
        self.positions = nn.Embedding(CONTEXT, EMBEDDING)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.1)
        self.widen = nn.Sequential(nn.LayerNorm(EMBEDDING), nn.Linear(EMBEDDING, WIDTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EMBEDDING), nn.GELU(), nn.LayerNorm(EMBEDDING)
        self.narrow = nn.Sequential(*narrow)
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.widen(self.characters(inputs) + self.positions.weight)
        for _ in range(LAYERS):
            hidden = self.layer(hidden)
        return self.narrow(hidden) @ self.characters.weight.T + self.bias


def build(steps: int) -> tuple[Albert, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The model, and an optimizer whose learning rate rises linearly, then falls linearly to 0 after `steps`."""
    model = Albert()
    # LAMB, lr 0.00176, weight decay 0.01, eps 1e-6
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.004, weight_decay=0.01, eps=1e-6)
    warm_up = max(1, steps // 10)  # 5,000 of 1,000,000 steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm_up, max(0, steps - step) / max(1, steps - warm_up))
    )
    return model, optimizer, scheduler


def read_text() -> tuple[Tensor, Tensor]:
    """The source of the standard library's modules: 4 MB to learn from, and every 20th module held out."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [module.read_text("utf-8", "replace").encode("ascii", "replace") for module in modules]
    rows = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts if text]
    return torch.cat([row for number, row in enumerate(rows) if number % 20]), torch.cat(rows[::20])


def batches(text: Tensor, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random batches (size, CONTEXT): what the model sees, and what it has to guess, -100 where nothing.

    15 % are to guess; of these 80 % are masked, 10 % replaced by another, 10 % left (Devlin et al. 2019, section 3.1).
    """
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=random)
        characters = text[starts + torch.arange(CONTEXT)].long()
        others = torch.randint(MASK, characters.shape, generator=random)
        draw = torch.rand(characters.shape, generator=random) / 0.15
        inputs = torch.where(draw < 0.8, MASK, torch.where(draw < 0.9, others, characters))
        yield inputs, torch.where(draw < 1, characters, -100)


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats per character to guess."""
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="steps of the swarm; give the same to all peers")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds per batch, times 1, 1, 2 or 4 by peer id")
    options = parser.parse_args()

    model, optimizer, scheduler = build(options.steps)
    swarm = shoal.join(os.environ.get("SHOAL_RUN", "masked_lm"), strategy=STRATEGY)
    model, optimizer = swarm.attach(model, optimizer, batch_size=BATCH, scheduler=scheduler)
    pace = options.pace * (1, 1, 2, 4)[swarm.data_seed % 4]  # unequal machines, emulated

    text, held_out = read_text()
    unseen = next(batches(held_out, 256, seed=0))
    told = 0
    with swarm:
        for inputs, targets in batches(text, BATCH, swarm.data_seed):
            began = time.monotonic()
            loss_of(model, inputs, targets).backward()
            time.sleep(max(0.0, began + pace - time.monotonic()))
            optimizer.step()  # only gathers, until the swarm has its batch: then all take one step, and it returns
            scheduler.step()  # moves with the steps of the swarm
            optimizer.zero_grad()
            step = swarm.progress
            if step >= min(told + 10, options.steps):
                with torch.no_grad():  # all peers print the same numbers
                    print(f"step {step}: {loss_of(model, *unseen):.3f} nats per character to guess, in unseen text")
                told = step
            if step >= options.steps:
                break
    print(swarm.report())


if __name__ == "__main__":
    main()
