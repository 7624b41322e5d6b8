"""The house: who may import whom, how large things may get, and what is loaded when."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gradflow"
DESIGN = ROOT.parent / "shared" / "design" / "architecture.md"

MAY_IMPORT = {
    "_core": "",
    "chains": "",
    "corpora": "chains",
    "populations": "chains corpora",
    "models": "populations",
    "problems": "populations models",
    "solvers": "",
    "_stepping": "problems solvers",
    "flows": "problems _stepping",
    "_integrate": "problems solvers _stepping flows",
    "_train": "chains populations problems _stepping flows",
    "landscape": "problems",
    "analysis": "problems flows _integrate landscape",
    "sweeps": "chains populations models problems solvers flows _integrate",
    "plotting": "flows analysis",
    "cli": "problems solvers flows _integrate _train analysis sweeps plotting",
}
"""The rooms, and the rooms that each may import beside `_core`."""

BEYOND_THE_DESIGN = {
    # A flow in a metric has the Jacobian of its velocity, which the loss states.
    ("problems", "landscape"),
    # The sweep of the command line builds its problem from plain numbers.
    *((room, "sweeps") for room in ("chains", "populations", "models", "problems")),
    # Its options name solvers.
    ("solvers", "sweeps"),
    ("solvers", "cli"),
}
"""Arrows that architecture.md does not have, each with its reason."""

ONLY_IN = {
    "diffrax": "solvers _stepping flows _integrate _train",
    "optax": "_train",
    "matplotlib": "plotting",
    "xarray": "flows sweeps",
    "cloudpickle": "sweeps",
    "ray": "sweeps",
    "huggingface_hub": "corpora",
    "pyarrow": "corpora",
}
"""The rooms that may import these packages."""


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


def files(folder=PACKAGE):
    return sorted(folder.rglob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def in_rooms():
    return [path for path in files() if path.parent != PACKAGE]


@pytest.mark.parametrize("path", in_rooms(), ids=name)
def test_arrows_point_the_right_way(path):
    here = room(path)
    assert here in MAY_IMPORT, f"{here} is not a room of architecture.md"
    allowed = {here, "_core", *MAY_IMPORT[here].split()}
    for module in imports(path):
        head, *rest = module.split(".")
        if head == "gradflow" and rest and rest != ["__version__"]:
            assert rest[0] in allowed, f"{here} may not import {rest[0]}"
        if head in ONLY_IN:
            assert here in ONLY_IN[head].split(), f"{here} may not import {head}"


def test_the_walk_sees_a_wrong_arrow(tmp_path, monkeypatch):
    """The test above can fail: relative, absolute and nested imports are seen."""
    wrong = tmp_path / "chains" / "_wrong.py"
    wrong.parent.mkdir()
    wrong.write_text(
        "def f():\n    from .._integrate import integrate\nimport ray.data\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    assert set(imports(wrong)) == {"gradflow._integrate", "ray.data"}
    with pytest.raises(AssertionError, match="chains may not import ray"):
        test_arrows_point_the_right_way(wrong)
    wrong.write_text("from .._integrate import integrate\n")
    with pytest.raises(AssertionError, match="chains may not import _integrate"):
        test_arrows_point_the_right_way(wrong)


def test_the_arrows_are_those_of_the_design():
    if not DESIGN.exists():
        pytest.skip("architecture.md is not beside the project")
    table = DESIGN.read_text().partition("## Who may import whom")[2]
    designed = set()
    names = r"((?:\w+, )*\w+)"
    for sources, targets in re.findall(rf"{names} +→ {names}", table):
        designed |= {(a, b) for a in sources.split(", ") for b in targets.split(", ")}
    designed = {arrow for arrow in designed if arrow[0] != "_core"}
    ours = {(b, a) for a, allowed in MAY_IMPORT.items() for b in allowed.split()}
    built = {arrow for arrow in designed if set(arrow) <= set(MAY_IMPORT)}
    assert ours - built == BEYOND_THE_DESIGN
    assert built - ours == set()


def test_the_top_level_fits_in_one_look():
    entries = [p.name for p in PACKAGE.iterdir() if p.name != "__pycache__"]
    assert len(entries) <= 20
    assert {p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__"} == set(
        MAY_IMPORT
    )


def test_tests_mirror_the_rooms():
    tests = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()}
    assert set(MAY_IMPORT) <= tests


@pytest.mark.parametrize("path", files(), ids=name)
def test_no_file_or_function_is_too_long(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert own_lines(node) <= 60, f"{node.name} has {own_lines(node)} lines"


def own_lines(function):
    """The number of lines of a function, docstring apart."""
    length = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        length -= first.end_lineno - first.lineno + 1
    return length


@pytest.mark.parametrize("path", files(ROOT / "tests"), ids=name)
def test_no_test_file_is_too_long(path):
    assert path.read_text().count("\n") <= 500


def calls(function):
    """The places in the package where a function or class of this name is called."""
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name) and called.id == function:
                yield f"{name(path)}:{node.lineno}", node


def test_a_flow_is_built_in_one_place():
    assert [where.partition(":")[0] for where, _ in calls("Flow")] == [
        "gradflow/flows/_flow.py"
    ]


LOSSES = {"loss", "problem", "trained", "self.loss", "self.problem", "flow.problem"}


def test_nobody_asks_what_a_loss_has():
    for function in ("hasattr", "getattr"):
        for where, call in calls(function):
            asked = ast.unparse(call.args[0])
            assert asked not in LOSSES, f"{where}: {function}({asked}, …)"


def test_import_is_lean():
    """Packages that are slow to import are imported when they are used."""
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


def test_the_table_of_contents_is_complete():
    import gradflow

    assert dir(gradflow) == sorted(gradflow.__all__)
    for public in gradflow.__all__:
        assert getattr(gradflow, public) is not None
    code = "import gradflow; print(*(k for k in vars(gradflow) if k[0] != '_'))"
    bound = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    # Python binds the rooms as attributes when they are imported.
    assert {*bound} - {*gradflow.__all__} <= {*MAY_IMPORT}


def test_plotting_is_loaded_on_first_use():
    import gradflow

    assert gradflow.plotting.__name__ == "gradflow.plotting"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = gradflow.nonsense
