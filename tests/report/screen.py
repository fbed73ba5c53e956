"""A terminal for tests: what a screen would show after these bytes. It knows the sequences that are in use and no more,
and refuses any other, so that a new one does not go unnoticed."""

import re

PIECES = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b([78DM])|([\r\n\x07\x08\t])|([^\x1b\r\n\x07\x08\t])", re.DOTALL)


class Screen:
    def __init__(self, columns=80, lines=24):
        self.columns, self.lines = columns, lines
        self.cells = [[" "] * columns for _ in range(lines)]
        self.scrolled_out = []
        self.row = self.column = 0
        self.top, self.bottom = 0, lines - 1
        self.saved = (0, 0)
        self.cursor_hidden = False

    def feed(self, data):
        text, end = data.decode("utf-8"), 0
        for piece in PIECES.finditer(text):
            assert piece.start() == end, f"unknown sequence: {text[end : piece.start() + 10]!r}"
            end = piece.end()
            numbers, letter, escape, control, character = piece.groups()
            if letter:
                self._sequence(numbers, letter)
            elif escape:
                self._escape(escape)
            elif control:
                self._control(control)
            else:
                self._put(character)
        return self

    @property
    def rows(self):
        return ["".join(row).rstrip() for row in self.cells]

    @property
    def everything(self):
        """All lines, those that were scrolled out first."""
        return [*self.scrolled_out, *self.rows]

    @property
    def whole_screen_scrolls(self):
        return (self.top, self.bottom) == (0, self.lines - 1)

    def _put(self, character):
        if self.column == self.columns:  # the cursor wraps when the next character comes, not before
            self.column = 0
            self._down()
        self.cells[self.row][self.column] = character
        self.column += 1

    def _control(self, control):
        if control == "\r":
            self.column = 0
        elif control == "\n":
            self._down()

    def _down(self):
        if self.row == self.bottom:
            gone = self.cells.pop(self.top)
            self.scrolled_out.append("".join(gone).rstrip())
            self.cells.insert(self.bottom, [" "] * self.columns)
        elif self.row < self.lines - 1:
            self.row += 1

    def _escape(self, escape):
        if escape == "7":
            self.saved = (self.row, self.column)
        elif escape == "8":
            self.row, self.column = self.saved
        elif escape == "D":
            self._down()
        else:
            raise AssertionError(f"unknown: ESC {escape}")

    def _sequence(self, numbers, letter):
        values = [int(number) for number in numbers.split(";") if number.isdigit()]
        if letter == "m":
            return
        if letter == "r":
            self.top, self.bottom = (values[0] - 1, values[1] - 1) if values else (0, self.lines - 1)
            self.row = self.column = 0
        elif letter == "H":
            self.row, self.column = (values[0] - 1, values[1] - 1) if values else (0, 0)
        elif letter == "A":
            self.row = max(0, self.row - (values[0] if values else 1))
        elif letter == "K":
            start = 0 if values == [2] else self.column
            self.cells[self.row][start:] = [" "] * (self.columns - start)
        elif letter == "J":
            self.cells[self.row][self.column :] = [" "] * (self.columns - self.column)
            self.cells[self.row + 1 :] = [[" "] * self.columns for _ in range(self.lines - self.row - 1)]
        elif letter in "hl" and numbers == "?25":
            self.cursor_hidden = letter == "l"
        elif letter in "hl" and numbers == "?1049":
            pass
        else:
            raise AssertionError(f"unknown: CSI {numbers}{letter}")
