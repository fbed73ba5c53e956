"""Further destinations of the run log: TensorBoard, Weights & Biases, MLflow, and alerts to a webhook.

Each is a `Sink` (`record/messages.py`): `write(batch)` and `close()`. A `SinkRunner` runs it in its own thread, so that
it may be slow, hang or raise without any effect on the training loop.
"""
