# SPDX-License-Identifier: Apache-2.0
"""Texts to tokens and back: bytes, or what a `tokenizer.json` of the tokenizers library says.

Rules: the library is loaded only where there is such a file. A tokenizer adds nothing of its own: what separates
documents is put there by whoever prepares a text. Must not know shards.

Errors: `DataError` (2) for a file that is no tokenizer; `EnvironmentFault` (3) where the library is missing.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from isthmus.trainer.data.corpus import DataError, TokenArray
from isthmus.trainer.errors import EnvironmentFault

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT: Final = "<|endoftext|>"
"""In a tokenizer that is trained here."""
_KNOWN_ENDS: Final = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOS>", "[EOS]", "[SEP]")
_NUM_BYTES: Final = 256


class Tokenizer(Protocol):
    """Texts to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token behind every document; None where there is none."""
        ...

    def encode(self, texts: Sequence[str]) -> Iterator[TokenArray]:
        """The tokens of each text, without anything before or behind them."""
        ...

    def text_nbytes(self, text: str) -> int:
        """Bytes of UTF-8 that the tokens of this text stand for."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text; what is no text is shown as U+FFFD."""
        ...


class Bytes:
    """The tokens of UTF-8: a document ends with a line break."""

    vocab_size = _NUM_BYTES
    end_of_document = None

    def encode(self, texts: Sequence[str]) -> Iterator[TokenArray]:
        """See `Tokenizer`; half of a surrogate pair becomes a question mark."""
        for text in texts:
            encoded = text.encode("utf-8", "replace")
            yield np.frombuffer(encoded if encoded.endswith(b"\n") else encoded + b"\n", dtype=np.uint8)

    def text_nbytes(self, text: str) -> int:
        """See `Tokenizer`: every byte is a token, a line break at the end too."""
        return len(next(self.encode([text])))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(tokens).decode(errors="replace")


class FileTokenizer:
    """What a `tokenizer.json` says.

    Args:
        path: of the file.
        end_of_document: the word for the token behind every document; None: one of those that are usual.
        needs_end: whether it must have such a token.

    Raises:
        DataError: it is none, or has no such token.
        EnvironmentFault: the library is missing.
    """

    def __init__(self, path: Path, end_of_document: str | None = None, *, needs_end: bool = True) -> None:
        self._tokenizer = _load(path)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        words = _KNOWN_ENDS if end_of_document is None else (end_of_document,)
        found = (self._tokenizer.token_to_id(word) for word in words)
        self.end_of_document: int | None = next((token for token in found if token is not None), None)
        if self.end_of_document is None and needs_end:
            raise DataError(
                path,
                f"has no token {end_of_document!r}" if end_of_document else "has no token known to end a document",
                cure="name one of its tokens with --end-of-document",
            )
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> Iterator[TokenArray]:
        """See `Tokenizer`."""
        for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoding.ids, dtype=np.uint32)

    def text_nbytes(self, text: str) -> int:
        """See `Tokenizer`."""
        return len(text.encode("utf-8", "replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> None:
    """Byte-level BPE, as GPT-2 has it: every text can be encoded, and no letter is lost. Writes a `tokenizer.json`.

    Args:
        texts: to learn from; read once.
        vocab_size: tokens, with those of all bytes and the end of a document.
        path: of the file.

    Raises:
        EnvironmentFault: the library is missing.
    """
    library = _library()
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _load(path: Path) -> "tokenizers.Tokenizer":
    library = _library()
    try:
        text = path.read_text("utf-8")
        tokenizer: tokenizers.Tokenizer = library.Tokenizer.from_str(text)
        return tokenizer
    except OSError as error:
        raise DataError(path, f"cannot be read: {error.strerror}", cure="check its spelling and permissions") from error
    except Exception as error:  # the library has no type of its own
        raise DataError(
            path, f"is no tokenizer.json: {error}", cure="name one that the tokenizers library has written"
        ) from error


def _library() -> ModuleType:
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentFault("the tokenizers library is not installed", cure="pip install tokenizers") from error
    return tokenizers
