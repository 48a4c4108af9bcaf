"""Floor 1: flat views, checks and mixing rules: the only arithmetic on tensors."""
