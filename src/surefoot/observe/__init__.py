"""tensors -> Signals: measures gradients, parameters and losses without a host sync."""
