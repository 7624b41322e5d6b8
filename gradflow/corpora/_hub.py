"""The public hub, as little of it as is needed; its libraries are an extra and are
imported when something is fetched."""

from collections.abc import Callable
from itertools import islice
from typing import Any, TypeVar

_T = TypeVar("_T")


class HubError(Exception):
    """Nothing came from the hub; the message is what the user might do about it."""


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


def _opened(hub: Any, repository: str, name: str) -> Any:
    # Not `hf_hub_download`: without network it tries again for 24 seconds, and it would
    # fetch all of a file of which we want the first lines.
    return hub.HfFileSystem().open(f"datasets/{repository}/{name}", "rb")


def _from_hub(fetch: Callable[[Any], _T]) -> _T:
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]

        return fetch(huggingface_hub)
    except ImportError as error:
        raise HubError("install 'gradflow[hub]' to fetch it") from error
    # The hub's clients raise errors of half a dozen libraries, and to a user they all
    # say the same: it did not come. The cause is chained.
    except Exception as error:
        raise HubError(
            "try again when the public hub can be reached, which failed with "
            f"{type(error).__name__}"
        ) from error
