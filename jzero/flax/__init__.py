"""Train states: a `TrainState` or an NNX pair taken apart, laid out, put together."""
