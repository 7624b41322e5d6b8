"""The memory that a flow or an ensemble takes, estimated before any work."""

import jax
from jaxtyping import PyTree

from .._core import machine
from .._stepping import SEGMENT_MEMORY, SMALLEST_SEGMENT, Common, Snapshot
from ..solvers import _internals as solvers
from ._request import Request


def bytes_of(tree: PyTree) -> int:
    """The memory of a pytree of arrays or shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_of_flow(
    request: Request, row: Snapshot, stored: int, size: int
) -> dict[str, int]:
    """Estimated bytes, without what the loss itself takes: the solver's working memory,
    a segment's dense output and its copy, the dense output that is kept, and the saved
    rows, which are copied once when they are joined. `row` is a snapshot's shape."""
    solver = request.choice.solver
    on_mesh = solvers.has_mesh(solver)
    a_step = 8 * size * (1 if on_mesh else 8)
    # Events are located on the dense output of a step, which is not the mesh's.
    rows = 8 if on_mesh and request.event is not None else 1
    params = bytes_of(row.params)
    observed = bytes_of(row) - params
    return _with_total(
        solver=solvers.memory(solver, size),
        segments=2 * rows * max(SEGMENT_MEMORY, SMALLEST_SEGMENT * a_step),
        dense=request.dense_memory,
        saved=2 * (len(request.times) * observed + (stored + 1) * params),
    )


def memory_of_ensemble(
    common: Common, row: Snapshot, members: int, under_way: int
) -> dict[str, int]:
    """Estimated bytes: for each member under way its solver, a segment's dense output
    and the states at all saved times with what is observed of them; for all members
    what is kept, which is copied once when it is joined."""
    size = common.ravel.size
    state = 8 * size
    on_mesh = solvers.has_mesh(common.solver) and common.event is None
    params = bytes_of(row.params)
    observed = bytes_of(row) - params
    rows = 1 + len(common.times)
    return _with_total(
        solver=under_way * solvers.memory(common.solver, size),
        segments=under_way * common.steps * state * (1 if on_mesh else 8),
        states=under_way * rows * (state + params + observed),
        saved=2 * members * (rows * observed + (1 + len(common.stored)) * params),
    )


def _with_total(**parts: int) -> dict[str, int]:
    return {**parts, "total": sum(parts.values())}


def refuse_large_flow(memory: dict[str, int], size: int) -> None:
    parts = {name: machine.readable(value) for name, value in memory.items()}
    machine.refuse_beyond(
        f"a flow of {size:,} numbers",
        memory["total"],
        f"{parts['solver']} for the solver, {parts['segments']} for its latest steps, "
        f"{parts['dense']} for dense output (`dense_memory`) and {parts['saved']} for "
        "what is saved (observables at the times `ts`, parameters as `save_params` "
        "says)",
    )


def refuse_large_ensemble(memory: dict[str, int], size: int, members: int) -> None:
    saved = memory["saved"]
    machine.refuse_beyond(
        f"an ensemble of {members:,} flows of {size:,} numbers",
        memory["total"],
        f"{machine.readable(memory['total'] - saved)} for the members under way "
        f"(`threads`, `batch`, `ts`) and {machine.readable(saved)} for what is saved "
        "(observables at the times `ts`, parameters as `save_params` says). A "
        "`gradflow.sweep` over smaller ensembles keeps its results on disk",
    )
