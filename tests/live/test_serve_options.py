"""The table of vLLM's options is that of its own parser, and reads lines as it does."""

import argparse

import pytest

pytest.importorskip("vllm")
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from twinserve.sim.serve_line.argv import options, read_argv
from twinserve.sim.serve_line.words import ServeLineError

pytestmark = pytest.mark.live
_TAKES = {0: {"flag", "switch"}, "+": {"many"}, "?": {"maybe"}}
_VALUES = {"whole", "number", "integer", "length", "json", "text"}


@pytest.fixture(scope="module")
def parser():
    return make_arg_parser(FlexibleArgumentParser())


def test_names_and_numbers_of_words_are_those_of_the_parser(parser):
    theirs = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if not name.startswith("--no-")]
        if names:
            long = next(name for name in names if name in options())
            theirs[long] = action
            assert set(names) == {long, *options()[long].short} | (
                {f"--no-{long[2:]}"} & set(names)
            )
            assert options()[long].takes in _TAKES.get(action.nargs, _VALUES), long
            if action.nargs == 0:
                has_no = any(name.startswith("--no-") for name in action.option_strings)
                assert (options()[long].takes == "switch") == has_no, long
    assert set(theirs) == {name for name, option in options().items() if option.gone is None}


@pytest.mark.parametrize(
    "line",
    [
        "m -tp 4 -pp=2 --max_model_len 32k --max-num-batched-tokens=16K",
        "--host 0.0.0.0 m --max-num-seq 7 -q awq --no-enable-prefix-caching",
        "m --seed 1 --seed 2 -O3 --api-key a b --block-size 32",
        "m --kv-cache-memory-bytes 1.5g --max-model-len auto",
    ],
)
def test_lines_have_the_values_of_the_parser(parser, line):
    theirs = vars(parser.parse_args(line.split()))
    for name, value in read_argv(line.split(), (0, 32, 0)).values.items():
        said = theirs[name[2:].replace("-", "_")]
        assert str(said) == str(value) or int(said) == int(value), name


@pytest.mark.parametrize(
    "line",
    ["m -tp4", "m --max-num-seqs 1k", "m --max-model-len 1.5M", "m --enable-prefix-caching=True",
     "m --swap-space 4", "m --max-num 4", "m --made-up"],
)  # fmt: skip
def test_lines_that_the_parser_refuses_are_refused(parser, line):
    with pytest.raises((SystemExit, ValueError, argparse.ArgumentError)):
        parser.parse_args(line.split())
    with pytest.raises(ServeLineError):
        read_argv(line.split(), (0, 32, 0))
