"""BERT and the encoders that kept its attention module under another name."""

from hf_favorpp.families.family import Family, geometry

BERT = Family(
    model_types=("bert", "roberta", "xlm-roberta", "camembert", "ernie", "electra", "esm"),
    attention_classes=(
        "BertSelfAttention",
        "RobertaSelfAttention",
        "XLMRobertaSelfAttention",
        "CamembertSelfAttention",
        "ErnieSelfAttention",
        "ElectraSelfAttention",
        "EsmSelfAttention",  # scales its queries before the rotary embedding and passes scaling = 1
    ),
    geometry=geometry("num_attention_heads", "attention_head_size"),
    dropout_option="attention_probs_dropout_prob",
)
