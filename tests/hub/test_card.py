"""The model card: filled from results.json, but only from those of the same weights; words of people stay."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_models import tiny_model, token_batch
from transformers import AutoModelForSequenceClassification

from hf_favorpp import FavorppConfig, approximation_report, convert_to_favorpp
from hf_favorpp.hub.card import BEGIN, END, write_card
from hf_favorpp.hub.measured import describe_results, find_results, weights_digest
from hf_favorpp.hub.origin import find_origin
from hf_favorpp.hub.upload import prepare_upload
from hf_favorpp.nn import converted_layers

RECORDED = Path(__file__).parents[2] / "recipes" / "results"
REPO = "me/bert-favorpp"


@pytest.fixture
def model():
    return convert_to_favorpp(tiny_model("bert", AutoModelForSequenceClassification), FavorppConfig(num_features=16))


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("---")[1])


def test_a_saved_model_says_how_to_load_it_and_that_nothing_was_measured(model, tmp_path):
    model.save_pretrained(tmp_path / "mine")
    text = (tmp_path / "mine" / "README.md").read_text()
    assert front_matter(tmp_path / "mine") == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["favorpp", "linear-attention", "performer"],
    }
    assert "Nothing was recorded with this checkpoint." in text
    assert 'AutoModelForSequenceClassification.from_pretrained("mine")' in text
    assert "in all 2 attention layers" in text


def test_the_snippet_runs(model, tmp_path, monkeypatch):
    model.save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec((tmp_path / "mine" / "README.md").read_text().split("```")[1].removeprefix("python"), names)
    assert len(converted_layers(names["model"])) == 2


def test_language_and_task_of_the_base_model_are_kept(model, tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text("---\nlanguage: de\npipeline_tag: sentence-similarity\n---\n")
    for of in (model, model.bert):
        of.config.name_or_path = str(base)
        of.save_pretrained(tmp_path / type(of).__name__)
    with_a_head, without = (front_matter(tmp_path / type(of).__name__) for of in (model, model.bert))
    assert with_a_head["language"] == without["language"] == "de"
    assert (with_a_head["pipeline_tag"], without["pipeline_tag"]) == ("text-classification", "sentence-similarity")


def test_options_are_those_in_force(model, tmp_path):
    model.save_pretrained(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert json.loads(text.split("```json")[1].split("```")[0])["preconditioning"] == "center"


def test_a_card_that_somebody_wrote_is_left_alone_by_a_save(model, tmp_path):
    (tmp_path / "README.md").write_text("# My project\n")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "# My project\n"


def test_words_of_people_stay_and_the_section_is_renewed_not_repeated(hub, model, tmp_path):
    model.save_pretrained(tmp_path)
    card = "---\nlicense: mit\nlanguage: de\ntags:\n- mine\n---\n# Title\n\nIntroduction.\n\n## Details\n\nWords.\n"
    (tmp_path / "README.md").write_text(card)
    hub.create(REPO, {})
    for _ in range(2):
        prepare_upload(model, tmp_path, REPO)
    text = (tmp_path / "README.md").read_text()
    assert text.count(BEGIN) == text.count(END) == 1
    assert text.index("Introduction.") < text.index(BEGIN) < text.index("## Details") < text.index("Words.")
    data = front_matter(tmp_path)
    assert (data["license"], data["language"]) == ("mit", "de")
    assert data["tags"] == ["mine", "favorpp", "linear-attention", "performer"]


def test_the_card_on_the_hub_is_kept_where_the_folder_has_none_of_its_own(hub, model):
    hub.create(REPO, {"README.md": b"---\nlicense: mit\n---\n# Title\n\nWords on the Hub.\n"})
    model.push_to_hub(REPO)
    assert "Words on the Hub." in hub.card(REPO)
    assert hub.front_matter(REPO)["license"] == "mit"
    assert BEGIN in hub.card(REPO)


def test_base_model_and_license_are_inherited(hub, model, tmp_path):
    card = b"---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\n---\n# Base\n"
    hub.create("google/tiny-bert", {"README.md": card})
    model.config.name_or_path = "google/tiny-bert"
    model.push_to_hub(REPO)
    data = hub.front_matter(REPO)
    assert (data["base_model"], data["license"], data["license_name"]) == ("google/tiny-bert", "other", "own")
    assert "[google/tiny-bert](https://huggingface.co/google/tiny-bert)" in hub.card(REPO)
    # by way of a folder and back to the Hub
    model.save_pretrained(tmp_path / "folder")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder")
    loaded.push_to_hub("me/second")
    assert hub.front_matter("me/second")["base_model"] == "google/tiny-bert"
    # pulled and pushed again, it is not its own base
    AutoModelForSequenceClassification.from_pretrained(REPO).push_to_hub(REPO)
    assert hub.front_matter(REPO)["base_model"] == "google/tiny-bert"


def test_a_base_model_that_the_hub_does_not_have_leaves_the_license_open(hub, model, caplog):
    model.config.name_or_path = "google/gone"
    model.push_to_hub(REPO)
    assert hub.front_matter(REPO)["base_model"] == "google/gone"
    assert "license" not in hub.front_matter(REPO)
    assert "the license of google/gone is not known" in caplog.text


def test_the_origin_is_found_through_folders(tmp_path):
    (tmp_path / "twin").mkdir()
    (tmp_path / "twin" / "results.json").write_text(json.dumps({"arguments": {"model_name_or_path": "me/base"}}))
    (tmp_path / "run").mkdir()
    arguments = {"arguments": {"model_name_or_path": str(tmp_path / "twin")}}
    (tmp_path / "run" / "results.json").write_text(json.dumps(arguments))
    assert find_origin(str(tmp_path / "run")).base_model == "me/base"
    assert find_origin("/no/such/folder").base_model is None
    assert find_origin("").base_model is None


# --- what was measured --------------------------------------------------------------------------------------------


def recorded(name):
    return json.loads((RECORDED / name).read_text())


def test_the_results_of_the_quickstart_become_a_table():
    text = describe_results(recorded("quickstart.json"))
    assert "| movie reviews | softmax | converted | of softmax |" in text
    assert "| accuracy | 0.8325 | 0.7965 | 95.7 % |" in text
    assert "| train tokens per s | 1796 | 1135 |  |" in text
    assert "recipes/glue.py --config configs/glue/quickstart.yaml" in text
    assert "AMD EPYC, 2 threads, hf-favorpp 0.1.0" in text


def test_the_results_of_an_image_run_show_the_conversion_before_training_too():
    text = describe_results(recorded("imagenet/quickstart.json"))
    assert "| digits | softmax | converted, before training | converted | of softmax |" in text
    assert "| top1 | 0.9806 | 0.7750 | 0.9778 | 99.7 % |" in text


def test_fidelity_and_crossover_are_shown_as_they_were_measured(model):
    report = approximation_report(model, token_batch(30, 20)).to_dict()
    entry = recorded("benchmark/attention_cpu.json")["crossovers"][0]
    slower = {**entry, "backend": "triton", "forward": None, "forward_measured": [128, 512], "train_measured": None}
    text = describe_results({"fidelity": report, "crossovers": [entry, slower]})
    mean, worst = sum(report["layer_errors"]) / 2, max(report["layer_errors"])
    assert f"| converted | {mean:.4f} | {worst:.4f} |" in text
    assert f"same prediction {report['end_to_end']['argmax_agreement']:.4f}" in text
    assert "- forward, backend `cpu`: faster from about 445 tokens on (measured from 128 to 32768)" in text
    assert "- forward, backend `triton`: slower at every length that was measured (128 to 512 tokens)" in text
    assert text.count("`triton`") == 1


def test_error_rates_stand_without_a_share_of_softmax():
    results = {"task": "digits", "metrics": {"wer": 0.2, "f1": 0.4}, "softmax_metrics": {"wer": 0.1, "f1": 0.5}}
    text = describe_results(results)
    assert "| wer | 0.1000 | 0.2000 |  |" in text
    assert "| f1 | 0.5000 | 0.4000 | 80.0 % |" in text


def test_nothing_is_made_up():
    assert describe_results({}) == ""
    assert describe_results({"metrics": {}, "fidelity": None, "crossovers": [], "command": "python x"}) == ""
    alone = describe_results({"task": "cola", "metrics": {"matthews_correlation": 0.5}})
    assert alone == "| cola | converted |\n| --- | --- |\n| matthews correlation | 0.5000 |"


def test_results_of_other_weights_are_left_out(model, tmp_path, caplog):
    run = tmp_path / "run"
    model.save_pretrained(run)
    (run / "results.json").write_text(json.dumps({"task": "cola", "metrics": {"accuracy": 0.5}}))
    loaded = AutoModelForSequenceClassification.from_pretrained(run)
    loaded.save_pretrained(tmp_path / "same", max_shard_size="20KB")
    assert "| accuracy | 0.5000 |" in (tmp_path / "same" / "README.md").read_text()
    scores = front_matter(tmp_path / "same")["model-index"][0]["results"][0]
    assert scores["task"] == {"type": "text-classification"}
    assert scores["metrics"] == [{"type": "accuracy", "value": 0.5, "name": "accuracy (converted)"}]
    loaded.classifier.bias.data += 1
    loaded.save_pretrained(tmp_path / "same")
    assert "accuracy" not in (tmp_path / "same" / "README.md").read_text(), "scores of the last save are stale"
    assert "is of other weights than these" in caplog.text


def test_a_digest_in_the_results_tells_a_folder_that_was_saved_over(model, tmp_path):
    model.save_pretrained(tmp_path)
    results = {"metrics": {"accuracy": 0.5}, "weights_sha256": weights_digest(tmp_path)}
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert find_results(tmp_path) == results
    converted_layers(model)[0].omega[0, 0, 0] += 1
    model.save_pretrained(tmp_path)
    assert find_results(tmp_path) is None


def test_a_file_of_results_that_is_broken_is_left_out(model, tmp_path, caplog):
    model.save_pretrained(tmp_path)
    (tmp_path / "results.json").write_text("{")
    write_card(model, tmp_path)
    assert "is not a JSON object" in caplog.text
