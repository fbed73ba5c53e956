"""surefoot keeps PyTorch training on its feet."""
