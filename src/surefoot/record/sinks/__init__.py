"""Other places the run log goes to: TensorBoard, Weights & Biases, MLflow, and alerts to a webhook.

Each is a `Sink` (`record/messages.py`): `write(batch)` and `close()`. A `SinkRunner` gives it a thread of its own, so
that it may be slow, hang or raise without the training loop noticing.
"""
