"""Summaries of trajectories in words."""

from ._trajectory import AbstractTrajectory

SMALLEST_FIXED = 1e-3
"""Losses below this are printed in scientific notation."""


def loss_text(loss: float) -> str:
    """A loss as it is printed: 0.553611, but 1.000e-31."""
    if loss != 0 and abs(loss) < SMALLEST_FIXED:
        return f"{loss:.3e}"
    return f"{loss:.6f}"


def described(trajectory: AbstractTrajectory, kind: str, held_to: str) -> str:
    """The summary that `print` shows; `held_to` describes the steps or tolerances."""
    stats = trajectory.stats
    evaluations, products = stats.num_evaluations, stats.num_hessian_products
    counted = "" if evaluations is None else f", {evaluations:,} evaluations"
    counted += f", {products:,} Hessian products" if products else ""
    ended = stats.reason or "reached the horizon"
    first, last = trajectory.loss[0], trajectory.loss[-1]
    lines = [
        f"{kind} to t = {trajectory.ts[-1]:g} ({ended})",
        f"loss             {loss_text(first)} → {loss_text(last)}"
        f"{_above_floor(trajectory)}, speed {trajectory.speed[-1]:.1e}",
        f"solver           {stats.solver} {held_to}",
        f"work             {stats.num_accepted_steps:,} steps, "
        f"{stats.num_rejected_steps:,} rejected{counted}",
        f"time             {stats.run_seconds:.2f} s, and "
        f"{stats.compile_seconds:.2f} s to compile",
        str(trajectory.certificate),
    ]
    return "\n".join([*lines, *(f"note             {note}" for note in stats.notes)])


def _above_floor(trajectory: AbstractTrajectory) -> str:
    floor = trajectory.knowledge.floor
    if floor is None:
        return ""
    above = trajectory.loss[-1] - floor
    return f" ({above:.1e} above its floor {loss_text(floor)})"
