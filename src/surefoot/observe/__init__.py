"""tensors -> Signals: what the gradients, parameters and losses look like, measured without a host sync."""
