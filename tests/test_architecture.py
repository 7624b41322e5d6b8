"""The arrows of architecture.md: who may import whom, and what is loaded when."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "gradflow"

SHARED = {
    "_checks",
    "_ravel",
    "_storage",
    "_types",
    "_certificate",
    "_compile_clock",
    "_machine",
    "_metric",
    "_products",
    "_xla",
}
"""Helpers that every room may use; they use only each other."""

MAY_IMPORT = {
    "corpora": set(),
    "chains": {"corpora"},
    "populations": {"chains"},
    "_population_loss": {"populations"},
    "models": {"_population_loss", "populations"},
    "problem": {"_population_loss", "models", "populations"},
    "solvers": set(),
    "_progress": set(),
    "_segments": {"solvers"},
    "_flow": set(),
    "_events": {"_flow"},
    "_record": {"_flow", "_segments"},
    "_checkpoint": {"_record", "_segments"},
    "_solve": {
        "_checkpoint",
        "_flow",
        "_progress",
        "_record",
        "_segments",
        "solvers",
    },
    "_integrate": {"_checkpoint", "_flow", "_segments", "_solve", "solvers"},
    "_resume": {"_checkpoint", "_flow", "_integrate", "_record", "_solve", "solvers"},
    "_ensemble": {"_flow"},
    "_integrate_ensemble": {
        "_ensemble",
        "_flow",
        "_integrate",
        "_progress",
        "_record",
        "_segments",
        "_solve",
        "solvers",
    },
    "_converged": {"_flow", "_integrate"},
    "samplers": {"chains", "populations"},
    "_train": {
        "_flow",
        "_integrate",
        "_progress",
        "_record",
        "_segments",
        "samplers",
        "solvers",
    },
    "_compare": {"_flow"},
    "stages": {"_events", "_flow", "models", "problem"},
    "_stopping": {"_events", "_flow"},
    "landscape": set(),
    "saddles": {"_flow", "landscape", "stages"},
    "_rank_one_comparison": {"_flow", "_integrate", "models", "problem"},
    "sweeps": {
        "_flow",
        "_integrate",
        "_progress",
        "chains",
        "models",
        "populations",
        "problem",
        "solvers",
    },
    "_cli_sweeps": {"sweeps"},
    "plotting": {
        "_compare",
        "_ensemble",
        "_flow",
        "_rank_one_comparison",
        "chains",
        "models",
        "populations",
        "problem",
        "stages",
        "saddles",
    },
    "cli": {
        "_cli_sweeps",
        "_flow",
        "_integrate",
        "chains",
        "models",
        "plotting",
        "populations",
        "problem",
        "saddles",
        "solvers",
        "stages",
        "sweeps",
    },
}
"""Left may import right, and the shared helpers. `populations → models` is for the type
of what a model reads."""

ONLY_IN = {
    "diffrax": {
        "_integrate",
        "_integrate_ensemble",
        "_flow",
        "_record",
        "_segments",
        "_solve",
        "solvers",
    },
    "optax": {"_train"},
    "matplotlib": {"plotting"},
    "xarray": {"_ensemble", "_flow", "sweeps"},
    "cloudpickle": {"sweeps"},
    "ray": {"sweeps"},
    "huggingface_hub": {"corpora"},
    "pyarrow": {"corpora"},
}


def room(path):
    """The room that a file belongs to: its first part below the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    """The modules that a file imports anywhere, by absolute name."""
    package = ("gradflow", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            if module == "gradflow":
                yield from (f"gradflow.{alias.name}" for alias in node.names)


def files():
    return [
        p
        for p in sorted(PACKAGE.rglob("*.py"))
        if p.parent != PACKAGE or p.name != "__init__.py"
    ]


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_arrows_point_the_right_way(path):
    here = room(path)
    if here in SHARED:
        allowed = SHARED
    else:
        assert here in MAY_IMPORT, f"{here} is not a room of architecture.md"
        allowed = MAY_IMPORT[here] | SHARED | {here}
    for name in imports(path):
        head, *rest = name.split(".")
        if head == "gradflow" and rest and rest != ["__version__"]:
            assert rest[0] in allowed, f"{here} may not import {rest[0]}"
        if head in ONLY_IN:
            assert here in ONLY_IN[head], f"{head} may not be imported in {here}"


def test_the_walk_sees_a_wrong_arrow(tmp_path, monkeypatch):
    """The test above can fail: relative, absolute and nested imports are seen."""
    wrong = tmp_path / "chains.py"
    wrong.write_text(
        "def f():\n    from ._integrate import integrate\nimport ray.data\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert set(imports(wrong)) == {"gradflow._integrate", "ray.data"}
    with pytest.raises(AssertionError, match="ray may not be imported in chains"):
        test_arrows_point_the_right_way(wrong)
    wrong.write_text("from ._integrate import integrate\n")
    with pytest.raises(AssertionError, match="chains may not import _integrate"):
        test_arrows_point_the_right_way(wrong)


def test_import_is_lean():
    """What is slow to import is imported when it is used."""
    code = (
        "import sys, diffrax; before = set(sys.modules); import gradflow;"
        "heavy = {'matplotlib', 'xarray', 'pandas', 'tqdm', 'optax', 'ray',"
        "'cloudpickle', 'huggingface_hub', 'pyarrow'};"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(heavy & new), 'scipy.integrate' in set(sys.modules) - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[] False"


def test_plotting_is_loaded_on_first_use():
    import gradflow

    assert gradflow.plotting.__name__ == "gradflow.plotting"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gradflow.nonsense
