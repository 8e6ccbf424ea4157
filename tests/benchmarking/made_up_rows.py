"""Measurements that were never made, and the rows of a benchmark from them."""

from __future__ import annotations

from hf_favorpp import FavorppConfig
from hf_favorpp.benchmarking.lineup import Entry, Lineup, Observer, config_name
from hf_favorpp.benchmarking.rows import make_rows
from hf_favorpp.benchmarking.timing import Measurement

CONFIG = FavorppConfig(num_features=8)
NAME = config_name(CONFIG)


def timed(ms, peak=1.0):
    return Measurement(ms, 0.9 * ms, 1.1 * ms, 5, peak)


def left_out(reason):
    return Measurement(reason=reason)


def rows_of(length, measured, peers=None, **more):
    observer = Observer("auto")
    observer.seen.append("cpu")
    return make_rows(Lineup(length, [], [Entry(NAME, CONFIG, observer, peers or {}, more)]), measured)
