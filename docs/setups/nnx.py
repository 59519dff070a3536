"""What pages about NNX presume: batches."""

import numpy as np

_rng = np.random.default_rng(0)
data = [
    {"x": _rng.standard_normal((32, 16), np.float32), "y": _rng.standard_normal((32, 8), np.float32)} for _ in range(3)
]
