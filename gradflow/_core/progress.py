"""Progress bars: one for the time of a flow, one for a count of jobs."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator

Report = Callable[[float, float, int], None]
"""Shows (time, loss, attempted steps) on a bar."""


@contextlib.contextmanager
def progress_bar(t1: float, shown: bool, remark: str = "") -> Iterator[Report]:
    """A bar for a solve from 0 to `t1`, on a logarithmic clock.

    Yields a function to call with (time, loss, attempted steps) as the solve proceeds.
    The bar is linear in log(1 + 1e5·t/t1), so that the default saved times, which begin
    at 1e-5·t1, pass at an even pace. A `remark` is printed above the bar; without
    `shown` nothing is printed.
    """
    if not shown:
        yield lambda t, loss, steps: None
        return
    from tqdm.auto import tqdm

    def fraction(t: float) -> float:
        return math.log1p(1e5 * t / t1) / math.log1p(1e5)

    if remark:
        tqdm.write(remark, file=sys.stderr)
    layout = "{l_bar}{bar}| {elapsed}{postfix}"
    with tqdm(total=1000, desc="flow", bar_format=layout, mininterval=_pause()) as bar:

        def report(t: float, loss: float, steps: int) -> None:
            bar.set_postfix_str(
                f"t = {t:.4g}, loss {loss:.6f}, {steps:,} steps", refresh=False
            )
            bar.update(int(1000 * fraction(t)) - bar.n)

        yield report
        bar.refresh()


@contextlib.contextmanager
def count_bar(
    total: int, name: str, shown: bool, remark: str = ""
) -> Iterator[Callable[[int, str], None]]:
    """A bar for `total` jobs, with their rate and the time left.

    Yields a function to call with (number of finished jobs, a note to show beside it).
    A `remark` is printed above the bar; without `shown` nothing is printed.
    """
    if not shown:
        yield lambda count, note: None
        return
    from tqdm.auto import tqdm

    if remark:
        tqdm.write(remark, file=sys.stderr)
    # The first jobs are slow because workers compile: show the recent rate.
    with tqdm(total=total, desc=name, mininterval=_pause(), smoothing=0.05) as bar:

        def report(count: int, note: str) -> None:
            bar.set_postfix_str(note, refresh=False)
            bar.update(count - bar.n)

        yield report
        bar.refresh()


def _pause() -> float:
    """Seconds between updates: a terminal gets a moving bar, a log file few lines."""
    return 0.1 if sys.stderr.isatty() else 10.0
