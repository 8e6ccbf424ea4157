"""Encoders with rotary positions, which are applied before the attention function and so need nothing special."""

from hf_favorpp.families.family import Family, geometry

EUROBERT = Family(
    model_types=("eurobert",),
    attention_classes=("EuroBertAttention",),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    dropout_option="attention_dropout",
)
NOMIC_BERT = Family(
    model_types=("nomic_bert", "jina_embeddings_v3"),
    attention_classes=("NomicBertAttention", "JinaEmbeddingsV3Attention"),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    dropout_option="attention_probs_dropout_prob",
)
