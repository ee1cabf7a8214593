# SPDX-License-Identifier: Apache-2.0
"""The text that a run trains on, as bytes.

Owns the reading of a corpus (`load_corpus`) and the split that holds some of it out. Rules: the same files give the
same tokens, split and digest on every machine; a document stands on one side of the split only. Must not know
samples, models or the network.

Bytes are tokens (vocabulary of 256), so there is no tokenizer to agree upon. A text is described as a state is: its two
sides are cut into chunks, and its digest is the root over their digests. So whoever knows the digest can check each
chunk, whoever sent it.

Errors: `DataError` (a `ConfigError`) — the operator's; names the path, what is wrong and the cure.
"""

import codecs
import dataclasses
import hashlib
import math
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from isthmus.elastic.state.digest import Hasher, StateManifest, describe_state
from isthmus.elastic.state.wire import MAX_DESCRIPTION
from isthmus.trainer.errors import ConfigError

TokenArray = npt.NDArray[np.unsignedinteger]
"""Tokens: uint8 (bytes), uint16 or uint32."""

SIDES = ("train", "validation")
"""Names of the two parts of a text in its manifest, in order."""
NUM_BYTES = 256
"""The vocabulary of a text whose tokens are bytes."""
CHUNK_NBYTES = 1 << 20
"""Of a text. What a peer that is killed while it fetches a text loses at most."""

STANDARD_LIBRARY_VALIDATION_FRACTION = 0.02
VALIDATION_FRACTION = 0.1

_BLOCK_NBYTES = 1 << 20
# Tests and installed packages are no sources of the library itself; the build's own notes name paths of one machine.
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


class DataError(ConfigError):
    """The training text cannot be used.

    Attributes:
        path: the file or directory at fault; None where the tokens came from no file.
        reason: what is wrong with it, as the end of a sentence that begins with the path.
    """

    def __init__(self, path: Path | None, reason: str, *, cure: str) -> None:
        super().__init__(f"{'the text' if path is None else path} {reason}", cure=cure)
        self.path = path
        self.reason = reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Corpus:
    """Tokens to train on and tokens held out.

    Attributes:
        train: uint8 [num_train_tokens], read-only in use; may be a map of the file.
        validation: uint8 [num_validation_tokens], never trained on.
        manifest: sizes and chunk digests of both sides.
        description: one line for people.
    """

    train: TokenArray
    validation: TokenArray
    manifest: StateManifest
    description: str

    @classmethod
    def of(cls, train: TokenArray, validation: TokenArray, description: str) -> "Corpus":
        """With its manifest, which costs one pass over the tokens; the description is made fit to be shown and sent."""
        hasher = Hasher(chunk_nbytes=CHUNK_NBYTES)
        try:
            parts = hasher.describe(list(zip(SIDES, (train.data, validation.data), strict=True)))
        finally:
            hasher.close()
        manifest = describe_state(0, parts, chunk_nbytes=CHUNK_NBYTES)
        shown = "".join(letter if letter.isprintable() else "?" for letter in description[:MAX_DESCRIPTION])
        return cls(train=train, validation=validation, manifest=manifest, description=shown)

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that name this text; peers compare them before they train together."""
        return self.manifest.digest.hex()

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return self.manifest.nbytes

    @property
    def vocab_size(self) -> int:
        """How many tokens there are: bytes."""
        return NUM_BYTES

    @property
    def bytes_per_token(self) -> float:
        """Of the held-out text: tokens are bytes."""
        return 1.0

    @property
    def shard_lengths(self) -> tuple[int, ...]:
        """Tokens to train on, in one piece."""
        return (len(self.train),)


# ---------------------------------------------------------------------------------------------------------- reading


def load_corpus(
    path: Path | None,
    *,
    seq_len: int,
    validation_fraction: float | None = None,
    limit_nbytes: int | None = None,
) -> Corpus:
    """Read and split a corpus.

    * `None`: the running interpreter's own standard library, `.py` sources without tests; split by file.
    * a file: mapped, not copied; its last `validation_fraction` is held out. It must not be truncated during the run.
    * a `.jsonl` file: the `text` of every line; split by line, equal lines always on the same side.
    * a directory: its files, recursively and sorted, without hidden ones; split by file.

    Which documents are held out is decided by a hash of their relative path (of their text in a `.jsonl` file), so
    that a document added later moves no other.

    Args:
        path: see above.
        seq_len: tokens in a sample; both sides must hold one sample.
        validation_fraction: in (0, 1); 0.02 for the standard library and 0.1 otherwise when None.
        limit_nbytes: read at most this much text: the head of a file, the first lines, or files chosen by hash.

    Raises:
        DataError: missing, unreadable, empty or not UTF-8, or too short for one sample on either side.
        ValueError: `seq_len`, `validation_fraction` or `limit_nbytes` out of range.
    """
    default = STANDARD_LIBRARY_VALIDATION_FRACTION if path is None else VALIDATION_FRACTION
    fraction = default if validation_fraction is None else validation_fraction
    if not 0 < fraction < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, not {fraction}")
    if limit_nbytes is not None and limit_nbytes < 1:
        raise ValueError(f"limit_nbytes must be at least 1, not {limit_nbytes}")

    source = Path(sysconfig.get_path("stdlib")) if path is None else path
    try:
        if not source.exists():
            raise DataError(source, "does not exist", cure="check the spelling of --data, or leave it out")
        if path is None:
            files = _capped(source, _standard_library_files(source), limit_nbytes)
            train, validation = _read_files(source, files, fraction)
            description = f"Python {platform.python_version()}'s standard library"
        elif source.is_dir():
            files = _capped(source, _directory_files(source), limit_nbytes)
            train, validation = _read_files(source, files, fraction)
            description = f"{source.name}, {len(files)} files"
        elif source.suffix == ".jsonl":
            train, validation = _read_json_lines(source, fraction, limit_nbytes)
            description = source.name
        else:
            train, validation = _split_tail(_map_file(source)[:limit_nbytes], fraction)
            description = source.name
    except OSError as error:
        at_fault = source if error.filename is None else Path(error.filename)
        raise DataError(
            at_fault, f"cannot be read: {error.strerror}", cure="check its permissions and its disk"
        ) from error

    for side, tokens in (("training", train), ("held-out", validation)):
        require_one_sample(len(tokens), seq_len, source, side)
    return Corpus.of(train, validation, description)


def _standard_library_files(root: Path) -> list[Path]:
    files = [
        file
        for file in sorted(root.rglob("*.py"))
        if not any(
            part in _SKIPPED_FOLDERS or part.startswith(_SKIPPED_PREFIXES) for part in file.relative_to(root).parts
        )
        and file.is_file()
    ]
    if not files:
        raise DataError(root, "holds no Python sources", cure="name your own text with --data PATH")
    return files


def _directory_files(root: Path) -> list[Path]:
    files = [
        file
        for file in sorted(root.rglob("*"))
        if not any(part.startswith(".") for part in file.relative_to(root).parts) and file.is_file()
    ]
    if not files:
        raise DataError(root, "holds no files", cure="put text files into it, or name another directory")
    return files


def _capped(root: Path, files: list[Path], limit_nbytes: int | None) -> list[Path]:
    """As many files as fit, chosen by hash so that they are a fair sample of all folders; still sorted."""
    if limit_nbytes is None:
        return files
    chosen, total_nbytes = set[Path](), 0
    for file in sorted(files, key=lambda file: _share(_key(root, file), b"cap")):
        total_nbytes += file.stat().st_size
        if chosen and total_nbytes > limit_nbytes:
            break
        chosen.add(file)
    return [file for file in files if file in chosen]


def _key(root: Path, file: Path) -> bytes:
    return file.relative_to(root).as_posix().encode("utf-8", "surrogateescape")


def _read_files(root: Path, files: Sequence[Path], fraction: float) -> tuple[TokenArray, TokenArray]:
    def read(index: int) -> bytes:
        file = files[index]
        if file.suffix == ".jsonl":
            return b"\n".join(_json_line_texts(file))
        text = file.read_bytes()
        _require_utf8(file, np.frombuffer(text, dtype=np.uint8))
        return text

    return _split_by_document(root, [_key(root, file) for file in files], read, fraction)


def _read_json_lines(path: Path, fraction: float, limit_nbytes: int | None) -> tuple[TokenArray, TokenArray]:
    texts, total_nbytes = list[bytes](), 0
    for text in _json_line_texts(path):
        total_nbytes += len(text)
        if texts and limit_nbytes is not None and total_nbytes > limit_nbytes:
            break
        texts.append(text)
    return _split_by_document(path, texts, texts.__getitem__, fraction)


class _TextLine(msgspec.Struct):
    text: str


def _json_line_texts(path: Path) -> Iterator[bytes]:
    decoder = msgspec.json.Decoder(_TextLine)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield decoder.decode(line).text.encode("utf-8")
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise DataError(
                    path,
                    f"has a bad line {number}: {error}",
                    cure='every line must be a JSON object in UTF-8 with a string "text"',
                ) from error


def _map_file(path: Path) -> TokenArray:
    if path.stat().st_size == 0:
        raise DataError(path, "is empty", cure="name a file with text in it")
    tokens: TokenArray = np.memmap(path, dtype=np.uint8, mode="r")
    _require_utf8(path, tokens)
    return tokens


def _require_utf8(path: Path, tokens: TokenArray) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    start = 0
    try:
        for start in range(0, len(tokens), _BLOCK_NBYTES):
            decoder.decode(tokens[start : start + _BLOCK_NBYTES].tobytes())
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            path,
            f"is not UTF-8 text near byte {start + error.start}",
            cure="convert it (iconv -t utf-8), or take it out of the corpus if it is not text",
        ) from error


# -------------------------------------------------------------------------------------------------------- splitting


def _split_by_document(
    source: Path, keys: Sequence[bytes], read: Callable[[int], bytes], fraction: float
) -> tuple[TokenArray, TokenArray]:
    """Whole documents on either side, a line break after each; a single document is cut like a file."""
    if not keys:
        raise DataError(source, "holds no text", cure="name a file with text in it")
    if len(keys) == 1:
        return _split_tail(np.frombuffer(read(0), dtype=np.uint8), fraction)
    held_out = _held_out(keys, fraction)
    train, validation = bytearray(), bytearray()
    for index in range(len(keys)):
        side = validation if index in held_out else train
        side += read(index)
        if side and not side.endswith(b"\n"):
            side += b"\n"
    return np.frombuffer(train, dtype=np.uint8), np.frombuffer(validation, dtype=np.uint8)


def _held_out(keys: Sequence[bytes], fraction: float) -> frozenset[int]:
    """Indices of the documents whose hash falls below the fraction; neither none nor all of them."""
    shares = [_share(key, b"split") for key in keys]
    threshold = fraction
    if min(shares) >= fraction:
        threshold = math.nextafter(min(shares), 1)
    elif max(shares) < fraction:
        threshold = max(shares)
    return frozenset(index for index, share in enumerate(shares) if share < threshold)


def _share(key: bytes, purpose: bytes) -> float:
    """A number in [0, 1) that follows from the key alone; independent between purposes."""
    digest = hashlib.blake2b(key, digest_size=8, person=purpose).digest()
    return (int.from_bytes(digest, "big") >> 11) / (1 << 53)


def _split_tail(tokens: TokenArray, fraction: float) -> tuple[TokenArray, TokenArray]:
    num_train = int(len(tokens) * (1 - fraction))
    return tokens[:num_train], tokens[num_train:]


def require_one_sample(num_tokens: int, seq_len: int, path: Path | None, side: str) -> None:
    """Refuse a text whose named side of the split holds no sample of `seq_len` inputs and a last target.

    Raises:
        DataError: too few tokens.
        ValueError: `seq_len` is below 1.
    """
    if seq_len < 1:
        raise ValueError(f"seq_len must be at least 1, not {seq_len}")
    if num_tokens < seq_len + 1:
        raise DataError(
            path,
            f"gives {num_tokens} {side} tokens, too few for one sample of {seq_len + 1}",
            cure="bring more text or shorten the sequence",
        )
