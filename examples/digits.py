"""Handwritten digits, 1,797 images of 8 x 8 (scikit-learn's), by a swarm of any size.

    python examples/digits.py                   alone
    shoal run examples/digits.py --peers 3      three local peers
    shoal run examples/digits.py --join shoal://...

Needs scikit-learn for the data. The loop is the usual one; the lines with `swarm` are shoal's.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images, dtype=torch.float32) / 16
labels = torch.tensor(labels)
train, test = slice(0, 1500), slice(1500, None)

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

swarm = shoal.join(os.environ.get("SHOAL_RUN", "digits"))
model, optimizer = swarm.attach(model, optimizer, batch_size=16)

shuffle = torch.Generator().manual_seed(swarm.data_seed)
loader = DataLoader(TensorDataset(images[train], labels[train]), batch_size=16, shuffle=True, generator=shuffle)

with swarm:
    for epoch in range(40):
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if epoch % 10 == 9:
            accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
            print(f"epoch {epoch + 1}: accuracy {accuracy:.3f} on unseen digits")
print(swarm.report())
