"""How a converted model is saved and loaded: hooks around methods of Transformers, put in place by registration.py."""

import inspect
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_favorpp.config import FavorppConfig
from hf_favorpp.convert import (
    IMPLEMENTATION,
    KEEP_FLOAT32,
    KEY_PATTERN,
    attach,
    converted_parts,
    tell_what_changed,
    tell_what_is_ignored,
)
from hf_favorpp.errors import CheckpointError
from hf_favorpp.families.plan import build_features, configurations, plan_loading
from hf_favorpp.hub.card import complete_card, write_card
from hf_favorpp.hub.remote import auto_map, forget_auto_map, write_remote_file
from hf_favorpp.hub.upload import prepare_upload
from hf_favorpp.nn import CALIBRATION_BUFFERS, LEARNABLE, FavorppFeatures, learnable_parameters

Original = Callable[..., Any]
"""The method that a hook stands before, bound to its model."""


def post_init(original: Original, model: PreTrainedModel) -> Any:
    """Attach empty features before a checkpoint is loaded, or let the checkpoint's features be ignored.

    Every model that a model is made of comes by here itself, before the whole does.

    Args:
        original: ``PreTrainedModel.post_init``.
        model: A model under construction. Where its config, not one that it is made of, asks for
            ``attn_implementation="favorpp"``, ``config.favorpp`` holds the options; without it the defaults apply.

    Returns:
        What the original returns.

    Raises:
        ConfigError: ``config.favorpp`` is not valid.
        UnsupportedModelError: The family is not supported, or no layer can be converted.
    """
    forget_auto_map(model.config)
    if model.config._attn_implementation == IMPLEMENTATION:
        _attach_empty(model)
    holders = [config for _, config in configurations(model.config) if getattr(config, "favorpp", None) is not None]
    if any(config._attn_implementation == IMPLEMENTATION for config in holders):
        _add_key(model, "_keys_to_ignore_on_load_missing", KEY_PATTERN)
        dtype_plan: Any = getattr(model, "dtype_plan", None)
        for name in KEEP_FLOAT32:
            _add_key(model, "_keep_in_fp32_modules_strict", name)
            if dtype_plan is not None:  # Transformers before 5.4 makes it from the class, before this line is reached
                dtype_plan[name] = torch.float32
    if any(config._attn_implementation != IMPLEMENTATION for config in holders):
        tell_what_is_ignored(model)
        _add_key(model, "_keys_to_ignore_on_load_unexpected", KEY_PATTERN)
    return original()


def _attach_empty(model: PreTrainedModel) -> None:
    options = getattr(model.config, "favorpp", None)
    config = FavorppConfig() if options is None else FavorppConfig.from_dict(options)
    layers = plan_loading(model, config)
    new = [layer for layer in layers if not layer.features]  # others are of a model within
    attach(model, [(layer, build_features(layer, config)) for layer in new])
    if not layers:
        return
    model.config.favorpp = config.to_dict()
    if options is None:
        tell_what_changed(model)


def _add_key(model: PreTrainedModel, name: str, key: str) -> None:
    """Add to one of the sets (before Transformers 5.4: lists) that rule how a checkpoint is loaded."""
    keys = getattr(model, name) or []
    setattr(model, name, type(keys)([*keys, key]))


def initialize_weights(
    original: Original, model: PreTrainedModel, module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Draw the projections that no checkpoint brought; the original fills everything else.

    Args:
        original: ``PreTrainedModel._initialize_weights``.
        model: The model.
        module: The module to fill.
        *args: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns.

    Raises:
        CheckpointError: The checkpoint holds a part of what belongs together.
    """
    if not isinstance(module, FavorppFeatures):
        return original(module, *args, **kwargs)
    tensors = (*module.named_buffers(), *module.named_parameters())
    loaded = {name for name, tensor in tensors if getattr(tensor, "_is_hf_initialized", False)}
    calibration = {name for name, _ in module.named_buffers() if name in CALIBRATION_BUFFERS}
    if calibration and calibration <= loaded:
        module.calibrated = True
    elif missing := sorted(calibration - loaded) if calibration & loaded else []:
        raise CheckpointError(
            f"the checkpoint holds a calibration of layer {module.layer}, but not its favorpp.{missing[0]}; save it "
            f"again with save_pretrained, or load it with attn_implementation='sdpa' and convert it anew."
        )
    else:
        module.forget_calibration_()
    if module.config.recalibrate is not None:
        module.moments = module.moments.double()
        if "moments" not in loaded or "calibration_index" not in loaded:
            module.moments.zero_()
            module.calibration_index.zero_()
    if "omega" not in loaded:
        module.redraw_(int(module.draw_index) if "draw_index" in loaded else 0)
    elif missing := sorted(set(LEARNABLE) - loaded) if module.config.learnable else []:
        raise CheckpointError(
            f"the checkpoint holds favorpp.omega of layer {module.layer}, which is learnt, but not its "
            f"favorpp.{missing[0]}; save it again with save_pretrained, or set config.favorpp.learnable to null."
        )
    elif "draw_index" not in loaded:
        raise CheckpointError(
            f"the checkpoint holds favorpp.omega of layer {module.layer} but not its favorpp.draw_index; save it "
            f"again with save_pretrained, or delete both to draw anew from the seed."
        )
    return None


def refuse_mismatched_keys(
    original: Original, model: PreTrainedModel, loading_info: Any, *args: Any, **kwargs: Any
) -> Any:
    """Name a tensor that contradicts the configuration; Transformers would name it in its log only.

    Args:
        original: ``PreTrainedModel._adjust_missing_and_unexpected_keys``.
        model: The model.
        loading_info: What was found in the checkpoint.
        *args: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns.

    Raises:
        CheckpointError: There is such a tensor.
    """
    mismatched = {key for key in getattr(loading_info, "mismatched_keys", ()) if re.search(KEY_PATTERN, key[0])}
    if mismatched:
        loading_info.mismatched_keys -= mismatched  # Transformers raises an error of its own for what is left here
        name, stored, expected = min(mismatched)
        raise CheckpointError(
            f"{name} has shape {tuple(stored)} in the checkpoint, but by its configuration (config.favorpp) it must "
            f"be {tuple(expected)}. Restore the option that was changed, such as num_features. To choose new options, "
            f"load with attn_implementation='sdpa' and call convert_to_favorpp(model, config)."
        )
    return original(loading_info, *args, **kwargs)


def save_pretrained(original: Original, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Write the implementation into ``config.json``, from where Transformers itself would strip it.

    Without it a plain reload would be softmax, silently. With it, loading without this package raises, unless
    ``trust_remote_code=True`` lets the file beside the weights import it. A model card says so, and what was measured.

    Args:
        original: ``PreTrainedModel.save_pretrained``.
        model: The model.
        *args: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns.
    """
    with _written_into_config(model) as converted:
        result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    folder, is_main = Path(given["save_directory"]), given.get("is_main_process", True)
    saves = getattr(model, "should_save_on_this_rank", lambda is_main: is_main)
    if converted and saves(is_main) and folder.is_dir():
        if not given.get("push_to_hub"):
            write_card(model, folder)
        if auto_map(model):
            write_remote_file(folder)
    return result


@contextmanager
def _written_into_config(model: PreTrainedModel) -> Generator[bool]:
    """Give the configuration, for a while, what only a saved one holds.

    A model made of several gets the implementation twice: at the top by the names of its parts, as it is read, and in
    each part, which can be loaded alone.

    Yields:
        Whether the model is converted and its weights, not adapters alone, are saved.
    """
    parts = {part.path: part.config for part in converted_parts(model)}
    if not parts or _saves_adapters_only(model):
        yield False
        return
    remote, upstream = auto_map(model), getattr(model.config, "auto_map", None)
    for config in parts.values():
        config.attn_implementation = IMPLEMENTATION
    model.config.attn_implementation = _by_part(model.config, list(parts))
    if remote:
        model.config.auto_map = remote
    try:
        yield True
    finally:
        for config in {id(config): config for config in (model.config, *parts.values())}.values():
            del config.attn_implementation
        if remote:
            del model.config.auto_map
            if upstream is not None:
                model.config.auto_map = upstream


def upload_modified_files(
    original: Original,
    model: PreTrainedModel,
    working_dir: Any,
    repo_id: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Put the model card and the file of ``trust_remote_code`` among what ``push_to_hub`` uploads.

    Args:
        original: ``PushToHubMixin._upload_modified_files``.
        model: The model.
        working_dir: Folder that holds the checkpoint.
        repo_id: Where it goes.
        *args: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns.
    """
    if converted_parts(model) and not _saves_adapters_only(model):
        prepare_upload(model, Path(working_dir), repo_id, kwargs.get("token"))
    return original(working_dir, repo_id, *args, **kwargs)


def on_push_begin(original: Original, handler: Any, args: Any, state: Any, *others: Any, **kwargs: Any) -> Any:
    """Put the file of ``trust_remote_code`` where ``Trainer`` uploads from, also while it trains.

    Args:
        original: ``CallbackHandler.on_push_begin``.
        handler: Knows the model.
        args: Of the training.
        state: Of the training.
        *others: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns.
    """
    model = handler.model
    if state.is_world_process_zero and isinstance(model, PreTrainedModel) and converted_parts(model):
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        if auto_map(model):
            write_remote_file(folder)
    return original(args, state, *others, **kwargs)


def decay_parameter_names(original: Original, trainer: Any, model: nn.Module) -> list[str]:
    """Leave learnt features out of what weight decay applies to.

    Args:
        original: ``Trainer.get_decay_parameter_names``.
        trainer: The trainer.
        model: Its model.

    Returns:
        Names of parameters.
    """
    features = learnable_parameters(model)
    learnt = {name for name, parameter in model.named_parameters() if id(parameter) in features}
    return [name for name in original(model) if name not in learnt]


def training_summary(original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the model card that ``Trainer`` writes say what kind of model this is.

    Args:
        original: ``TrainingSummary.from_trainer``.
        trainer: The trainer.
        *args: For the original.
        **kwargs: For the original.

    Returns:
        What the original returns, with another ``to_model_card``.
    """
    summary = original(trainer, *args, **kwargs)
    model = trainer.model
    if isinstance(model, PreTrainedModel) and converted_parts(model):
        folder = Path(trainer.args.output_dir)
        name = trainer.hub_model_id or folder.name
        plain, token = summary.to_model_card, trainer.args.hub_token
        summary.to_model_card = lambda: complete_card(plain(), model, folder, name, token)
    return summary


def _saves_adapters_only(model: PreTrainedModel) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _by_part(config: Any, paths: list[tuple[str, ...]]) -> str | dict[str, Any]:
    """Return the implementation as ``attn_implementation`` takes it: of everything, or by the names of the parts."""
    if paths == [()] and len(list(configurations(config))) == 1:
        return IMPLEMENTATION
    names: dict[str, Any] = {"": IMPLEMENTATION} if () in paths else {}
    for name in sorted({path[0] for path in paths if path}):
        names[name] = _by_part(getattr(config, name), [path[1:] for path in paths if path[:1] == (name,)])
    return names


def config_from_dict(original: Original, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """Make Transformers before 5.4 honour the implementation that is written in ``config.json``, as newer ones do.

    Args:
        original: ``PreTrainedConfig.from_dict``.
        config_dict: What was read.
        **kwargs: For the original.

    Returns:
        What the original returns.
    """
    stored = config_dict.get("attn_implementation")
    if kwargs.get("attn_implementation") is None and _is_ours(stored):
        kwargs["attn_implementation"] = stored
    return original(config_dict, **kwargs)


def _is_ours(implementation: Any) -> bool:
    if isinstance(implementation, dict):
        return any(_is_ours(part) for part in implementation.values())
    return bool(implementation == IMPLEMENTATION)
