"""Speech encoders with the attention module of wav2vec 2.0; a mask of samples reaches it as one of frames."""

from hf_favorpp.families.family import Family, geometry

WAV2VEC2 = Family(
    model_types=("wav2vec2", "hubert"),
    attention_classes=("Wav2Vec2Attention", "HubertAttention"),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
)
