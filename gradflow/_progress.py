"""A progress bar on the logarithmic clock."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator

Report = Callable[[float, float, int], None]


@contextlib.contextmanager
def progress_bar(t1: float, shown: bool) -> Iterator[Report]:
    """A function to call with (time, loss, attempted steps) as a solve to t1 goes on.

    Half the bar is half the logarithm of time from 1e-5·t1 on, which is where the
    default saved times begin.
    """
    if not shown:
        yield lambda t, loss, steps: None
        return
    from tqdm.auto import tqdm

    def place(t: float) -> float:
        return math.log1p(1e5 * t / t1) / math.log1p(1e5)

    layout = "{l_bar}{bar}| {elapsed}{postfix}"
    # A log file wants a line now and then, a terminal a moving bar.
    pause = 0.1 if sys.stderr.isatty() else 10.0
    with tqdm(total=1000, desc="flow", bar_format=layout, mininterval=pause) as bar:

        def report(t: float, loss: float, steps: int) -> None:
            bar.set_postfix_str(
                f"t = {t:.4g}, loss {loss:.6f}, {steps:,} steps", refresh=False
            )
            bar.update(int(1000 * place(t)) - bar.n)

        yield report
        bar.refresh()
