"""`jzero.value_and_grad`: gradient accumulation over micro-batches, loss scaling, and a check for coupled examples.

Vocabulary
  micro-batch  a part of the batch whose gradient is computed separately; gradients are summed in fp32
  reduce       "step": once after the loop; "microbatch": in each micro-batch
  coupled      a loss in which examples are combined before they are summed (batch statistics, contrastive losses)

What always holds
  The gradient is that of the whole batch, or the call is refused. Exceptions: coupled="allow", modules with batch
  statistics (those of whole micro-batches), and a loss that jzero cannot check, which gets a warning.
"""
