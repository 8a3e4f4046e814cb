"""What pages say of measured closed loops comes from the kept errors (docs/results/silicon)."""

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from twinserve.experiments.measured.scores import scores
from twinserve.experiments.silicon.main import ENGINE, table

ROOT = Path(__file__).parents[2]
PAGE = "docs/validation.md"
GPT, MOST = "gpt-oss-120b", 512  # requests; the page says why gpt-oss with so many stands by itself


@cache
def errors() -> pd.DataFrame:
    return pd.read_csv(ROOT / "docs" / "results" / "silicon" / "errors" / "table.csv")


def shown() -> pd.DataFrame:
    """Of the table of engines."""
    rows = errors()
    return rows[~((rows.model == GPT) & (rows.concurrency == MOST))]


def test_the_page_has_the_table_of_the_kept_errors():
    page = (ROOT / PAGE).read_text().splitlines()
    at = page.index("### Errors")
    begin = next(i for i in range(at, len(page)) if page[i].startswith("|"))
    end = next(i for i in range(begin, len(page)) if not page[i].startswith("|"))
    lines = [line.replace(" %", "") for line in table(shown(), ENGINE)]
    cells = [line.strip("|").split("|") for line in lines if "| staggered |" not in line]
    found = ["|" + "|".join(one[at] for at in (0, 1, 2, 3, 5, 7, 9)) + "|" for one in cells]
    found = [line.replace(": operators", "").replace(" ", "") for line in found]
    assert [line.replace(" ", "") for line in page[begin:end]] == found


def test_each_point_has_four_loops_or_the_page_says_how_many_lack_two():
    loops = errors().groupby(["form", "start"]).size()
    (points,), (tables,) = {*loops["roofline"]}, {*loops["operators"]}
    page = text_of(PAGE)
    assert f"of all {points} points" in page and f"In {points} closed loops" in text_of("README.md")
    assert f"{points - tables} points have no kernel tables" in page


def text_of(page: str) -> str:
    """In one line, as sentences are broken anywhere."""
    return " ".join((ROOT / page).read_text().split())


def means(metric: str, by: tuple[str, ...] = (*ENGINE, "start"), **where) -> pd.DataFrame:
    """Of each engine and start, by kernel tables: mean error and mean size, in per cent, as in the
    table of engines. where: columns and their values."""
    rows = shown()
    for column, value in ({"form": "operators"} | where).items():
        rows = rows[rows[column].isin(value if isinstance(value, tuple) else (value,))]
    assert len(rows)
    return scores(rows.assign(off=rows[metric]), by)[["mean", "size"]].round().astype(int)


def span(*found: pd.Series) -> str:
    """Sizes from the least to the largest, as prose has them."""
    sizes = pd.concat(found).abs()
    least, most = sizes.min(), sizes.max()
    return f"{most}" if least == most else f"{least} to {most}"


FP8, NVFP4 = "llama-3.1-70b-fp8", "llama-3.1-70b-nvfp4"
HOPPER, ONCE = ("h100", "h200"), "all at once"
GOOD = ({"model": "qwen3-32b"}, {"model": FP8}, {"model": NVFP4}, {"model": GPT, "gpu": HOPPER})
REST = ("llama-3.1-8b-fp8", "qwen3-235b-a22b-fp8", "qwen3-32b-fp8")
OTHERS = ({"model": REST}, {"model": GPT, "gpu": "b200"})


def sizes(kinds, *metrics: str) -> str:
    return span(*(means(metric, **where)["size"] for metric in metrics for where in kinds))


def at_once(metric: str, **where) -> str:
    return span(means(metric, start=ONCE, **where)["mean"])


def sentences() -> dict[str, list[str]]:
    """Page -> what stands in it, with the numbers of the kept errors."""
    parts = (GOOD[:1], GOOD[1:3], GOOD[3:])
    most = [sizes(kinds, "throughput").split()[-1] for kinds in parts]
    on_b200 = means("TPOT", ("tp",), model=GPT, gpu="b200", start=ONCE)["mean"]
    rows = errors()
    full = rows[(rows.concurrency == MOST) & (rows.form == "operators") & (rows.start == ONCE)]
    good, others = (sizes(kinds, "TPOT", "throughput") for kinds in (GOOD, OTHERS))
    return {
        PAGE: [
            f"Their mean errors are {good} %. The other kinds are {others} % off",
            f"On H100 and H200 TTFT of gpt-oss-120b is {at_once('TTFT', **GOOD[3])} % "
            "short, and that of Llama-3.1-70B on B200 "
            f"{at_once('TTFT', model=(FP8, NVFP4), gpu='b200')} %",
            "TPOT is {} % long on one GPU, {} % on two, {} % on four, {} % on eight".format(
                *on_b200
            ),
            f"TPOT is {1 + full.TPOT.mean():.1f} times as long, and TTFT "
            f"{-100 * full.TTFT.mean():.0f} % short",
        ],
        "README.md": [
            f"within {most[0]} % on average for Qwen3-32B (16 bits), {most[1]} % for "
            f"Llama-3.1-70B (FP8, NVFP4) and {most[2]} % for gpt-oss-120b on Hopper",
            f"Other kinds are {others} % off",
        ],
    }


@pytest.mark.slow
def test_sentences_have_the_numbers_of_the_kept_errors():
    for page, sayings in sentences().items():
        text = text_of(page)
        assert [said for said in sayings if said not in text] == [], page
