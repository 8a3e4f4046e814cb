"""For vLLM's `worker_extension_cls`: registers the backend when imported. Imports vLLM."""

from twinserve.backends.live.attention import cells
from twinserve.backends.live.attention.registration import register

register()


class AttentionExtension:
    """Methods of the worker, for `collective_rpc`."""

    def twinserve_set_counts(self, entries: list[int], counts: list[int]) -> None:
        """See `cells.CellCounts.set`. Raises ValueError if no blocks are left early here."""
        from twinserve.backends.live.attention.backend import PARTIAL_BLOCKS

        config = self.vllm_config
        if not (
            isinstance(config.additional_config, dict)
            and config.additional_config.get(PARTIAL_BLOCKS)
        ):
            raise ValueError(
                f"set additional_config {PARTIAL_BLOCKS!r} when the engine is built; it keeps no "
                "counts"
            )
        blocks, size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
        cells.of_device(blocks, size, self.device).set(entries, counts)
