"""Reads shell text without running any of it: simple commands, with the values that the text itself
gives to variables.

Understood: quotes, line continuations, comments, assignments, arrays, `export`, here-documents,
`$NAME`, `${NAME:-default}` and its kin, `$((A * B))`, functions with their arguments. What only a
run would tell, such as `$(command)` or `${NAME%suffix}`, stays in its word as an expansion without
a value. Tests whose values are known choose a branch (`branches.py`). Of others all branches are
read, and an assignment in one counts if the variable has no value yet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from twinserve.sim.serve_line.branches import SHUTS, Blocks
from twinserve.sim.serve_line.words import OPEN, Word, without_value

Value = str | list[str]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[[^\]]*\])?(\+?)=", re.DOTALL)
_DECLARES = {"export", "declare", "local", "readonly", "typeset"}
_SKIPPED = {"then", "else", "elif", "do", "{", "}", "!", "time", "if", "while", "until"}
_BRACED = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*|[0-9@*])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?", re.DOTALL
)
_FUNCTION = re.compile(r"(?m)^[ \t]*(?:function[ \t]+)?([A-Za-z_][\w-]*)[ \t]*\(\)\s*\{")
BRANCH = "|"  # before the name of a variable that branches give several values
_DEEPEST = 4  # of functions that call each other
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Div, ast.Mod)


@dataclass
class Command:
    """words: expanded. env: variables that were exported so far, or stand before it. here: texts of
    its here-documents, with their lines. into: the file that it writes. looped: it stands in a
    `for`. runs: no test before it says that it does not."""

    words: list[Word]
    env: dict[str, str]
    line: int
    here: list[Word] = field(default_factory=list)
    into: str = ""
    looped: bool = False
    runs: bool = True


@dataclass
class _Variables:
    """values: `1`, `2` and `@` are the arguments of a function. defaults: variables whose value is
    a default of an expansion, and those behind BRANCH."""

    values: dict[str, Value]
    exported: set[str]
    defaults: list[str]

    def env(self) -> dict[str, str]:
        return {k: _joined(v) for k, v in self.values.items() if k in self.exported}


@dataclass
class _Piece:
    """A part of a word. quoted: not split at blanks."""

    text: Value
    quoted: bool


def read_shell(
    text: str, env: Mapping[str, str], line: int = 1, defaults: list[str] | None = None
) -> list[Command]:
    """The simple commands of a script, in order.

    env: variables that have a value before it. line: of its first line. defaults: gets the names of
    variables whose default was taken.
    """
    variables = _Variables(dict(env), set(env), [] if defaults is None else defaults)
    text, functions = _without_functions(text, line)
    return list(_called(_Reader(text, variables, line), functions))


def _without_functions(text: str, line: int) -> tuple[str, dict[str, Word]]:
    """The text with blank lines where its functions were, and their bodies by name."""
    functions: dict[str, Word] = {}
    while (said := _FUNCTION.search(text)) is not None:
        end = _closing(text, said.end() - 1, "{", "}")
        begins = line + text.count("\n", 0, said.end())
        functions[said[1]] = Word(text[said.end() : end - 1], begins)
        text = text[: said.start()] + "\n" * text.count("\n", said.start(), end) + text[end:]
    return text, functions


def _called(reader: _Reader, functions: Mapping[str, Word], deep: int = 0) -> Iterator[Command]:
    """The commands, those of functions where these are called."""
    variables = reader.variables
    for command in reader.commands():
        name = command.words[0] if command.words else ""
        if name == "shift":
            said = command.words[1] if command.words[1:] else "1"
            taken = int(said) if said.isdecimal() else 1
            _set_arguments(variables, _listed(variables.values.get("@", []))[taken:])
        elif name in functions and deep < _DEEPEST:
            before = dict(variables.values)
            _set_arguments(variables, [str(word) for word in command.words[1:]])
            body = functions[name]
            yield from _called(_Reader(body, variables, body.line), functions, deep + 1)
            variables.values = before
        else:
            yield command


def _set_arguments(variables: _Variables, words: list[str]) -> None:
    kept = {k: v for k, v in variables.values.items() if not (k.isdigit() or k == "@")}
    numbered = {str(i): word for i, word in enumerate(words, 1)}
    variables.values = {**kept, **numbered, "@": words}


class _Reader:
    def __init__(self, text: str, variables: _Variables, line: int) -> None:
        self.text, self.at, self.line, self.variables = text, 0, line, variables
        self.ended = ""  # the sign that ended the last command
        self.pending: list[tuple[str, bool, Command]] = []  # here-documents to come

    def commands(self) -> Iterator[Command]:
        blocks = Blocks()
        while self.at < len(self.text):
            command, assigned, first = self._command()
            blocks.see(first, command.words, bool(command.words or assigned), self.ended)
            command.looped, command.runs = blocks.in_loop, not blocks.passed_over
            if not command.runs:
                assigned = []
            variables = self.variables
            if not command.words or command.words[0] in _DECLARES:
                declared = command.words[:1] == ["export"]
                for name, value in assigned:
                    before = variables.values.get(name)
                    if blocks.sure or not before:
                        variables.values[name] = value
                    elif before != value:
                        variables.defaults.append(f"{BRANCH}{name}")
                    variables.exported |= {name} if declared else set()
                if declared:
                    variables.exported.update(w for w in command.words[1:] if "=" not in w)
            else:
                command.env = variables.env() | {k: _joined(v) for k, v in assigned}
            if command.words or command.here:
                yield command

    def _command(self) -> tuple[Command, list[tuple[str, Value]], str]:
        """Up to the next operator; the assignments before its words, and its first word."""
        command = Command([], {}, self.line)
        assigned: list[tuple[str, Value]] = []
        first = ""
        while self.at < len(self.text):
            self.ended = sign = self.text[self.at]
            if sign == "\n":
                self._newline()
                break
            if sign in " \t\r":
                self.at += 1
            elif self.text.startswith("\\\n", self.at) or self.text.startswith("\\\r\n", self.at):
                self.at = self.text.index("\n", self.at) + 1
                self.line += 1
            elif sign == "#":
                self.at = _end(self.text.find("\n", self.at), self.text)
            elif sign in ";|()" or (sign == "&" and self.text[self.at + 1 : self.at + 2] != ">"):
                self.at += 1
                break
            elif redirect := re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>&|<&|[<>])").match(
                self.text, self.at
            ):
                self._redirect(redirect[0], command)
            else:
                begins = self.at
                declares = bool(command.words) and command.words[0] in _DECLARES
                said = _ASSIGNED.match(self.text, self.at)
                if said and (not command.words or declares):
                    self.at = said.end()
                    assigned.append(self._assignment(said[1], said[2] == "+"))
                    continue
                line = self.line
                words = self._word()
                raw = self.text[begins : self.at]
                first = first or raw
                if not command.words and raw in _SKIPPED | SHUTS:
                    continue
                if not command.words:
                    command.line = line
                command.words += [Word(word, line) for word in words]
        return command, assigned, first

    def _newline(self) -> None:
        self.at += 1
        self.line += 1
        for end, expands, command in self.pending:
            begin, begin_line = self.at, self.line
            while self.at < len(self.text):
                stop = _end(self.text.find("\n", self.at), self.text)
                found, self.at = self.text[self.at : stop], min(stop + 1, len(self.text))
                self.line += 1
                if found.strip("\t ") == end:
                    body = self.text[begin : self.at - len(found) - 1]
                    break
            else:
                body = self.text[begin:]
            if expands:
                body = _expanded_text(body, self.variables)
            command.here.append(Word(body, begin_line))
        self.pending = []

    def _redirect(self, sign: str, command: Command) -> None:
        self.at += self.text[self.at :].index(sign) + len(sign)
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        begins = self.at
        target = "".join(self._word())
        raw = self.text[begins : self.at]
        if sign.endswith(">"):
            command.into = target
        if sign.endswith(("<<", "<<-")):
            self.pending.append((raw.strip("'\"\\"), raw[:1] not in "'\"\\", command))

    def _assignment(self, name: str, adds: bool) -> tuple[str, Value]:
        if self.text[self.at : self.at + 1] == "(":
            value: Value = self._array()
        else:
            value = "".join(_joined(piece.text) for piece in self._pieces())
        before = self.variables.values.get(name)
        if adds and before is not None:
            both = isinstance(before, list) or isinstance(value, list)
            value = [*_listed(before), *_listed(value)] if both else f"{before}{value}"
        return name, value

    def _array(self) -> list[str]:
        self.at += 1
        items: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            sign = self.text[self.at]
            if sign == "#":
                self.at = _end(self.text.find("\n", self.at), self.text)
            elif sign in " \t\r\n;|&(<>" or self.text.startswith("\\\n", self.at):
                self.line += sign == "\n"
                self.at += 1
            else:
                items += self._word()
        self.at += 1
        return items

    def _word(self) -> list[str]:
        """The fields that one word of the text becomes."""
        return _fields(self._pieces())

    def _pieces(self) -> list[_Piece]:
        pieces: list[_Piece] = []
        while self.at < len(self.text):
            sign = self.text[self.at]
            if sign in " \t\r\n;|&()<>":
                break
            if sign == "'":
                end = _end(self.text.find("'", self.at + 1), self.text)
                pieces.append(self._taken(end + 1, self.text[self.at + 1 : end]))
            elif sign == '"':
                self.at += 1
                pieces.append(_Piece("", True))
                while self.at < len(self.text) and self.text[self.at] != '"':
                    pieces.append(self._part('"', True))
                self.at += 1
            else:
                pieces.append(self._part(" \t\r\n;|&()<>'\"", False))
        return pieces

    def _taken(self, end: int, text: str) -> _Piece:
        self.line += self.text.count("\n", self.at, end)
        self.at = end
        return _Piece(text, True)

    def _part(self, ends: str, quoted: bool) -> _Piece:
        """An escape, an expansion, or text up to one of `ends`."""
        text, at = self.text, self.at
        if text[at] == "\\":
            self.at += 2
            escaped = text[at + 1 : at + 2]
            if escaped == "\n":
                self.line += 1
                return _Piece("", quoted)
            keep = quoted and escaped not in '"\\$`'
            return _Piece(f"\\{escaped}" if keep else escaped, True)
        if text[at] in "$`":
            end, value = expand(text, at, self.variables, quoted)
            self.line += text.count("\n", at, end)
            self.at = end
            return _Piece(value, quoted or OPEN in value)
        stop = at
        while stop < len(text) and text[stop] not in ends + "\\$`":
            stop += 1
        self.at = stop
        self.line += text.count("\n", at, stop)
        return _Piece(text[at:stop], True)


def _fields(pieces: list[_Piece]) -> list[str]:
    """Words of the pieces of one: what an expansion outside quotes gave is split at blanks."""
    words: list[str] = []
    open_word = False
    for piece in pieces:
        parts = piece.text if isinstance(piece.text, list) else [piece.text]
        if not piece.quoted:
            spaced = " ".join(parts)
            parts = spaced.split()
            if spaced[:1].isspace():
                open_word = False
        elif isinstance(piece.text, str) and not words and not piece.text:
            words.append("")
            open_word = True
            continue
        for i, part in enumerate(parts):
            if i == 0 and open_word and words:
                words[-1] += part
            else:
                words.append(part)
            open_word = True
        if not piece.quoted and parts and " ".join(piece.text)[-1:].isspace():
            open_word = False
    return words


def expand(text: str, at: int, variables: _Variables, quoted: bool = True) -> tuple[int, Value]:
    """Return the end and the value of the expansion that begins at `at` with $ or `."""
    if text[at] == "`":
        end = _end(text.find("`", at + 1), text) + 1
        is_comment = text[at + 1 : end].lstrip().startswith("#")
        return end, [] if is_comment else without_value(text[at:end])
    if text.startswith("$((", at):
        end = _closing(text, at + 1, "(", ")")
        return end, _arithmetic(text[at + 3 : end - 2], text[at:end], variables)
    if text.startswith("$(", at):
        end = _closing(text, at + 1, "(", ")")
        return end, without_value(text[at:end])
    if text.startswith("${", at):
        end = _closing(text, at + 1, "{", "}")
        return end, _braced(text[at + 2 : end - 1], text[at:end], variables)
    name = _NAME.match(text, at + 1)
    if name is not None:
        return name.end(), _value(name[0], name[0], variables, f"${name[0]}")
    if text[at + 1 : at + 2] in ("@", "*"):
        return at + 2, variables.values.get("@", [])
    if text[at + 1 : at + 2] and text[at + 1] in "0123456789?$!#":
        return at + 2, _value(text[at + 1], text[at + 1], variables, text[at : at + 2])
    return at + 1, "$"


def _value(name: str, said: str, variables: _Variables, raw: str) -> Value:
    found = variables.values.get(name)
    return without_value(raw) if found is None else found if said == name else _joined(found)


def _braced(inside: str, raw: str, variables: _Variables) -> Value:
    said = _BRACED.fullmatch(inside)
    if said is None:
        return without_value(raw)
    name, index, sign, word = said.groups()
    if name in ("@", "*"):
        return variables.values.get("@", [])
    found = variables.values.get(name)
    unset = found is None or (sign is not None and sign[0] == ":" and not _joined(found))
    if sign and sign[-1] == "+":
        return "" if unset else _expanded_text(word, variables)
    if unset and sign and sign[-1] in "-=":
        variables.defaults.append(name)
        default = _expanded_text(word.strip("\"'"), variables)
        if sign[-1] == "=":
            variables.values[name] = default
        return default
    if found is None:
        return without_value(raw)
    if index and index[1:-1].isdigit():
        listed = _listed(found)
        return listed[int(index[1:-1])] if int(index[1:-1]) < len(listed) else ""
    if isinstance(found, list) and not index:
        return found[0] if found else ""
    return found


def _expanded_text(text: str, variables: _Variables) -> str:
    """With its expansions, as between double quotes."""
    parts: list[str] = []
    at = 0
    while at < len(text):
        if text[at] == "\\" and text[at + 1 : at + 2] in ("$", "`", "\\"):
            parts.append(text[at + 1])
            at += 2
        elif text[at] in "$`":
            at, value = expand(text, at, variables)
            parts.append(_joined(value))
        else:
            parts.append(text[at])
            at += 1
    return "".join(parts)


def _arithmetic(inside: str, raw: str, variables: _Variables) -> str:
    text = _expanded_text(inside, variables)
    known = variables.values
    text = _NAME.sub(lambda name: _joined(known.get(name[0], without_value(name[0]))), text)
    if OPEN in text:
        return without_value(raw)
    try:
        tree = ast.parse(text.strip().replace("/", "//"), mode="eval")
        return str(_computed(tree.body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return without_value(raw)


def _computed(node: ast.AST) -> int:
    """Of whole numbers and + - * / %. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        left, right = _computed(node.left), _computed(node.right)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Mod():
                return left % right
            case _:
                return left // right
    raise ValueError


def _closing(text: str, at: int, opens: str, shuts: str) -> int:
    """Behind the bracket that closes the one at `at`."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == opens) - (text[i] == shuts)
        if depth == 0:
            return i + 1
    return len(text)


def _end(found: int, text: str) -> int:
    return len(text) if found < 0 else found


def _joined(value: Value) -> str:
    return value if isinstance(value, str) else " ".join(value)


def _listed(value: Value) -> list[str]:
    return [value] if isinstance(value, str) else value


def interpolated(text: str, values: Mapping[str, str], defaults: list[str]) -> str:
    """A text of a compose file: `${NAME}`, `${NAME:-default}` and `$NAME` with `values`, `$$` as
    one $. defaults: gets the names of variables whose default was taken."""
    variables = _Variables(dict(values), set(), defaults)
    return "$".join(_expanded_text(part, variables) for part in text.split("$$"))
