"""An implicit multistep method for gradient flows, without matrices.

The Jacobian of a gradient flow is -∇²L: symmetric, and late in training it has a
handful of large eigenvalues above many small ones. Newton's method for an implicit step
then needs no factorisation, only the top of the spectrum.

- `_formulas.py`: numerical differentiation formulas, their error estimates and the
  choice of order and step size;
- `_newton.py`: the implicit equation of a step and its solution;
- `_curvature.py`: the top eigenpairs of the Hessian, followed along the flow;
- `_solver.py`: the diffrax solver `LowRankNDF`;
- `_mesh.py`: dense output that stores one state per step.
"""

from ._mesh import (
    MeshInterpolation as MeshInterpolation,
    RecentPoints as RecentPoints,
    has_mesh as has_mesh,
    on_mesh as on_mesh,
)
from ._solver import LowRankNDF as LowRankNDF
