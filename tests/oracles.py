"""Closed forms and independent methods that share no code with gradflow.

Everything here uses only NumPy, SciPy and Python's fractions, and follows theory.md.
The letters are those of the papers.
"""

import itertools
from fractions import Fraction

import numpy as np

REFERENCE_LAW = np.array([0.75, 0.19, 0.05, 0.01])
REFERENCE_STICKINESS = 0.5
SHAPES = ("W0", "WQ", "WK", "W1")


def sticky(pi, stickiness):
    return stickiness * np.eye(len(pi)) + (1 - stickiness) * np.asarray(pi)[None, :]


#
# The stationary distribution in exact arithmetic
#


def exact_stationary_law(P):
    """The stationary distribution of the rates P_ij, i ≠ j, in rational arithmetic."""
    d = len(P)
    rate = [[Fraction(float(P[i][j])) for j in range(d)] for i in range(d)]
    for i in range(d):
        rate[i][i] = -sum(rate[i][j] for j in range(d) if j != i)
    # π rate = 0 and Σ π = 1: transpose, and replace the last equation by the sum.
    A = [[rate[j][i] for j in range(d)] for i in range(d)]
    A[d - 1] = [Fraction(1)] * d
    b = [Fraction(0)] * (d - 1) + [Fraction(1)]
    for k in range(d):
        pivot = next(i for i in range(k, d) if A[i][k] != 0)
        A[k], A[pivot], b[k], b[pivot] = A[pivot], A[k], b[pivot], b[k]
        for i in range(d):
            if i != k and A[i][k] != 0:
                factor = A[i][k] / A[k][k]
                A[i] = [x - factor * y for x, y in zip(A[i], A[k], strict=True)]
                b[i] -= factor * b[k]
    return np.array([float(b[k] / A[k][k]) for k in range(d)])


#
# The loss by enumerating sequences, and its gradient derived by hand
#


def _softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def enumerated_loss(P, start, length, W0, WQ, WK, W1, positions="last"):
    """The loss over all d^length sequences, with attention position by position."""
    lengths = range(1, length + 1) if positions == "all" else [length]
    total = 0.0
    for s in lengths:
        for x in itertools.product(range(len(P)), repeat=s):
            p = start[x[0]]
            for a, b in itertools.pairwise(x):
                p *= P[a][b]
            query = W0[x[-1]] @ WQ
            scores = np.array([query @ (W0[token] @ WK) for token in x])
            attention = _softmax(scores)
            logits = sum(a * (W0[t] @ W1) for a, t in zip(attention, x, strict=True))
            total -= p * float(P[x[-1]] @ np.log(_softmax(logits))) / len(lengths)
    return total


def infinite_context_gradient(pi, P, W0, WQ, WK, W1):
    """L and its gradient for infinite context, with the chain rule applied by hand.

    With A = softmax(Φ + log π), Z = A M and p = softmax(Z):
    E = diag(π)(p - P) is ∂L/∂Z, so G_M = ∂L/∂M = AᵀE, S = E Mᵀ is ∂L/∂A, and
    G_Φ = A ∘ (S - rowsum(A ∘ S)).
    """
    M = W0 @ W1
    Phi = W0 @ WQ @ WK.T @ W0.T
    A = _softmax(Phi + np.log(pi))
    p = _softmax(A @ M)
    loss = -np.sum(pi[:, None] * P * np.log(p))
    E = pi[:, None] * (p - P)
    G_M = A.T @ E
    S = E @ M.T
    G_Phi = A * (S - np.sum(A * S, axis=1, keepdims=True))
    K = WQ @ WK.T
    gradient = (
        G_M @ W1.T + G_Phi @ W0 @ K.T + G_Phi.T @ W0 @ K,
        W0.T @ G_Phi @ W0 @ WK,
        W0.T @ G_Phi.T @ W0 @ WQ,
        W0.T @ G_M,
    )
    return loss, gradient, G_M, G_Phi


def scipy_flow(pi, P, weights, ts, rtol=1e-12):
    """The flow of the hand-written gradient, integrated by SciPy: the flattened weights
    at each time."""
    from scipy.integrate import solve_ivp

    shapes = [w.shape for w in weights]
    splits = np.cumsum([w.size for w in weights])[:-1]

    def unpack(y):
        parts = np.split(y, splits)
        return [p.reshape(s) for p, s in zip(parts, shapes, strict=True)]

    def field(_, y):
        _, gradient, _, _ = infinite_context_gradient(pi, P, *unpack(y))
        return -np.concatenate([g.ravel() for g in gradient])

    y0 = np.concatenate([w.ravel() for w in weights])
    scale = np.sqrt(np.mean(y0**2))
    solution = solve_ivp(
        field,
        (0, ts[-1]),
        y0,
        method="DOP853",
        t_eval=ts,
        rtol=rtol,
        atol=1e-3 * rtol * scale,
    )
    assert solution.success
    return solution.y.T


#
# Closed forms of theory.md, section 1
#


def first_rate(pi):
    """‖π‖·‖π - 1/d‖, the rate at which the flow leaves 0."""
    return np.linalg.norm(pi) * np.linalg.norm(pi - 1 / len(pi))


def first_saddle(pi, width, head_width, seed=0):
    """θ¹: W0 = γαᵀ, W1 = αβᵀ and no attention, with α a random unit vector."""
    alpha = np.random.default_rng(seed).normal(size=width)
    alpha /= np.linalg.norm(alpha)
    norm = np.linalg.norm(pi)
    c = np.log(pi) - np.mean(np.log(pi))
    g = np.sqrt(np.linalg.norm(c) / norm)
    gamma, beta = g * pi / norm, c / (g * norm)
    zero = np.zeros((width, head_width))
    return (np.outer(gamma, alpha), zero, zero, np.outer(alpha, beta)), gamma, beta


def focus_rate(pi, P, gamma, beta):
    """κ = [Σ_i π_i γ_i ((P - 1πᵀ)β)_i]·Var_π(γ)."""
    P = np.asarray(P)
    moved = (P - np.ones((len(pi), 1)) * pi[None, :]) @ beta
    variance = pi @ gamma**2 - (pi @ gamma) ** 2
    return (pi * gamma) @ moved * variance


def entropy(p):
    p = np.asarray(p)[np.asarray(p) > 0]
    return -np.sum(p * np.log(p))


#
# Landscapes
#


def symmetric(eigenvalues, seed=0):
    """A symmetric matrix with these eigenvalues, in a random orthonormal basis."""
    n = len(eigenvalues)
    Q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))
    H = (Q * np.asarray(eigenvalues)) @ Q.T
    return (H + H.T) / 2


def linear_flow(H, g, start, ts):
    """δ(t) of δ̇ = -g - Hδ, by the exponential of a matrix augmented with g."""
    from scipy.linalg import expm

    n = len(g)
    A = np.zeros((n + 1, n + 1))
    A[:n, :n], A[:n, n] = -H, -g
    return np.stack([(expm(A * t) @ np.append(start, 1.0))[:n] for t in ts])


def infinite_context_hessian(pi, P, weights, h=1e-4):
    """The Hessian, by fourth-order differences of the hand-derived gradient."""
    shapes = [w.shape for w in weights]
    splits = np.cumsum([w.size for w in weights])[:-1]
    y = np.concatenate([w.ravel() for w in weights])

    def gradient(y):
        parts = [p.reshape(s) for p, s in zip(np.split(y, splits), shapes, strict=True)]
        _, g, _, _ = infinite_context_gradient(pi, P, *parts)
        return np.concatenate([x.ravel() for x in g])

    rows = []
    for e in np.eye(y.size) * h:
        near = gradient(y + e) - gradient(y - e)
        far = gradient(y + 2 * e) - gradient(y - 2 * e)
        rows.append((8 * near - far) / (12 * h))
    H = np.stack(rows)
    return (H + H.T) / 2


def factorisation_saddle(A, width, taken, seed=0):
    """A critical point of ½‖UVᵀ - A‖² with the `taken` largest singular directions of A
    in random orthonormal columns; its loss, its index and its lowest eigenvalue. Each
    missing direction of A is unstable with each free column, and with each present
    direction that is smaller (there is none if the largest are taken)."""
    u, sigma, vt = np.linalg.svd(A, full_matrices=False)
    Q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(width, width)))
    root = np.sqrt(sigma[:taken])
    U = (u[:, :taken] * root) @ Q[:taken]
    V = (vt[:taken].T * root) @ Q[:taken]
    loss = 0.5 * np.sum(sigma[taken:] ** 2)
    index = int(np.sum(sigma[taken:] > 1e-9)) * (width - taken)
    return (U, V), loss, index, -sigma[taken]
