"""The fields of a config.json, with a record of those that were read. A field that was not read is
refused by name, unless it is known not to change memory and compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from twinserve.profiles.specs import ProfileError

# Names, of documentation, sampling, training, positions and activations: they change neither
# memory nor, beyond what is noise here, compute.
HARMLESS = re.compile(
    r"^_|token_id|token_index|dropout|_pdrop$|layerdrop|rope|rotary|theta|_eps$|epsilon|^initializer"
    r"|_init_|init_std|loss|^output_|^return_|softcapping|^hidden_act|activation|^transformers_ver"
    r"|^use_cache$|^cache_implementation$|^auto_map$|^architectures$|^task_specific_params$"
    r"|^pretraining_tp$|^original_max_position_embeddings$|^tokenizer_class$|^prefix$|^torchscript$"
    # how a router weighs its choice
    r"|^norm_topk_prob$|^n_group$|^topk_group$|^topk_method$|^routed_scaling_factor$"
    r"|^scoring_func$|^seq_aux$|^aux_loss_alpha$|^router_jitter_noise$|^ep_size$"
    # how scores are scaled
    r"|^query_pre_attn_scalar$|^swiglu_limit$|^attn_scale$|^floor_scale$|^attn_temperature_tuning$"
    r"|^initial_context_length$|^for_llm_compressor$|^mm_tokens_per_image$|^image_size$"
    # what transformers and vLLM pass over (Gemma 2, Phi-4-mini, SmolLM2)
    r"|^sliding_window_size$|^full_attn_mod$|^interpolate_factor$|^is_llama_config$"
    # how transformers samples and labels, and where images stand in a text
    r"|^(?:id2label|label2id|max_length|num_beams|num_beam_groups|num_return_sequences|temperature"
    r"|top_[kp]|typical_p|(?:length|repetition)_penalty|problem_type|ignore_index)$"
    r"|placeholder|^use_unified_vision_chunk$"
    # layers that only speculation loads
    r"|^num_nextn_predict_layers$"
)
# What a name says that only looks like one of these.
_WEIGHTY = re.compile(r"expert|layers|window|lora|heads|_rank|_dim$|_size$")
LARGEST = 10**9  # of a size in a config.json; more is a mistake


class Fields:
    """One object of a config.json. where: its name in error lines."""

    def __init__(self, data: Mapping[str, Any], where: str):
        self.data, self.where = data, where
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value, or `default` if it is missing or null."""
        self._asked.add(key)
        found = self.data.get(key)
        return default if found is None else found

    def need(self, key: str, default: int | None = None) -> int:
        """Return a whole number. ProfileError if it is missing or not one."""
        found = self.get(key, default)
        if found is None:
            raise ProfileError(f"{self.where}: no field {key!r}; give a Hugging Face config.json")
        if isinstance(found, bool) or not isinstance(found, int):
            raise ProfileError(f"{self.where}: {key} {found!r} is not a whole number")
        if abs(found) > LARGEST:
            self.refuse(key, f"is more than {LARGEST:,}")
        return found

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; `default` if it is missing or null. Raises ProfileError for anything
        else."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            self.refuse(key, "is not true or false")
        return found

    def asked(self, key: str) -> bool:
        """Whether this field was asked for."""
        return key in self._asked

    def number(self, key: str, default: int = 0) -> int:
        """Return a whole number, or None if it is missing."""
        return self.need(key, default)

    def divisor(self, key: str, default: int) -> int:
        """The same of what others are divided by: at least 1."""
        found = self.number(key, default)
        if found < 1:
            self.refuse(key, "is not at least 1")
        return found

    def items(self, key: str, of: type) -> list[Any]:
        """Return a list of values of type `of`; empty if missing. ProfileError for others."""
        found = self.get(key, [])
        if not isinstance(found, (list, tuple)) or not all(isinstance(one, of) for one in found):
            self.refuse(key, f"is not a list of {'names' if of is str else 'whole numbers'}")
        return list(found)

    def part(self, key: str) -> Fields:
        """Return an object; empty if missing or null. ProfileError if it is none."""
        found = self.get(key, {})
        if not isinstance(found, Mapping):
            self.refuse(key, "is not an object")
        return Fields(found, f"{self.where}: {key}")

    def refuse(self, key: str, why: str) -> NoReturn:
        """ProfileError that names the field and its value."""
        shown = str(self.data.get(key))
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise ProfileError(f"{self.where}: {key} {shown}: {why}")

    def check_rest(self) -> None:
        """ProfileError for a field that was not asked for and that may change memory or compute."""
        for key, value in self.data.items():
            if key in self._asked or not value or _harmless(key):
                continue
            self.refuse(
                key,
                "not understood, and it may change memory or compute; if it does not, delete it "
                "in a copy of the file",
            )


def _harmless(key: str) -> bool:
    """Whether a name is one of HARMLESS; one that is matched in part must not speak of sizes."""
    found = HARMLESS.search(key)
    if not found:
        return False
    return found[0] == key or key.startswith("_") or not _WEIGHTY.search(key)
