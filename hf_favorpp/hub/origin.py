"""Where a model comes from: the base model and the license that its card inherits."""

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils._validators import validate_repo_id

LICENSE_FIELDS = ("license", "license_name", "license_link")
DESCRIPTION_FIELDS = ("language", "pipeline_tag")
"""Of a card: what stays true of a converted model."""
RESULTS_FILE = "results.json"
_MOST_STEPS = 8
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Origin:
    """What a card says about the base model.

    Attributes:
        base_model: Its id on the Hub, or None where it is not known.
        license: Fields of its card that state the license; empty where they are not known.
        description: Its language and task, as far as its card says.
    """

    base_model: str | None = None
    license: dict[str, Any] = field(default_factory=dict)
    description: dict[str, Any] = field(default_factory=dict)


def find_origin(name_or_path: str | None) -> Origin:
    """Return what is known without a network about what a model was loaded from.

    A folder tells by its model card, or by the arguments in its results.json, which may name another folder.

    Args:
        name_or_path: As ``from_pretrained`` was given it; None or "" for a model that was built from a configuration.

    Returns:
        The origin.
    """
    for _ in range(_MOST_STEPS):
        if not name_or_path:
            break
        folder = Path(name_or_path)
        if not folder.is_dir():
            return Origin(name_or_path) if is_repository_id(name_or_path) else Origin()
        if (card := folder / REPOCARD_NAME).is_file():
            data = ModelCard.load(card, ignore_metadata_errors=True).data
            base_model = data.get("base_model")
            base_model = base_model if isinstance(base_model, str) else None
            return Origin(base_model, license_of(data), _stated(data, DESCRIPTION_FIELDS))
        name_or_path = _argument(folder / RESULTS_FILE)
    return Origin()


def inherit_license(origin: Origin, token: str | bool | None) -> Origin:
    """Ask the Hub for the license of the base model, and for what its card says besides.

    Args:
        origin: What is known.
        token: As ``push_to_hub`` takes it.

    Returns:
        The origin with the license; as it was where the license is known, or the Hub does not tell it.
    """
    if origin.license or origin.base_model is None:
        return origin
    try:
        data = HfApi(token=token).model_info(origin.base_model).card_data
    except Exception as error:  # of the network, the Hub, or a repository that is gone: no reason to fail an upload
        _log.warning("the license of %s is not known (%s): the model card states none.", origin.base_model, error)
        return origin
    if data is None:
        return origin
    return Origin(origin.base_model, license_of(data), {**_stated(data, DESCRIPTION_FIELDS), **origin.description})


def license_of(data: Any) -> dict[str, Any]:
    """Return the fields of a card that state a license.

    Args:
        data: Front matter of a card.

    Returns:
        Those that are there.
    """
    return _stated(data, LICENSE_FIELDS)


def _stated(data: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: data.get(name) for name in names if data.get(name) is not None}


def is_repository_id(name: str) -> bool:
    """Return whether a name can be that of a repository on the Hub.

    Args:
        name: The name.

    Returns:
        Whether the Hub's rules allow it.
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _argument(results: Path) -> str | None:
    """Return what a run was started from, by its results.json."""
    if not results.is_file():
        return None
    try:
        name = json.loads(results.read_text(encoding="utf-8"))["arguments"]["model_name_or_path"]
    except (ValueError, KeyError, TypeError):
        return None
    return name if isinstance(name, str) else None
