"""vLLM's scheduler, unchanged in what it decides, with a log of every step.

Imports vLLM: name it by path as the engine's scheduler class, do not import it where vLLM may be
missing.
"""

from vllm.v1.core.sched.scheduler import Scheduler

from tests.identity.protocol import Observed


class RecordingScheduler(Scheduler):
    """Every method calls through; `log` grows by one entry a step, under vLLM's own request ids."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.log: list[Observed] = []
        self._victims: list[str] = []
        self._planned: dict = {}

    def schedule(self, *args, **kwargs):
        before = len(self.running)
        self._victims = []
        plan = super().schedule(*args, **kwargs)
        scheduled = dict(plan.num_scheduled_tokens)
        joined = self.running[before - len(self._victims) :]
        self._planned = {
            "scheduled": scheduled,
            "preempted": tuple(self._victims),
            "free_blocks": self.kv_cache_manager.block_pool.get_num_free_blocks(),
            # the tokens of this plan are counted as computed already
            "hits": {
                request.request_id: request.num_computed_tokens - scheduled[request.request_id]
                for request in joined
            },
        }
        return plan

    def _preempt_request(self, request, *args, **kwargs):
        self._victims.append(request.request_id)
        return super()._preempt_request(request, *args, **kwargs)

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        emitted = [output for client in outputs.values() for output in client.outputs]
        self.log.append(
            Observed(
                **self._planned,
                finished=tuple(o.request_id for o in emitted if o.finish_reason is not None),
                running=tuple(request.request_id for request in self.running),
                waiting=len(self.waiting),
            )
        )
        return outputs
