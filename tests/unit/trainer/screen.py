# SPDX-License-Identifier: Apache-2.0
"""A terminal that remembers: what stands on it, and every line that was ever drawn in place. Not a test."""

import fcntl
import os
import pty
import re
import struct
import termios
import threading

COLUMNS = 80
_PIECE = re.compile(r"\r\n|\r|\n|\x1b\[K|[^\r\n\x1b]+|\x1b")


class Screen:
    """A terminal of 80 columns. `lines` are those that scrolled and the one of the cursor; `drawn` all live lines.

    Reads in a thread of its own until the other side is closed.
    """

    def __init__(self) -> None:
        self._ours, self.terminal = pty.openpty()
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        self._content = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Our side of the terminal's; whatever was written has been read afterwards, once all others have ended."""
        os.close(self.terminal)
        self._reader.join(30)
        os.close(self._ours)

    @property
    def text(self) -> str:
        """Every byte so far."""
        return self._content.decode()

    @property
    def lines(self) -> list[str]:
        """What stands there."""
        return self._play()[0]

    @property
    def drawn(self) -> list[str]:
        """What was taken away again."""
        return self._play()[1]

    def _play(self) -> tuple[list[str], list[str]]:
        lines, drawn, column = [""], [], 0
        for piece in _PIECE.findall(self.text):
            match piece:
                case "\r\n" | "\n":
                    lines.append("")
                    column = 0
                case "\r":
                    column = 0
                case "\x1b[K":
                    drawn.append(lines[-1])
                    lines[-1] = lines[-1][:column]
                case _:
                    assert piece != "\x1b", "another control sequence"
                    lines[-1] = lines[-1][:column] + piece + lines[-1][column + len(piece) :]
                    column += len(piece)
        return lines, drawn

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._ours, 1 << 16)
            except OSError:  # nobody else has it open
                return
            if not piece:
                return
            self._content += piece
