"""GLUE's metrics against their definitions, written out on small arrays."""

from pathlib import Path

import evaluate
import glue_metrics
import numpy as np
import pytest
from scipy.stats import rankdata

MODULE = Path(glue_metrics.__file__)
LABELS = np.array([1, 0, 1, 1, 0, 1, 0, 0, 1, 1])
PREDICTED = np.array([1, 0, 0, 1, 1, 1, 0, 0, 1, 0])  # 4 true and 1 false positive, 3 true and 2 false negatives
SCORES = np.array([0.0, 1.5, 2.5, 2.5, 4.0, 5.0])
ESTIMATES = np.array([0.3, 1.0, 3.5, 2.0, 3.0, 9.0])


def compute(task, predictions, references):
    metric = evaluate.load(str(MODULE), task, keep_in_memory=True)
    return metric.compute(predictions=predictions, references=references)


def product_moment(x, y):
    x, y = x - x.mean(), y - y.mean()
    return (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())


def test_matthews_correlation_is_the_product_moment_of_the_labels():
    by_hand = (4 * 3 - 1 * 2) / np.sqrt((4 + 1) * (4 + 2) * (3 + 1) * (3 + 2))
    assert compute("cola", PREDICTED, LABELS) == pytest.approx({"matthews_correlation": by_hand})
    assert by_hand == pytest.approx(product_moment(PREDICTED.astype(float), LABELS.astype(float)))


@pytest.mark.parametrize("task", ["mrpc", "qqp"])
def test_f1_and_accuracy(task):
    assert compute(task, PREDICTED, LABELS) == pytest.approx({"f1": 2 * 4 / (2 * 4 + 1 + 2), "accuracy": 0.7})


def test_correlations_of_scores():
    by_hand = {
        "spearmanr": product_moment(rankdata(ESTIMATES), rankdata(SCORES)),
        "pearson": product_moment(ESTIMATES, SCORES),
    }
    assert compute("stsb", ESTIMATES, SCORES) == pytest.approx(by_hand)


@pytest.mark.parametrize("task", ["sst2", "mnli", "qnli", "rte", "wnli", "movie_reviews"])
def test_other_tasks_have_accuracy(task):
    assert compute(task, PREDICTED, LABELS) == pytest.approx({"accuracy": 0.7})


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb"])
def test_constant_predictions_score_zero_instead_of_nan(task):
    references = SCORES if task == "stsb" else LABELS
    assert next(iter(compute(task, np.zeros_like(references), references).values())) == 0


def test_unknown_task_is_refused():
    with pytest.raises(KeyError, match="'ax'"):
        evaluate.load(str(MODULE), "ax")
