"""Combinations of settings: files in vLLM's conventions, grids, links, and what is refused."""

import json
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinserve.sim.setup.config import SettingsError, SimulationConfig
from twinserve.sim.sweep.combinations import (
    crossed,
    of_policies,
    read_grid,
    read_links,
    read_params,
    runs_of,
)
from twinserve.sim.sweep.repeats import Repeat


def build(settings: dict) -> SimulationConfig:
    return SimulationConfig(**settings)


def params(tmp_path, content, name="combos.json"):
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_params(file)


def settings(sources, links="") -> list[dict]:
    return [found.settings for found in crossed(sources, read_links(links))]


AXES = {
    "load": st.sampled_from([0.5, 0.7, 0.9, 1.1]),
    "pool": st.integers(0, 5),
    "policy": st.sampled_from(["vllm", "bros:chunk=2048,kv=paged", "echo"]),
    "block_tokens": st.sampled_from([16, 32]),
}


@given(
    st.lists(st.sampled_from(sorted(AXES)), unique=True, max_size=4).flatmap(
        lambda names: st.fixed_dictionaries(
            {name: st.lists(AXES[name], unique=True, min_size=1) for name in names}
        )
    ),
    st.integers(1, 3),
    st.integers(0, 9),
)
def test_runs_are_the_cross_product_seeds_fastest(axes, seeds, base):
    grids = read_grid(f"{name}={json.dumps(values)}" for name, values in axes.items())
    runs = runs_of(crossed(grids), Repeat(seeds), lambda s: build({"seed": base, **s}))
    expected = [
        ({**dict(zip(axes, values, strict=True))}, base + seed)
        for values in product(*axes.values())
        for seed in range(seeds)
    ]
    shown = [
        ({k: v[0] if k == "policy" else v for k, v in run.axes.items()}, run.config.seed)
        for run in runs
    ]
    assert shown == expected
    assert len({run.config for run in runs}) == len(runs)


@given(st.lists(st.dictionaries(st.sampled_from(["load", "pool"]), st.integers(1, 4)), min_size=1))
def test_a_file_gives_its_combinations_in_its_order(entries):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        listed = params(Path(folder), entries)
        named = params(Path(folder), {f"n{i}": entry for i, entry in enumerate(entries)})
    assert settings([listed]) == settings([named]) == entries
    assert [found.name for found in crossed([named])] == [f"n{i}" for i in range(len(entries))]


@pytest.mark.parametrize("window", [[0, 60], "0 60", "0,60"])
def test_settings_of_two_numbers_are_lists_or_texts(tmp_path, window):
    (run,) = runs_of(crossed([params(tmp_path, [{"window": window}])]), Repeat(), build)
    assert run.config.window == (0.0, 60.0)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("policy=vllm,bros", ["vllm", "bros"]),
        ("policy=vllm,bros:chunk=2048,kv=paged,echo", ["vllm", "bros:chunk=2048,kv=paged", "echo"]),
        ("policy=a/b.py:Mine:x=1,y=2,vllm", ["a/b.py:Mine:x=1,y=2", "vllm"]),
        ('policy=["bros:chunk=1,kv=paged"]', ["bros:chunk=1,kv=paged"]),
    ],
)
def test_policies_with_options_keep_their_commas(text, values):
    assert [s["policy"] for s in settings(read_grid([text]))] == [(v,) for v in values]


def test_traces_and_objectives_with_commas_go_into_a_list():
    grids = read_grid(['trace=["fixed:40,4","poisson"]', "slo=ttft=1,tpot=0.2"])
    assert [tuple(s.values()) for s in settings(grids)] == [
        ("fixed:40,4", "ttft=1,tpot=0.2"),
        ("poisson", "ttft=1,tpot=0.2"),
    ]


def test_a_setting_in_two_files_joins_them_where_it_is_linked(tmp_path):
    left = params(tmp_path, [{"load": 1, "pool": 1}, {"load": 2, "pool": 2}], "a.json")
    right = params(tmp_path, [{"load": 2, "replicas": 2}, {"load": 3}], "b.json")
    assert settings([left, right], "load=load") == [{"load": 2, "pool": 2, "replicas": 2}]
    with pytest.raises(SettingsError, match=r"b\.json: load is set by --params .*a\.json as well"):
        settings([left, right])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "this is not JSON"),
        ("[" * 100_000, "this is not JSON"),
        ("[]", "holds no combination"),
        ("3", "holds no combination"),
        ("[3]", "entry 1: is no object"),
        ('{"a": {"lod": 1}}', "entry 'a': no setting 'lod' that may vary (did you mean 'load'?)"),
        ('[{"load": 1}, {"load": 1, "load": 2}]', "'load' is given twice in one object"),
        ('[{"num-blocks": 1, "num_blocks": 2}]', "entry 1: num_blocks is given twice"),
        (
            '[{"_benchmark_name": "a"}, {"_benchmark_name": "a", "load": 1}]',
            "entry 2: another entry is called 'a'",
        ),
    ],
)
def test_a_file_that_is_wrong_is_one_line_with_its_entry(tmp_path, content, said):
    with pytest.raises(SettingsError) as error:
        params(tmp_path, content)
    assert "combos.json" in str(error.value) and said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([{"load": -1}], "entry 1: --load: Input should be greater than 0 (given: -1)"),
        ([{"load": 1}, {"load": 1, "rate": 2}], "entry 2: --load and --rate both"),
        ([{"load": 1}, {"load": "1.0"}], "entry 2: with seed 0 is the same run as --params"),
        ([{"seed": 1}, {"seed": 2}], "with seed 2 is the same run as"),
        ([{"policy": ["vllm", "bros"]}], "entry 1: a run has one policy"),
        ([{"window": [5, 5]}], "entry 1: --window 5.0 5.0 is empty"),
    ],
)
def test_combinations_that_cannot_be_are_refused_by_entry(tmp_path, entries, said):
    with pytest.raises(SettingsError) as error:
        runs_of(
            crossed([params(tmp_path, entries)]), Repeat(2 if "seed" in entries[0] else 1), build
        )
    assert "combos.json" in str(error.value) and said in str(error.value)


@pytest.mark.parametrize("text", ["load", "load=", "=1", "load=1,,2", "load=[]", "load=[1", "x=1"])
def test_a_grid_that_is_wrong_is_refused_by_its_text(text):
    with pytest.raises(SettingsError, match="--grid"):
        read_grid([text])


def test_no_combination_left_by_links_is_an_error():
    grids = read_grid(["load=1", "pool=2"])
    with pytest.raises(SettingsError, match="--link-vars: no combination"):
        runs_of(crossed(grids, read_links("load=pool")), Repeat(), build)


def test_policies_of_flags_are_an_axis():
    assert settings([of_policies(["vllm", "bros"])]) == [
        {"policy": ("vllm",)},
        {"policy": ("bros",)},
    ]
