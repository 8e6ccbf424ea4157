"""DistilBERT."""

from hf_favorpp.families.family import Family, geometry

DISTILBERT = Family(
    model_types=("distilbert",),
    attention_classes=("DistilBertSelfAttention",),
    geometry=geometry("n_heads", "attention_head_size"),
    dropout_option="attention_dropout",
)
