"""Communication: every collective that jzero asks XLA for is made in this package.

Vocabulary
  stored, used   the layout of an array between steps, and the one that the arithmetic sees
  gather         from stored to used: an all-gather
  reduce         from one gradient per device to one gradient on its shards: a reduce-scatter, or an all-reduce
  transport      the form in which values travel: as they are, or encoded before the collective and decoded after it
  exchange       pieces of matrices to the devices that own them, and back: an all-to-all
  wire bytes     bytes that one device sends; rings assumed

What always holds
  There is one object per kind of collective: `WeightGather`, `GradientReduce`, `UpdateGather`, `HostTransfer` (all four
  in `comm_of(plan)`), and `MatrixExchange`. Each knows its layouts, the scope under which its operations appear in a
  program, and its cost; `WeightGather` has a transport too. The step calls these objects; `estimate`, `explain`,
  `check`, buckets and checkpoint policies read them.
"""

from jzero.comm.collectives import Comm, comm_of

__all__ = ["Comm", "comm_of"]
