"""`jzero.value_and_grad`: micro-batches, loss scaling, and whether a loss keeps its examples apart."""
