"""Yardsticks of the statistical tests: each has false-alarm rate ALARM, split over the
comparisons of a test.
"""

import numpy as np
from scipy import stats

try:
    from hypothesis import settings
except ModuleNotFoundError:  # the conformance suite does without, elsewhere
    settings = dict

ALARM = 1e-6  # probability that a correct program fails one statistical test, before its seed was fixed

drawn = settings(derandomize=True, deadline=None, database=None, max_examples=60)


def radius(std, n: int, comparisons: int = 1):
    """How far the mean of n draws with standard deviation `std` may lie from its
    expectation (central limit).
    """
    return stats.norm.isf(ALARM / 2 / comparisons) * np.asarray(std) / np.sqrt(n)


def count_bounds(n: int, p: float, comparisons: int = 1) -> tuple[float, float]:
    "Smallest and largest binomial count that is no alarm (exact)."
    tail = ALARM / 2 / comparisons
    return stats.binom.ppf(tail, n, p), stats.binom.isf(tail, n, p)


def fit(counts, probabilities) -> float:
    "p-value of Pearson's chi-square; cells that expect fewer than 10 are merged."
    counts = np.asarray(counts, float)
    expected = counts.sum() * np.asarray(probabilities, float)
    assert np.isclose(expected.sum(), counts.sum()), "the law does not sum to one"
    small = expected < 10
    if small.any():
        counts = np.append(counts[~small], counts[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    squares = (counts - expected) ** 2 / np.maximum(expected, 1e-300)
    return float(stats.chi2.sf(squares.sum(), len(counts) - 1))


def same_law(a, b) -> float:
    """p-value of the two-sample Kolmogorov-Smirnov test (conservative where values
    repeat).
    """
    return float(stats.ks_2samp(np.asarray(a), np.asarray(b), method="asymp").pvalue)
