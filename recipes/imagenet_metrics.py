"""Top-1 and top-5 as an ``evaluate`` module: ``evaluate.load("recipes/imagenet_metrics.py")`` needs no network."""

import datasets
import evaluate
import numpy as np
from sklearn.metrics import accuracy_score

DESCRIPTION = "The share of images whose class is the likeliest, or among the five likeliest."
CITATION = "Russakovsky et al. 2015, ImageNet Large Scale Visual Recognition Challenge, IJCV."


class ImageNetMetrics(evaluate.Metric):
    """Accuracy among the likeliest classes."""

    def _info(self) -> evaluate.MetricInfo:
        classes = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description="predictions: the likeliest classes of each image, the likeliest first; references.",
            features=datasets.Features({"predictions": classes, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions, references) -> dict[str, float]:
        likeliest, references = np.array(predictions), np.array(references)
        metrics = {"top1": float(accuracy_score(references, likeliest[:, 0]))}
        if likeliest.shape[1] >= 5:
            metrics["top5"] = float((likeliest[:, :5] == references[:, None]).any(axis=1).mean())
        return metrics
