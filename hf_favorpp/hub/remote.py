"""``trust_remote_code=True``: a file beside the weights that imports this package, and what it exports.

``auto_map`` in ``config.json`` names, for each Auto class that can load the model, an attribute of
``modeling_favorpp.py``. All of them lead to :func:`auto_class`: the Auto class itself, once this package is imported.
What is loaded is thus Transformers' own class, the same as after ``import hf_favorpp``.
"""

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import transformers
from packaging import version
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

REMOTE_MODULE = "modeling_favorpp"
"""Name of the file beside the weights, without ``.py``."""

LESS_TELLING = ("AutoModelForPreTraining", "AutoModelForTextEncoding")
"""Auto classes that share their models with others of a better known name."""
CAUSAL = ("AutoModelForCausalLM",)
"""Auto classes whose models attend causally, which is not converted."""


def auto_map(model: PreTrainedModel) -> dict[str, str]:
    """Return what ``config.json`` says about the file beside the weights.

    Args:
        model: A converted model.

    Returns:
        By name of the Auto class; empty for a model that no Auto class knows, or that has remote code of its own.
    """
    if model._auto_class is not None:
        return {}
    return {
        name: f"{REMOTE_MODULE}.{name}"
        for name, auto in _auto_classes()
        if name not in CAUSAL and type(model.config) in _classes(auto)
    }


def auto_class_of(model: PreTrainedModel) -> str | None:
    """Return the name of the Auto class that loads the class of a model.

    Args:
        model: Any model.

    Returns:
        Such as ``"AutoModelForMaskedLM"``; None where there is none.
    """
    found = []
    for name, auto in _auto_classes():
        if type(model.config) in _classes(auto):
            known = _classes(auto)[type(model.config)]
            if type(model) in (known if isinstance(known, list | tuple) else (known,)):
                found.append(name)
    return min(found, key=lambda name: (name in LESS_TELLING, name != "AutoModel"), default=None)


def is_ours(reference: object) -> bool:
    """Return whether an entry of an ``auto_map`` names the file that this package writes.

    Args:
        reference: The entry.

    Returns:
        True for ``"modeling_favorpp.AutoModel"``, also of another repository.
    """
    return isinstance(reference, str) and reference.rpartition("--")[2].startswith(f"{REMOTE_MODULE}.")


def forget_auto_map(config: PreTrainedConfig) -> None:
    """Take the entries of this package out of a configuration, where they have done their work once it is loaded.

    They are written anew with every save of a converted model, and must not outlive a conversion that is undone.

    Args:
        config: As loaded; changed in place.
    """
    entries = getattr(config, "auto_map", None)
    if isinstance(entries, dict) and any(is_ours(entry) for entry in entries.values()):
        others = {name: entry for name, entry in entries.items() if not is_ours(entry)}
        if others:
            config.auto_map = others
        else:
            del config.auto_map


def write_remote_file(folder: Path) -> None:
    """Write the file that ``auto_map`` names.

    Args:
        folder: Of the checkpoint.
    """
    shutil.copyfile(Path(__file__).with_name(f"{REMOTE_MODULE}.py"), folder / f"{REMOTE_MODULE}.py")


class RemoteAuto:
    """Stands for an Auto class where Transformers expects a model class from remote code."""

    auto: ClassVar[Any]

    @classmethod
    def from_pretrained(cls, name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load as the Auto class does after ``import hf_favorpp``.

        Args:
            name_or_path: Hub id or folder.
            *args: For the Auto class.
            **kwargs: For the Auto class.

        Returns:
            The model, of the class that Transformers has for it.
        """
        if version.parse(transformers.__version__) < version.parse("5.4"):
            _restore_implementation(name_or_path, kwargs)
        return cls.auto.from_pretrained(name_or_path, *args, **{**kwargs, "trust_remote_code": False})

    @classmethod
    def _from_config(cls, config: PreTrainedConfig, **kwargs: Any) -> Any:
        return cls.auto.from_config(config, **{**kwargs, "trust_remote_code": False})

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a model that came from Transformers' own class is saved without copying that class's code.

        Args:
            auto_class: Ignored.
        """


@cache
def auto_class(name: str) -> type[RemoteAuto]:
    """Return what stands for an Auto class, the ``__getattr__`` of the file beside the weights.

    Args:
        name: Such as ``"AutoModelForMaskedLM"``.

    Returns:
        A class with ``from_pretrained``.

    Raises:
        AttributeError: Transformers has no Auto class of models of that name.
    """
    auto = dict(_auto_classes()).get(name)
    if auto is None:
        raise AttributeError(f"transformers {transformers.__version__} has no Auto class {name!r} of models.")
    return type(name, (RemoteAuto,), {"auto": auto, "__module__": __name__})


def _auto_classes() -> Iterator[tuple[str, Any]]:
    for name, member in vars(modeling_auto).items():
        if name.startswith("Auto") and getattr(member, "_model_mapping", None) is not None:
            yield name, member


def _classes(auto: Any) -> Any:
    """Return the model classes of an Auto class, by class of the configuration."""
    return auto._model_mapping


def _restore_implementation(name_or_path: Any, kwargs: dict[str, Any]) -> None:
    """Let Transformers before 5.4 honour the implementation in ``config.json``, which it read before this package."""
    config = kwargs.get("config")
    if getattr(config, "favorpp", None) is None or config._attn_implementation is not None:  # type: ignore[union-attr]
        return
    names = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    hub_options = {name: kwargs[name] for name in names if name in kwargs}
    stored, _ = PreTrainedConfig.get_config_dict(name_or_path, **hub_options)
    config._attn_implementation = stored.get("attn_implementation")  # type: ignore[union-attr]
