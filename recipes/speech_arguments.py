"""The arguments of speech.py, by the names of Transformers' run_speech_recognition_ctc.py where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from command_line import flag
from media_arguments import MediaArguments

DIAL_TONES = "dial_tones"
TextCase = Literal["keep", "lower", "upper"]


@dataclass
class SpeechArguments(MediaArguments):
    """Fine-tune a speech encoder by CTC, with softmax attention or converted to random features."""

    LEAST: ClassVar = {
        **MediaArguments.LEAST,
        **dict.fromkeys(("digits_per_string", "num_strings", "sampling_rate"), (1, "at least")),
        "max_duration_s": (0, "above"),
    }
    FREE_ON_RESUME: ClassVar = (*MediaArguments.FREE_ON_RESUME, "data_dir")
    NAMES: ClassVar = (*MediaArguments.NAMES, "data_dir", "vocabulary")

    # data
    dataset_name: str | None = flag(
        "Data set on the Hub, folder that datasets.load_dataset takes, or `dial_tones`: telephone numbers that are "
        "made here, without a network."
    )
    data_dir: str | None = flag(
        "Folder as LibriSpeech is laid out (speaker/chapter/*.flac beside *.trans.txt), or of such folders by the "
        "names of the splits (train-clean-100); or of spoken digits (digit_speaker_index.wav)."
    )
    audio_column_name: str = flag("Column of the recordings.", "audio")
    text_column_name: str = flag("Column of the transcripts.", "text")
    text_case: TextCase = field(default="keep", metadata={"help": "Letters of the transcripts, as a tokenizer wants."})
    max_duration_s: float | None = flag("Leave longer recordings out of the training, seconds.")
    group_by_length: bool = flag(
        "Put training recordings of similar length into a batch: less padding, faster.", False
    )
    digits_per_string: int = flag("Digits, or tones, of the longest string; a string has as many or fewer.", 1)
    num_strings: int | None = flag("Strings to train on; None is one per recording, or 2000 of tones.")
    # model
    model_name_or_path: str | None = flag("Hub id or folder of a speech encoder, with or without a CTC head.")
    vocabulary: str | None = flag("Characters of the transcripts; None takes those of the training rows.")
    sampling_rate: int = flag("Of a new model, Hz; a checkpoint brings its own.", 16_000)
    freeze_feature_encoder: bool = flag("Do not train the convolutions that make frames of the waveform.", False)
    output_dir: str = flag("Receives the model, results.json and checkpoints.", "outputs/speech")

    def __post_init__(self) -> None:
        """Refuse what would be ignored or cannot be run.

        Raises:
            ValueError: The message names the argument, the rule and the remedy.
        """
        super().__post_init__()
        if (self.dataset_name is None) == (self.data_dir is None):
            raise ValueError("give either --dataset_name or --data_dir.")
        if self.streaming and self.dataset_name in (None, DIAL_TONES):
            raise ValueError("--streaming needs a --dataset_name on the Hub.")
        if self.streaming and self.group_by_length:
            raise ValueError("--group_by_length needs all lengths before the training: leave out --streaming.")

    def task(self) -> str:
        """Return what the data are called in reports."""
        return self.dataset_name or str(self.data_dir).replace("\\", "/").rstrip("/").rpartition("/")[2]
