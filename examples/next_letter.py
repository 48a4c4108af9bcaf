"""A small network guesses the next letter of Python's own standard library, trained by a swarm of any size.

    python examples/next_letter.py                       alone, one pass over the text
    shoal run examples/next_letter.py --peers 3 -- 10    three local peers, ten passes
    shoal run examples/next_letter.py --join shoal://...

The loop is the usual one; the lines with `swarm` are shoal's.
"""

import itertools
import os
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import shoal

CONTEXT = 8


class Letters(Dataset):
    """Each sample: eight letters, and the one that follows."""

    def __init__(self, modules: list[str]) -> None:
        folder = Path(sysconfig.get_path("stdlib"))
        text = "".join((folder / f"{module}.py").read_text() for module in modules)
        self.codes = torch.tensor([min(ord(letter), 127) for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - CONTEXT

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[at : at + CONTEXT], self.codes[at + CONTEXT]


def main() -> None:
    model = nn.Sequential(
        nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(), nn.Linear(128, 128)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    swarm = shoal.join(os.environ.get("SHOAL_RUN", "letters"))
    model, optimizer = swarm.attach(model, optimizer, batch_size=32)

    shuffle = torch.Generator().manual_seed(swarm.data_seed)
    loader = DataLoader(Letters(["argparse", "inspect", "typing"]), batch_size=32, shuffle=True, generator=shuffle)
    unseen = torch.stack([torch.cat([letters, next_one[None]]) for letters, next_one in Letters(["bisect"])])

    passes = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    with swarm:
        for step, (inputs, targets) in enumerate(itertools.chain.from_iterable(loader for _ in range(passes))):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 1000 == 999:
                guesses = model(unseen[:, :-1]).argmax(1)
                print(f"step {step + 1}: {(guesses == unseen[:, -1]).float().mean():.1%} of unseen letters right")
    print(swarm.report())


if __name__ == "__main__":
    main()
