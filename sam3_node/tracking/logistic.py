"""Logistic regression with few weights, whose signs are known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def fit_logistic(x: Floats, y: Floats, share: Floats, least: Floats, ridge: float) -> tuple[Floats, float]:
    """Return the weights [F] and the bias of the logistic function of x [N, F] that gives y [N].

    share: [N], what each row counts. least: [F], below which no weight lies. ridge: penalty on squared weights.
    """
    from scipy.optimize import minimize  # takes a second to import

    def loss(values: Floats) -> tuple[float, Floats]:
        logit = x @ values[:-1] + values[-1]
        cost = share @ (np.logaddexp(0, logit) - y * logit) + ridge / 2 * values[:-1] @ values[:-1]
        error = share * (1 / (1 + np.exp(-logit)) - y)
        return float(cost), np.append(x.T @ error + ridge * values[:-1], error.sum())

    bounds = [*((low, None) for low in least), (None, None)]
    found = minimize(loss, np.append(least, 0.0), jac=True, bounds=bounds, method="L-BFGS-B").x
    return found[:-1], float(found[-1])
