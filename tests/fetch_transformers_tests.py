"""Download the common tests of transformers for `test_transformers_common.py`.

    python tests/fetch_transformers_tests.py        # those of the installed version, into .cache/ (a few seconds)

pip downloads the source distribution and checks it against the SHA-256 below. It is not kept in this repository.
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
    """Return the cache folder for the tests of a version; None is the installed version."""
    return CACHE / (version or metadata.version("transformers"))


def download(version: str, target: Path) -> Path:
    """Download the source distribution as an archive into `target`.

    Raises:
        subprocess.CalledProcessError: pip cannot download it, or its SHA-256 differs.
    """
    checksum = f" --hash=sha256:{SHA256[version]}" if version in SHA256 else ""
    requirements = target / "requirements.txt"
    requirements.write_text(f"transformers=={version}{checksum}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*pip, "--requirement", str(requirements), "--dest", str(target)], check=True)
    (archive,) = target.glob("*.tar.gz")
    return archive


def fetch(version: str | None = None) -> Path:
    """Download the tests of a version into the cache, unless they exist.

    Args:
        version: A release of transformers; None is the installed one.

    Returns:
        The folder, with `test_modeling_common.py` and other files.

    Raises:
        ValueError: The distribution contains no tests.
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
