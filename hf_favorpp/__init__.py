"""FAVOR++ attention for pretrained Hugging Face models: linear in length, converted in place.

Importing this package makes ``attn_implementation="favorpp"`` known to Transformers.
"""

from hf_favorpp.attention import favorpp_attention
from hf_favorpp.attention_maps import attention_matrix
from hf_favorpp.calibration import calibrate
from hf_favorpp.config import FavorppConfig, RedrawSchedule
from hf_favorpp.convert import convert_to_favorpp, revert_to_softmax
from hf_favorpp.errors import FavorppError
from hf_favorpp.registration import register
from hf_favorpp.report import approximation_report
from hf_favorpp.training.redraw import FavorppCallback
from hf_favorpp.training.transfer import transfer_attention

__version__ = "0.5.0"
__all__ = [
    "FavorppCallback",
    "FavorppConfig",
    "FavorppError",
    "RedrawSchedule",
    "approximation_report",
    "attention_matrix",
    "calibrate",
    "convert_to_favorpp",
    "favorpp_attention",
    "revert_to_softmax",
    "transfer_attention",
]

register()
