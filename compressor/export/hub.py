"""Push bundles to the Hugging Face hub, as one commit, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressorError, UsageError, first_line
from compressor.export.manifest import UNLISTED, foreign_files

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_OF_THE_HUB = (".gitattributes",)
"""Files that the hub makes with a repository."""
_SHOWN = 3


def push_bundle(bundle: Path, repository: str, *, private: bool = False, replace: bool = False) -> str:
    """Push a bundle's files to a repository of models, which is made if there is none; returns the commit's address.

    The bundle is checked against its manifest first.  Files of the repository that are not the bundle's are removed in
    the same commit, and stay in its history.

    Args:
        repository: ``OWNER/NAME``.
        private: a repository that is made is seen by its owner alone.
        replace: a repository that holds something already may be changed.
    Raises:
        UsageError: the name cannot be, the folder holds something else than a whole bundle, or the repository holds
            files and ``replace`` is False.
        CompressorError: the hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if repository.count("/") != 1:
        raise UsageError(f"{repository!r:.80}: not the name of a repository; write OWNER/NAME")
    files = _files(bundle)
    api = HfApi(library_name="compressor")
    of_http: type[Exception] = HfHubHTTPError.__mro__[1]  # HTTPError of httpx or httpx2, whichever huggingface_hub uses
    try:
        return _push(api, bundle, files, repository, private, replace)
    except HFValidationError as error:
        raise UsageError(f"{repository!r:.80}: {first_line(error)}") from error
    except HfHubHTTPError as error:
        raise CompressorError(
            f"{repository}: the hub refused: {first_line(error)}; `hf auth login` stores a token that may write there"
        ) from error
    except (of_http, OSError, ValueError) as error:  # no network, no token, HF_HUB_OFFLINE
        raise CompressorError(f"{repository}: cannot be pushed to: {first_line(error)}") from error


def _files(bundle: Path) -> list[str]:
    """Return the names of a bundle's files, once they are those of its manifest.

    Raises:
        UsageError: there is no bundle, it is damaged, or other files lie beside it.
    """
    from compressor_runtime.check import check_listed
    from compressor_runtime.errors import BundleError
    from compressor_runtime.manifest import any_manifest, field

    try:
        listed = field(any_manifest(bundle), "files", dict)
        check_listed(bundle, listed)
    except BundleError as error:
        raise UsageError(f"{error}; nothing was pushed") from error
    if foreign := foreign_files(bundle, listed):
        raise UsageError(f"{bundle}: holds {_some(foreign)} beside the bundle; move that away")
    return sorted([*listed, *(name for name in UNLISTED if (bundle / name).is_file())])


def _push(api: HfApi, bundle: Path, files: Sequence[str], repository: str, private: bool, replace: bool) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        head: str | None = api.repo_info(repository).sha
        there = [name for name in api.list_repo_files(repository) if name not in _OF_THE_HUB]
    except RepositoryNotFoundError:
        head, there = None, []
    if there and not replace:
        raise UsageError(f"{repository}: holds {_some(there)}; --replace puts the bundle in their place")
    if head is None:
        api.create_repo(repository, private=private)
    added: list[Any] = [CommitOperationAdd(name, bundle / name) for name in files]
    removed = [CommitOperationDelete(name) for name in sorted({*there} - {*files})]
    done = api.create_commit(
        repository, [*added, *removed], commit_message="A bundle of Compressor", parent_commit=head
    )
    return str(done.commit_url)


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
