"""Skips what Transformers or PyTorch is too old for where that is installed, and says why; see .ci/matrix."""

from importlib.metadata import version

import pytest
from packaging.version import Version

LOADS = "which does not load a checkpoint with an attention that it does not know"
NAMES = "which asks this package before it gives up a tensor of another shape"
TRACES = "2.6 cannot trace the models of Transformers 5.0"
NAMED_AS_LOADED = "from which on what was loaded as LayerNorm.weight is not saved as LayerNorm.gamma"
TOKENIZER = "whose AutoTokenizer reads the folder of a SigLIP without sentencepiece"
VIT = "where the layers of ViT are vit.layers, as this test has them"
CONFORMER = "whose Conformers call the attention interface"
NEEDS = {
    "recipes/test_speech_config.py::test_two_steps_of_every_config": ("transformers", "5.16", CONFORMER),
    "recipes/test_speech_config.py::test_the_controls_that_the_headers_name_run": ("transformers", "5.16", CONFORMER),
    "cli/test_report_command.py::test_texts_are_for_the_text_model_of_siglip": ("transformers", "5.3", TOKENIZER),
    "hub/test_card.py::test_results_of_other_weights_are_left_out": ("transformers", "5.6", NAMED_AS_LOADED),
    "hub/test_remote_code.py::test_a_process_that_never_imported": ("transformers", "5.4", LOADS),
    "recipes/test_kernel_report.py::test_nothing_spills_on_hopper": (
        "triton",
        "3.3",
        "whose ASTSource takes constexprs",
    ),
    "test_composite_models.py::test_without_this_package_two_towers_do_not_load_as_softmax": (
        "transformers",
        "5.4",
        LOADS,
    ),
    "test_speech_families.py::test_without_this_package_no_family_loads_as_softmax": ("transformers", "5.4", LOADS),
    "test_save_load.py::test_without_this_package_loading_raises_and_is_not_softmax": ("transformers", "5.4", LOADS),
    "test_save_load.py::test_a_number_of_features_other_than_that_of_the_tensors": ("transformers", "5.4", NAMES),
    "test_save_load.py::test_a_tensor_of_another_shape": ("transformers", "5.4", NAMES),
    "test_convert.py::test_it_compiles_without_a_graph_break": ("torch", "2.7", TRACES),
    "test_convert.py::test_a_compiled_model": ("torch", "2.7", TRACES),
    "test_convert.py::test_it_exports_for_any_batch_and_length": ("torch", "2.7", TRACES),
    "training/test_drop_path.py::test_the_rate_grows_linearly": ("transformers", "5.10", VIT),
    "training/test_parameter_groups.py::test_layers_learn_slower": ("transformers", "5.10", VIT),
    "training/test_parameter_groups.py::test_depths_count_from_the_embeddings": ("transformers", "5.10", VIT),
    "training/test_parameter_groups.py::test_a_model_without_layers_is_refused": ("transformers", "5.10", VIT),
}
"""Package, the first version of it that is new enough, and why; by the beginning of file and name of a test."""


def lacking(package: str, least: str, why: str) -> str | None:
    """Return the reason to skip what needs a version of a package, or None where it is installed."""
    installed = version(package)
    return f"needs {package} {least}, {why}; {installed} is installed" if Version(least) > Version(installed) else None


def needs_transformers(least: str, why: str) -> None:
    """Skip the test that calls this, or the module that is imported, on Transformers before a version."""
    if reason := lacking("transformers", least, why):
        pytest.skip(reason, allow_module_level=True)


def skip_what_is_too_new(node_ids: dict[str, pytest.Item]) -> None:
    """Mark the tests that the installed versions are too old for.

    Args:
        node_ids: The tests, by file and name below ``tests/``.
    """
    for beginning, (package, least, why) in NEEDS.items():
        if reason := lacking(package, least, why):
            for node_id, item in node_ids.items():
                if node_id.startswith(beginning):
                    item.add_marker(pytest.mark.skip(reason=reason))
