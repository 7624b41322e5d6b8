"""Texts from files, from the cache and from the hub, and the corpora themselves."""

import itertools
import os
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from generated_text import TEXT, TOKENS

from gradflow import MarkovChain, SampledContext, corpora
from gradflow.corpora import Vocabulary

SHARED = Path(
    os.environ.get("GRADFLOW_CORPORA")
    or Path(__file__).parents[3] / "shared" / "corpora"
)
needs_corpora = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"there are no corpora at {SHARED}"
)


def test_a_text_is_read_as_it_is(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes("\ufeffErste Zeile: ü\r\nzweite\n".encode())
    assert corpora.read_text(file) == "Erste Zeile: ü\nzweite\n"
    assert corpora.read_text(str(file)) == corpora.read_text(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"some text \xff\xfe and more", "which is not text at byte 10"),
        (b"PK\x03\x04\x00\x00", "which is not text at byte 4"),
        (b"", "which is empty"),
        (b" \n ", "which is empty"),
    ],
)
def test_files_that_are_no_text(content, message, tmp_path):
    file = tmp_path / "file"
    file.write_bytes(content)
    for read in (corpora.read_text, corpora.wikitext2, corpora.tinystories):
        with pytest.raises(ValueError, match=f"`path` must be a text file.*{message}"):
            read(file)


def test_loaders_read_a_file_or_a_folder(tmp_path):
    (tmp_path / "train.txt").write_text(TEXT)
    (tmp_path / "valid.txt").write_text("One day , it's \n\nover.")
    wiki = corpora.wikitext2(tmp_path)
    assert wiki == TEXT.replace("\n", " <eos> ").split()
    assert corpora.wikitext2(tmp_path / "train.txt") == wiki
    valid = corpora.wikitext2(tmp_path, split="valid")
    assert valid == ["One", "day", ",", "it's", "<eos>", "<eos>", "over.", "<eos>"]
    assert corpora.tinystories(str(tmp_path)) == TOKENS
    valid = corpora.tinystories(tmp_path, split="valid")
    assert valid == ["One", "day", ",", "it's", "over", "."]
    assert corpora.tinystories(tmp_path, split="valid", lines=2) == valid[:-2]


def test_loaders_refuse_what_is_not_there(tmp_path):
    for load in (corpora.wikitext2, corpora.tinystories):
        with pytest.raises(
            FileNotFoundError, match=r"must be an existing file, got '.*nowhere'"
        ):
            load(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"got '.*train\.txt'"):
            load(tmp_path)
        with pytest.raises(ValueError, match="`split` must be one of 'train', 'valid'"):
            load(tmp_path, split="dev")
        with pytest.raises(
            ValueError, match="`path` must be the path of a file, got 3"
        ):
            load(3)


class FakeHub(types.ModuleType):
    """A hub with these files, or one that cannot be reached."""

    def __init__(self, files):
        super().__init__("huggingface_hub")
        self.files, self.asked = files, []

    def HfFileSystem(self):
        return self

    def open(self, name, mode):
        self.asked.append(name)
        if self.files is None:
            raise ConnectionError("Name or service not known")
        assert mode == "rb"
        return self.files[name].open("rb")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRADFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "corpora"


@pytest.mark.parametrize("there", [False, True], ids=["no library", "no network"])
def test_without_hub_and_cache_one_sentence_says_where_to_put_the_file(
    there, cache, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", types.ModuleType("pyarrow"))
    parquet = types.ModuleType("parquet")
    monkeypatch.setattr(sys.modules["pyarrow"], "parquet", parquet, raising=False)
    # None in the table of modules makes an import fail.
    monkeypatch.setitem(
        sys.modules, "huggingface_hub", FakeHub(None) if there else None
    )
    for load, folder in (
        (corpora.wikitext2, "wikitext-2"),
        (corpora.tinystories, "tinystories"),
    ):
        start = time.monotonic()
        with pytest.raises(FileNotFoundError, match="was not found: put it") as caught:
            load()
        assert time.monotonic() - start < 1
        message = str(caught.value)
        assert f"put it at '{cache / folder / 'train.txt'}', pass the `path`" in message
        remedy = (
            "failed with ConnectionError)." if there else "'gradflow[hub]' to fetch"
        )
        assert remedy in message
        assert message.count(". ") == 0
    assert not cache.exists()


def test_what_the_hub_gives_is_kept_in_the_cache(cache, monkeypatch, tmp_path):
    wiki, stories = tmp_path / "wiki", tmp_path / "stories"
    wiki.write_text("")
    stories.write_text("A story.\n" * 12_000)
    hub = FakeHub(
        {
            "datasets/Salesforce/wikitext/wikitext-2-v1/"
            "validation-00000-of-00001.parquet": wiki,
            "datasets/roneneldan/TinyStories/TinyStoriesV2-GPT4-train.txt": stories,
        }
    )
    rows = ["", " = Title = \n", "", " Some text . \n"]
    column = types.SimpleNamespace(to_pylist=lambda: rows)
    parquet = types.SimpleNamespace(read_table=lambda file, columns: {"text": column})
    arrow = types.ModuleType("pyarrow")
    monkeypatch.setattr(arrow, "parquet", parquet, raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    for _ in range(2):
        tokens = corpora.wikitext2(split="valid")
        assert tokens == [
            "<eos>",
            "=",
            "Title",
            "=",
            "<eos>",
            "<eos>",
            "Some",
            "text",
            ".",
            "<eos>",
        ]
        assert corpora.tinystories() == ["A", "story", "."] * 10_000
    assert len(hub.asked) == 2
    assert (cache / "wikitext-2" / "valid.txt").is_file()
    assert (cache / "tinystories" / "train.txt").is_file()


def test_the_cache_is_where_the_system_keeps_caches(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADFLOW_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gradflow" / "corpora" / "tinystories"
    folder.mkdir(parents=True)
    (folder / "train.txt").write_text("Once upon a time.")
    assert corpora.tinystories() == ["Once", "upon", "a", "time", "."]


#
# The corpora themselves
#


@needs_corpora
def test_wikitext_makes_a_chain_of_a_thousand_tokens():
    tokens = corpora.wikitext2(SHARED / "wikitext-2")
    chain = MarkovChain.from_tokens(tokens, 1000, keep=["continue"], smoothing=1e-3)
    assert len(tokens) == 2_088_628
    assert tokens.count("continue") == 169
    assert chain.labels[:5] == ("the", ",", ".", "of", "<unk>")
    assert chain.labels[-2:] == ("continue", "<rest>")
    at = chain.labels.index("continue")
    after = Counter(b for a, b in itertools.pairwise(tokens) if a == "continue")
    to = chain.labels.index("to")
    expected = (after["to"] + 1e-3) / (169 + 1000 * 1e-3)
    assert after["to"] > 20
    assert chain.transition[at, to] == pytest.approx(expected, rel=1e-12)
    assert chain.stationary[0] == pytest.approx(tokens.count("the") / len(tokens), 1e-3)


@needs_corpora
def test_tinystories_and_a_sample_of_its_contexts():
    tokens = corpora.tinystories(SHARED / "tinystories")
    assert len(tokens) == 336_445
    words = Vocabulary.from_tokens(tokens, 100, keep=["full", "been"])
    assert words.labels[:5] == (".", ",", "the", "and", "a")
    numbers = words.encode(tokens)
    chain = MarkovChain.from_tokens(numbers, words, smoothing=1e-3)
    sample = SampledContext(chain, numbers, 16, examples=2000)
    np.testing.assert_allclose(
        np.exp(sample.log_multiplicities).sum(axis=1), 16, rtol=1e-13
    )
    # The last tokens of 2,000 contexts have the chain's law, up to chance.
    spread = np.sqrt(chain.stationary / 2000)
    miss = np.asarray(sample.query_weights) - chain.stationary
    assert np.max(np.abs(miss) / spread) < 5
