"""Progress bars: of a flow, on the logarithmic clock, and of a count."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator

Report = Callable[[float, float, int], None]


@contextlib.contextmanager
def progress_bar(t1: float, shown: bool, remark: str = "") -> Iterator[Report]:
    """A function to call with (time, loss, attempted steps) as a solve to t1 goes on;
    the remark is shown before it.

    Half the bar is half the logarithm of time from 1e-5·t1 on, which is where the
    default saved times begin.
    """
    if not shown:
        yield lambda t, loss, steps: None
        return
    from tqdm.auto import tqdm

    def place(t: float) -> float:
        return math.log1p(1e5 * t / t1) / math.log1p(1e5)

    if remark:
        tqdm.write(remark, file=sys.stderr)
    layout = "{l_bar}{bar}| {elapsed}{postfix}"
    with tqdm(total=1000, desc="flow", bar_format=layout, mininterval=_pause()) as bar:

        def report(t: float, loss: float, steps: int) -> None:
            bar.set_postfix_str(
                f"t = {t:.4g}, loss {loss:.6f}, {steps:,} steps", refresh=False
            )
            bar.update(int(1000 * place(t)) - bar.n)

        yield report
        bar.refresh()


@contextlib.contextmanager
def count_bar(
    total: int, name: str, shown: bool, remark: str = ""
) -> Iterator[Callable[[int, str], None]]:
    """A function to call with (how many are done, a remark), for a bar that shows the
    rate and the time left; the remark is shown before it."""
    if not shown:
        yield lambda count, remark: None
        return
    from tqdm.auto import tqdm

    if remark:
        tqdm.write(remark, file=sys.stderr)
    # The first counts take long, as workers compile: the rate is that of late.
    with tqdm(total=total, desc=name, mininterval=_pause(), smoothing=0.05) as bar:

        def report(count: int, remark: str) -> None:
            bar.set_postfix_str(remark, refresh=False)
            bar.update(count - bar.n)

        yield report
        bar.refresh()


def _pause() -> float:
    # A log file wants a line now and then, a terminal a moving bar.
    return 0.1 if sys.stderr.isatty() else 10.0
