"""The steered scheduler of a calibration: requests may start with KV that was never computed.
Imports vLLM: name it by path.

A decode step over 256 contexts of 2,048 tokens costs milliseconds; computing these contexts first
costs ten seconds. What attention costs depends on how many keys and values there are, and where,
hardly on what they are. So a request can be given free blocks of the pool as if they were a prefix
hit; `Bench.fill_cache` has put some prompt's keys and values there. Every request gets blocks of
its own: with one prefix for all, a GPU would answer from its cache.
"""

from itertools import islice

from vllm.v1.core.kv_cache_manager import KVCacheBlocks

from twinserve.backends.live.engine.scheduler import SteeredScheduler


class MeasuringScheduler(SteeredScheduler):
    """A request with `hits` in the plan gets that many tokens (whole blocks) from the pool,
    uncomputed.

    can_adopt  vLLM takes over such blocks only with prefix caching, and here only if one kind of
               block is all the KV there is; else contexts must be computed
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        manager = self.kv_cache_manager
        self.can_adopt = (
            bool(manager.enable_caching) and len(manager.empty_kv_cache_blocks.blocks) == 1
        )
        lookup = manager.get_computed_blocks

        def adopted(request):
            wanted = self._steered.hits.get(request.request_id, 0) if self._steered else 0
            found, _, *rest = lookup(request)
            if not (wanted and self.can_adopt):
                return (found, _, *rest)
            blocks = tuple(islice(self._adoptable(), wanted // self.block_size))
            return (KVCacheBlocks((blocks,)), len(blocks) * self.block_size, *rest)

        manager.get_computed_blocks = adopted

    def _adoptable(self):
        """Return free blocks, next to be used first. vLLM takes adopted ones off the list."""
        queue = self.kv_cache_manager.block_pool.free_block_queue
        block, tail = queue.fake_free_list_head.next_free_block, queue.fake_free_list_tail
        while block is not None and block is not tail:
            yield block
            block = block.next_free_block
