"""Runs where this checkpoint is loaded with trust_remote_code=True: imports the installed hf_favorpp, nothing else."""

try:
    from hf_favorpp.hub import remote
except ImportError as error:
    raise ImportError(
        "this checkpoint attends by FAVOR++, which the package hf-favorpp brings: pip install -U hf-favorpp. To have "
        "its softmax model instead, load it with attn_implementation='sdpa' and without trust_remote_code."
    ) from error

__getattr__ = remote.auto_class
