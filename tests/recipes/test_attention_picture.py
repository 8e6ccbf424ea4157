"""attention_picture.py on a tiny Vision Transformer."""

import re

import numpy as np
import pytest
import torch
from attention_picture import main
from matplotlib.figure import Figure
from PIL import Image
from transformers import ViTConfig, ViTImageProcessor, ViTModel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("vit")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8, initializer_range=0.2)).save_pretrained(path)
    return path


@pytest.fixture
def drawn(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    return figures


def test_the_portrait_is_drawn_to_a_new_folder(folder, tmp_path, capsys):
    output = tmp_path / "new" / "picture.png"
    main([
        "--model_name_or_path",
        str(folder),
        "--patch",
        "1",
        "2",
        "--exact_window",
        "2",
        "2",
        "--output",
        str(output),
    ])
    assert output.read_bytes().startswith(b"\x89PNG")
    assert f"drawn: {output}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "title"), [([], "layer 1, mean of 4 heads"), (["--layer", "0", "--head", "3"], "layer 0, head 3")]
)
def test_the_photo_is_shown_as_the_model_saw_it(folder, tmp_path, drawn, arguments, title):
    pixels = np.zeros((64, 64, 3), dtype=np.uint8)
    pixels[:32, :, 0], pixels[32:, :, 2] = 255, 128
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.2] * 3, image_std=[0.7] * 3).save_pretrained(
        folder
    )
    main(["--model_name_or_path", str(folder), "--image", str(tmp_path / "photo.png"), *arguments])
    photo, softmax, converted = (axis for axis in drawn[0].axes if axis.images)
    shown = np.asarray(photo.images[0].get_array())
    np.testing.assert_allclose(shown[4, 4], [1, 0, 0], atol=1e-3)
    np.testing.assert_allclose(shown[28, 28], [0, 0, 128 / 255], atol=1e-3)
    assert softmax.get_title().startswith(f"softmax, {title}")
    maps = [np.asarray(axis.images[1].get_array()) for axis in (softmax, converted)]
    assert maps[0].shape == (4, 4)
    assert not np.allclose(*maps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "nothing.png"], "--image must name an image file, got 'nothing.png'"),
        (["--patch", "1"], r"--patch must be two numbers, of rows and of columns, got \[1\]"),
        (["--exact_window", "1", "2", "3"], "--exact_window must be two numbers"),
    ],
)
def test_what_is_wrong_ends_the_program(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert re.search(message, capsys.readouterr().err)
