"""What is skipped with older versions: tests that exist, for a reason, and only there."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import versions

TESTS = Path(__file__).parent


@pytest.mark.parametrize("beginning", versions.NEEDS)
def test_what_may_be_skipped_exists(beginning):
    file, _, name = beginning.partition("::")
    assert f"\ndef {name}" in (TESTS / file).read_text(encoding="utf-8")


def test_older_versions_are_told_what_they_lack(monkeypatch):
    installed = {"torch": "2.6.0+cu124", "transformers": "5.10.0", "triton": "3.2.0"}
    monkeypatch.setattr(versions, "version", installed.__getitem__)
    assert versions.lacking("transformers", "5.4", "why") is None
    assert versions.lacking("transformers", "5.10", "why") is None
    assert versions.lacking("torch", "2.7", "for a reason") == (
        "needs torch 2.7, for a reason; 2.6.0+cu124 is installed"
    )
    marks = {
        name: [] for name in ("test_convert.py::test_a_compiled_model_trains", "test_save_load.py::test_a_tensor_x")
    }
    versions.skip_what_is_too_new({name: SimpleNamespace(add_marker=each.append) for name, each in marks.items()})
    assert [len(each) for each in marks.values()] == [1, 0]
    with pytest.raises(pytest.skip.Exception, match=r"needs transformers 5\.11"):
        versions.needs_transformers("5.11", "why")
