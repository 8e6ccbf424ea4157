"""Draw what a Vision Transformer attends to in an image, by softmax and as converted, side by side.

For example ``python recipes/attention_picture.py --model_name_or_path google/vit-base-patch16-224 --image ANT.jpg``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from command_line import flag, parse_arguments
from fidelity_media import image_preparation
from matplotlib.cbook import get_sample_data
from quiet import quiet
from transformers import AutoModel

from hf_favorpp import FavorppConfig, FavorppError, attention_matrix, convert_to_favorpp


@dataclass
class PictureArguments:
    """Draw attention maps over an image."""

    config: str | None = flag("YAML file of arguments; the command line wins over it.")
    model_name_or_path: str = flag("Hub id or folder of a Vision Transformer.", "google/vit-base-patch16-224")
    image: str | None = flag("The image file; None takes the portrait of Grace Hopper that comes with matplotlib.")
    layer: int | None = flag("Index of the layer, from 0; None takes the last one.")
    head: int | None = flag("Index of the head; None draws the mean over heads.")
    patch: list[int] = field(
        default_factory=list,
        metadata={"help": "Row and column of the query among the patches; without them the class token."},
    )
    num_features: int = flag("Random features per head.", 128)
    kernel: str = flag("Feature map.", "favor++")
    preconditioning: str | None = flag("Change of variables of each image: none, center, diagonal or full.")
    exact_window: list[int] = field(
        default_factory=list, metadata={"help": "Rows and columns of the tiles of exact attention; without them none."}
    )
    seed: int = flag("Of the projections.", 0)
    output: str = flag("File to draw: png, pdf or svg.", "outputs/attention_picture.png")

    def __post_init__(self) -> None:
        """Check what the library does not.

        Raises:
            ValueError: There is no such file, or a pair is none.
        """
        if self.image is None:
            self.image = get_sample_data("grace_hopper.jpg", asfileobj=False)
        if not Path(self.image).is_file():
            raise ValueError(f"--image must name an image file, got {self.image!r}.")
        for name in ("patch", "exact_window"):
            if len(pair := getattr(self, name)) not in (0, 2):
                raise ValueError(f"--{name} must be two numbers, of rows and of columns, got {pair}.")


def main(argv: list[str] | None = None) -> None:
    """Run the program.

    Args:
        argv: Command line without the program's name; None takes it from ``sys.argv``.
    """
    args = parse_arguments(PictureArguments, argv)
    model: Any = AutoModel.from_pretrained(args.model_name_or_path, dtype=torch.float32).eval()
    prepare, mean, std = image_preparation(args.model_name_or_path, model)
    pixels = prepare(Path(str(args.image)))["pixel_values"]
    shown = (pixels.permute(1, 2, 0) * torch.tensor(std) + torch.tensor(mean)).clamp(0, 1).numpy()
    config = FavorppConfig(
        num_features=args.num_features,
        kernel=args.kernel,
        preconditioning=args.preconditioning,
        exact_window=(args.exact_window[0], args.exact_window[1]) if args.exact_window else 0,
        seed=args.seed,
    )
    with quiet():
        convert_to_favorpp(model, config)
    layer = model.config.num_hidden_layers - 1 if args.layer is None else args.layer
    maps = attention_matrix(model, {"pixel_values": pixels.unsqueeze(0)}, layer, exact=True)
    Path(args.output).parent.mkdir(parents=True, exist_ok=True)
    maps.plot_on_image(args.output, shown, (args.patch[0], args.patch[1]) if args.patch else None, args.head)
    print(f"drawn: {args.output}")


if __name__ == "__main__":
    try:
        main()
    except FavorppError as error:
        sys.exit(f"error: {error}")
