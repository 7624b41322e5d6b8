"""Files from the public hub (huggingface.co). Its client libraries are optional and are
imported only when something is fetched."""

from collections.abc import Callable
from itertools import islice
from typing import IO, Any, TypeVar

_T = TypeVar("_T")


class HubError(Exception):
    """Fetching from the hub failed; the message says what the user can do about it."""


def parquet_texts(repository: str, name: str) -> list[str]:
    """The column `text` of a Parquet file in a dataset repository."""

    def fetch(hub: Any) -> list[str]:
        from pyarrow import parquet  # pyright: ignore[reportMissingImports]

        with _opened(hub, repository, name) as file:
            return parquet.read_table(file, columns=["text"])["text"].to_pylist()

    return _from_hub(fetch)


def first_lines(repository: str, name: str, count: int) -> str:
    """The first lines of a text in a dataset repository, without fetching the rest."""

    def fetch(hub: Any) -> str:
        with _opened(hub, repository, name) as file:
            return b"".join(islice(file, count)).decode()

    return _from_hub(fetch)


def _opened(hub: Any, repository: str, name: str) -> IO[bytes]:
    # Not `hf_hub_download`: without a network it retries for 24 seconds, and it fetches
    # whole files where the first lines are enough.
    return hub.HfFileSystem().open(f"datasets/{repository}/{name}", "rb")


def _from_hub(fetch: Callable[[Any], _T]) -> _T:
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]

        return fetch(huggingface_hub)
    except ImportError as error:
        raise HubError("install 'gradflow[hub]' to fetch it") from error
    # The hub's client raises errors of half a dozen libraries, which all mean the same
    # to a user: the file could not be fetched. The cause is chained.
    except Exception as error:
        raise HubError(
            "try again when the public hub can be reached (it failed with "
            f"{type(error).__name__})"
        ) from error
