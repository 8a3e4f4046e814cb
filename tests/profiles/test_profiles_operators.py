"""Operator tables: interpolation, the terms of a step worked by hand, what a table is built from,
and fits to steps."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.examples import examples
from tests.parameters import each
from tests.profiles.recorded_steps import slower_host, write_steps
from tests.truth import truth
from twinserve.profiles.catalog import find_model
from twinserve.profiles.composition import StepComposition, decode_work, prefill_work
from twinserve.profiles.evidence import marks
from twinserve.profiles.forms.step_fits import fit_forms
from twinserve.profiles.gpus import SYSTEMS
from twinserve.profiles.measured.step_files import read_steps
from twinserve.profiles.names import list_profiles
from twinserve.profiles.operators.aic import TILE_TOKENS
from twinserve.profiles.operators.interpolation import Box, Curve, Plane, never_falling
from twinserve.profiles.operators.layers import form_from_layers
from twinserve.profiles.operators.model import (
    TAIL_SHARE,
    OperatorForm,
    OperatorModel,
    capture_sizes,
    default_capture,
)
from twinserve.profiles.operators.shipped import (
    AIC,
    LAYERS,
    layer_profile,
    operator_profile,
    shipped_operators,
    tensor_parallel_pair,
)
from twinserve.profiles.profile import derive_profile, load_profile
from twinserve.profiles.specs import ProfileError

OPERATORS = [n for n in list_profiles() if load_profile(n).step_model.form == "operators"]


# Interpolation


def test_a_curve_is_linear_inside_flat_below_and_goes_on_above():
    curve = Curve([1, 3, 5], [10, 20, 40])
    assert [curve.at(x) for x in (0, 1, 2, 3, 4, 5, 6)] == [10, 10, 15, 20, 30, 40, 50]


@examples(100)
@given(st.lists(st.floats(0, 1e5), min_size=1, max_size=20))
def test_many_values_of_a_curve_are_the_single_ones_bit_for_bit(values):
    curve = Curve([1.0, 3.5, 100.0, 4096.0], [1e-3, 1.7e-3, 1.9e-3, 0.3])
    assert curve.of(np.array(values)).tobytes() == np.array([curve.at(v) for v in values]).tobytes()


def test_planes_and_boxes_by_hand():
    plane = Plane([0, 2], [0, 10], [[0, 10], [2, 12]])  # x + y
    assert plane.at(1, 5) == 6 and plane.at(2, 10) == 12 and plane.at(4, 20) == 24
    assert plane.row(1) == [1, 11]
    box = Box([0, 1], [0, 2], [0, 10], [[[0, 10], [2, 12]], [[5, 15], [7, 17]]])  # 5 x + y + z
    assert box.at(0.5, 1, 5) == 8.5
    assert Plane([7], [0, 1], [[3, 4]]).at(99, 1) == 4


@examples(60)
@given(st.lists(st.lists(st.floats(0, 100), min_size=4, max_size=4), min_size=2, max_size=5))
def test_never_falling_does_not_fall_along_any_axis(rows):
    found = never_falling(np.array(rows))
    assert (np.diff(found, axis=0) >= -1e-9).all() and (np.diff(found, axis=1) >= -1e-9).all()


def test_never_falling_keeps_what_does_not_fall_and_averages_what_does():
    assert never_falling(np.array([1.0, 2, 5])).tolist() == [1, 2, 5]
    assert never_falling(np.array([1.0, 4, 2, 5])).tolist() == [1, 3, 3, 5]


# A step, by hand

FORM = OperatorForm(
    tokens=(1, 101), token_s=(1.0, 2.0), comm_s=(0.1, 0.2), rows=(1, 11), row_s=(0.5, 0.6),
    requests=(1, 9), context=(0, 100), decode_s=((0.0, 0.1), (0.0, 0.9)), chunk=(10, 20),
    prefix=(0, 100), chunk_s=((0.01, 0.02), (0.03, 0.05)), beside_chunk=(10, 20),
    beside_requests=(1, 9), beside_context=(0, 100),
    beside_s=(((0.0, 0.2), (0.0, 1.8)), ((0.0, 0.4), (0.0, 3.6))), skew_requests=(2, 4),
    skew_s=(0.0, 0.001), skew_beside_s=(0.002, 0.002), capture_tokens=0, host_s=0.03,
    host_request_s=0.001,
)  # fmt: skip


def test_a_step_of_decodes_by_hand():
    # mean 50 with the new token, longest 90
    terms = OperatorModel(FORM).terms(StepComposition(5, 245, 89))
    expected = {
        "tokens": 1.04,
        "comm": 0.104,
        "head": 0.54,
        "host": 0.035,
        "decode": 0.25,  # half way from 1 to 9 requests: 0.5 at a context of 100
        "beside": 0,
        "chunks": 0,
        "skew": TAIL_SHARE * 0.001 * 40,  # past the last count, the last value
    }
    assert terms == pytest.approx(expected)


def test_a_mixed_step_by_hand():
    work = StepComposition(5, 245, 49, np.array([10, 20]), np.array([0, 50]))
    terms = OperatorModel(FORM).terms(work)
    # the second chunk: 0.04; one launch (0.01) for both
    assert terms["chunks"] == pytest.approx(0.01 + 0.04 - 0.01)
    assert terms["beside"] == pytest.approx(1.0) and terms["decode"] == 0
    assert terms["tokens"] == pytest.approx(1.34)
    apart = OperatorModel(
        replace(FORM, beside_s=(), beside_chunk=(), beside_requests=(), beside_context=())
    )
    assert apart.terms(work)["decode"] == pytest.approx(0.25)
    assert apart.terms(work)["chunks"] == pytest.approx(0.01 + 0.04 - 0.02)


def test_a_chunk_longer_than_the_table_is_that_of_its_pieces():
    model = OperatorModel(FORM)
    whole = model.terms(prefill_work(50))["chunks"]
    pieces = [model.terms(prefill_work(n, r))["chunks"] for n, r in ((20, 0), (20, 20), (10, 40))]
    assert whole == pytest.approx(sum(pieces) - 2 * 0.01)


def test_a_step_without_tokens_costs_the_host():
    model = OperatorModel(FORM)
    assert model.step_seconds(StepComposition()) == 0.03
    assert model.decode_run_seconds(0, 0, 0, 3).tolist() == [0.03] * 3


def test_cuda_graphs_pad_to_the_sizes_that_vllm_captures():
    assert capture_sizes(16) == [1, 2, 4, 8, 16]
    assert len(capture_sizes(512)) == 51 and capture_sizes(512)[-3:] == [480, 496, 512]
    assert (default_capture(128), default_capture(1024)) == (256, 512)
    model = OperatorModel(replace(FORM, capture_tokens=40))
    assert [model.padded(n) for n in (1, 3, 9, 33, 40, 41)] == [1, 4, 16, 40, 40, 41]
    assert model.terms(decode_work(9, 10))["tokens"] == model.terms(decode_work(16, 10))["tokens"]
    assert load_profile("llama-3.1-8b@rtxpro6000").model(128).padded(300) == 300
    assert load_profile("llama-3.1-8b@rtxpro6000").model(256).padded(300) == 304


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": (5, 5)}, "rise strictly"),
        ({"row_s": (0.1,)}, "row_s"),
        ({"decode_s": ((0.0, 0.1), (0.0,))}, "decode_s must have 2 x 2"),
        ({"beside_s": (((0.0,),),)}, "beside_s must have"),
        ({"chunk_s": ((0.01, -0.02), (0.03, 0.05))}, "negative"),
    ],
)
def test_a_misshapen_table_is_refused(change, words):
    fields = {name: getattr(FORM, name) for name in FORM.__dataclass_fields__}
    with pytest.raises(ValidationError, match=words):
        OperatorForm(**{**fields, **change})


@each("name", OPERATORS)
def test_more_work_takes_no_less_time(name):
    model = load_profile(name).model()
    contexts = [model.step_seconds(decode_work(32, c)) for c in (64, 300, 1000, 5000, 20_000)]
    chunks = [model.step_seconds(prefill_work(n)) for n in (16, 100, 512, 700, 2048, 5000, 9000)]
    prefixes = [model.step_seconds(prefill_work(512, r)) for r in (0, 100, 3000, 16_000, 40_000)]
    skewed = [model.step_seconds(StepComposition(32, 32_000, m)) for m in (1000, 2000, 8000)]
    for times in (contexts, chunks, prefixes, skewed):
        assert times == sorted(times)
    links = model.terms(decode_work(32, 64))["comm"]  # the same at every context
    assert contexts[-1] - links > 1.5 * (contexts[0] - links) and prefixes[-1] > prefixes[0]


def test_a_late_chunk_pays_for_the_prompt_before_it():
    """A chunk's keys and values have to be read at least; on H100 that is what decodes of one
    request cost."""
    model = load_profile("llama-3.1-8b@h100/operators").model()
    late = model.terms(prefill_work(16, 65_536))["chunks"]
    llm = find_model("llama-3.1-8b")
    assert late > llm.kv_bytes_per_token * 65_536 / 3.35e12
    assert (
        model.terms(prefill_work(2048, 65_536))["chunks"]
        > 10 * model.terms(prefill_work(2048))["chunks"]
    )


def test_decode_steps_are_near_the_public_marks():
    """Single steps or TPOT of vLLM; test_profiles_evidence.py computes the errors again."""
    errors = np.abs([mark.errors["operators"] for mark in marks() if mark.source == "marks"])
    assert len(errors) == 17 and errors.mean() < 0.035 and errors.max() < 0.1


# From per-layer tables


def _layer_tables(folder: Path, stem: str, tile: int = 1) -> None:
    """Times that follow simple laws, so that what is made of them can be foretold. tile: tokens
    that take one time."""

    def write(name: str, rows: list[dict]) -> None:
        with gzip.open(folder / f"{stem}__{name}.csv.gz", "wt") as file:
            pd.DataFrame(rows).to_csv(file, index=False)

    tokens = [1, 2, 4, *range(8, 520, 8), 1024, 2032, 2048]
    layers = {"embedding": 1, "final_layernorm": 1, "layernorm": 2, "qkv_proj": 10, "down_proj": 30}
    tiles = {t: tile * -(-t // tile) for t in tokens}
    write(
        "dense",
        [
            {"layer": k, "tokens": t, "time_us": v + 0.01 * tiles[t]}
            for k, v in layers.items()
            for t in tokens
        ],
    )
    rows = [1, 16, 256]
    once = {"lm_head": 100, "sampler": 20}
    write(
        "per_sequence",
        [{"layer": k, "sequences": r, "time_us": v} for k, v in once.items() for r in rows],
    )
    attention = []
    for c in (0, 16, 32, 64, 128, 256, 512, 1024, 2048):
        for r in (0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384) if c else (0,):
            for n in (0, 1, 8, 64):
                for k in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384) if n else (0,):
                    if c or n:
                        time = c * (r + c) * 1e-4 + n * k * (2e-3 if c else 1e-3)
                        attention.append([c, r, n, k, time])
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    write("attention", [dict(zip(columns, row, strict=True)) for row in attention])
    skew = [
        {
            "regime": "", "n": n, "nb": 1, "pc": pc, "kp": 0, "kv_big": 4096, "kv_mean": 1024,
            "t_mean_us": 0.0, "t_skew_us": 3 * 0.02 * 3072, "alpha": 0.0,
        }
        for n in (4, 32, 64)
        for pc in (0, 128)
    ]  # fmt: skip
    write("skew", skew)


def test_a_form_from_per_layer_tables(tmp_path):
    _layer_tables(tmp_path, "GPU__M__tp1")
    llm = find_model("llama-3.1-8b")
    form = form_from_layers(tmp_path, "GPU__M__tp1", llm, 1, sms=100, capture_tokens=0)
    model = OperatorModel(form)
    us = {
        name: seconds * 1e6
        for name, seconds in model.terms(StepComposition(64, 64 * 1023, 1023)).items()
    }
    # embedding and last norm once, two norms a layer
    assert us["tokens"] == pytest.approx(2 + 2 * 0.64 + 32 * (2 * 2 + 10 + 30 + 4 * 0.64), rel=1e-4)
    assert us["head"] == pytest.approx(120, rel=1e-4)
    assert us["decode"] == pytest.approx(32 * 64 * 1024e-3, rel=1e-3)
    mixed = model.terms(StepComposition(64, 64 * 1023, 1023, np.array([512]), np.array([0])))
    assert mixed["chunks"] * 1e6 == pytest.approx(32 * 512 * 512e-4, rel=1e-3)
    assert mixed["beside"] * 1e6 == pytest.approx(2 * us["decode"], rel=1e-3)
    between = model.terms(prefill_work(1536))["chunks"] * 1e6  # the square is met, not its chord
    assert between == pytest.approx(32 * 1536**2 * 1e-4, rel=1e-3)
    # 8 KV heads on 100 SMs: contexts are split below 20 requests, but these tables have the same
    # tail everywhere
    per_token = model.terms(StepComposition(32, 32 * 999, 1999))["skew"] / 1000 * 1e6
    assert per_token == pytest.approx(32 * 0.02 * TAIL_SHARE * (1 - 1 / 32) * 7 / 6, rel=1e-3)
    assert 20.0 in form.skew_requests


def test_past_the_tables_tokens_cost_what_they_do_on_the_mean_not_on_the_last_tile(tmp_path):
    _layer_tables(tmp_path, "GPU__M__tp1", tile=128)  # 2,032 and 2,048 tokens take the same time
    form = form_from_layers(
        tmp_path, "GPU__M__tp1", find_model("llama-3.1-8b"), 1, sms=100, capture_tokens=0
    )
    model = OperatorModel(form)
    for tokens in (2048, 4096, 16384, 32768):
        us = 2 + 2 * 0.01 * tokens + 32 * (2 * 2 + 10 + 30 + 4 * 0.01 * tokens)
        assert model.terms(prefill_work(tokens))["tokens"] * 1e6 == pytest.approx(us, rel=1e-4)


def test_all_reduces_go_on_past_the_largest_measured_message():
    comm, _ = tensor_parallel_pair(find_model("qwen3-32b"))
    a_token, largest = 5120 * 2, 2**28
    seconds = comm(np.array([largest / a_token / 2, largest / a_token, largest / a_token * 1.5]))
    assert seconds[1] == pytest.approx(129 * 17549.9e-6)
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])


def test_a_missing_table_is_one_clear_line(tmp_path):
    with pytest.raises(ProfileError, match="per_sequence.csv.gz: cannot be read"):
        form_from_layers(tmp_path, "GPU__M__tp1", find_model("opt-13b"), 1, sms=100)


@pytest.mark.parametrize(
    "key", [pytest.param(key, marks=pytest.mark.slow if i else ()) for i, key in enumerate(LAYERS)]
)
def test_shipped_files_are_what_the_layer_tables_give(key):
    if key[1] in SYSTEMS:
        pytest.importorskip("aiconfigurator_core")
    computed = layer_profile(key, truth("steps/rtx_layer_profile"))
    assert load_profile(computed.name) == computed


@pytest.mark.slow
def test_shipped_files_are_what_aiconfigurator_gives():
    pytest.importorskip("aiconfigurator_core")
    for key in AIC[:4]:
        computed = shipped_operators(*key)
        assert load_profile(computed.name) == computed


@pytest.mark.parametrize("name", ["llama-3.1-8b@rtxpro6000", "llama-3.1-8b@h100/operators"])
def test_a_chunk_of_one_token_takes_as_long_as_a_decode(name):
    model = load_profile(name).model()
    chunks = StepComposition(40, 40 * 1000, 1500, np.array([1, 1]), np.array([2000, 500]))
    decodes = StepComposition(42, 40 * 1000 + 2500, 2000)
    assert model.step_seconds(chunks) == pytest.approx(model.step_seconds(decodes), rel=1e-12)
    beside = StepComposition(40, 40 * 1000, 1500, np.array([1, 300]), np.array([2000, 0]))
    prompt = StepComposition(41, 40 * 1000 + 2000, 2000, np.array([300]), np.array([0]))
    assert model.step_seconds(beside) == pytest.approx(model.step_seconds(prompt), rel=1e-12)


def test_one_token_more_than_whole_tiles_costs_a_tile():
    """Where the tables have both sides (L40S), and on the A100 as many tokens' time as the constant
    says."""
    for name in ("llama-3.1-8b@l40s/operators", "llama-3.1-8b@a100-80g"):
        model = load_profile(name).model()
        times = {t: model.token_seconds(t) for t in (512, 513, 768, 769, 1024, 1025, 2048)}
        more = np.mean([times[t + 1] - times[t] for t in (512, 768, 1024)]) / times[2048] * 2048
        assert 60 < more < 180, name
    # the noise that falls is averaged, slopes differ
    assert more == pytest.approx(TILE_TOKENS["a100-80g"], rel=0.15)


def test_a_gpu_without_tables_is_one_clear_line():
    with pytest.raises(ProfileError, match="no operator tables for GPU 'rtx4090'"):
        operator_profile("llama-3.1-8b", "rtx4090")


@pytest.mark.parametrize(
    "name", ["mixtral-8x7b@h100:tp2/operators", "qwen3-30b-a3b@h200/operators"]
)
def test_the_kernels_of_a_mixture_are_near_its_tables(name):
    """On Hopper, which has tables of both. One request takes longer than the tables say: these lack
    what a layer of experts takes besides."""
    tables = load_profile(name)
    ours = derive_profile(tables.llm, tables.gpu, tables.tp).model()
    alone = decode_work(1, 700)
    assert 1.1 < ours.step_seconds(alone) / tables.model().step_seconds(alone) < 1.3
    for requests in (8, 32, 64, 128, 256):
        work = decode_work(requests, 700)
        assert ours.step_seconds(work) == pytest.approx(tables.model().step_seconds(work), rel=0.12)
    for tokens in (256, 512, 2048, 8192):
        work = prefill_work(tokens)
        assert ours.step_seconds(work) == pytest.approx(tables.model().step_seconds(work), rel=0.28)


@pytest.mark.slow
def test_a_model_whose_sizes_the_tables_lack_is_one_clear_line():
    """Phi-4 has ten KV heads, of which no attention was timed."""
    pytest.importorskip("aiconfigurator_core")
    with pytest.raises(ProfileError, match="phi-4 on h100 tp=1: aiconfigurator has no tables"):
        operator_profile("phi-4", "h100")


@pytest.mark.parametrize("name", ["opt-13b", "cfg"])
def test_tables_are_not_asked_about_what_they_would_take_for_another_model(name):
    pytest.importorskip("aiconfigurator_core")
    model = (
        name if name == "opt-13b" else replace(find_model("qwen3-8b"), window=9, window_layers=2)
    )
    with pytest.raises(ProfileError, match="the operator tables are not used for that"):
        operator_profile(model, "h100")


# Fits to recorded steps


def _recorded(tmp_path: Path, model) -> Path:
    names = ["m" if i % 3 else "other" for i in range(60)]
    return write_steps(tmp_path / "steps.csv", slower_host(model), names)


def test_host_terms_are_found_again(tmp_path):
    model = load_profile("llama-3.1-8b@l40s/operators").model()
    steps, seconds = read_steps(_recorded(tmp_path, model))
    fits = {fit.form: fit for fit in fit_forms(steps, seconds, model)}
    ours = fits["profile + host"]
    assert ours.coefficients == pytest.approx((2e-3, 1e-5), rel=1e-6) and ours.cross_error < 1e-9
    assert fits["profile as it is"].error > 0.03
    # the published forms describe the same steps, and less well where they have not seen them
    for form in ("bros", "echo", "layerkv"):
        assert ours.cross_error < fits[form].error < 0.5
        assert fits[form].cross_error > 0
    assert fits["bros"].cross_error < fits["layerkv"].cross_error


def test_only_the_rows_of_a_model(tmp_path):
    model = load_profile("llama-3.1-8b@l40s/operators").model()
    path = _recorded(tmp_path, model)
    assert len(read_steps(path, "OTHER")[0]) == 20 and len(read_steps(path)[0]) == 60


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a,b\n1,2\n", "no column"),
        (
            "seconds,decode_requests,decode_context\n-1,1,1\n",
            "row 1: seconds is '-1', no number from 0 up",
        ),
        ("seconds,decode_requests,decode_context\n0.1,-3,1\n", "row 1: decode_requests is '-3'"),
        ("seconds,decode_requests,decode_context\n", "no usable steps"),
    ],
)
def test_a_bad_file_of_steps_is_one_clear_line(tmp_path, content, words):
    path = tmp_path / "steps.csv"
    path.write_text(content)
    with pytest.raises(ProfileError, match=words) as raised:
        read_steps(path)
    assert "\n" not in str(raised.value)


def test_too_few_steps_are_refused():
    with pytest.raises(ProfileError, match="ten or more"):
        fit_forms([decode_work(1, 10)] * 3, np.ones(3))
