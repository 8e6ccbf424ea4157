"""What the tests of kernels share: kinds of masks, and comparisons with float64."""

import torch


def order_and_count(name, rows, length):
    """Return order and count of the named kind of mask."""
    if name is None:
        return None, None
    if name == "shorter":  # the tokens of each row are its first ones
        return None, torch.randint(1, length, (rows,)).int()
    if name == "packed":  # three sequences of one row, the second without a token, the last token without a sequence
        cut = length // 3
        order = torch.full((3, length), length - 1)
        order[0, :cut], order[2, : length - cut - 1] = torch.arange(cut), torch.arange(cut, length - 1)
        return order.int(), torch.tensor([cut, 0, length - cut - 1]).int()
    mask = torch.rand(rows, length) < 0.7
    mask[0] = name != "empty row"
    mask[0, :2] = False
    order = mask.logical_not().byte().argsort(dim=-1, stable=True)
    return order.int(), mask.sum(-1).int() * (torch.arange(rows) > 0 if name == "empty row" else 1)


def to(value, device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def compare(name, actual, expected, tolerance):
    """Compare with an error relative to the largest number, infinities exactly."""
    actual = actual.double().cpu()
    assert actual.shape == expected.shape, name
    assert torch.equal(actual == float("-inf"), expected == float("-inf")), name
    finite = expected > float("-inf")
    error = (actual[finite] - expected[finite]).abs()
    assert error.isfinite().all(), name
    if error.numel():
        assert error.max() <= tolerance * max(1.0, expected[finite].abs().max()), f"{name}: {error.max():.2e}"
