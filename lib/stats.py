"""What the studies say of several seeds, or of several windows of text."""
import math

import numpy as np


def mean_interval(values):
    """Mean with its 95% t interval: (mean, low, high)."""
    from scipy.stats import t                    # slow to import, and most commands do without
    mean, n = np.mean(values), len(values)
    half = t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n ** 0.5 if n > 1 else math.nan
    return float(mean), float(mean - half), float(mean + half)       # not numpy's, which write their type into a table
