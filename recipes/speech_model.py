"""The model of speech.py and its processor: a feature extractor, and characters where the checkpoint has none."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from media_rows import Rows
from skipped_files import MediaDataError
from speech_arguments import SpeechArguments
from speech_audio import normalised
from transformers import (
    FEATURE_EXTRACTOR_MAPPING,
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCTC,
    PreTrainedConfig,
    PreTrainedModel,
    ProcessorMixin,
    SeamlessM4TFeatureExtractor,
    SequenceFeatureExtractor,
    Wav2Vec2BertProcessor,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2Processor,
)
from uptraining import ModelError, favorpp_config, override

from hf_favorpp import convert_to_favorpp

BLANK, UNKNOWN, BETWEEN_WORDS = "[PAD]", "[UNK]", "|"


def make_config(args: SpeechArguments) -> PreTrainedConfig:
    """Return the configuration of the checkpoint, or of the new model, with the overrides."""
    if args.model_type is None:
        config = AutoConfig.from_pretrained(args.model_name_or_path, trust_remote_code=args.trust_remote_code)
    else:
        config = AutoConfig.for_model(args.model_type)
    config.ctc_loss_reduction, config.ctc_zero_infinity = "mean", True
    override(config, args.config_overrides)
    return config


def make_processor(args: SpeechArguments, config: PreTrainedConfig, train: Rows) -> ProcessorMixin:
    """Return the feature extractor and the tokenizer of the checkpoint; what it lacks is made.

    Args:
        args: Model, vocabulary, sampling rate.
        config: Of the model.
        train: Rows whose transcripts hold all characters.

    Returns:
        The processor.
    """
    extractor, tokenizer = find_extractor(args, config), find_tokenizer(args.model_name_or_path)
    if tokenizer is None or args.vocabulary is not None:
        tokenizer = make_tokenizer(find_characters(args, train))
    kind = Wav2Vec2BertProcessor if isinstance(extractor, SeamlessM4TFeatureExtractor) else Wav2Vec2Processor
    return kind(extractor, tokenizer)


def find_extractor(args: SpeechArguments, config: PreTrainedConfig) -> SequenceFeatureExtractor:
    """Return the feature extractor of the checkpoint, or that of the type of a new model.

    Raises:
        ModelError: If models of this type are not made for recordings.
    """
    if args.model_name_or_path is not None:
        return AutoFeatureExtractor.from_pretrained(args.model_name_or_path)
    if type(config) not in FEATURE_EXTRACTOR_MAPPING:
        raise ModelError(
            f"--model_type {args.model_type} takes no recordings. Choose wav2vec2_conformer, for example."
        )
    kind = FEATURE_EXTRACTOR_MAPPING[type(config)]
    if config.model_type == "wav2vec2-bert":
        kind = SeamlessM4TFeatureExtractor  # as in the published one; the mapping names one of waves
    padding_is_seen = getattr(config, "feat_extract_norm", "layer") == "group"  # as in the published ones
    return kind(sampling_rate=args.sampling_rate, return_attention_mask=not padding_is_seen)


def find_tokenizer(source: str | None) -> Wav2Vec2CTCTokenizer | None:
    """Return the characters of a checkpoint that was trained by CTC; None where it has none."""
    if source is None:
        return None
    try:
        return Wav2Vec2CTCTokenizer.from_pretrained(source)
    except (OSError, TypeError, ValueError):
        return None


def find_characters(args: SpeechArguments, train: Rows) -> set[str]:
    """Return the characters that the arguments name, or those of the training transcripts.

    Raises:
        MediaDataError: If the rows are a stream.
    """
    if args.vocabulary is not None:
        return set(args.vocabulary)
    if args.streaming:
        raise MediaDataError('a stream does not tell its characters: give --vocabulary, such as " \'ABC...XYZ".')
    return {character for text in train["text"] for character in normalised(text, args.text_case)}


def make_tokenizer(characters: set[str]) -> Wav2Vec2CTCTokenizer:
    """Return a tokenizer of single characters, with the blank of CTC as its padding."""
    ordered = [BLANK, UNKNOWN, BETWEEN_WORDS, *sorted(characters - {" ", BETWEEN_WORDS})]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "vocab.json")
        path.write_text(json.dumps({token: place for place, token in enumerate(ordered)}), encoding="utf-8")
        return Wav2Vec2CTCTokenizer(
            str(path),
            bos_token=None,
            eos_token=None,
            unk_token=UNKNOWN,
            pad_token=BLANK,
            word_delimiter_token=BETWEEN_WORDS,
        )


def build_model(args: SpeechArguments, tokenizer: Wav2Vec2CTCTokenizer) -> PreTrainedModel:
    """Load or make the model with a CTC head for the characters, and convert it as the arguments say.

    Args:
        args: Model, seed, attention.
        tokenizer: Of the transcripts.

    Returns:
        The model, in float32; mixed precision is Accelerate's.

    Raises:
        ModelError: If there is no feature encoder to freeze.
    """
    set_seed(args.seed)  # the head's weights
    config = make_config(args)
    config.vocab_size, config.pad_token_id = len(tokenizer), tokenizer.pad_token_id
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model: Any
    if args.model_type is not None:
        model = AutoModelForCTC.from_config(config, dtype=torch.float32)
    else:
        model = AutoModelForCTC.from_pretrained(
            args.model_name_or_path,
            config=config,
            trust_remote_code=args.trust_remote_code,
            ignore_mismatched_sizes=args.ignore_mismatched_sizes,
            dtype=torch.float32,
        )
    if args.attention != "softmax":
        model = convert_to_favorpp(model, favorpp_config(args))
    if args.freeze_feature_encoder:
        if not hasattr(model, "freeze_feature_encoder"):
            raise ModelError(f"{type(model).__name__} has no feature encoder: leave out --freeze_feature_encoder.")
        model.freeze_feature_encoder()
    return model
