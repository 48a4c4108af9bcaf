"""Optimizers that gradient mode must refuse."""

from __future__ import annotations

import torch


class Restless(torch.optim.SGD):
    """Moves parameters that have no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.999)
        return super().step(closure)
