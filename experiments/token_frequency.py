"""Experiment 27: when a token is learned, as a function of its frequency.

On the flow of experiment 24 (WikiText-2, d = 1,000) token i has the loss
ℓ_i(t) = - Σ_y P_iy log p_i(y), which is bounded below by its entropy H(P_i). It is
*embedded* when ‖W0[i]‖ is half way, on a logarithmic scale, from its initial to its
largest value, and *learned* when its excess ℓ_i - H(P_i) has fallen by half of its
total fall. Times are interpolated linearly in log t between saved times.

Claim. While W0 condenses on παᵀ, embeddings grow in proportion to π_i: frequent tokens
are embedded earlier. Condensation at rate μ = ‖π‖·‖π - 1/d‖ makes ‖W0[i]‖ grow by
π_i e^{μt}, so that of two tokens the one embedded later has the smaller π. The script
prints the rank correlations of the times with π, and medians over bands.
"""

from pathlib import Path
from typing import Any

import numpy as np
from _common import Claim, Measurement, run
from _corpus import COLOURS, Size, follow
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from wikitext import QUICK, SIZES, WIKITEXT

BANDS = 5
"""The number of bands of equally many tokens, most frequent first."""


def measure(quick: bool, out: Path) -> Measurement:
    size: Size = QUICK[0] if quick else SIZES[-1]
    followed = follow(WIKITEXT, quick, size, out)
    ts, law = followed.flow.ts, followed.chain.stationary
    norms, losses = followed.seen["embedding"], followed.seen["token_loss"]
    level = np.sqrt(norms[0] * norms.max(axis=0))
    embedded = _first_time(ts, norms - level)
    falls = losses[0] - losses.min(axis=0)
    learned = _first_time(ts, losses[0] - losses - 0.5 * falls)
    order = np.argsort(-law, kind="stable")
    parts = np.array_split(order, BANDS)
    ranks = {
        name: float(spearmanr(law[ok], times[ok])[0])  # pyright: ignore
        for name, times in (("embedded", embedded), ("learned", learned))
        for ok in [np.isfinite(times)]
    }
    lines = [f"{'tokens':>14} {'frequency':>10} {'embedded':>9} {'learned':>9}"]
    for i, part in enumerate(parts):
        first = sum(len(p) for p in parts[:i])
        lines.append(
            f"{first + 1:>6} … {first + len(part):>5} {np.median(law[part]):>10.2g} "
            f"{np.nanmedian(embedded[part]):>9.4g} {np.nanmedian(learned[part]):>9.4g}"
        )
    lines.append(f"rank correlation with π: {ranks}")
    medians = [float(np.nanmedian(embedded[part])) for part in parts]
    claims = [
        Claim("most frequent band embedded first", 0, int(np.argmin(medians)), 0),
        Claim(
            "energy imbalance", 0.0, followed.flow.certificate.energy_imbalance, 1e-5
        ),
    ]
    numbers = {
        "frequency": law,
        "embedded": embedded,
        "learned": learned,
        "rank_correlation": ranks,
        "medians": medians,
        "ts": ts,
        "norms": norms if len(law) < 50 else None,
    }
    return Measurement(claims, numbers, (law, embedded, learned), "\n".join(lines))


def _first_time(ts: np.ndarray, above: np.ndarray) -> np.ndarray:
    """The time at which each column first becomes positive; NaN if it never does."""
    times = np.full(above.shape[1], np.nan)
    for j, column in enumerate(above.T):
        i = int(np.argmax(column > 0))
        if i > 1:
            share = column[i - 1] / (column[i - 1] - column[i])
            logs = np.log(ts[i - 1 : i + 1])
            times[j] = np.exp(logs[0] + share * (logs[1] - logs[0]))
    return times


def draw(measurement: Measurement) -> Figure:
    law, *times = measurement.data
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharex=True)
    names = (
        "embedded: half of the growth of $\\|W_0[i]\\|$",
        "learned: half of the fall of $\\ell_i$",
    )
    for ax, when, name, colour in zip(axes, times, names, COLOURS, strict=False):
        ax.plot(law, when, "o", markersize=3, alpha=0.5, color=colour)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel(r"frequency $\pi_i$ of the token")
        ax.set_ylabel("time $t$")
        ax.set_title(name, loc="left", fontsize="medium")
    return figure


if __name__ == "__main__":
    run(__doc__, measure, draw, keeps=True)
