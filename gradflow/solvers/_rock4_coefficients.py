"""Coefficients of a stabilised Runge-Kutta method of order four, computed from its
definition.

A method of s stages advances ẏ = λy by y₁ = R(hλ) y₀ with a polynomial R of degree s.
Its coefficients follow in three steps:

1. The optimal polynomial: R(z) = eᶻ + O(z⁵) with |R| ≤ η on the longest possible
   interval [-ℓ, 0], except near 0, where R ≈ eᶻ; ℓ ≈ 0.35 s². It has s - 4 real zeros
   and two complex pairs, and reaches η and -η alternately, s - 3 times.
2. R = w P, with the complex zeros in w and the real ones in P. P is the last of a
   family of orthogonal polynomials, whose three-term recurrence gives s - 4 stages,
   each with |P_j| ≤ 1 on the interval.
3. Four more stages with the polynomial w, chosen so that the whole method has order
   four for nonlinear equations too; and an error estimate and a dense output of order
   three.

This is the approach of A. Abdulle, "Fourth order Chebyshev methods with recurrence
relation", SIAM J. Sci. Comput. 23 (2002), where R is only nearly optimal. The error
estimate and the dense output are our own: they do not use the vector field at y₁, in
which the rest of a stiff mode would be magnified hρ times.
"""

import functools
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Int

DAMPING = 0.95
"""η: less than 1, so that stiff modes decay."""
FEWEST_STAGES = 5
_GROWTH = 1.15
"""The factor between the numbers of stages of consecutive methods in the family."""

# The limits of ℓ/s² and of one zero of each complex pair as s → ∞, from which Newton's
# method starts.
_LIMIT_LENGTH = 0.3532
_LIMIT_ZEROS = np.array([-2.4985 + 1.3168j, -0.3062 + 3.5806j])
_CLASSICAL = np.array([1 / 2, 0, 1 / 2, 0, 0, 1, 1 / 6, 1 / 3, 1 / 3, 1 / 6])
"""The rows of the classical method of order four; the last row is the weights."""


class Method(NamedTuple):
    """One method of the family. From g₀ = y₀ and κ₀ = 0, for j = 0, …, s - 5,

        g_{j+1} = μ_j h f(g_j) + (1 + κ_j) g_j - κ_j g_{j-1},

    then with g = g_{s-4}, Y_i = g + h Σ_{k<i} a_ik f(Y_k) for i = 0, …, 4, the last of
    which is y₁. With the five vectors v = (g - y₀, h f(Y₀), …, h f(Y₃)), the error is
    Σ e_i v_i and the dense output is y(t₀ + θh) = y₀ + Σ_p θᵖ Σ_i b_pi v_i for
    p = 1, …, 4.
    """

    length: float
    """ℓ, the length of the interval of stability."""
    mu: Float[np.ndarray, " stages-4"]
    kappa: Float[np.ndarray, " stages-4"]
    c: Float[np.ndarray, " stages-4"]
    """The times of g₀, …, g_{s-5}, in units of h."""
    a: Float[np.ndarray, "5 5"]
    c_last: Float[np.ndarray, " 5"]
    """The times of Y₀, …, Y₄."""
    error: Float[np.ndarray, " 5"]
    """Normalised so that the error is z⁴/24 + O(z⁵) for ẏ = λy."""
    dense: Float[np.ndarray, "4 5"]


class Family(NamedTuple):
    """Methods with increasing numbers of stages, stacked along a leading axis; `mu`,
    `kappa` and `c` are padded."""

    stages: Int[np.ndarray, " methods"]
    length: Float[np.ndarray, " methods"]
    mu: Float[np.ndarray, "methods rows"]
    kappa: Float[np.ndarray, "methods rows"]
    c: Float[np.ndarray, "methods rows"]
    a: Float[np.ndarray, "methods 5 5"]
    c_last: Float[np.ndarray, "methods 5"]
    error: Float[np.ndarray, "methods 5"]
    dense: Float[np.ndarray, "methods 4 5"]


@functools.cache
def family(max_stages: int) -> Family:
    """The methods of 5, 6, … stages, up to `max_stages`; beyond 13 stages, each has
    about a seventh more than the one before."""
    stages = [FEWEST_STAGES]
    while stages[-1] < max_stages:
        stages.append(min(max_stages, max(stages[-1] + 1, int(_GROWTH * stages[-1]))))
    rows = max_stages - 4
    methods = []
    for m in map(method, stages):
        padding = (0, rows - len(m.mu))
        padded = {name: np.pad(getattr(m, name), padding) for name in _PADDED}
        methods.append(m._replace(**padded))
    return Family(np.array(stages), *map(np.stack, zip(*methods, strict=True)))


_PADDED = ("mu", "kappa", "c")


def method(stages: int) -> Method:
    """The method with this number of stages."""
    r, zeta, length = _optimal_polynomial(stages)
    mu, kappa = _recurrence(r, zeta, length)
    moments = _moments(mu, kappa)
    a, M = _last_stages(moments[-1], zeta)
    error, dense = _error_and_dense(M)
    return Method(
        length=length,
        mu=mu,
        kappa=kappa,
        c=moments[:-1, 0],
        a=a,
        c_last=M[:, 0],
        error=error,
        dense=dense,
    )


#
# 1. The optimal polynomial
#


def _optimal_polynomial(
    s: int,
) -> tuple[Float[np.ndarray, " zeros"], Complex[np.ndarray, "2"], float]:
    """The real zeros r in decreasing order, the reciprocals ζ of one zero of each pair,
    and ℓ.

    log R(z) = Σ log(1 - z ρ_i) over the reciprocals ρ of all zeros, so that
    R(z) = eᶻ + O(z⁵) means Σ ρ_i = -1 and Σ ρ_i^k = 0 for k = 2, 3, 4. Together with
    log |R| = log η at the s - 3 extrema these are s + 1 equations for as many unknowns:
    log(-r), Re ζ, Im ζ and log ℓ. The position of an extremum does not enter the
    Jacobian, because log |R| is stationary there; that of the interval's end -ℓ, which
    is not an extremum, does.
    """
    n = s - 4
    length = _LIMIT_LENGTH * s**2
    zeta = 1 / _LIMIT_ZEROS
    r = -length * (1 - np.cos(np.pi * (np.arange(n) + 2) / (n + 1.5))) / 2
    k = np.arange(1, 5)
    for _ in range(40):
        z = np.append(_extrema(r, zeta), -length)[:, None]
        pair = 1 - zeta * z
        values = np.sum(np.log(np.abs(1 - z / r)), 1) + 2 * np.sum(np.log(abs(pair)), 1)
        powers = np.sum(r ** -k[:, None], 1) + 2 * np.sum(zeta ** k[:, None], 1).real
        F = np.concatenate([values - np.log(DAMPING), powers + (k == 1)])
        J = np.zeros((s + 1, s + 1))
        change = k[:, None] * zeta ** (k[:, None] - 1)
        J[: s - 3] = np.hstack(
            [z / (r - z), -2 * (z / pair).real, 2 * (z / pair).imag, 0 * z]
        )
        J[s - 3 :, :-1] = np.hstack(
            [-k[:, None] * r ** -k[:, None], 2 * change.real, -2 * change.imag]
        )
        J[s - 4, -1] = -length * _slope(z[-1], r, zeta)[0]
        step = np.linalg.solve(J, -F)
        if np.max(np.abs(step)) < 1e-8:  # the next step would be the square of this
            return r, zeta, length
        step *= min(1.0, 0.3 / np.max(np.abs(step)))
        r, length = r * np.exp(step[:n]), length * np.exp(step[-1])
        zeta = zeta + step[n : n + 2] + 1j * step[n + 2 : n + 4]
    raise RuntimeError(f"The stability polynomial of degree {s} was not found.")


def _slope(
    z: Float[np.ndarray, " points"],
    r: Float[np.ndarray, " zeros"],
    zeta: Complex[np.ndarray, "2"],
) -> Float[np.ndarray, " points"]:
    """The derivative of log |R|."""
    z = z[:, None]
    return np.sum(1 / (z - r), 1) - 2 * np.sum((zeta / (1 - zeta * z)).real, 1)


def _extrema(
    r: Float[np.ndarray, " zeros"], zeta: Complex[np.ndarray, "2"]
) -> Float[np.ndarray, " zeros"]:
    """The local maxima of |R|: between 0 and the first zero, and between the zeros."""
    # From 0 on R falls like eᶻ, and rises to a maximum before its first zero. Far from
    # the solution there may be no maximum: then the point of slowest fall is taken.
    grid = np.linspace(r[0], 0.0, 402)[1:-1]
    slope = _slope(grid, r, zeta)
    first = min(np.argmin(slope), np.argmax(slope < 0) or len(grid)) - 1
    lower = np.append(grid[first], r[1:])
    upper = np.append(grid[first + 1], r[:-1])
    for _ in range(26):  # the error of the position enters squared
        middle = (lower + upper) / 2
        rising = _slope(middle, r, zeta) > 0
        lower, upper = np.where(rising, middle, lower), np.where(rising, upper, middle)
    return (lower + upper) / 2


#
# 2. The recurrence
#


def _recurrence(
    r: Float[np.ndarray, " m"], zeta: Complex[np.ndarray, "2"], length: float
) -> tuple[Float[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """μ and κ of P_{j+1} = (μ_j z + 1 + κ_j) P_j - κ_j P_{j-1}, P_0 = 1, where P_m has
    the zeros r. The P_j are orthogonal for weights w(r)² on the zeros, by Lanczos."""
    m, x = len(r), r / length
    Q, alpha, beta2 = np.zeros((m, m)), np.zeros(m), np.zeros(m)
    q = np.prod(np.abs(1 - zeta * r[:, None]) ** 2, 1)
    for j in range(m):
        norm = np.linalg.norm(q)
        beta2[j] = norm**2 if j else 0.0
        Q[j] = q / norm
        alpha[j] = Q[j] @ (x * Q[j])
        q = x * Q[j]
        for _ in range(2):  # twice is enough
            q = q - Q[: j + 1].T @ (Q[: j + 1] @ q)
    # Monic, p_{j+1} = (x - α_j) p_j - β²_j p_{j-1}; P_j = p_j / p_j(0).
    mu, kappa = np.zeros(m), np.zeros(m)
    ratio = np.inf  # p_j(0) / p_{j-1}(0)
    for j in range(m):
        previous, ratio = ratio, -alpha[j] - beta2[j] / ratio
        mu[j] = 1 / (length * ratio)
        kappa[j] = beta2[j] / (ratio * previous)
    return mu, kappa


def _grafted(M: np.ndarray) -> np.ndarray:
    """The moments of h f(g), from the moments M of g (along the last axis).

    Moments are the elementary weights of the trees with at most four nodes: with the
    matrix A and times c = A1 of the stages, and the row a of A for g,

        a·1, a·c, a·c², a·Ac, a·c³, a·(c Ac), a·Ac², a·AAc.
    """
    c, ac, ac2, aac, *_ = np.moveaxis(M, -1, 0)
    return np.stack([np.ones_like(c), c, c**2, ac, c**3, c * ac, ac2, aac], axis=-1)


_ORDER_FOUR = np.array([1, 1 / 2, 1 / 3, 1 / 6, 1 / 4, 1 / 8, 1 / 12, 1 / 24])
_BRANCHED = np.array([2, 4, 5, 6])
"""The trees whose order conditions do not follow from R(z) = eᶻ + O(z⁵)."""


def _moments(
    mu: Float[np.ndarray, " m"], kappa: Float[np.ndarray, " m"]
) -> Float[np.ndarray, "m+1 8"]:
    """The moments of g₀, …, g_{s-4}."""
    M = np.zeros((len(mu) + 1, 8))
    for j in range(len(mu)):
        M[j + 1] = mu[j] * _grafted(M[j]) + (1 + kappa[j]) * M[j] - kappa[j] * M[j - 1]
    return M


#
# 3. The last four stages
#


def _last_stages(
    start: Float[np.ndarray, " 8"], zeta: Complex[np.ndarray, "2"]
) -> tuple[Float[np.ndarray, "5 5"], Float[np.ndarray, "5 8"]]:
    """a and the moments of Y₀, …, Y₄. These are eight equations for ten unknowns; the
    solution is the one that minimum-norm Newton steps reach from the classical
    method."""
    w = np.array([1.0])
    for q in zeta:
        w = np.convolve(w, [1, -2 * q.real, abs(q) ** 2])

    def residual(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The residual, a and the moments for one x or a batch of them."""
        a = np.zeros((*x.shape[:-1], 5, 5), x.dtype)
        a[..., *np.tril_indices(5, -1)] = x
        M = np.zeros((*x.shape[:-1], 5, 8), x.dtype) + start
        for i in range(1, 5):
            M[..., i, :] = start + (a[..., i, None, :] @ _grafted(M))[..., 0, :]
        chain, chains = np.ones(5), []
        for _ in range(4):
            chain = (a @ chain[..., None])[..., 0]
            chains.append(chain[..., 4])
        order = (M[..., 4, :] - _ORDER_FOUR)[..., _BRANCHED]
        return np.concatenate([np.stack(chains, -1) - w[1:], order], -1), a, M

    x = w[1] * _CLASSICAL
    for _ in range(20):
        F, a, M = residual(x)
        if np.max(np.abs(F)) < 1e-15:
            return a, M
        # By complex steps, which give exact derivatives.
        J = np.imag(residual(x + 1e-30j * np.eye(10))[0]).T / 1e-30
        x = x - np.linalg.lstsq(J, F)[0]
    raise RuntimeError("The last stages do not attain order four.")


def _error_and_dense(
    M: Float[np.ndarray, "5 8"],
) -> tuple[Float[np.ndarray, " 5"], Float[np.ndarray, "4 5"]]:
    """The error and the dense output, from five conditions on five weights: the four
    trees with at most three nodes, and the chain of four, which is λ⁴y for ẏ = λy."""
    trees = [0, 1, 2, 3, 7]
    conditions = np.vstack([M[0], _grafted(M)[:4]]).T[trees]
    # The trees' targets θ, θ²/2, θ³/3, θ³/6 and θ⁴/24, by powers of θ.
    targets = np.zeros((5, 4))
    targets[range(5), [0, 1, 2, 2, 3]] = _ORDER_FOUR[trees]
    dense = np.linalg.solve(conditions, targets).T
    # For the error all targets but the last are zero, as in the power θ⁴.
    return dense[3], dense
