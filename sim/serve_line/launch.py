"""Where in a command vLLM's server is started, and with which words, environment and image."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from twinserve.sim.serve_line.argv import is_option
from twinserve.sim.serve_line.shell import Command, read_shell
from twinserve.sim.serve_line.words import ServeLineError, Word, lacking, line_of, plain
from twinserve.sim.serve_line.yaml_lines import as_word

_MODULE = re.compile(r"vllm\.entrypoints\.(?:openai\.|launchers\.)?\w+")
_SHELLS = {"sh", "bash", "dash", "zsh", "ash"}
_TALK = (
    "echo printf grep pkill pgrep kill curl wget cat pip pip3 which man apt apt-get tee alias sed "
    "awk ps mkdir cd"
).split()
_CARRIERS = {"tmux", "screen", "ssh", "eval", "su", "runuser", "parallel", "watch", "xargs"}
_BOXES = {"docker", "podman", "nerdctl"}
# Options of `docker run` that stand alone; all others take a word.
_ALONE = (
    "--detach --init --interactive --no-healthcheck --oom-kill-disable --privileged --publish-all "
    "--quiet --read-only --rm --tty --replace --rmi --tls-verify --network-host"
).split()
_IMAGE = re.compile(r"(?:^|/)(?:[\w.-]*vllm[\w.-]*)(?:[:@]|$)")
# Only these bear vLLM's own releases; llm-d, Ray and LMCache count theirs.
_RELEASE = re.compile(r"(?:^|/)vllm/vllm-(?:openai|cpu|tpu|rocm)[\w-]*:v?(\d+\.\d+\.\d+[\w.]*)")
_PINNED = re.compile(r"vllm(?:\[[\w,-]*\])?==(\d+\.\d+(?:\.\d+)*(?:\.?(?:post|rc)\d+)?)")


@dataclass
class Launch:
    """One start of a server.

    argv: the words after `vllm serve`. env: of the process. image: of its container. line: its
    place. visible: GPUs that a container runtime was asked for; None: not said.
    """

    argv: list[Word]
    env: dict[str, str] = field(default_factory=dict)
    image: str | None = None
    line: int = 1
    visible: int | None = None


def release_of_image(image: str | None) -> str | None:
    """vLLM's release in the tag of an image of vLLM's own."""
    found = _RELEASE.search(plain(image or ""))
    return found[1] if found else None


def pinned_release(text: str) -> str | None:
    """Of `pip install vllm==0.10.0`; a bound is none."""
    found = _PINNED.search(text)
    return found[1] if found else None


def is_vllm_image(image: str | None) -> bool:
    return bool(image and _IMAGE.search(image.partition("@")[0]))


def launches(
    text: str, env: Mapping[str, str], line: int = 1, defaults: list[str] | None = None
) -> list[Launch]:
    """The servers that a script starts."""
    return of_commands(read_shell(text, env, line, defaults), defaults)


def of_commands(commands: list[Command], defaults: list[str] | None = None) -> list[Launch]:
    """Of those that run; where these start no server, of the others."""
    for runs in (True, False):
        chosen = [command for command in commands if command.runs == runs]
        found = [of_words(one.words, one.env, None, defaults) for one in chosen]
        if any(found):
            return [launch for launches in found for launch in launches]
    return []


def of_words(
    words: Sequence[Word],
    env: Mapping[str, str],
    image: str | None = None,
    defaults: list[str] | None = None,
) -> list[Launch]:
    """The servers that a command starts: itself, under a launcher, in a container or in a shell."""
    words = list(words)
    while words and (said := re.match(r"([A-Za-z_]\w*)=(.*)", words[0], re.DOTALL)):
        env = {**env, said[1]: said[2]}
        words = words[1:]
    if not words or _base(words[0]) in _TALK:
        return []
    names = [_base(word) for word in words]
    if names[0] in _CARRIERS:
        texts = [Word(" ".join(words[1:]), line_of(words[0]))] if names[0] == "eval" else words
        inside = [one for text in texts if " " in text for one in _in_text(text, env, defaults)]
        if inside:
            return inside
    for i, name in enumerate(names):
        if name == "env":
            rest = [w for w in words[i + 1 :] if not re.fullmatch(r"-[iu0]|--ignore-.*", w)]
            return of_words(rest, env, image, defaults)
        if name in _BOXES and names[i + 1 : i + 2] in (["run"], ["create"]):
            return _of_container(words[i + 2 :], defaults)
        if name in _BOXES and names[i + 1 : i + 3] == ["container", "run"]:
            return _of_container(words[i + 3 :], defaults)
        if name in _SHELLS:
            script = _script(words[i + 1 :])
            if script is not None:
                found = launches(script, env, line_of(script), defaults)
                return [_with_image(one, image) for one in found]
        begins = _start(words, names, i)
        if begins is not None:
            return [Launch(words[begins:], dict(env), image, line_of(words[i]))]
    return []


def _in_text(text: Word, env: Mapping[str, str], defaults: list[str] | None) -> list[Launch]:
    return launches(text, env, line_of(text), defaults)


def _start(words: Sequence[Word], names: Sequence[str], i: int) -> int | None:
    """Where vLLM's words begin if word `i` starts it."""
    if names[i] == "vllm" and names[i + 1 : i + 2] == ["serve"]:
        return i + 2
    if words[i] == "-m" and words[i + 1 : i + 2]:
        if words[i + 1] == "vllm.entrypoints.cli.main" and names[i + 2 : i + 3] == ["serve"]:
            return i + 3
        if _MODULE.fullmatch(words[i + 1]) and words[i + 1].endswith("api_server"):
            return i + 2
    if words[i].endswith("vllm/entrypoints/openai/api_server.py"):
        return i + 1
    return None


def _base(word: str) -> str:
    return PurePosixPath(word).name if "/" in word and " " not in word else str(word)


def _script(words: Sequence[Word]) -> Word | None:
    """Of `bash -c SCRIPT`, `-lc`, `-exc`; None: it runs a file."""
    for i, word in enumerate(words):
        if re.fullmatch(r"-[a-zA-Z]*c[a-zA-Z]*", word):
            return words[i + 1] if i + 1 < len(words) else None
        if not word.startswith(("-", "+")) and words[max(i - 1, 0)] not in ("-o", "+o"):
            return None
    return None


def _with_image(launch: Launch, image: str | None) -> Launch:
    launch.image = launch.image or image
    return launch


def _of_container(words: Sequence[Word], defaults: list[str] | None) -> list[Launch]:
    """The words after `docker run`: its options, the image, and what runs in it."""
    env: dict[str, str] = {}
    entry: list[Word] = []
    visible: int | None = None
    i = 0
    while i < len(words) and words[i].startswith("-"):
        name, equals, value = words[i].partition("=")
        if not equals and name not in _ALONE and not re.fullmatch(r"-[dit]+", name):
            i += 1
            value = words[i] if i < len(words) else ""
        i += 1
        if name in ("-e", "--env"):
            key, has, said = value.partition("=")
            env |= {key: said} if has else {}
        elif name == "--entrypoint":
            entry = [Word(value, line_of(words[i - 1]))]
        elif name in ("--gpus", "--device"):
            visible = _visible(value) if visible is None or name == "--gpus" else visible
    if i >= len(words):
        return []
    return of_container([*entry], list(words[i + 1 :]), env, str(words[i]), visible, defaults)


def _visible(text: str) -> int | None:
    """GPUs that `--gpus` or `--device` of a container runtime names; None: all, or not said."""
    text = text.strip("'\"")
    if text.isdigit():
        return int(text)
    named = re.search(r"(?:device=|nvidia\.com/gpu=)([\w,-]+)", text)
    return None if named is None or named[1] == "all" else len(named[1].split(","))


def of_container(
    command: Sequence[Word],
    args: Sequence[Word],
    env: Mapping[str, str],
    image: str | None,
    visible: int | None = None,
    defaults: list[str] | None = None,
) -> list[Launch]:
    """The servers that a container runs. Without a command it is vLLM if its image says so, or if
    its words are options of vLLM."""
    words = [*command, *args]
    found = of_words(words, env, image, defaults)
    if not found and not command and words and _base(words[0]) not in {*_SHELLS, *_TALK}:
        options = [word for word in words if word.startswith("--")]
        known = [word for word in options if is_option(word)]
        begins = 1 if words[0] == "serve" else 0
        if is_vllm_image(image) or (len(known) >= 2 and len(known) * 2 > len(options)):
            line = line_of(words[0])
            found = [Launch([*words[begins:]], dict(env), image, line)]
    for one in found:
        one.visible = visible if one.visible is None else one.visible
        one.image = one.image or image
    return found


PREFILL, DECODE = "prefill", "decode"
# Returns the text of a file that another one names; None: not there.
ReadNamed = Callable[[str], str | None]


@dataclass
class Found:
    """kind: of the file. name: of the service. role: prefill or decode. replicas: servers. nodes:
    machines or pods of one server. gpus: of a node; 0: none; None: not said. labels: what may name
    the GPU, as (key, values). release: if the image does not say it. warnings: what is no option
    and is not simulated. defaults: variables whose default was taken. passed: options that were
    left out of the words. label_text: the labels as the file has them, if not `key: value`."""

    launch: Launch
    kind: str
    name: str = ""
    role: str | None = None
    replicas: int = 1
    nodes: int = 1
    gpus: int | None = None
    labels: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    release: str | None = None
    warnings: list[str] = field(default_factory=list)
    defaults: list[str] = field(default_factory=list)
    passed: list[str] = field(default_factory=list)
    label_text: str = ""

    @property
    def line(self) -> int:
        return self.launch.line


def count(value: object, where: str, what: str, default: int = 1) -> int:
    """A number of a file. Raises ServeLineError for one that is not there to read."""
    if value is None or value == "":
        return default
    text = str(value)
    if text.strip().isdigit():
        return int(text)
    line = line_of(value)
    if lacking(text):
        raise ServeLineError(
            f"{where}:{line}: {what}: {lacking(text)[0]} has no value; render the file, or write "
            "the number"
        )
    raise ServeLineError(f"{where}:{line}: {what}: {text} is no number; write one")


def one_server(found: list[Found], where: str, noun: str, name: str | None) -> list[Found]:
    """Return the one server, or its prefill and decode pools. name: the chosen one. Raises
    ServeLineError if there are several others."""
    if name is not None:
        named = [one for one in found if one.name == name]
        if not named:
            names = ", ".join(one.name for one in found if one.name)
            raise ServeLineError(f"{where}: no {noun} {name!r} runs vLLM; there are {names}")
        return named[:1]
    heads = [one for one in found if "--headless" not in one.launch.argv]
    if heads and len(heads) < len(found):
        nodes = sum(one.replicas for one in found) - sum(one.replicas for one in heads)
        heads[0].nodes += nodes if len(heads) == 1 else 0
        found = heads
    roles = [one.role or _role(one.launch.argv) for one in found]
    if len(found) == 2 and set(roles) == {PREFILL, DECODE}:
        for one, role in zip(found, roles, strict=True):
            one.role = role
        return sorted(found, key=lambda one: one.role == DECODE)
    if len(found) > 1:
        names = ", ".join(one.name or f"line {one.line}" for one in found)
        hint = f"name one: {where}#{found[0].name}" if found[0].name else "give one of them"
        line = line_of(found[1].name, found[1].line)
        raise ServeLineError(f"{where}:{line}: {len(found)} {noun}s with vLLM: {names}; {hint}")
    return found


def _role(argv: list[Word]) -> str | None:
    """Of a server that only gives KV to another one, or only takes it."""
    said = re.search(r'"kv_role"\s*:\s*"kv_(producer|consumer)"', " ".join(argv))
    return None if said is None else PREFILL if said[1] == "producer" else DECODE


def words_of(value: object, line: int = 1) -> list[Word]:
    """A list of YAML as words."""
    if value is None or value == {}:
        return []
    if isinstance(value, list):
        return [as_word(item, line) for item in value]
    return [as_word(value, line)]
