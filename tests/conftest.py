"""Tests share two cores: neither this process nor its children start a thread pool of torch's."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
