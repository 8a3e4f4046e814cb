"""What a model and a GPU are, as far as time and memory depend on it.

Both are plain facts (a config.json, a data sheet) with derived values as properties; what an engine
reaches of a GPU's peak numbers is another matter and lives in `forms/efficiency.py`.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from twinserve.formats import parse_json

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


class ProfileError(ValueError):
    """A bad model, GPU or profile, as one line that says what is wrong, where, and what to do."""


def one_line(error: ValidationError) -> str:
    """The first finding of a pydantic error as `field: what is wrong`, and how many more there
    are."""
    findings = error.errors()
    first = findings[0]
    where = ".".join(str(part) for part in first["loc"]) or "contents"
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{where}: {first['msg'].removeprefix('Value error, ')}{more}"


@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """A decoder-only transformer. Sizes as in a Hugging Face config.json; `dtype_bytes` of weights
    and KV.

    `experts`: MLPs a layer, of which a token passes `experts_per_token`; 0 = a dense model. Then
    `intermediate` is the width of one expert, and a router of `experts` rows stands before them.

    `gated_mlp`: three MLP matrices (SwiGLU) or two (OPT). `biases`: None, "qkv" (Qwen2) or "all"
    (OPT). `qk_norm`: a norm over each head of q and k (Qwen3). `learned_positions`: rows of a
    position table (OPT), else 0.
    """

    name: str = Field(min_length=1)
    layers: int = Field(gt=0)
    hidden: int = Field(gt=0)
    heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate: int = Field(gt=0)
    vocab: int = Field(gt=0)
    max_positions: int = Field(gt=0)
    tied_embeddings: bool = False
    dtype_bytes: float = Field(default=2, gt=0)
    gated_mlp: bool = True
    biases: str | None = Field(default=None, pattern="^(qkv|all)$")
    qk_norm: bool = False
    learned_positions: int = Field(default=0, ge=0)
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.experts_per_token > self.experts or bool(self.experts) != bool(
            self.experts_per_token
        ):
            raise ValueError(
                f"{self.experts_per_token} of {self.experts} experts a token cannot be"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads are not a multiple of {self.kv_heads} KV heads"
            )
        return self

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices, all experts; attention scores left out."""
        return self.attention_parameters + max(self.experts, 1) * self.mlp_parameters

    @property
    def attention_parameters(self) -> int:
        """Of one layer's projections, and of its router where there are experts."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return projections + self.experts * self.hidden

    @property
    def mlp_parameters(self) -> int:
        """Of one MLP or expert."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.intermediate

    @property
    def matrix_parameters(self) -> int:
        return self.layers * self.layer_matrix_parameters

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, read for every step whether tied or not."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biases = {
            None: 0,
            "qkv": q + 2 * kv,
            "all": q + 2 * kv + self.intermediate + 2 * self.hidden,
        }[self.biases]
        # LayerNorm (OPT) has a shift beside the scale that RMSNorm has.
        per_norm = self.hidden * (2 if self.biases == "all" else 1)
        small = self.layers * (biases + 2 * per_norm + (2 * self.head_dim if self.qk_norm else 0))
        tables = (1 if self.tied_embeddings else 2) * self.head_parameters
        return (
            self.matrix_parameters
            + small
            + per_norm
            + tables
            + self.learned_positions * self.hidden
        )

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token over all layers, in bytes, stored once (see
        `rank_kv_bytes_per_token` for TP)."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    def rank_kv_bytes_per_token(self, tp: int) -> float:
        """The same on one of `tp` ranks: heads are split, and copied once there are more ranks than
        heads."""
        return self.kv_bytes_per_token / min(tp, self.kv_heads)

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted values of one (query token, key token) pair over all layers and
        heads."""
        return 4 * self.layers * self.heads * self.head_dim

    def check_tp(self, tp: int) -> None:
        """Raise ProfileError if `tp` ranks cannot split the heads as vLLM requires."""
        if tp < 1 or self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            raise ProfileError(
                f"{self.name}: {self.heads} heads ({self.kv_heads} KV heads) cannot be split over"
                f" tp={tp}; choose a tp that divides the head counts"
            )

    @classmethod
    def from_config(cls, config: dict | str | Path, name: str | None = None) -> ModelSpec:
        """From a Hugging Face config.json (a path or its dict); ProfileError names a missing or
        unfit field.

        Of mixtures of experts, those whose layers are all routed experts are known (Mixtral,
        Qwen3-MoE); others (shared experts, some dense layers) and state-space models are refused:
        their cost per token is not this spec's.
        """
        where = "config.json"
        if not isinstance(config, dict):
            where, config = str(config), read_json(Path(config))
        kind = str(config.get("model_type", ""))
        experts = config.get("num_experts") or config.get("num_local_experts") or 0
        if experts and kind not in ("mixtral", "qwen3_moe"):
            raise ProfileError(
                f"{where}: {kind or 'model'} is a mixture of experts of a kind that is not "
                "supported;"
                " mixtral and qwen3_moe are"
            )
        known = {
            "layers": "num_hidden_layers",
            "hidden": "hidden_size",
            "heads": "num_attention_heads",
            "intermediate": {"opt": "ffn_dim", "qwen3_moe": "moe_intermediate_size"}.get(
                kind, "intermediate_size"
            ),
            "vocab": "vocab_size",
            "max_positions": "max_position_embeddings",
        }
        missing = [key for key in known.values() if config.get(key) is None]
        if missing:
            raise ProfileError(f"{where}: no field {missing[0]!r}; give a Hugging Face config.json")
        fields = {ours: config[key] for ours, key in known.items()}
        heads = fields["heads"]
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
        sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        if dtype not in sizes:
            raise ProfileError(f"{where}: torch_dtype {dtype!r} is not one of {', '.join(sizes)}")
        biases = "all" if kind == "opt" else "qkv" if kind == "qwen2" else None
        if config.get("attention_bias"):
            biases = "qkv"
        try:
            return cls(
                name=name or str(config.get("_name_or_path") or kind or "model"),
                kv_heads=config.get("num_key_value_heads") or heads,
                head_dim=config.get("head_dim") or fields["hidden"] // heads,
                tied_embeddings=bool(config.get("tie_word_embeddings", kind == "opt")),
                dtype_bytes=sizes[dtype],
                gated_mlp=kind != "opt",
                biases=biases,
                qk_norm=kind in ("qwen3", "qwen3_moe"),
                experts=experts,
                experts_per_token=(config.get("num_experts_per_tok") or 0) if experts else 0,
                # OPT's table has two rows before position 0.
                learned_positions=fields["max_positions"] + 2 if kind == "opt" else 0,
                **fields,
            )
        except ValidationError as error:
            raise ProfileError(f"{where}: {one_line(error)}") from None


@dataclass(frozen=True, config=STRICT)
class GpuSpec:
    """A GPU's data-sheet numbers. Rates are dense (no sparsity) and, for links, one direction of
    one GPU.

    `peak_flops`: FLOP/s of bf16 tensor cores with fp32 accumulation (fp16 where there is no bf16).
    `memory_bytes`: what CUDA reports as the total, which is what vLLM's utilisation is a share of.
    `nvlink_bytes_per_s`: None = tensor parallelism goes over PCIe. `family`: whose efficiency
    constants apply.
    """

    name: str = Field(min_length=1)
    family: str = Field(min_length=1)
    peak_flops: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    pcie_bytes_per_s: float = Field(gt=0)
    nvlink_bytes_per_s: float | None = Field(default=None, gt=0)

    @property
    def link_bytes_per_s(self) -> float:
        """The link that all-reduces use, bytes/s in one direction."""
        return self.nvlink_bytes_per_s or self.pcie_bytes_per_s


def read_json(path: Path) -> dict:
    """The object in a JSON file; ProfileError, naming the file, if there is none."""
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ProfileError(f"{path}: not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ProfileError(f"{path}: holds a {type(found).__name__}, not a JSON object")
    return found
