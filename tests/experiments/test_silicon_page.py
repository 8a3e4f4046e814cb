"""What pages say of measured closed loops comes from the kept errors (docs/results/silicon)."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from twinserve.experiments.silicon.main import ENGINE, table

ROOT = Path(__file__).parents[2]
PAGE = "docs/validation.md"
DENSE = ("qwen3-32b", "llama-3.1-70b-fp8", "llama-3.1-70b-nvfp4")
GPT = "gpt-oss-120b"
MOST = 512  # requests; the page says why gpt-oss with so many stands by itself


@cache
def errors() -> pd.DataFrame:
    return pd.read_csv(ROOT / "docs" / "results" / "silicon" / "errors" / "table.csv")


def rows_of(section: str) -> pd.DataFrame:
    """Of the table of engines ("Errors"), or of gpt-oss-120b alone ("gpt")."""
    rows = errors()
    few = rows[~((rows.model == GPT) & (rows.concurrency == MOST))]
    return few[few.model == GPT] if section == "gpt" else few


def test_the_page_has_the_table_of_the_kept_errors():
    page = (ROOT / PAGE).read_text().splitlines()
    at = page.index("### Errors")
    begin = next(i for i in range(at, len(page)) if page[i].startswith("|"))
    end = next(i for i in range(begin, len(page)) if not page[i].startswith("|"))
    lines = [line.replace(" %", "") for line in table(rows_of("Errors"), ENGINE)]
    cells = [line.strip("|").split("|") for line in lines if "| staggered |" not in line]
    shown = ["|" + "|".join(one[at] for at in (0, 1, 2, 3, 5, 7, 9)) + "|" for one in cells]
    shown = [line.replace(": operators", "") for line in shown]
    assert [line.replace(" ", "") for line in page[begin:end]] == [
        x.replace(" ", "") for x in shown
    ]


def test_each_point_has_four_loops_or_the_page_says_how_many_lack_two():
    loops = errors().groupby(["form", "start"]).size()
    (points,) = {*loops["roofline"]}
    (tables,) = {*loops["operators"]}
    page = text_of(PAGE)
    assert f"of all {points} points" in page and f"In {points} closed loops" in text_of("README.md")
    assert f"{points - tables} points have no kernel tables" in page


def text_of(page: str) -> str:
    """In one line, as sentences are broken anywhere."""
    return " ".join((ROOT / page).read_text().split())


def means(metric: str, form: str = "operators", **where) -> pd.DataFrame:
    """Of each engine and start: mean error and mean size, in per cent, as in the table of engines.
    where: columns and their values."""
    rows = rows_of("Errors")
    rows = rows[rows.form == form]
    for column, value in where.items():
        rows = rows[rows[column].isin(value if isinstance(value, tuple) else (value,))]
    assert len(rows)
    errors_of = 100 * rows[metric]
    by = rows.assign(error=errors_of, size=errors_of.abs()).groupby([*ENGINE, "start"])
    return by[["error", "size"]].mean().round().astype(int)


def span(found: pd.Series) -> str:
    """Sizes from the least to the largest, as prose has them."""
    least, most = found.abs().min(), found.abs().max()
    return f"{most}" if least == most else f"{least} to {most}"


FP8, NVFP4, HOPPER, ONCE = DENSE[1], DENSE[2], ("h100", "h200"), "all at once"
GOOD = ({"model": DENSE[0]}, {"model": FP8}, {"model": NVFP4}, {"model": GPT, "gpu": HOPPER})


def error(metric: str, form: str = "operators", **where) -> str:
    """Of points whose clients start all at once."""
    return span(means(metric, form, start=ONCE, **where).error)


def of_good(metric: str) -> list[str]:
    return [span(means(metric, **where)["size"]) for where in GOOD]


def all_good() -> str:
    found = [means(m, **where)["size"] for m in ("TPOT", "throughput") for where in GOOD]
    return span(pd.concat(found))


def others() -> str:
    rest = ("llama-3.1-8b-fp8", "qwen3-235b-a22b-fp8", "qwen3-32b-fp8")
    found = [means(m, model=rest)["size"] for m in ("TPOT", "throughput")]
    found += [means(m, model=GPT, gpu="b200")["size"] for m in ("TPOT", "throughput")]
    return span(pd.concat(found))


def of_gpt_on_b200() -> list[int]:
    rows = rows_of("gpt")
    rows = rows[(rows.gpu == "b200") & (rows.form == "operators") & (rows.start == ONCE)]
    return [round(100 * part.TPOT.mean()) for _, part in rows.groupby("tp")]


def of_most(metric: str) -> float:
    rows = errors()
    rows = rows[(rows.concurrency == MOST) & (rows.form == "operators") & (rows.start == ONCE)]
    return float(rows[metric].mean())


def sentences() -> dict[str, list[str]]:
    """Page -> what stands in it, with the numbers of the kept errors."""
    throughput, on_b200 = of_good("throughput"), of_gpt_on_b200()
    llama = span(pd.concat([means("throughput", model=m)["size"] for m in (FP8, NVFP4)]))
    most = [text.split()[-1] for text in (throughput[0], llama, throughput[3])]
    return {
        PAGE: [
            f"Their mean errors are {all_good()} %. The other kinds are {others()} % off",
            f"On H100 and H200 TTFT of gpt-oss-120b is {error('TTFT', model=GPT, gpu=HOPPER)} % "
            f"short, and that of Llama-3.1-70B on B200 "
            f"{error('TTFT', model=(FP8, NVFP4), gpu='b200')} %",
            "TPOT is {} % long on one GPU, {} % on two, {} % on four, {} % on eight".format(
                *on_b200
            ),
            f"TPOT is {1 + of_most('TPOT'):.1f} times as long, and TTFT "
            f"{-100 * of_most('TTFT'):.0f} % short",
        ],
        "README.md": [
            f"within {most[0]} % on average for Qwen3-32B (16 bits), {most[1]} % for "
            f"Llama-3.1-70B (FP8, NVFP4) and {most[2]} % for gpt-oss-120b on Hopper",
            f"Other kinds are {others()} % off",
        ],
    }


@pytest.mark.slow
def test_sentences_have_the_numbers_of_the_kept_errors():
    for page, sayings in sentences().items():
        text = text_of(page)
        assert [said for said in sayings if said not in text] == [], page
