"""vLLM's scheduler, unchanged in what it decides, that shows each decision while the step is under
way and waits for the word that the step has ended. Imports vLLM: name it by path."""

import copy
from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from twinserve.backends.live.apart.decided import Decided


class ApartScheduler(Scheduler):
    """hold     called with each decision, before the step's outcome is taken in; returns what the
             connector's worker has to tell, as its `ended`
    finished  ids that ended with the last step
    keeps_stepping  also without a request, to hear what became of what is kept
    """

    hold: Callable[[Decided], tuple[list[str], list[str], set[int]]]
    keeps_stepping = True
    drift, first_drift = 0, ""  # from plans of others: it has none

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.steps = 0
        self.finished: tuple[str, ...] = ()
        self._victims: list[str] = []
        self._decided: Decided

    def has_requests(self) -> bool:
        return self.keeps_stepping or super().has_requests()

    def schedule(self, *args, **kwargs):
        self.steps += 1
        before, self._victims = len(self.running), []
        plan = super().schedule(*args, **kwargs)
        grants = dict(plan.num_scheduled_tokens)
        joined = self.running[before - len(self._victims) :]
        self._decided = Decided(
            grants,
            # the tokens of this plan are counted as computed already
            {r.request_id: r.num_computed_tokens - grants[r.request_id] for r in joined},
            tuple(self._victims),
            self.kv_cache_manager.block_pool.get_num_free_blocks(),
        )
        return plan

    def _preempt_request(self, request, *args, **kwargs):
        self._victims.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output, model_runner_output):
        kept_no_more, landed, bad = self.hold(self._decided)
        output = copy.copy(model_runner_output)  # an empty one is the same object each time
        output.kv_connector_output = KVConnectorOutput(
            finished_sending=kept_no_more, finished_recving=landed, invalid_block_ids=bad
        )
        outputs = super().update_from_output(scheduler_output, output)
        emitted = [one for client in outputs.values() for one in client.outputs]
        self.finished = tuple(one.request_id for one in emitted if one.finish_reason is not None)
        return outputs
