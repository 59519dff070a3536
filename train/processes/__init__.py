"""Several processes that train together: how they find each other, agree, watch each other and end.

`find` says from flags and variables whether this process is one of several. `join` brings them together before JAX is
started: everyone is there, and with the same settings, or all of them end with the reason. The `Watch` that it returns
keeps their connections: when a process dies, the others say which and end, instead of waiting for it for ever.
"""

from train.processes.group import Group, find
from train.processes.join import check_devices, join
from train.processes.rollcall import Refused
from train.processes.watch import Watch

__all__ = ["Group", "Refused", "Watch", "check_devices", "find", "join"]
