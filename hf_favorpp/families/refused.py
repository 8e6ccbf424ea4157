"""Models that cannot be converted, each with the reason that the user is told."""

_BIAS = "adds a bias that depends on query and key to every logit, which has no linear form"
_WINDOWS = "attends within small windows, so there is nothing quadratic to replace, and adds a bias to every logit"
_SPARSE = "is already linear in length by its own sparse attention"

REFUSED: dict[str, str] = {
    "deberta": f"DeBERTa's disentangled attention {_BIAS}",
    "deberta-v2": f"DeBERTa's disentangled attention {_BIAS}",
    "wavlm": f"WavLM's gated relative position bias {_BIAS}",
    "mpnet": f"MPNet's relative position bias {_BIAS}",
    "t5": f"T5's relative position bias {_BIAS}",
    "swin": f"Swin {_WINDOWS}",
    "swinv2": f"Swin v2 {_WINDOWS}",
    "nystromformer": "Nystromformer approximates softmax by landmarks of its own and is linear in length already",
    "longformer": f"Longformer {_SPARSE}",
    "big_bird": f"BigBird {_SPARSE}",
    "funnel": "Funnel pools its queries between blocks and adds relative position terms to every logit",
    "fnet": "FNet has no attention: it mixes tokens by a Fourier transform",
    "roformer": "RoFormer's attention does not go through the attention interface of Transformers",
}
