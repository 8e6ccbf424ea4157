"""GLUE's metrics as an ``evaluate`` module: ``evaluate.load("recipes/glue_metrics.py", "cola")`` needs no network."""

import datasets
import evaluate
import numpy as np
from scipy import stats
from sklearn.metrics import f1_score, matthews_corrcoef

DESCRIPTION = "The metrics in which BERT and CRT (arXiv:2205.15317, Table 2) report GLUE."
CITATION = "Wang et al. 2019, GLUE: A Multi-Task Benchmark and Analysis Platform, ICLR."


def accuracy(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the share of equal labels."""
    return float((predictions == references).mean())


def f1(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return the F1 score of the label 1; 0 where it occurs neither in predictions nor in references."""
    return float(f1_score(y_true=references, y_pred=predictions, zero_division=0.0))


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return Matthews' correlation coefficient; 0 where all predictions are the same."""
    return float(matthews_corrcoef(references, predictions))


def pearson(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return Pearson's correlation; 0 where a side is constant."""
    return _finite(stats.pearsonr, predictions, references)


def spearmanr(predictions: np.ndarray, references: np.ndarray) -> float:
    """Return Spearman's rank correlation; 0 where a side is constant."""
    return _finite(stats.spearmanr, predictions, references)


def _finite(correlation, predictions: np.ndarray, references: np.ndarray) -> float:
    if np.ptp(predictions) == 0 or np.ptp(references) == 0:
        return 0.0
    return float(correlation(predictions, references)[0])


# The first of each is the one that CRT's table shows.
METRICS = {
    "cola": {"matthews_correlation": matthews_correlation},
    "sst2": {"accuracy": accuracy},
    "mrpc": {"f1": f1, "accuracy": accuracy},
    "stsb": {"spearmanr": spearmanr, "pearson": pearson},
    "qqp": {"f1": f1, "accuracy": accuracy},
    "mnli": {"accuracy": accuracy},
    "qnli": {"accuracy": accuracy},
    "rte": {"accuracy": accuracy},
    "wnli": {"accuracy": accuracy},
    "movie_reviews": {"accuracy": accuracy},
    "documents": {"accuracy": accuracy},
    "far_answers": {"accuracy": accuracy},
}


class GlueMetrics(evaluate.Metric):
    """The metrics of one task, chosen by the configuration's name."""

    def _info(self) -> evaluate.MetricInfo:
        if self.config_name not in METRICS:
            raise KeyError(f"the task must be one of {sorted(METRICS)}, got {self.config_name!r}.")
        value = datasets.Value("float64" if self.config_name == "stsb" else "int64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions and references: labels, or scores for stsb.",
            features=datasets.Features({"predictions": value, "references": value}),
            format="numpy",
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        predictions, references = np.asarray(predictions), np.asarray(references)
        return {name: metric(predictions, references) for name, metric in METRICS[self.config_name].items()}
