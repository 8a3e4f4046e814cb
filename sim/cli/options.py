"""Options of several commands, and the headings of help pages."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token

from twinserve.sim.serve_line.words import human_integer
from twinserve.sim.setup import option_groups as groups


def _whole(kind: type, tokens: Sequence[Token]) -> int:
    """What is no whole number is refused, not rounded."""
    text = tokens[0].value.strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f"{text!r} is no whole number")
    return int(text)


def _human(kind: type, tokens: Sequence[Token]) -> int:
    """As vLLM takes it: 32k is 32,000, 32K is 32,768."""
    return human_integer(tokens[0].value)


MISSED = 3  # exit status with --fail-on-miss
Human = Annotated[int, Parameter(converter=_human)]
Whole = Annotated[int, Parameter(converter=_whole)]
Flag = Annotated[bool, Parameter(negative="")]
Measured = Parameter(group=groups.OBJECTIVES)
Starting = Parameter(group=groups.ASKED)
Engine = Parameter(group=groups.LIVE)
Doing = Parameter(group=groups.CARRYING_OUT)
Writing = Parameter(group=groups.RESULTS)

ConfigFile = Annotated[Path | None, Parameter(name="--config", group=groups.ASKED)]
Goodput = Annotated[
    list[str] | None, Parameter(consume_multiple=True, negative="", group=groups.OBJECTIVES)
]
Percentiles = Annotated[
    str | None, Parameter(name=["--percentiles", "--metric-percentiles"], group=groups.OBJECTIVES)
]
EngineArgs = Annotated[
    list[str] | None, Parameter(name="--engine-arg", negative="", group=groups.LIVE)
]
Out = Annotated[Path | None, Parameter(name=["--out", "-o"], group=groups.RESULTS)]
Overwrite = Annotated[Flag, Writing]
FailOnMiss = Annotated[Flag, Writing]
Json = Annotated[bool, Parameter(name="--json", negative="", group=groups.RESULTS)]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], negative="", group=groups.RESULTS)]
