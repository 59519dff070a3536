"""Several processes that train together: `find` says which one this is, `join` starts JAX's runtime and compares what
they are about to run, and under the `Watch` that it returns they end together.
"""

from train.processes.group import Group, find
from train.processes.watch import Refused, Watch, check_devices, join

__all__ = ["Group", "Refused", "Watch", "check_devices", "find", "join"]
