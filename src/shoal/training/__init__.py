"""Floor 5: the PyTorch face: join, attach, safe points, the report."""
