"""One table of tiny random models, which every integration test draws on."""

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from versions import needs_transformers

HIDDEN_SIZE, NUM_HEADS, VOCABULARY, PAD = 32, 4, 64, 1

# The initializer range makes logits of standard deviation 1 or so: softmax is far from uniform, and a wrong
# temperature shows.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": NUM_HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 96,
    "initializer_range": 0.18,
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
_DISTILBERT_SIZES = {"dim": HIDDEN_SIZE, "n_layers": 2, "n_heads": NUM_HEADS, "hidden_dim": 48}

TINY_MODELS: dict[str, dict] = {
    "bert": {},
    "roberta": {},
    "xlm-roberta": {},
    "camembert": {},
    "ernie": {},
    "electra": {"embedding_size": 16},
    "esm": {"position_embedding_type": "rotary", "mask_token_id": 3, "token_dropout": True, "initializer_range": 0.1},
    "distilbert": {**_DISTILBERT_SIZES, "initializer_range": 0.14},
    "albert": {"embedding_size": 16, "num_hidden_layers": 3},
    "eurobert": {"mask_token_id": 3, "initializer_range": 0.1},
    "nomic_bert": {},
    "jina_embeddings_v3": {},
    "modernbert": {
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "local_attention": 8,
        "cls_token_id": 0,
        "sep_token_id": 2,
    },
}
"""What makes each supported model type tiny, by ``config.model_type``."""


def tiny_config(model_type: str, **options):
    """Return the configuration of a tiny model; its attention dropout is 0 and its other dropout as by default."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"the installed Transformers has no {model_type}")
    sizes = {**_SIZES, **TINY_MODELS[model_type], **options}
    if model_type == "distilbert":
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
            sizes.pop(name)
        return AutoConfig.for_model(model_type, **{"attention_dropout": 0.0, **sizes})
    dropout = "attention_dropout" if model_type in ("eurobert", "modernbert") else "attention_probs_dropout_prob"
    return AutoConfig.for_model(model_type, **{dropout: 0.0, **sizes})


def tiny_model(
    model_type: str = "bert", auto=AutoModel, attn_implementation: str = "sdpa", **options
) -> PreTrainedModel:
    """Build a tiny model in eval mode whose parameters, biases too, are all random, and always the same."""
    if model_type == "modernbert":
        needs_transformers("5.7", "from which on the attention of ModernBERT can be replaced")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(tiny_config(model_type, **options), attn_implementation=attn_implementation)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def token_batch(*lengths: int, length: int | None = None, seed: int = 0) -> dict[str, Tensor]:
    """Return random token ids, padded on the right, with their mask: (B, L) both.

    The tokens of row i depend on (seed, i) and on its own length alone.
    """
    length = max(lengths) if length is None else length
    input_ids = torch.full((len(lengths), length), PAD)
    for row, real in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * seed + row)
        input_ids[row, :real] = torch.randint(4, VOCABULARY, (real,), generator=generator)
    return {"input_ids": input_ids, "attention_mask": (torch.arange(length) < torch.tensor(lengths)[:, None]).long()}


def hidden_states(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return the last hidden state at real tokens, (tokens, hidden_size), without gradient."""
    with torch.no_grad():
        return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


def fingerprint(model: PreTrainedModel) -> dict[str, object]:
    """Return everything a conversion could change: configuration, attention implementation, modules and tensors."""
    return {
        "config": model.config.to_dict(),
        "implementation": model.config._attn_implementation,
        "modules": [name for name, _ in model.named_modules()],
        "tensors": {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items()},
        "loading": (model._keep_in_fp32_modules_strict, model._keys_to_ignore_on_load_missing),
    }
