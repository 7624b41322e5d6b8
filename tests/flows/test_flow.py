import json
import zipfile
from typing import NamedTuple

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow
from gradflow import FiniteContext, Flow, MarkovChain, OneLayerTransformer, Problem


def bowl(x):
    return 0.5 * jnp.sum(x["w"] ** 2)


@pytest.fixture(scope="module")
def small():
    return gradflow.integrate(
        bowl, {"w": np.array([1.0, 2.0])}, 2.0, ts=[0.0, 1.0, 2.0]
    )


@pytest.fixture
def saved(reference_flow, tmp_path):
    return reference_flow.save(tmp_path / "flow.npz")


def assert_same(a, b):
    assert jax.tree.structure(a.params) == jax.tree.structure(b.params)
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("ts", "loss", "speed"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert set(a.observables) == set(b.observables)
    for name, value in a.observables.items():
        np.testing.assert_array_equal(value, b.observables[name])
    assert a.certificate == b.certificate
    assert a.settings == b.settings
    assert a.result == b.result
    assert dict(a.stats) == dict(b.stats)


def test_round_trip_is_exact(reference_flow, saved):
    loaded = Flow.load(saved)
    assert_same(reference_flow, loaded)
    assert str(loaded) == str(reference_flow)
    assert loaded.stats["versions"]["jax"] == jax.__version__


def test_a_loaded_flow_of_our_own_problem_is_whole(reference_flow, saved):
    loaded = Flow.load(saved)
    assert isinstance(loaded.problem, Problem)
    final = jax.tree.map(jnp.asarray, loaded.final)
    assert float(loaded.problem(final)) == pytest.approx(loaded.loss[-1], rel=1e-14)
    # Between saved times it integrates again, and finds what the dense output has.
    for t in (0.05, 33.3, 333.3):
        np.testing.assert_allclose(
            loaded.at(t).W0, reference_flow.at(t).W0, rtol=1e-6, atol=1e-8
        )


def test_finite_context_problems_come_back(tmp_path):
    chain = MarkovChain.random([0.5, 0.3, 0.2], labels=["a", "b", "ç"])
    population = FiniteContext(chain, 5, positions="all", start="uniform")
    problem = Problem(OneLayerTransformer(3, 2), population)
    flow = gradflow.integrate(problem, problem.init(), 1.0, solver="tsit5")
    loaded = Flow.load(flow.save(tmp_path / "f.npz"))
    again = loaded.problem
    assert isinstance(again, Problem)
    assert again.population.chain.labels == ("a", "b", "ç")
    np.testing.assert_array_equal(again.population.weights, population.weights)
    params = problem.init(scale=1.0)
    assert float(again(params)) == float(problem(params))


def test_a_users_loss_is_given_again(small, tmp_path):
    path = small.save(tmp_path / "small.npz")
    loaded = Flow.load(path)
    assert_same(small, loaded)
    np.testing.assert_array_equal(loaded.at(1.0)["w"], small.params["w"][1])
    with pytest.raises(
        ValueError, match=r"Flow\.load\(path, loss=.*gradflow\.integrate"
    ):
        loaded.at(1.5)
    whole = Flow.load(path, loss=bowl)
    np.testing.assert_allclose(
        whole.at(1.5)["w"], np.exp(-1.5) * np.array([1.0, 2.0]), rtol=1e-7
    )


class Pair(NamedTuple):
    first: jax.Array
    second: jax.Array


class Own(eqx.Module):
    weight: jax.Array
    pair: Pair


def test_parameters_of_a_users_own_type(tmp_path):
    params = Own(jnp.ones(2), Pair(jnp.zeros(1), jnp.ones((2, 1))))
    flow = gradflow.integrate(
        lambda p: jnp.sum(p.weight**2) + jnp.sum(p.pair.second**2),
        params,
        1.0,
        solver="tsit5",
    )
    path = flow.save(tmp_path / "own.npz")
    as_dict = Flow.load(path).params
    assert set(as_dict) == {"weight", "pair.first", "pair.second"}
    assert_same(flow, Flow.load(path, like=params))


def test_saving_is_whole_or_not_at_all(small, tmp_path, monkeypatch):
    path = small.save(tmp_path / "f.npz")
    before = path.read_bytes()

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="disk full"):
        small.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f.npz"]


def test_saving_into_a_folder_that_is_not_there(small, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder '.*nowhere' to write"):
        small.save(tmp_path / "nowhere" / "f.npz")


def test_a_run_file_holds_no_code(saved):
    with zipfile.ZipFile(saved) as archive:
        assert all(name.endswith(".npy") for name in archive.namelist())
    with np.load(saved, allow_pickle=False) as file:
        header = json.loads(file["header"].tobytes())
    assert header["format"] == "gradflow-run"
    versions = header["run"]["dict"]["stats"]["dict"]["versions"]["dict"]
    assert versions["diffrax"] == diffrax.__version__


def test_a_solver_without_a_name_is_given_again(tmp_path):
    flow = gradflow.integrate(bowl, {"w": np.ones(1)}, 1.0, solver=diffrax.Bosh3())
    path = flow.save(tmp_path / "f.npz")
    with pytest.raises(ValueError, match=r"by 'bosh3'.*Flow\.load\(path, solver="):
        Flow.load(path, loss=bowl).at(0.5)
    again = Flow.load(path, loss=bowl, solver=diffrax.Bosh3())
    np.testing.assert_allclose(again.at(0.5)["w"], np.exp(-0.5), rtol=1e-6)


class OwnPopulation(gradflow.populations.AbstractDenseUnorderedPopulation):
    """A population of a user's own, which a run file cannot rebuild."""

    chain: MarkovChain
    weights: np.ndarray
    queries: np.ndarray
    log_multiplicities: np.ndarray
    targets: np.ndarray

    def query_rows(self, table):
        return table[self.queries]


def test_a_problem_with_a_users_own_population_is_saved_without_it(tmp_path):
    chain = MarkovChain.sticky([0.6, 0.4], 0.5)
    given = gradflow.InfiniteContext(chain)
    arrays = (given.weights, given.queries, given.log_multiplicities, given.targets)
    problem = Problem(OneLayerTransformer(2, 2), OwnPopulation(chain, *arrays))
    flow = gradflow.integrate(
        problem, problem.init(), 1.0, ts=[0.0, 1.0], solver="tsit5"
    )
    loaded = Flow.load(flow.save(tmp_path / "f.npz"))
    assert loaded.problem is None
    np.testing.assert_array_equal(loaded.params.W0, flow.params.W0)


#
# Damaged, altered, foreign
#


def test_missing_file(tmp_path):
    with pytest.raises(gradflow.RunFileError, match="no run file at"):
        Flow.load(tmp_path / "nothing.npz")


@pytest.mark.parametrize("kept", [0, 10, 1000, -1, -100])
def test_cut_short(saved, kept):
    saved.write_bytes(saved.read_bytes()[:kept])
    with pytest.raises(gradflow.RunFileError, match="cut short or damaged"):
        Flow.load(saved)


def test_every_altered_byte_of_the_data_is_noticed(saved):
    whole = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        spans = [
            (i.header_offset + 200, i.header_offset + i.compress_size - 1)
            for i in archive.infolist()
            if i.compress_size > 300
        ]
    for start, stop in spans:
        for place in np.linspace(start, stop, 5).astype(int):
            altered = bytearray(whole)
            altered[place] ^= 1
            saved.write_bytes(altered)
            with pytest.raises(gradflow.RunFileError):
                Flow.load(saved)


def test_altered_with_matching_checksums_of_the_archive(saved):
    """Someone rewrote one number with NumPy: a sound archive, but another digest."""
    with np.load(saved) as file:
        members = {name: file[name] for name in file.files}
    members["array0"][5] *= 1.001
    np.savez(saved, **members)
    with pytest.raises(gradflow.RunFileError, match="altered after it was written"):
        Flow.load(saved)


def test_foreign_files(tmp_path):
    text = tmp_path / "text.npz"
    text.write_text("hello")
    archive = tmp_path / "archive.npz"
    np.savez(archive, x=np.ones(3))
    single = tmp_path / "single.npy"
    np.save(single, np.ones(3))
    pickled = tmp_path / "pickled.npz"
    np.savez(pickled, header=np.array([{"a": 1}], dtype=object), digest=np.ones(1))
    for path in (text, archive, single, pickled):
        with pytest.raises(gradflow.RunFileError, match="not a gradflow run file"):
            Flow.load(path)


def test_a_newer_format_is_refused_by_name(saved, monkeypatch, reference_flow):
    monkeypatch.setattr(gradflow._core.file_format, "FORMAT_VERSION", 99)
    newer = reference_flow.save(saved)
    monkeypatch.undo()
    with pytest.raises(
        gradflow.RunFileError,
        match=r"version 99 of the run file format.*newer gradflow",
    ):
        Flow.load(newer)


def test_a_stored_class_that_we_do_not_know_is_refused(small, tmp_path, monkeypatch):
    path = small.save(tmp_path / "f.npz")
    known = dict(gradflow._core.file_format._storable)
    known.pop("Certificate")
    monkeypatch.setattr(gradflow._core.file_format, "_storable", known)
    with pytest.raises(gradflow.RunFileError, match=r"'Certificate'.*cannot read"):
        Flow.load(path)


#
# Printed, and as xarray
#


def test_print_shows_the_certificate(reference_flow):
    text = str(reference_flow)
    assert "Flow to t = 400 (reached the horizon)" in text
    assert "above its floor 0.553611" in text
    assert "energy balance" in text
    assert "embedding_balance" in text
    assert "ndf" in text
    assert len(text.splitlines()) <= 8
    assert max(map(len, text.splitlines())) <= 110


def test_to_xarray(reference_flow):
    data = reference_flow.to_xarray()
    assert data.sizes["time"] == len(reference_flow.ts)
    np.testing.assert_array_equal(data["loss"].values, reference_flow.loss)
    np.testing.assert_array_equal(data["W0"].values, reference_flow.params.W0)
    np.testing.assert_array_equal(
        data["attention"].sel(time=400.0).values,
        reference_flow.observables["attention"][-1],
    )
    assert data.attrs["rtol"] == 1e-8


def test_to_xarray_with_names_that_are_taken():
    params = {"loss": np.ones(2), "time": np.ones(1)}
    flow = gradflow.integrate(
        lambda p: jnp.sum(p["loss"] ** 2) + jnp.sum(p["time"] ** 2),
        params,
        1.0,
        observables={"pair": lambda p: (p["loss"][0], p["loss"])},
    )
    data = flow.to_xarray()
    np.testing.assert_array_equal(data["loss"].values, flow.loss)
    np.testing.assert_array_equal(data["params.loss"].values, flow.params["loss"])
    np.testing.assert_array_equal(data["params.time"].values, flow.params["time"])
    np.testing.assert_array_equal(data["pair.1"].values, flow.observables["pair"][1])
