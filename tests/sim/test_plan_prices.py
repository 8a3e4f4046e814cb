"""Prices: the table that ships, and tables of users, checked row by row."""

import datetime

import pytest

from twinserve.profiles.gpus import GPUS
from twinserve.sim.plan.prices import load_prices, read_prices
from twinserve.sim.setup.config import SettingsError


def test_the_table_that_ships_has_a_date_and_a_source_in_every_row():
    prices = load_prices()
    assert {"h100", "h200", "l40s", "a100-80g"} <= set(prices) <= set(GPUS)
    for price in prices.values():
        assert 0.1 < price.usd_per_hour < 50 and price.source.startswith("https://")
        assert datetime.date(2026, 1, 1) <= datetime.date.fromisoformat(price.date)
        assert price.date in str(price) and f"${price.usd_per_hour:g}" in str(price)


def test_a_table_of_ones_own(tmp_path):
    file = tmp_path / "p.csv"
    file.write_text('# ours\n\nusd_per_hour, GPU,product\n 2.5 ,A100,"8x, one node"\n1,h100,\n')
    prices = load_prices(file)
    assert {gpu: p.usd_per_hour for gpu, p in prices.items()} == {"a100-80g": 2.5, "h100": 1.0}
    assert prices["a100-80g"].product == "8x, one node"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("gpu,price\nh100,2\n", "no column usd_per_hour"),
        ("gpu,usd_per_hour,colour\n", "no column 'colour'"),
        ("gpu,usd_per_hour,gpu\n", "gpu is there twice"),
        ("gpu,usd_per_hour\nh100\n", "line 2: has 1 fields"),
        ("gpu,usd_per_hour\n\nh1000,2\n", "line 3: unknown GPU 'h1000'; nearest: h100"),
        ("gpu,usd_per_hour\nh100,two\n", "line 2: usd_per_hour 'two'"),
        ("gpu,usd_per_hour\nh100,-1\n", "line 2: usd_per_hour '-1'"),
        ("gpu,usd_per_hour\nh100,nan\n", "line 2: usd_per_hour 'nan'"),
        ("gpu,usd_per_hour\nh100,inf\n", "line 2: usd_per_hour 'inf'"),
        ("gpu,usd_per_hour\na100,1\na100-80g,2\n", "line 3: a100-80g is there twice"),
        ('gpu,usd_per_hour\n"h100,1\n', "is no CSV"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(text, says):
    with pytest.raises(SettingsError, match=says) as caught:
        read_prices(text, "--prices p.csv")
    assert "\n" not in str(caught.value) and str(caught.value).startswith("--prices p.csv")
