"""Uptraining: redraws during training, and what the recipes share."""
