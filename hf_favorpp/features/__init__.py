"""The mathematics of random features: pure functions of tensors, which know nothing of models."""
