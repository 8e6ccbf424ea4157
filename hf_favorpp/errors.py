"""The exceptions of this package.

::

    FavorppError
    ├── ConfigError                 (ValueError)    an option, or a combination of options, that has no meaning
    ├── InputError                  (ValueError)    tensors or masks that do not fit the attention
    ├── UnsupportedModelError       (ValueError)    a model, or a layer, whose attention has no linear form here
    ├── ConversionError             (RuntimeError)  a model in the wrong state, such as converted already
    └── CheckpointError             (RuntimeError)  saved tensors that do not belong to the saved configuration

Every message says the rule, the value that was given and the remedy. A model is never left half converted.
"""


class FavorppError(Exception):
    """Whatever this package raises on purpose."""


class ConfigError(FavorppError, ValueError):
    """An unknown option, an impossible value, or options that contradict each other."""


class InputError(FavorppError, ValueError):
    """Tensors or masks whose shape, dtype or content the attention cannot take."""


class UnsupportedModelError(FavorppError, ValueError):
    """A model, or one of its layers, whose attention cannot be written as FAVOR++."""


class ConversionError(FavorppError, RuntimeError):
    """A model that is in the wrong state for what was asked of it."""


class CheckpointError(FavorppError, RuntimeError):
    """A checkpoint whose tensors do not fit its own configuration."""
