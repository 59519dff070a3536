"""`jzero.value_and_grad`: micro-batches, loss scaling, and whether a loss keeps its examples apart.

Vocabulary
  micro-batch  a part of the batch whose gradient is computed by itself; the sums are in fp32
  reduce       "step": once after the loop; "microbatch": in each micro-batch
  coupled      a loss in which examples are combined before they are summed (batch statistics, contrastive losses)

What always holds
  The gradient is that of the whole batch, or the call is refused.
"""
