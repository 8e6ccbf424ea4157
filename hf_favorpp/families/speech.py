"""Speech encoders; where their masks are of samples, they reach the attention as masks of frames."""

from typing import Any

from hf_favorpp.families.family import Family, biased_stays, causal_stays, geometry


def _encoder_only(attention: Any) -> str | None:
    return causal_stays(attention) or biased_stays(attention)


def _padded_heads(attention: Any) -> tuple[int, int]:
    """Return the heads of Moonshine, which come with zeros up to a multiple of some dimension."""
    return attention.config.num_key_value_heads, attention.head_dim + attention.head_dim_padding


WAV2VEC2 = Family(
    model_types=("wav2vec2", "hubert", "sew", "unispeech", "unispeech-sat", "data2vec-audio"),
    attention_classes=(
        *("Wav2Vec2Attention", "HubertAttention", "SEWAttention"),
        *("UniSpeechAttention", "UniSpeechSatAttention", "Data2VecAudioAttention"),
    ),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    stays_softmax=biased_stays,
)
WHISPER = Family(
    model_types=("whisper",),
    attention_classes=("WhisperAttention",),  # scales its queries and passes scaling = 1
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
)
MOONSHINE = Family(
    model_types=("moonshine",),
    attention_classes=("MoonshineAttention",),
    geometry=_padded_heads,
    dropout_option="attention_dropout",
    stays_softmax=_encoder_only,
)
LASR = Family(
    model_types=("lasr_ctc", "lasr_encoder"),
    attention_classes=("LasrEncoderAttention",),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    dropout_option="attention_dropout",
)
