"""What lies beside the weights of a converted checkpoint when it is uploaded, whatever uploads it."""

from pathlib import Path

from transformers import PreTrainedModel

from hf_favorpp.hub.card import publish_card
from hf_favorpp.hub.remote import auto_map, write_remote_file


def prepare_upload(
    model: PreTrainedModel,
    folder: Path,
    repo_id: str,
    token: str | bool | None = None,
    base_model: str | None = None,
) -> None:
    """Write the model card and the file of ``trust_remote_code``.

    Args:
        model: The converted model, as saved in ``folder``.
        folder: That is uploaded. Its results.json, or that of the folder that the model was loaded from, fills the
            card, where it is of these weights.
        repo_id: Where it goes.
        token: As ``push_to_hub`` takes it.
        base_model: Its id on the Hub; None for what is known of it.
    """
    publish_card(model, folder, repo_id, token, base_model)
    if auto_map(model):
        write_remote_file(folder)
