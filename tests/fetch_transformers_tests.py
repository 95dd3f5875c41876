"""Fetches the common tests that transformers ships in its source distribution; `test_transformers_common.py` runs them.

    python tests/fetch_transformers_tests.py        # those of the installed version, into .cache/ (a few seconds)

pip finds the distribution by name and checks it against the SHA-256 below. Nothing of it is kept in this repository.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache" / "transformers-tests"
# SHA-256 of transformers-<version>.tar.gz on PyPI: the oldest version that is supported, and the pinned one.
SHA256 = {
    "5.17.0": "a153be279169b55b92d8000bf4af294aed684503d091cca7804da2dd8a9de000",
    "5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
}


def folder(version: str | None = None) -> Path:
    """Where the tests of a version are, or would be; None is the installed version."""
    return CACHE / (version or metadata.version("transformers"))


def download(version: str, target: Path) -> Path:
    """The source distribution as an archive in `target`.

    Raises:
        subprocess.CalledProcessError: pip cannot find or fetch it, or it is not the file whose SHA-256 is recorded.
    """
    checksum = f" --hash=sha256:{SHA256[version]}" if version in SHA256 else ""
    requirements = target / "requirements.txt"
    requirements.write_text(f"transformers=={version}{checksum}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--requirement", str(requirements), "--dest", str(target)], check=True)
    (archive,) = target.glob("*.tar.gz")
    return archive


def fetch(version: str | None = None) -> Path:
    """Puts the tests of a version into their folder, unless they are there.

    Args:
        version: A release of transformers; None is the installed one.

    Returns:
        The folder, which holds `test_modeling_common.py` and its like.

    Raises:
        ValueError: The distribution ships no such tests.
    """
    version = version or metadata.version("transformers")
    if folder(version).is_dir():
        return folder(version)
    if version not in SHA256:
        print(f"no SHA-256 of transformers {version} is recorded in {Path(__file__).name}; add it", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch, tarfile.open(download(version, Path(scratch))) as archive:
        prefix = f"transformers-{version}/tests/"
        members = [member for member in archive if member.name.startswith(prefix) and member.name.endswith(".py")]
        if not members:
            raise ValueError(f"the source distribution of transformers {version} holds no file under {prefix}")
        archive.extractall(scratch, members, filter="data")
        tests = Path(scratch, prefix)
        # test_configuration_common.py loads the package around itself.
        (tests / "__init__.py").touch()
        tests.replace(folder(version))
    return folder(version)


if __name__ == "__main__":
    print(fetch())
