"""Fine-tune a speech encoder by CTC with softmax attention or with random features, or compare the two.

For example ``accelerate launch recipes/speech.py --config configs/speech/quickstart.yaml``, or without a configuration
``accelerate launch recipes/speech.py --data_dir LIBRISPEECH --train_split_name train-clean-100 --validation_split_name
dev-clean --model_name_or_path facebook/wav2vec2-conformer-rope-large --attention favor++ --num_features 128``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jiwer
import torch
from accelerate import Accelerator
from command_line import parse_arguments
from length_grouping import LengthGroupedSampler
from media_loaders import media_loaders
from skipped_files import MediaDataError, SkippedFiles
from speech_arguments import SpeechArguments
from speech_audio import IGNORED, AudioReader, Collator
from speech_data import SpeechData, load_speech
from speech_model import build_model, make_config, make_processor
from stages import Stages, loss_and_logits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCTC, PreTrainedModel, ProcessorMixin
from uptraining import (
    ModelError,
    Repository,
    beside_twin,
    describe_results,
    finish,
    loop_settings,
    make_accelerator,
    needs_teacher,
    run_with_twin,
    set_threads,
    with_teacher,
)
from uptraining_report import print_table

from hf_favorpp import FavorppCallback, FavorppError, calibrate
from hf_favorpp.training.loop import train
from hf_favorpp.training.parameter_groups import parameter_groups
from hf_favorpp.training.results import reset_peak_memory

MEASUREMENTS = {
    "train_frames_per_s": "training frames / s",
    "wall_time_s": "wall time, s",
    "peak_memory_mib": "peak memory, MiB",
}
RECORDED_PACKAGES = ("datasets", "jiwer", "soundfile", "soxr")
NO_DECAY = ("masked_spec_embed",)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What was written to results.json.
    """
    args = parse_arguments(SpeechArguments, argv)
    processes = Accelerator()  # starts them as ``accelerate launch`` or ``torchrun`` says; a PartialState would not
    set_threads(args.num_threads, processes)
    skipped = SkippedFiles(Path(args.output_dir), args.strict, "recording")
    if args.resume_from_checkpoint is None and processes.is_main_process:
        skipped.clear()
    with processes.main_process_first():  # the others find what it downloaded
        data = load_speech(args, skipped)
        start = args if args.teacher is None else args.continuing(args.teacher)
        processor = make_processor(start, make_config(start), data.train)  # a teacher's logits are of its characters
    results = run_with_twin(
        args, processes, lambda *which: run(*which, data=data, processor=processor, skipped=skipped)
    )
    if processes.is_main_process:
        print_table(results, MEASUREMENTS)
        print(skipped.summary(), end="\n" if skipped.summary() else "")
    processes.end_training()
    return results


def run(
    args: SpeechArguments,
    output_dir: Path,
    twin: dict[str, Any] | None,
    *,
    data: SpeechData,
    processor: ProcessorMixin,
    skipped: SkippedFiles,
) -> dict[str, Any]:
    """Train and evaluate one model, save it, load it back, and write its results.json.

    Args:
        args: Everything but the folder.
        output_dir: Receives everything.
        twin: Results of the softmax twin to compare with.
        data: What to train and evaluate on.
        processor: Of recordings and transcripts.
        skipped: Receives the names of files that cannot be read.

    Returns:
        The results.
    """
    reset_peak_memory()
    args, teacher, twin = with_teacher(args, output_dir, twin)
    accelerator = make_accelerator(args, output_dir, "speech", some_unused=True)  # layerdrop, SpecAugment
    repository = Repository.wanted(args, accelerator, output_dir)
    accelerator.print(f"\n{args.task()}, {args.attention} attention, in {output_dir}")
    model = build_model(args, processor.tokenizer).to(accelerator.device)
    train_loader, eval_loader, few_loader = make_loaders(args, accelerator, data, processor, skipped)
    if args.attention != "softmax" and args.statistics == "calibrated":
        calibrate(model, model_inputs(few_loader, accelerator.device))
    score = make_evaluate(accelerator, accelerator.prepare(eval_loader), model, processor)
    softmax = build_model(args.as_twin(), processor.tokenizer) if needs_teacher(args, teacher) else None
    stages = Stages(args, output_dir, accelerator, softmax)
    stages.run(model, train_loader, score, no_decay=NO_DECAY)
    renewal = None if args.attention == "softmax" else FavorppCallback()
    groups = parameter_groups(
        model,
        args.learning_rate,
        args.weight_decay,
        feature_learning_rate=args.feature_learning_rate,
        no_decay=NO_DECAY,
    )
    report = train(
        accelerator,
        model,
        torch.optim.AdamW(groups, lr=args.learning_rate, fused=True),
        train_loader,
        score,
        loop_settings(args, output_dir),
        on_step_begin=renewal and renewal.step,
        on_step_end=renewal and renewal.end_step,
        compute_loss=stages.loss(loss_and_logits),
        count_tokens=lambda batch: real_frames(model, batch).sum(),
    )
    accelerator.wait_for_everyone()
    names = skipped.names()
    results = describe_results(args, args.task(), model, report, "frames", RECORDED_PACKAGES)
    results |= {**stages.report, "skipped_files": {"count": len(names), "names": list(names)}}
    results = beside_twin(results, twin, MEASUREMENTS)
    finish(
        accelerator,
        accelerator.unwrap_model(model, keep_fp32_wrapper=False),
        processor,
        output_dir,
        results,
        auto=AutoModelForCTC,
        batch=next(model_inputs(eval_loader, accelerator.device)),
        repository=repository,
    )
    return results


def make_loaders(
    args: SpeechArguments, accelerator: Accelerator, data: SpeechData, processor: ProcessorMixin, skipped: SkippedFiles
) -> tuple[DataLoader[Any], DataLoader[Any], DataLoader[Any]]:
    """Return the loaders of the training, of the evaluation, and of a few training rows to calibrate on."""
    extractor = processor.feature_extractor
    reader = AudioReader(processor.tokenizer, args.text_case, extractor.sampling_rate, skipped)
    sampler = None
    if args.group_by_length and data.seconds is not None:
        sampler = LengthGroupedSampler(data.seconds, args.per_device_train_batch_size, args.seed)
    return media_loaders(args, accelerator, data, reader, reader, collate=Collator(extractor), sampler=sampler)


def model_inputs(loader: DataLoader[Any], device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yield what the model takes, without labels."""
    for batch in loader:
        yield {name: tensor.to(device) for name, tensor in batch.items() if name != "labels"}


def real_frames(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return how many frames of 20 ms or so the encoder makes of each row, without those of padding.

    Args:
        model: Tells how long a frame is.
        batch: With or without "attention_mask"; without it padding counts, as the model sees it.

    Returns:
        (batch,), integers.
    """
    if "attention_mask" in batch:
        lengths = batch["attention_mask"].sum(-1)
    else:
        inputs = batch[model.main_input_name]
        lengths = torch.full(inputs.shape[:1], inputs.shape[1], device=inputs.device)
    frames: Tensor = model._get_feat_extract_output_lengths(lengths)
    return frames


def make_evaluate(
    accelerator: Accelerator, loader: DataLoader[Any], model: PreTrainedModel, processor: ProcessorMixin
) -> Callable[[nn.Module], dict[str, float]]:
    """Return the function that gives a model's word and character error rates, decoding greedily."""
    tokenizer, blank = processor.tokenizer, processor.tokenizer.pad_token_id

    @torch.no_grad()
    def score(prepared: nn.Module) -> dict[str, float]:
        predictions: list[str] = []
        references: list[str] = []
        for batch in loader:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            with accelerator.autocast():
                best = prepared(**inputs).logits.argmax(dim=-1)
            frames = torch.arange(best.shape[1], device=best.device)
            best = best.masked_fill(frames >= real_frames(model, batch)[:, None], blank)
            best = accelerator.pad_across_processes(best, dim=1, pad_index=blank)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=IGNORED)
            best, labels = accelerator.gather_for_metrics((best, labels))
            readable = (labels != IGNORED).any(dim=1)
            labels = labels.masked_fill(labels == IGNORED, blank)
            predictions += tokenizer.batch_decode(best[readable])
            references += tokenizer.batch_decode(labels[readable], group_tokens=False)
        if not references:
            raise MediaDataError("none of the recordings to evaluate on can be read.")
        return {"wer": jiwer.wer(references, predictions), "cer": jiwer.cer(references, predictions)}

    return score


if __name__ == "__main__":
    try:
        main()
    except (MediaDataError, ModelError, FavorppError, FloatingPointError) as error:
        sys.exit(f"error: {error}")
