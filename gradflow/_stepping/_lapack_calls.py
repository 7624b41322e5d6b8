"""Which functions call LAPACK to factorise matrices. XLA calls it from outside compiled
code, so that a loop around such a function is not compiled as a whole."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxprs_in_params
from jaxtyping import PyTree

_FACTORISATIONS = {
    *("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product"),
    *("lu", "qr", "schur", "svd", "triangular_solve", "tridiagonal"),
}


def factorised(function: Callable, params: PyTree) -> set[int]:
    """The numbers of axes of the arrays that `function` factorises: empty if there are
    none, and above two where several matrices are factorised at once."""

    def in_jaxpr(jaxpr: Any) -> set[int]:
        found = set()
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in _FACTORISATIONS:
                found |= {len(getattr(x.aval, "shape", ())) for x in eqn.invars}
            for inner in jaxprs_in_params(eqn.params):
                found |= in_jaxpr(inner)
        return found

    return in_jaxpr(jax.make_jaxpr(function)(params).jaxpr)
