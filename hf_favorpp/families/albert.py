"""ALBERT: one attention module serves every layer, so it has one set of projections and one index."""

from hf_favorpp.families.family import Family, geometry

ALBERT = Family(
    model_types=("albert",),
    attention_classes=("AlbertAttention",),
    geometry=geometry("num_attention_heads", "attention_head_size"),
    dropout_option="attention_probs_dropout_prob",
)
