"""ModernBERT: every third layer is global and is converted, the local ones keep their window."""

from torch import nn

from hf_favorpp.families.family import Family, geometry


def _local_stays(attention: nn.Module) -> str | None:
    if (window := getattr(attention, "sliding_window", None)) is not None:
        return f"it is local (half-window {window - 1} tokens) and linear in length already"
    return None


MODERNBERT = Family(
    model_types=("modernbert",),
    attention_classes=("ModernBertAttention",),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    dropout_option="attention_dropout",
    stays_softmax=_local_stays,
)
