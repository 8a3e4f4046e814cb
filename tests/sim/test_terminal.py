"""How the commands meet a person: pages of help in groups, vLLM's names, what is meant by names
that there are not, completion, and any width of a terminal."""

import errno
import fcntl
import inspect
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
import traceback
from functools import cache
from pathlib import Path
from typing import NoReturn

import pytest

from tests.commands import status
from tests.parameters import mostly_nightly
from twinserve.profiles.specs import ProfileError
from twinserve.sim.cli import main as cli
from twinserve.sim.cli.main import command_meant, option_meant
from twinserve.sim.setup.config import SimulationConfig
from twinserve.sim.setup.hardware import resolve_hardware
from twinserve.sim.setup.option_groups import SETTINGS, VLLM_NAMES, flag
from twinserve.sim.setup.speculation import parse_speculation

ESCAPE = "\x1b"
MANY = ("simulate", "sweep", "plan", "calibrate", "validate", "replay")  # options
SMALL = "simulate -p vllm -p bros -t poisson --rate 20 --requests 12 --pool 4 --seed 1"


def said(capsys, *words: str) -> tuple[int, str, str]:
    return status(cli.main, words), *capsys.readouterr()


@cache
def app_of(verb: str):
    return cli.twinserve_app([verb])[verb]


@cache
def options_of(verb: str) -> dict[str, str]:
    """Option -> title of its group."""
    return {
        name: group._name
        for one in app_of(verb).assemble_argument_collection()
        if one.parse and not one.field_info.is_positional
        for group in one.parameter.group
        for name in one.names
    }


# -- groups ----------------------------------------------------------------------------------------
def test_each_setting_is_in_one_group():
    names = " ".join(SETTINGS.values()).split()
    assert sorted(names) == sorted(SimulationConfig.model_fields)


@pytest.mark.parametrize("verb", MANY)
def test_every_option_of_a_long_page_is_below_a_heading_of_its_own(verb):
    found = options_of(verb)
    assert not [name for name, group in found.items() if name[0] == "-" and group == "Parameters"]
    assert len(set(found.values())) >= 3


def test_settings_have_one_heading_in_all_commands():
    pages = [options_of(verb) for verb in ("simulate", "sweep", "validate")]
    for name in SimulationConfig.model_fields:
        assert len({page[flag(name)] for page in pages}) == 1


def examples() -> list[str]:
    found = []
    for verb in (*MANY, "compare", "report", "completion"):
        command = app_of(verb).default_command
        found += re.findall(r"^ *\$ (.*)$", inspect.getdoc(command) or "", re.M)
    return found


@pytest.mark.parametrize("example", examples())
def test_an_example_is_a_command_that_is_understood(example):
    if example.startswith("eval"):
        example = re.search(r"\$\((.*)\)", example)[1]
    name, *words = shlex.split(example.partition(" > ")[0])
    app = cli.twinserve_app() if name == "twinserve" else cli.simulate_app()
    command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
    assert command.__name__ == (words[0] if name == "twinserve" else "simulate") and bound.arguments


@pytest.mark.slow
@pytest.mark.parametrize("verb", (*MANY, "compare", "report", "completion"))
def test_a_page_shows_each_example_on_a_line(verb, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    shown = said(capsys, verb, "--help")[1].splitlines()
    own = re.findall(r"^ *\$ (.*)$", inspect.getdoc(app_of(verb).default_command), re.M)
    assert own and all(f"$ {example}" in shown for example in own)


# -- names of vLLM ---------------------------------------------------------------------------------
def settings_of(words: str) -> dict:
    app = cli.simulate_app()
    _, bound, _ = app.parse_args(shlex.split(words), exit_on_error=False, print_error=False)
    return bound.arguments["config"].model_dump(exclude_unset=True)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            "--max-num-seqs 8 --max-num-batched-tokens 512 --max-model-len 4096 --seed 4",
            {"max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 4096, "seed": 4},
        ),
        (
            "--gpu-memory-utilization 0.8 --kv-cache-dtype fp8 --block-size 32",
            {"gpu_memory_utilization": 0.8, "kv_cache_dtype": "fp8", "block_tokens": 32},
        ),
        (
            "--num-gpu-blocks-override 900 --enable-prefix-caching --no-async-scheduling",
            {"num_blocks": 899, "prefix_caching": True, "async_scheduling": False},
        ),
        (
            "--no-enable-prefix-caching --async-scheduling --request-rate 3 --num-prompts 30",
            {"prefix_caching": False, "async_scheduling": True, "rate": 3.0, "requests": 30},
        ),
        (
            "--max-model-len 32K --max-num-batched-tokens 1.5k --kv-cache-memory-bytes 20G",
            {
                "max_model_len": 32768,
                "max_num_batched_tokens": 1500,
                "kv_cache_memory_bytes": 20 * 2**30,
            },
        ),
        ("-tp 2", {"profile": "llama-3.1-8b@h100:tp2"}),
        (
            "--profile qwen3-8b@h100 -tp=2 -pp 4 -dp 3",
            {"profile": "qwen3-8b@h100:tp2:pp4", "replicas": 3},
        ),
        (
            "--profile qwen3-30b-a3b@h100:tp2 -dp 2 -ep --replicas 3",
            {"profile": "qwen3-30b-a3b@h100:tp2:dp2:ep", "replicas": 6},
        ),
    ],
)
def test_a_name_of_vllm_is_taken_as_it_is(theirs, ours):
    assert settings_of(theirs) == ours


def test_bytes_of_kv_memory_are_blocks():
    """A block of Llama-3.1-8B has 2 MiB, of which each rank and each stage holds its part."""
    config = SimulationConfig(profile="llama-3.1-8b@h100:tp4", kv_cache_memory_bytes="20G")
    assert resolve_hardware(config).num_blocks == 20 * 2**30 // (2**21 // 4)
    config = SimulationConfig(profile="llama-3.1-8b@h100:pp2", kv_cache_memory_bytes=2**30)
    assert resolve_hardware(config).num_blocks == 2**30 // (2**21 // 2)
    for size, said in ((10**12, "more than the"), (1000, "no KV memory")):
        with pytest.raises(ProfileError, match=said):
            resolve_hardware(SimulationConfig(kv_cache_memory_bytes=size))


# -- what is meant ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("simulate --tp 2", "--tensor-parallel-size?"),
        ("simulate --qps 3", "--rate?"),
        ("simulate --gpus h100", "--profile (MODEL@GPU)"),
        ("simulate --batch-size 3", "--max-num-seqs?"),
        ("simulate --scheduler bros", "--policy?"),
        ("simulate --output x", "--out?"),
        ("simulate --sla 1", "--slo?"),
        ("sweep --repeats 3", "--seeds?"),
        ("validate --model tiny --seeds 3", "--repeats?"),
        ("plan --model m -t poisson --slo x --rate-scale 3", "--grow?"),
        ("simulate --polcy bros", "--policy?"),
    ],
)
def test_an_option_is_guessed_by_its_meaning(words, meant, capsys):
    code, out, err = said(capsys, *words.split())
    assert (code, out, err.count("\n")) == (2, "", 1) and f"Did you mean {meant}" in err


def test_what_is_said_of_speculation_can_be_given():
    (text,) = re.findall(r"\((k=.*?)\)", option_meant("--num-speculative-tokens", {"--speculate"}))
    assert parse_speculation(text).k == 3


def test_what_is_meant_is_an_option_of_that_command():
    assert option_meant("--qps", {"--rate"}) == " Did you mean --rate?"
    assert option_meant("--qps", {"--out"}) == ""
    for verb in MANY:
        known = set(options_of(verb))
        for word in ("--tp", "--qps", "--gpus", "--batch_size=3", "--foo", "--output"):
            guess = re.search(r"Did you mean (\S+?)[ ?]", option_meant(word, known))
            assert guess is None or guess[1] in known


@pytest.mark.parametrize("word", ["--foo", "--bar", "--x", "-x"])
def test_nothing_is_guessed_where_the_dashes_alone_are_alike(word, capsys):
    code, _, err = said(capsys, "simulate", word)
    assert code == 2 and "Did you mean" not in err


@pytest.mark.parametrize(
    ("word", "verb"), [("run", "simulate"), ("grid", "sweep"), ("plam", "plan")]
)
def test_a_command_is_guessed_too(word, verb, capsys):
    assert command_meant(word, cli.VERBS) == f" Did you mean {verb}?"
    code, _, err = said(capsys, word)
    assert code == 2 and f"Unknown command {word}. Did you mean {verb}?" in err


def test_every_command_can_be_quiet(capsys):
    assert said(capsys, "policies", "-q")[:2] == said(capsys, "policies", "--quiet")[:2]
    code, out, err = said(capsys, "trace", "fetch", "nosuch", "--quiet")
    assert code == 2 and err.startswith("error: ") and "quiet" not in err
    code, _, err = said(capsys, "policies", "--quieter")
    assert code == 2 and "Unknown option: --quieter" in err


def test_an_option_that_stands_twice_leads_to_sweeps(capsys):
    code, _, err = said(capsys, *SMALL.split(), "-r", "random", "-r", "session")
    line = "error: -r is given twice; several values are compared by twinserve sweep --grid"
    assert code == 2 and err == f"{line} (see --help)\n"


@pytest.mark.slow
def test_a_missed_objective_may_be_an_exit_status(capsys):
    words = (*SMALL.split(), "-q", "--fail-on-miss")
    assert said(capsys, *words, "--slo", "p90 ttft < 1 us")[0] == 3
    assert said(capsys, *words, "--slo", "p90 ttft < 99 s")[0] == 0
    code, _, err = said(capsys, *words)
    assert code == 2 and "--fail-on-miss: no objective is of the whole run" in err


# -- completion ------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes(capsys):
    cases = [
        ("twinserve sw", {"sweep"}),
        ("twinserve trace conv", {"convert"}),
        ("simulate --max-num", {"--max-num-seqs", "--max-num-batched-tokens"}),
        ("simulate --kv-cache-dtype f", {"fp8"}),
        ("twinserve plan --max-model", {"--max-model-len"}),
        ("simulate --policy bros", {"bros", "bros-exact"}),
        ("twinserve sweep -p ec", {"echo", "echo-bs", "echo-bs-e", "echo-bs-e-s"}),
        ("simulate --router least", {"least-requests", "least-tokens"}),
        ("simulate --profile codellama", {"codellama-34b@h100:tp2"}),
        ("twinserve plan --trace azure-2023", {"azure-2023:code", "azure-2023:conv"}),
    ]
    lines = [said(capsys, "completion", "bash")[1]]
    for words, _ in cases:
        lines += [
            f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; COMPREPLY=()",
            f"_{words.split()[0]}; echo ${{COMPREPLY[@]}}",
        ]
    # as its input: one word of a command line may have 128 KiB
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True)
    assert not done.stderr
    found = [{*line.split()} for line in done.stdout.splitlines()]
    assert found == [there for _, there in cases]


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_for_other_shells_have_every_verb_and_parse(shell, capsys, tmp_path):
    assert not status(cli.main, ["completion", shell])
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS) and "max-num-seqs" in text
    beside = "azure-2023" in text and ("-l trace -r -F -a" in text or ":trace: _twinserve" in text)
    assert beside  # files: a trace may be one
    if shutil.which(shell):
        file = tmp_path / "script"
        file.write_text(text)
        subprocess.run([shell, "-n", str(file)], check=True, timeout=300)


# -- terminals and pipes ---------------------------------------------------------------------------
def _command_of(words: str, terminal: int, variables: dict[str, str]) -> NoReturn:
    """Be a process that runs this command in that terminal, and end with it."""
    code = 1
    try:
        for name in ("COLUMNS", "NO_COLOR", "LINES"):
            os.environ.pop(name, None)
        os.environ.update(variables)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(terminal, 1)
        os.dup2(terminal, 2)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        name, *rest = words.split()
        sys.argv = [name, *rest]
        (cli.simulate_main if name == "simulate" else cli.main)()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def in_terminal(words: str, columns: int, **variables: str) -> str:
    """What a command shows in a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    child = os.fork()  # all is imported here already
    if not child:
        os.close(ours)
        _command_of(words, theirs, {"TERM": "xterm-256color", **variables})
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError as error:  # Linux' way of saying that nobody writes any more
            if error.errno != errno.EIO:
                raise
            break
        if not part:
            break
        parts.append(part)
    os.close(ours)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return b"".join(parts).decode()


def plain(text: str) -> list[str]:
    """Lines as they stay on a terminal: no escape codes, and what was overwritten is gone."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r\n", "\n")
    return [line.rpartition("\r")[2].rstrip() for line in text.split("\n")]


@pytest.mark.slow
@pytest.mark.parametrize("columns", mostly_nightly([60, 80, 120, 200], 60, 200))
@pytest.mark.parametrize(
    "words",
    mostly_nightly(
        ["simulate --help", "twinserve --help", "twinserve policies", SMALL],
        "simulate --help",
        SMALL,
    ),
)
def test_no_line_is_wider_than_the_terminal(words, columns):
    lines = plain(in_terminal(words, columns))
    assert len(lines) > 10 and max(map(len, lines)) <= columns


@pytest.mark.slow
@pytest.mark.parametrize("words", ["twinserve --help", SMALL])
def test_no_color_is_without_colours(words):
    colours = re.compile(r"\x1b\[[0-9;]*(?:3[0-8]|4[0-8]|9[0-7])(?:;[0-9]+)*m")
    assert not colours.search(in_terminal(words, 100, NO_COLOR="1"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [*mostly_nightly([f"twinserve {verb} --help" for verb in MANY]), "simulate --help", SMALL],
)
def test_a_pipe_gets_no_escape_codes(words):
    name, *rest = words.split()
    verb = ["simulate"] if name == "simulate" else []
    done = subprocess.run(
        [sys.executable, "-m", "twinserve.sim.cli.main", *verb, *rest],
        capture_output=True,
        text=True,
        env={**os.environ, "TERM": "xterm-256color"},
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0 and done.stdout
    assert ESCAPE not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr


# -- the page --------------------------------------------------------------------------------------
PAGE = Path(__file__).resolve().parents[2] / "docs" / "terminal.md"


def test_the_page_shows_what_is_printed(capsys):
    shown = re.findall(r"^\$ (.*)\n(error: .*)$", PAGE.read_text(encoding="utf-8"), re.M)
    assert len(shown) == 3
    for command, line in shown:
        name, *words = command.split()
        with pytest.raises(SystemExit):
            (cli.simulate_main if name == "simulate" else cli.main)(words)
        assert capsys.readouterr().err == f"{line}\n"


def test_the_page_has_the_names_of_vllm():
    text = PAGE.read_text(encoding="utf-8")
    for ours, theirs in VLLM_NAMES.items():
        assert f"| `{flag(theirs)}` | `{flag(ours)}` |" in text
