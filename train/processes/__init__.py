"""Several processes that train together: `find` says which one this is, `join` starts JAX's runtime once all agree on
what to run, and under the `Watch` that it returns they end together. What they tell each other goes through JAX's
coordination service, in process 0.
"""

from train.processes.group import Group, find
from train.processes.watch import Refused, Watch, check_devices, join

__all__ = ["Group", "Refused", "Watch", "check_devices", "find", "join"]
