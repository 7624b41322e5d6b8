"""Workers on a Ray cluster, running or started here. Ray is imported only in this file
and only when it is used."""

import os
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any

from .._core import checks
from . import _worker
from ._local import Outcome, SweepError, single_threaded
from ._worker import Label, Shipped


class RayWorkers:
    """Ray's workers, which load a task once and keep it from point to point.

    **Arguments:**

    - `workers`: the number of points submitted at once; by default twice as many as
        the cluster can compute at once, so that no worker idles.
    - `cpus`, `gpus`: the resources that Ray reserves for each point.
    - `runtime_env`: Ray's runtime environment, the code and packages to ship.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        runtime_env: dict[str, Any] | None = None,
    ):
        self._workers = (
            None if workers is None else checks.whole_number("workers", workers)
        )
        self._cpus = checks.positive_number("cpus", cpus, zero_allowed=True)
        self._gpus = checks.positive_number("gpus", gpus, zero_allowed=True)
        if self._cpus == 0 and self._gpus == 0:
            raise ValueError("`cpus` must be positive if `gpus` is 0, got 0.")
        if runtime_env is not None and not isinstance(runtime_env, dict):
            raise ValueError(
                f"`runtime_env` must be a dictionary, got {type(runtime_env).__name__}."
            )
        self._environment = runtime_env or {}
        self._single = self._cpus <= 1 and self._gpus == 0
        self._ours = False

    def __enter__(self) -> "RayWorkers":
        try:
            import ray  # pyright: ignore[reportMissingImports] (an extra)
            import ray.exceptions  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise ValueError(
                "`engine` is 'ray', which is not installed: pip install gradflow[ray]."
            ) from error
        self._ray: Any = ray
        if not ray.is_initialized():
            # Connects to the cluster that Ray finds (RAY_ADDRESS), or starts one.
            ray.init(log_to_driver=False, include_dashboard=False)
            self._ours = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            self._ray.shutdown()

    def _remote(self, function: Callable, retries: int) -> Callable[..., Any]:
        return (
            self._ray.remote(function)
            .options(
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_retries=retries,
                runtime_env=self._environment,
            )
            .remote
        )

    def start(self, task: Shipped, points: int, retries: int) -> None:
        """Check the cluster's resources, and that a worker can load `task`."""
        self._check_resources()
        try:
            problem = self._ray.get(self._remote(_load, retries)(task, self._single))
        except self._ray.exceptions.RayError as error:
            raise SweepError(f"Ray could not start a worker: {error}") from error
        if problem is not None:
            raise ValueError(
                "`task` must be a function that a worker process can load, but loading "
                f"it raised {problem}"
            )

    def _check_resources(self) -> None:
        there = self._ray.cluster_resources()
        for name, kind, wanted in (
            ("cpus", "CPU", self._cpus),
            ("gpus", "GPU", self._gpus),
        ):
            if wanted > there.get(kind, 0):
                raise ValueError(
                    f"`{name}` must be at most the {there.get(kind, 0):g} of the Ray "
                    f"cluster, got {wanted:g}."
                )

    def run(
        self, task: Shipped, labels: Iterator[Label], retries: int
    ) -> Generator[Outcome, None, None]:
        """Yield the outcome of each of `labels` as it arrives."""
        ray = self._ray
        compute = self._remote(_compute, retries)
        shipped = ray.put(task)
        under_way: dict[Any, Label] = {}
        try:
            while True:
                while len(under_way) < self._at_once():
                    label = next(labels, None)
                    if label is None:
                        break
                    under_way[compute(shipped, self._single, label)] = label
                if not under_way:
                    return
                for reference in ray.wait(list(under_way), num_returns=1)[0]:
                    label = under_way.pop(reference)
                    yield Outcome(label["point"], *self._answer(reference))
        finally:
            for reference in under_way:
                ray.cancel(reference, force=True)

    def _answer(self, reference: Any) -> tuple[str, Any]:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # all retries failed
            reason = str(error).strip().partition("\n")[0]
            return "failed", (f"the worker died: {reason}", str(error))

    def _at_once(self) -> int:
        """The number of points to submit: by default one in work and one waiting for
        each worker."""
        if self._workers is not None:
            return self._workers
        there = self._ray.cluster_resources()
        room = [
            there.get(kind, 0) / wanted
            for kind, wanted in (("CPU", self._cpus), ("GPU", self._gpus))
            if wanted
        ]
        return max(1, 2 * int(min(room)))


#
# On Ray's workers
#

_loaded: dict[Shipped, Callable] = {}


def _task(shipped: Shipped, single: bool) -> Callable:
    """The task, loaded once; `single` if the worker has one core."""
    if shipped not in _loaded:
        if single:
            # JAX has been imported but reads its flags at the first computation. Ray
            # limits the threads of linear algebra itself.
            os.environ["XLA_FLAGS"] = single_threaded(os.environ.get("XLA_FLAGS", ""))
        _loaded[shipped] = _worker.load(shipped)
    return _loaded[shipped]


def _load(shipped: Shipped, single: bool) -> str | None:
    """The traceback of loading the task, or None if it loads."""
    try:
        _task(shipped, single)
    except BaseException:
        return traceback.format_exc()
    return None


def _compute(shipped: Shipped, single: bool, label: Label) -> tuple[str, Any]:
    """The outcome of one point."""
    return _worker.compute(_task(shipped, single), label)
