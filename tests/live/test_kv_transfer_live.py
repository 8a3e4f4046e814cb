"""Requests of the real CPU engine lose their blocks to others and come back from the host, and
answer as if nothing had happened."""

import contextlib
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from tests.identity.protocol import EngineSettings
from tests.live.engine import LOGPROB_TOLERANCE, LiveEngine, Output, same_answer
from tests.parameters import mostly_nightly
from twinserve.backends.live.engine import tiny_model
from twinserve.policies.plan import DEVICE, HOST

pytestmark = [pytest.mark.slow, pytest.mark.live]

SETTINGS = {
    "num_blocks": 26, "block_tokens": 32, "max_num_seqs": 8, "max_num_batched_tokens": 96,
    "max_model_len": 448, "reserve_full_isl": False,
}  # fmt: skip
TINY = tiny_model.MODELS["tiny"]
SLOT_BYTES = TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 4


class SwapEngine(LiveEngine):
    """A live engine with the swapping scheduler, the connector and room for `host_tokens`."""

    def __init__(
        self, settings, model, host_tokens: int, role: str = "kv_producer", **extra
    ) -> None:
        super().__init__(settings, model, **swap_arguments(host_tokens, role) | extra)

    @property
    def connector(self):
        return self.scheduler.connector

    @property
    def copier(self):
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._copier

    def serve(self, requests: dict[str, tuple[list[int], int]]) -> dict[str, Output]:
        """All requests submitted at once, stepped to the end."""
        return serve(self, requests)


def swap_arguments(host_tokens: int, role: str) -> dict:
    from vllm.config import KVTransferConfig

    return {
        "scheduler_cls": f"{__package__}.swap_scheduler.SwapScheduler",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="TwinserveConnector",
            kv_connector_module_path="twinserve.backends.live.transfer.connector",
            kv_role=role,
            kv_connector_extra_config={"host_tokens": host_tokens},
        ),
    }


def serve(engine: LiveEngine, requests: dict[str, tuple[list[int], int]]) -> dict[str, Output]:
    for name, (prompt, output_tokens) in requests.items():
        engine.submit(name, prompt, output_tokens)
    for _ in range(3000):
        if not engine.unfinished:
            break
        engine.step()
    assert not engine.unfinished, "the engine does not come to an end"
    return {name: engine.outputs.pop(name) for name in requests}


def make_requests(count: int = 14, seed: int = 5) -> dict[str, tuple[list[int], int]]:
    """name -> (prompt, output tokens); half of the prompts begin alike."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, tiny_model.VOCAB, 70).tolist()
    made = {}
    for number in range(count):
        own = rng.integers(0, tiny_model.VOCAB, int(rng.integers(10, 140))).tolist()
        made[f"r{number:02d}"] = (shared + own if number % 2 else own, int(rng.integers(30, 70)))
    return made


@pytest.fixture(scope="module")
def undisturbed(model) -> dict[str, Output]:
    """The answers of an engine without connector that has blocks for all."""
    with contextlib.closing(
        LiveEngine(EngineSettings(**SETTINGS | {"num_blocks": 120}), model)
    ) as engine:
        answers = serve(engine, make_requests())
        assert not any(step.preempted for step in engine.scheduler.log)
        return answers


@pytest.fixture(
    scope="module",
    params=mostly_nightly([False, True], True),
    ids=["no prefix cache", "prefix cache"],
)
def engine(request, model, undisturbed) -> Iterator[SwapEngine]:
    # after `undisturbed`: a process holds one engine at a time
    settings = EngineSettings(**SETTINGS, enable_prefix_caching=request.param)
    with contextlib.closing(SwapEngine(settings, model, host_tokens=1500)) as engine:
        yield engine


def differing(undisturbed: dict[str, Output], answers: dict[str, Output]) -> dict[str, str]:
    verdicts = {name: same_answer(undisturbed[name], answers[name]) for name in answers}
    return {name: verdict for name, verdict in verdicts.items() if verdict != "same"}


def all_rows_free(engine: SwapEngine) -> None:
    engine.connector.host.check()
    engine.connector.host.take_orders()
    assert engine.connector.free_tokens == engine.connector.host.host_rows.rows


@pytest.mark.parametrize("role", mostly_nightly(["kv_producer", "kv_both"], "kv_both"))
def test_requests_that_never_swap_are_scheduled_as_without_connector(model, role):
    settings = EngineSettings(**SETTINGS, enable_prefix_caching=True)
    logs, answers = [], []
    for build in (
        lambda: LiveEngine(settings, model),
        lambda: SwapEngine(settings, model, host_tokens=64, role=role),
    ):
        with contextlib.closing(build()) as engine:
            answers.append(serve(engine, make_requests()))
            logs.append(engine.scheduler.log)
    assert any(step.preempted for step in logs[0])
    assert logs[0] == logs[1]
    for name in answers[0]:
        assert same_answer(answers[0][name], answers[1][name]) == "same"
        assert answers[0][name].logprob(0) == pytest.approx(
            answers[1][name].logprob(0), abs=LOGPROB_TOLERANCE
        )


def test_a_full_host_refuses_and_victims_are_recomputed(model, undisturbed):
    from twinserve.backends.live.transfer.host import HostFull

    with contextlib.closing(
        SwapEngine(EngineSettings(**SETTINGS), model, host_tokens=150)
    ) as engine:
        engine.scheduler.set_rule(period=5, away=4)
        assert differing(undisturbed, engine.serve(make_requests())) == {}
        counts = engine.scheduler.counts
        assert counts["refused"] > 0 and counts["back"] > 0
        with pytest.raises(HostFull, match="room for 150 of 150 tokens, 151 shall be copied out"):
            engine.connector.swap_out("big", [1, 2, 3, 4, 5], 151)
        all_rows_free(engine)


@pytest.mark.parametrize("forget", [0, 4], ids=["all come back", "some are recomputed"])
def test_swapped_requests_answer_as_undisturbed_ones(engine, undisturbed, forget, capsys):
    engine.scheduler.set_rule(period=2, away=5, forget=forget)
    answers = engine.serve(make_requests())
    scheduler = engine.scheduler
    with capsys.disabled():
        print(f"\nswapping: {scheduler.counts}, tokens {scheduler.tokens}, steps {scheduler.steps}")
    assert differing(undisturbed, answers) == {}
    swaps = list(scheduler.swaps.values())
    assert len(swaps) == len(answers) and np.median(swaps) >= 3
    assert scheduler.counts["reused"] >= 20  # others took the blocks while it was away
    assert scheduler.counts["unfilled"] >= 1  # the order lapsed for want of room, and was renewed
    assert scheduler.counts["back"] >= 30
    assert (scheduler.counts["forgotten"] > 0) == bool(forget)
    engine.forget_prefixes()
    all_rows_free(engine)


def test_copies_after_the_forward_pass_would_show(engine, undisturbed):
    """So equal answers do mean that blocks are read before others overwrite them, and filled before
    they are read."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()
    with (
        mock.patch.object(worker, "handle_preemptions", lambda meta: None),
        mock.patch.object(
            worker,
            "wait_for_save",
            lambda: type(worker).handle_preemptions(worker, worker._get_connector_metadata()),
        ),
    ):
        engine.scheduler.set_rule(period=2, away=5)
        assert differing(undisturbed, engine.serve(make_requests()))
    engine.forget_prefixes()
    all_rows_free(engine)


def test_transfers_are_reported(engine):
    engine.scheduler.set_rule(period=2, away=5)
    engine.serve(make_requests())
    transfers, tokens = engine.scheduler.transfers, engine.scheduler.tokens
    moved = {
        target: sum(t.tokens for t in transfers if t.target == target) for target in (HOST, DEVICE)
    }
    assert moved[HOST] == tokens["out"]
    cached = engine.limits.enable_prefix_caching
    assert moved[DEVICE] < tokens["back"] if cached else moved[DEVICE] == tokens["back"]
    for transfer in transfers:
        assert transfer.nbytes == transfer.tokens * SLOT_BYTES
        assert 0 < transfer.held_s <= transfer.seconds
    assert [t.order for t in transfers] == sorted(t.order for t in transfers)
    engine.forget_prefixes()


def test_an_aborted_request_leaves_the_host(engine):
    scheduler = engine.scheduler
    scheduler.set_rule(period=0, away=1000)
    engine.submit("gone", make_requests()["r01"][0], 40)
    for _ in range(5):
        engine.step()
    scheduler.before_step.append(lambda s: s.send_out(s.running[0]))
    engine.step()
    assert engine.connector.host.held("gone") > 0
    engine.abort("gone")
    assert engine.connector.host.held("gone") == 0
    engine.forget_prefixes()
    all_rows_free(engine)


@pytest.mark.parametrize("slots", [32, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_slot_of_the_cpu_kernels_cache_is_one_token(vllm, dtype, slots):
    """Whatever order this processor's kernels keep: what they write for a token is what is gathered
    for its slot."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    from twinserve.backends.live.transfer.cpu import slot_elements
    from twinserve.backends.live.transfer.layout import Packed

    dtype, heads, dim, blocks = getattr(torch, dtype), 3, 64, 4
    isa = _get_attn_isa(dtype, slots, dim)
    cache = torch.zeros((blocks, heads, slots, 2 * dim), dtype=dtype)
    packed = Packed(cache, slot_elements(cache, isa))
    chosen = torch.randperm(blocks * slots, generator=torch.Generator().manual_seed(2))[:50]
    key, value = (torch.randn((len(chosen), heads, dim)).to(dtype) for _ in range(2))
    halves = cache.view(blocks, heads, 2 * slots, dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *halves, chosen, isa)
    found = torch.zeros((len(chosen), packed.width), dtype=dtype)
    packed.gather(chosen, found)
    found = found.view(len(chosen), heads, 2, dim)
    assert torch.equal(found[:, :, 0], key) and torch.equal(found[:, :, 1], value)
    with pytest.raises(ValueError, match="use an unquantised one"):
        slot_elements(cache.to(torch.float8_e4m3fn), isa)


def test_settings_that_cannot_work_are_refused(vllm):
    from twinserve.backends.live.transfer.connector import _host_tokens

    for settings in ({}, {"host_blocks": 4, "host_tokens": 64}):
        with pytest.raises(ValueError, match="set host_blocks or host_tokens"):
            _host_tokens(settings, 16)
    with pytest.raises(ValueError, match="host_blocks is 0; it must be 1 or more"):
        _host_tokens({"host_blocks": 0}, 16)
    assert _host_tokens({"host_blocks": 4}, 16) == 64
