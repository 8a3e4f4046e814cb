"""The prefill side with leases: vLLM's scheduler, and of its NIXL connector the scheduler side and
those parts of the worker that keep leases, beside policy `vllm` with `sim/fleet/connector.py`.

Nothing is sent: heartbeats and notices of decode engines are handed on as the messages that they
are. Two decode engines ask for KV some steps after it was handed over, and have fetched it some
steps later; a client may leave before, and an engine may die with all that it waits for. When that
happens is a function of the request's number and of the step. A step is a second.
"""

import queue
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np

from tests.identity.protocol import EngineSettings, Observed
from tests.identity.remote import HandingOver, RemoteReal
from twinserve.sim.fleet.connector import Freed, Gone, Heartbeats, Lease, Stage

LEASE_S = 12  # heartbeats every 2, which renew it by 8
ENGINES = 2
DIES = 0.02  # of the steps, a decode engine; another takes its place
NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


class Asking:
    """What decode engines do with what was handed over, step by step."""

    def __init__(self) -> None:
        self._plans: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._engine: dict[str, int] = {}  # of those that ask now

    def handed_over(self, name: str, step: int) -> None:
        rng = np.random.default_rng([31, int(name.removeprefix("r"))])
        if rng.random() < 0.15:
            return  # nobody ever asks
        asks = step + 1 + int(rng.integers(0, 2 * LEASE_S) if rng.random() < 0.5 else 0)
        self._plans[asks].append(("asks", name))
        over = "leaves" if rng.random() < 0.1 else "fetched"
        self._plans[asks + int(rng.integers(1, 2 * LEASE_S))].append((over, name))

    def at(self, step: int) -> Iterator[tuple[str, str, int]]:
        """(what, whose, which engine)."""
        rng = np.random.default_rng([32, step])
        if rng.random() < DIES:
            dead = int(rng.integers(ENGINES))
            self._engine = {name: e for name, e in self._engine.items() if e != dead}
            yield "dies", "", dead
        for what, name in self._plans.pop(step, ()):
            if what == "asks":
                self._engine[name] = int(name.removeprefix("r")) % ENGINES
                yield what, name, self._engine[name]
            elif name in self._engine:
                yield what, name, self._engine.pop(name)


@contextmanager
def clock_of(now):
    """vLLM's NIXL connector goes by `now()`."""
    import importlib

    import pytest

    modules = ("base_scheduler", "pull_scheduler", "base_worker", "pull_worker")
    with pytest.MonkeyPatch.context() as patch:
        for name in modules:
            module = importlib.import_module(f"{NIXL}.{name}")
            patch.setattr(module, "time", SimpleNamespace(perf_counter=now))
        yield


def lease_worker():
    """vLLM's worker, with what it keeps leases by, and nothing to send or receive."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import (
        NixlPullConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

    worker = object.__new__(NixlPullConnectorWorker)
    vars(worker).update(
        _lease_extension=LEASE_S * 2 // 3,
        _reqs_to_send={},
        _reqs_to_process=set(),
        _ready_requests=queue.Queue(),
        _failed_recv_reqs=queue.Queue(),
        _recving_transfers={},
        _recving_metadata={},
        _recv_failures=set(),
        _replicated_pcp_done_sending=set(),
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        xfer_stats=NixlKVConnectorStats(),
        transfer_topo=object(),
        nixl_wrapper=SimpleNamespace(get_new_notifs=dict),
        pcp_rank=0,
        pcp_dcp_sharded=False,
        tp_rank=0,
        use_host_buffer=False,
        _has_mamba=False,
        _cleanup_remote_engines=lambda: None,
    )
    return worker


class LeasingReal(RemoteReal):
    def __init__(self, settings: EngineSettings) -> None:
        self.now = 0
        self.asking, self.worker = Asking(), lease_worker()
        self._asked: dict[str, int] = {}
        super().__init__(settings, "kv_producer", connector="LeasingConnector", lease_s=LEASE_S)
        self._engines = [self._decode_engine(i) for i in range(ENGINES)]

    def _decode_engine(self, index: int):
        """The scheduler's side of its connector, which says when heartbeats are sent."""
        nixl = self.scheduler.connector.nixl
        return type(nixl)(nixl.vllm_config, f"decode-{index}", nixl.kv_cache_config)

    def step(self) -> Observed:
        with clock_of(lambda: float(self.now)):
            seen = super().step()
        self.now += 1
        return seen

    def _ended(self, plan) -> list[str]:
        seen, leases = self.seen, self.worker._reqs_to_send
        for name in self.scheduler.connector.kept:
            self.asking.handed_over(name, self.now)
            seen["kept"] += 1
        self.scheduler.connector.kept.clear()
        self.worker.start_load_kv(plan.kv_connector_metadata)
        before, notices = dict(leases), self._notices()
        messages = [f"{name}:1" for name in notices] + self._heartbeats()
        self.worker.nixl_wrapper.get_new_notifs = lambda: {"": [m.encode() for m in messages]}
        ended = self.worker.get_transfer_results().finished_sending
        over = ended - set(notices)
        seen["fetched, or not wanted"] += len(ended) - len(over)
        seen["lease over"] += len(over)
        seen["lease over while asked for"] += len(over & self._asked.keys())
        seen["asked for too late"] += len(set(notices) - ended)
        seen["lease renewed"] += sum(leases.get(n, 0) > expires for n, expires in before.items())
        return sorted(ended)

    def _notices(self) -> list[str]:
        """Who need not be kept any more, of all that happens at the decode engines."""
        from vllm.v1.outputs import KVConnectorOutput

        notices = []
        for what, name, engine in self.asking.at(self.now):
            if what == "dies":
                self.seen["decode engine dies"] += 1
                self._engines[engine] = self._decode_engine(engine)
                self._asked = {n: e for n, e in self._asked.items() if e != engine}
            elif what == "asks":
                self._asked[name] = engine
                self._engines[engine].on_new_request(_asking_for(name))
            else:
                del self._asked[name]
                notices.append(name)
                if what == "leaves":
                    self._engines[engine].request_finished(_asking_for(name), ())
                else:
                    done = KVConnectorOutput(finished_recving={name})
                    self._engines[engine].update_connector_output(done)
        return notices

    def _heartbeats(self) -> list[str]:
        metas = [engine.build_connector_meta(None) for engine in self._engines]
        infos = [info for meta in metas for info in meta.heartbeat_by_engine.values()]
        self.seen["heartbeats"] += len(infos)
        return ["HB:" + ",".join(sorted(info.req_ids)) for info in infos]


def _asking_for(name: str):
    """What a decode engine knows of a request whose prompt was computed elsewhere."""
    params = {
        "do_remote_prefill": True, "tp_size": 1, "remote_engine_id": "p", "remote_request_id": name,
        "remote_host": "p", "remote_port": 1, "remote_block_ids": ((1,),),
    }  # fmt: skip
    return SimpleNamespace(request_id=name, kv_transfer_params=params, status=None)


class _Leased:
    """What is kept on our side, as `remote._Due` has it."""

    def __init__(self) -> None:
        self.step, self._asking = 0, Asking()
        self._beats = [Heartbeats(LEASE_S / 6) for _ in range(ENGINES)]
        self._leases: dict[str, Lease] = {}
        self._kept: set[str] = set()
        self._tracked_by: dict[str, int] = {}

    def begin(self, name: str) -> None:
        self._asking.handed_over(name, self.step)
        self._leases[name] = Lease(self.step - 1 + LEASE_S, LEASE_S * 2 / 3)
        self._kept.add(name)

    def ended(self) -> list[str]:
        now, over = self.step, []
        for what, name, engine in self._asking.at(now):
            if what == "dies":
                for other in [n for n, e in self._tracked_by.items() if e == engine]:
                    self._let_go(other)
                self._beats[engine] = Heartbeats(LEASE_S / 6)
            elif what == "asks":
                self._tracked_by[name] = engine
                self._leases[name].track(self._beats[engine], now)
            else:
                self._let_go(name)
                over += [name] if name in self._kept else []
        over += [n for n in self._kept - set(over) if self._leases[n].renew(now) <= now]
        self._kept.difference_update(over)
        self.step += 1
        return sorted(over)

    def _let_go(self, name: str) -> None:
        del self._tracked_by[name]
        self._leases[name].let_go(self.step)


class LeasingOurs(HandingOver):
    def __init__(self, settings: EngineSettings, mutation=None) -> None:
        super().__init__(settings)
        self.due = _Leased()
        if mutation is not None:
            mutation.apply(self)


def let_go(nixl, gone: Gone, stage: Stage, push: bool) -> Freed:
    """When vLLM's prefill worker frees what it keeps, by what the decode engine's connector tells
    it once nobody will use the KV: the connector's two sides are asked, and nothing is sent.
    nixl: any of them, for its configuration."""
    import importlib

    way, name = ("push", "NixlPush") if push else ("pull", "NixlPull")
    scheduler = importlib.import_module(f"{NIXL}.{way}_scheduler")
    worker = importlib.import_module(f"{NIXL}.{way}_worker")

    def engine():
        kind = getattr(scheduler, f"{name}ConnectorScheduler")
        return kind(nixl.vllm_config, "decode", nixl.kv_cache_config)

    decodes, request, told = engine(), _asking_for("r0"), []
    request.prompt_token_ids, sends = list(range(16)), []
    decodes.on_new_request(request)
    if stage is not Stage.AWAITED:
        block = SimpleNamespace(block_hash=None, is_null=False)
        blocks = SimpleNamespace(
            blocks=([block],), get_unhashed_block_ids_all_groups=lambda: ([1],)
        )
        decodes.update_state_after_alloc(request, blocks, 16)
    if stage is Stage.COMING:
        sends.append(decodes.build_connector_meta(None))  # the transfer has been asked for
    if gone is Gone.DIED:
        decodes = engine()  # another one in its place, which knows of nothing
    else:
        assert decodes.request_finished(request, ([1],)) == (False, None)  # its own memory is free
    meta = decodes.build_connector_meta(None)
    assert not meta.heartbeat_by_engine  # nobody renews the lease from now on

    fetching = object.__new__(getattr(worker, f"{name}ConnectorWorker"))
    vars(fetching).update(vars(lease_worker()))
    vars(fetching).update(
        _remote_agents={},
        _reg_send_inbox=queue.Queue(),
        _push_writer_wake=SimpleNamespace(set=lambda: None),
        _physical_blocks_per_logical_kv_block=1,
        _logical_to_kernel_block_ids=lambda ids, _: ids,
        _read_blocks_for_req=lambda name, what: told.append(any(what.local_block_ids)),
        _send_heartbeats=lambda _: None,
    )
    for sent in (*sends, meta):
        fetching.start_load_kv(sent)
    asked = fetching._reg_send_inbox.qsize() + sum(told)  # a write, or a read of blocks
    if gone is Gone.DIED:
        return Freed.LEASE  # what was asked for goes to memory that is there no more
    if asked:
        return Freed.LANDED
    return Freed.AT_ONCE if told else Freed.LEASE  # an empty read is a notice
