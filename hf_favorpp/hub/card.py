"""The model card of a converted checkpoint: front matter, how to load it, and what was measured.

A card that somebody wrote keeps its words: what this package has to say stands between two comments, and is renewed
there.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CardData, EvalResult, ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled
from transformers import PreTrainedModel

from hf_favorpp.families import attention_layers
from hf_favorpp.hub.measured import describe_results, find_results
from hf_favorpp.hub.origin import LICENSE_FIELDS, Origin, find_origin, inherit_license
from hf_favorpp.hub.remote import REMOTE_MODULE, auto_class_of

BEGIN, END = "<!-- hf_favorpp: made from the checkpoint, renewed with each save -->", "<!-- hf_favorpp: end -->"
OURS = "(converted)"
"""Ends the names of those scores in the front matter that this package wrote."""
PERFORMER = "[Performer](https://arxiv.org/abs/2009.14794)"
KERNEL_NAMES = {
    "favor++": "FAVOR++, positive random features ([Chefs' Random Tables](https://arxiv.org/abs/2205.15317))",
    "favor+": f"FAVOR+, positive random features ({PERFORMER})",
    "favor+hyperbolic": f"FAVOR+, hyperbolic positive random features ({PERFORMER})",
    "trig": f"random Fourier features ({PERFORMER})",
    "relu": f"ReLU features ({PERFORMER})",
    "elu": "features elu + 1 ([Katharopoulos et al.](https://arxiv.org/abs/2006.16236))",
    "uniform": "the mean of the values, a control",
    "none": "exact attention to a neighbourhood alone, a control",
}
TAGS = ("favorpp", "linear-attention", "performer")
UNNAMED = '("sentence_transformers_model_id"'
"""In cards of Sentence-Transformers, where the name belongs that is known once the model is pushed."""
PLACEHOLDER = "that has been pushed on the Hub. This model card has been automatically generated."
"""In every card that Transformers makes of its empty template."""
TASKS = {
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForVideoClassification": "video-classification",
}
"""Task of the Hub by Auto class."""
FEATURE_TASKS = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}
"""Task of a model without a head, by what it takes, where the base model has no other."""


def write_card(model: PreTrainedModel, folder: Path, base_model: str | None = None) -> None:
    """Write README.md beside a saved checkpoint, unless one is there that this package has no part in.

    Args:
        model: The converted model, as saved in ``folder``.
        folder: Of the checkpoint.
        base_model: Its id on the Hub; None for what is known of it.
    """
    path = folder / REPOCARD_NAME
    card = _load(path)
    if card is None or BEGIN in card.text:
        origin = _stated_origin(find_origin(model.config.name_or_path), card, base_model)
        _complete(card, model, folder, folder.name, origin).save(path)


def publish_card(
    model: PreTrainedModel,
    folder: Path,
    repo_id: str,
    token: str | bool | None = None,
    base_model: str | None = None,
) -> None:
    """Write README.md for an upload. Words that somebody wrote stay: those in the folder, else those on the Hub.

    Args:
        model: The converted model, as saved in ``folder``.
        folder: That is uploaded.
        repo_id: Where it goes.
        token: As ``push_to_hub`` takes it.
        base_model: Its id on the Hub; None for what is known of it.
    """
    path = folder / REPOCARD_NAME
    card = _load(path)
    if card is None or _is_bare(card):
        card = _load_from_hub(repo_id, token) or card
    origin = find_origin(model.config.name_or_path)
    if origin.base_model == repo_id:  # loaded from there: its card knows more
        origin = Origin()
    origin = _with_license(_stated_origin(origin, card, base_model), card, token)
    _complete(card, model, folder, repo_id, origin).save(path)


def complete_card(
    content: str, model: PreTrainedModel, folder: Path, name: str, token: str | bool | None = None
) -> str:
    """Add to a card what this package has to say.

    Args:
        content: The card, front matter and text.
        model: The converted model, as saved in ``folder``.
        folder: Of the checkpoint.
        name: What ``from_pretrained`` is to be given.
        token: To ask the Hub for the license of the base model.

    Returns:
        The card.
    """
    card = ModelCard(content, ignore_metadata_errors=True)
    origin = _with_license(find_origin(model.config.name_or_path), card, token)
    return str(_complete(card, model, folder, name, origin))


def _stated_origin(origin: Origin, card: ModelCard | None, base_model: str | None) -> Origin:
    """Return the origin with the base model that somebody named, and let the card name no other."""
    if base_model is None:
        return origin
    if card is not None:
        card.data["base_model"] = base_model
    return replace(origin, base_model=base_model)


def _with_license(origin: Origin, card: ModelCard | None, token: str | bool | None) -> Origin:
    """Return the origin with the license of the base model, where the card does not state one already."""
    if card is not None:
        if any(card.data.get(name) for name in LICENSE_FIELDS):
            return origin
        if isinstance(known := card.data.get("base_model"), str):
            origin = replace(origin, base_model=known)
    return inherit_license(origin, token)


def _is_bare(card: ModelCard) -> bool:
    """Return whether a card holds no words but those of a template."""
    before, _, rest = card.text.partition(BEGIN)
    outside = before + rest.partition(END)[2]
    return PLACEHOLDER in card.text or not re.sub(r"^# .*$", "", outside, flags=re.MULTILINE).strip()


def _complete(card: ModelCard | None, model: PreTrainedModel, folder: Path, name: str, origin: Origin) -> ModelCard:
    results = find_results(folder, model.config.name_or_path)
    if card is None:
        card = ModelCard("---\n{}\n---\n")
    if _is_bare(card):
        card.text = f"\n# {name.rpartition('/')[2]}\n"
        if origin.base_model is not None:
            card.data["base_model"] = origin.base_model
    library, loading, softmax = _how_to_load(model, folder, name)
    _complete_data(card.data, model, name, library, origin, results)
    section = _section(model, loading, softmax, card.data, results)
    card.text = _insert(card.text.replace(UNNAMED, f'("{name}"'), f"{BEGIN}\n{section}{END}")
    return card


def _how_to_load(model: PreTrainedModel, folder: Path, name: str) -> tuple[str, str, str]:
    """Return the library that loads all of a checkpoint, the lines that do, and the option that gives softmax."""
    if not (folder / "modules.json").is_file():
        auto = auto_class_of(model) or type(model).__name__
        names, calls = [auto], [f'model = {auto}.from_pretrained("{name}")']
        for file, loader, variable in _beside(model):
            if (folder / file).is_file():
                names.append(loader)
                calls.append(f'{variable} = {loader}.from_pretrained("{name}")')
        lines = "\n".join((f"from transformers import {', '.join(names)}", "", *calls))
        return "transformers", lines, 'attn_implementation="sdpa"'
    options = folder / "config_sentence_transformers.json"
    kind = json.loads(options.read_text(encoding="utf-8")).get("model_type") if options.is_file() else None
    kind = kind or "SentenceTransformer"
    lines = f'from sentence_transformers import {kind}\n\nmodel = {kind}("{name}")'
    return "sentence-transformers", lines, 'model_kwargs={"attn_implementation": "sdpa"}'


def _beside(model: PreTrainedModel) -> list[tuple[str, str, str]]:
    """Return files that may lie beside a model, the Auto classes that load them, and what these are called."""
    processor = ("AutoFeatureExtractor", "feature_extractor")
    if model.main_input_name == "pixel_values":
        processor = ("AutoImageProcessor", "image_processor")
    return [("tokenizer_config.json", "AutoTokenizer", "tokenizer"), ("preprocessor_config.json", *processor)]


def _complete_data(
    data: CardData,
    model: PreTrainedModel,
    name: str,
    library: str,
    origin: Origin,
    results: Mapping[str, Any] | None,
) -> None:
    """Fill in what the front matter lacks; nothing that is there is changed, but the scores of this model."""
    auto = auto_class_of(model) or ""
    task = TASKS.get(auto) or origin.description.get("pipeline_tag")
    if task is None and auto == "AutoModel":
        task = FEATURE_TASKS.get(model.main_input_name)
    found: dict[str, Any] = {**origin.description, "pipeline_tag": task}
    found |= {"library_name": library, "base_model": origin.base_model}
    if not any(data.get(field) for field in LICENSE_FIELDS):
        found.update(origin.license)
    for field, value in found.items():
        if value is not None and data.get(field) is None:
            data[field] = value
    tags = data.get("tags") or []
    data["tags"] = [*tags, *(tag for tag in TAGS if tag not in tags)]
    scores = [score for score in data.get("eval_results") or [] if not str(score.metric_name).endswith(OURS)]
    scores += _scores(model, results)
    data["eval_results"] = scores or None
    if scores:
        data["model_name"] = data.get("model_name") or name.rpartition("/")[2]


def _scores(model: PreTrainedModel, results: Mapping[str, Any] | None) -> list[EvalResult]:
    """Return the metrics as the front matter takes them."""
    task_type = TASKS.get(auto_class_of(model) or "")
    task, metrics = (results or {}).get("task"), (results or {}).get("metrics")
    if task_type is None or not isinstance(task, str) or not isinstance(metrics, Mapping):
        return []
    return [
        EvalResult(
            task_type=task_type,
            dataset_type=task,
            dataset_name=task,
            metric_type=metric,
            metric_name=f"{metric} {OURS}",
            metric_value=value,
        )
        for metric, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    ]


def _section(
    model: PreTrainedModel, loading: str, softmax: str, data: CardData, results: Mapping[str, Any] | None
) -> str:
    layers = list(attention_layers(model))
    converted = [layer for layer in layers if layer.features]
    count = "all" if len(converted) == len(layers) else f"{len(converted)} of its"
    base = data.get("base_model")
    of = f"[{base}](https://huggingface.co/{base})" if isinstance(base, str) else f"A {model.config.model_type} model"
    options = [
        {**layer.features.config.to_dict(), "preconditioning": layer.features.config.preconditioning}
        for layer in converted
        if layer.features
    ]
    distinct = [option for index, option in enumerate(options) if option not in options[:index]]
    described = describe_results(results or {})
    closeness = " See below how close it is." if described else ""
    measured = described or (
        "Nothing was recorded with this checkpoint. `hf_favorpp.approximation_report(model, batch)` measures how far "
        "its attention is from softmax on inputs of yours."
    )
    kernels = ", ".join(dict.fromkeys(KERNEL_NAMES[option["kernel"]] for option in options))
    return f"""## Linear attention

{of} whose softmax attention was replaced by {kernels}, in {count} {len(layers)} attention layers: time and memory
grow linearly with the length of the input.{closeness}

### How to load it

```python
import hf_favorpp  # pip install hf-favorpp
{loading}
```

Without the import, `trust_remote_code=True` does the same where the package is installed: it runs
[{REMOTE_MODULE}.py]({REMOTE_MODULE}.py), which imports it. Without either, Transformers says that
`attn_implementation="favorpp"` is not supported. `{softmax}` gives the softmax model
with these weights, with a report of unexpected tensors of `favorpp`, which is harmless.

### What was measured

{measured}

### Options

```json
{json.dumps(distinct[0] if len(distinct) == 1 else distinct)}
```
"""


def _insert(text: str, section: str) -> str:
    """Put the section where the last one was, else before the first heading of the second level."""
    if BEGIN in text:
        before, _, rest = text.partition(BEGIN)
        return f"{before}{section}{rest.partition(END)[2]}"
    if heading := re.search(r"^## ", text, re.MULTILINE):
        return f"{text[: heading.start()]}{section}\n\n{text[heading.start() :]}"
    return f"{text.rstrip()}\n\n{section}\n"


def _load(path: Path) -> ModelCard | None:
    return ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else None


def _load_from_hub(repo_id: str, token: str | bool | None) -> ModelCard | None:
    try:
        card: ModelCard = ModelCard.load(repo_id, token=token, ignore_metadata_errors=True)  # type: ignore[arg-type]
    except (EntryNotFoundError, OfflineModeIsEnabled):
        return None
    return card
