"""A flow that was killed goes on from its checkpoint; a checkpoint of anything else is
refused."""

import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import gradflow
from gradflow._integrate import _checkpoint, _run
from gradflow._stepping import _segments

HORIZON = 300.0
OBSERVABLES = ("attention_entropy", "singular_values_W0")

# Short segments and no pause between checkpoints, so that there is much to be killed.
CHILD = """
import sys
import gradflow
from gradflow._integrate import _checkpoint, _run
from gradflow._stepping import _segments

_segments.LARGEST_SEGMENT = 32
_checkpoint.LARGEST_SHARE = 1e9
advance = _run.advance

def told(*args):
    print("segment", flush=True)
    return advance(*args)

_run.advance = told
chain = gradflow.MarkovChain.sticky([0.75, 0.19, 0.05, 0.01], 0.5)
model = gradflow.OneLayerTransformer(4, 3, 2)
problem = gradflow.Problem(model, gradflow.InfiniteContext(chain))
path, out = sys.argv[1:]
flow = gradflow.integrate(
    problem,
    problem.init(seed=1),
    300.0,
    observables=("attention_entropy", "singular_values_W0"),
    checkpoint=path,
    checkpoint_every=0.0,
)
flow.save(out)
"""


@pytest.fixture(scope="module")
def problem(reference_chain):
    """Of a shape of its own: for another's, long segments may be compiled already."""
    model = gradflow.OneLayerTransformer(4, 3, 2)
    return gradflow.Problem(model, gradflow.InfiniteContext(reference_chain))


@pytest.fixture(scope="module", autouse=True)
def short_segments():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_segments, "LARGEST_SEGMENT", 32)
        patch.setattr(_checkpoint, "LARGEST_SHARE", 1e9)
        yield


def integrate(problem, **options):
    options = {"observables": OBSERVABLES, "checkpoint_every": 0.0} | options
    start = options.pop("start", None)
    params = problem.init(seed=1) if start is None else start
    return gradflow.integrate(problem, params, options.pop("t1", HORIZON), **options)


@pytest.fixture(scope="module")
def whole_and_segments(problem):
    """A flow that nothing stopped, and in how many segments it was solved."""
    starts = []
    advance = _run.advance

    def counted(*args):
        starts.append(args)
        return advance(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "advance", counted)
        return integrate(problem), len(starts)


@pytest.fixture(scope="module")
def whole(whole_and_segments):
    return whole_and_segments[0]


@pytest.fixture(scope="module")
def interrupted(problem, tmp_path_factory):
    """The bytes of a checkpoint that was left after nine segments."""
    path = tmp_path_factory.mktemp("checkpoint") / "c"
    left_after(9, problem, path)
    return path.read_bytes()


def left_after(segments, problem, path, **options):
    count = iter(range(segments))
    advance = _run.advance

    def stopping(*args):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return advance(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_run, "advance", stopping)
        with pytest.raises(KeyboardInterrupt):
            integrate(problem, checkpoint=path, **options)


def assert_same(found, expected, rtol=1e-12):
    """Whole trajectories, balances and counts."""
    np.testing.assert_array_equal(found.ts, expected.ts)
    for name in ("params", "loss", "speed", "observables"):
        for a, b in zip(
            jax.tree.leaves(getattr(found, name)),
            jax.tree.leaves(getattr(expected, name)),
            strict=True,
        ):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-14)
    for count in ("num_accepted_steps", "num_rejected_steps", "num_evaluations"):
        assert found.stats[count] == expected.stats[count]
    assert found.certificate.energy_imbalance == pytest.approx(
        expected.certificate.energy_imbalance, rel=1e-6
    )
    assert found.certificate.drift == pytest.approx(
        expected.certificate.drift, rel=1e-6
    )


def test_a_flow_that_is_killed_again_and_again_ends_where_it_should(
    whole_and_segments, tmp_path
):
    whole, segments = whole_and_segments
    checkpoint, out = tmp_path / "c", tmp_path / "flow.npz"
    command = [sys.executable, "-c", CHILD, str(checkpoint), str(out)]
    rng = np.random.default_rng()
    kept = 0
    for _ in range(2):
        seen = int(rng.integers(3, 12))
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with child:
            assert child.stdout is not None
            for _ in range(seen):
                assert child.stdout.readline() == "segment\n"
            # In the midst of a segment, or of writing a checkpoint.
            try:
                child.wait(float(rng.uniform(0.0, 0.02)))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGKILL)
        assert child.returncode == -signal.SIGKILL
        assert not out.exists()
        assert checkpoint.exists()
        kept += seen - 1
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.count("segment") <= segments - kept
    assert_same(gradflow.Flow.load(out), whole, rtol=1e-9)
    # Neither the checkpoint nor a file that was not written to its end is left.
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_flow_goes_on(problem, whole, interrupted, tmp_path):
    path = tmp_path / "c"
    path.write_bytes(interrupted)
    flow = integrate(problem, checkpoint=path)
    assert_same(flow, whole)
    assert not path.exists()
    # Of what came before there is no dense output; it is integrated again.
    assert flow.dense.starts[0] > 0
    times = np.array([0.1, 0.5, 0.9]) * flow.dense.starts[0]
    np.testing.assert_allclose(flow.at(times).W0, whole.at(times).W0, rtol=1e-6)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"rtol": 1e-7}, r"`rtol` \(1e-08, now 1e-07\)"),
        ({"t1": 200.0, "ts": [0.0, 200.0]}, r"`t1` \(300, now 200\)"),
        ({"ts": [0.0, 100.0]}, "`ts`"),
        ({"save_params": False}, "`save_params`"),
        ({"observables": ("alignment",)}, "`observables`"),
        ({"max_steps": 10**6}, r"`max_steps` \(None, now 1000000\)"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused(
    problem, interrupted, tmp_path, changed, named
):
    path = tmp_path / "c"
    path.write_bytes(interrupted)
    with pytest.raises(gradflow.RunFileError, match=f"another flow.*{named}"):
        integrate(problem, checkpoint=path, **changed)
    assert path.read_bytes() == interrupted


def test_a_checkpoint_of_another_problem_or_start_is_refused(
    problem, interrupted, tmp_path
):
    path = tmp_path / "c"
    path.write_bytes(interrupted)
    with pytest.raises(gradflow.RunFileError, match="differs in `params`"):
        integrate(problem, checkpoint=path, start=problem.init(seed=2))
    chain = gradflow.MarkovChain.sticky([0.7, 0.2, 0.06, 0.04], 0.5)
    other = gradflow.Problem(problem.model, gradflow.InfiniteContext(chain))
    with pytest.raises(gradflow.RunFileError, match="differs in `loss`"):
        integrate(other, checkpoint=path)


def test_a_damaged_checkpoint_is_refused(problem, whole, interrupted, tmp_path):
    path = tmp_path / "c"
    path.write_bytes(interrupted[:-100])
    with pytest.raises(gradflow.RunFileError, match="cut short or damaged"):
        integrate(problem, checkpoint=path)
    middle = len(interrupted) // 2
    flipped = bytes([interrupted[middle] ^ 1])
    path.write_bytes(interrupted[:middle] + flipped + interrupted[middle + 1 :])
    with pytest.raises(gradflow.RunFileError, match=r"digest|damaged"):
        integrate(problem, checkpoint=path)
    whole.save(path)
    with pytest.raises(gradflow.RunFileError, match="a saved flow, not a checkpoint"):
        integrate(problem, checkpoint=path)


def test_a_loss_of_ones_own_is_known_by_its_value_and_slope(tmp_path):
    traced = []

    def bowl(scale):
        def loss(x):
            traced.append(scale)
            return 0.5 * scale * (x**2).sum() + 1.0

        return loss

    loss, path = bowl(1.0), tmp_path / "c"
    options = {"start": np.ones(3), "t1": 5.0, "observables": None, "solver": "tsit5"}
    left_after(1, loss, path, rtol=1e-10, **options)
    with pytest.raises(gradflow.RunFileError, match="differs in `loss`"):
        integrate(bowl(2.0), checkpoint=path, rtol=1e-10, **options)
    traced.clear()
    flow = integrate(loss, checkpoint=path, rtol=1e-10, **options)
    assert not traced  # nothing was compiled anew
    np.testing.assert_allclose(
        flow.params, np.exp(-flow.ts)[:, None] * np.ones(3), rtol=1e-8
    )


@pytest.mark.parametrize("path", [3, "nowhere/c", "."])
def test_bad_paths_are_refused_before_any_work(problem, path):
    with pytest.raises(ValueError, match="`checkpoint` must be"):
        integrate(problem, checkpoint=path)
    with pytest.raises(ValueError, match="`checkpoint_every` must be"):
        integrate(problem, checkpoint_every=-1.0)
