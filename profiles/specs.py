"""What a model and a GPU are, as far as time and memory depend on it.

Both are plain facts (a config.json, a data sheet) with derived values as properties; what an engine
reaches of a GPU's peak numbers is another matter and lives in `forms/efficiency.py`.
"""

from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field, ValidationError, model_serializer, model_validator
from pydantic.dataclasses import dataclass

from twinserve.errors import TwinserveError
from twinserve.formats import parse_json

# deferred: most runs make no object of most of these classes
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)


class ProfileError(TwinserveError, ValueError):
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
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one latent vector a token is
    cached for all heads. Sizes as in config.json; `q_rank` 0 = queries are projected directly."""

    kv_rank: int = Field(gt=0)
    q_rank: int = Field(ge=0)
    nope_dim: int = Field(gt=0)
    rope_dim: int = Field(gt=0)
    v_dim: int = Field(gt=0)

    @property
    def cached(self) -> int:
        """Values a token and layer in the KV cache."""
        return self.kv_rank + self.rope_dim

    def projections(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's projections."""
        q = heads * (self.nope_dim + self.rope_dim)
        queries = hidden * self.q_rank + self.q_rank * q if self.q_rank else hidden * q
        keys = hidden * self.cached + self.kv_rank * heads * (self.nope_dim + self.v_dim)
        return queries + keys + heads * self.v_dim * hidden


@dataclass(frozen=True, config=STRICT)
class WeightFormat:
    """What quantised matrices are stored as. bits: of a weight, scales included; multiplies: in
    what kernels multiply on a GPU that has tensor cores for it, else in 16 bits; experts_only: of
    the routed experts alone; block: scales are of squares with such sides, 0: of no squares;
    group: inputs of a matrix that share a scale, 0: all; plain: parameters of matrices that every
    token passes and that keep 16 bits. Embeddings, output projection and norms are not
    quantised."""

    name: str = Field(min_length=1)
    bits: float = Field(gt=0, le=16)
    multiplies: Literal["bf16", "fp8", "int8", "fp4"] = "bf16"
    experts_only: bool = False
    block: int = Field(default=0, ge=0)
    group: int = Field(default=0, ge=0)
    plain: int = Field(default=0, ge=0)

    @model_serializer(mode="wrap")
    def _as_before(self, dump):
        """Without what older files do not say, so that these keep their bits."""
        return {k: v for k, v in dump(self).items() if k not in ("group", "plain") or v}


@dataclass(frozen=True, config=STRICT)
class ModelSpec:
    """A decoder-only transformer. Sizes as in a Hugging Face config.json; `dtype_bytes` of weights
    that are not quantised (`weights`), and of KV unless `kv_dtype_bytes` is given.

    `experts`: MLPs a layer, of which a token passes `experts_per_token`; 0 = a dense model. Then
    `intermediate` is the width of one expert, and a router of `experts` rows stands before them.
    `shared_intermediate`: width of the experts that every token passes, together.
    `dense_layers`: layers of a mixture that have one MLP of width `dense_intermediate` instead.

    `latent`: multi-head latent attention; `kv_heads` is 1 then, as vLLM counts it. `window`: tokens
    that `window_layers` of the layers attend to at most, the new one included. `chunked_window`:
    those since the last multiple of `window` instead of the last ones (Llama 4).

    `gated_mlp`: three MLP matrices (SwiGLU) or two (OPT). `biases`: None, "qkv" (Qwen2) or "all"
    (OPT). `qk_norm`: a norm over each head of q and k (Qwen3); `norms_over_heads`: over all heads
    together (MiniMax), which ranks exchange. `learned_positions`: rows of a position table (OPT),
    else 0. `other_parameters`: of the whole model, in memory but not counted in a step, being small
    or idle in text. Examples are more norms, biases of experts, a vision tower. `mtp_modules`: of
    the checkpoint, that predict further tokens and that vLLM loads to speculate.
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
    norms_over_heads: bool = False
    learned_positions: int = Field(default=0, ge=0)
    experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    shared_intermediate: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0)
    dense_intermediate: int = Field(default=0, ge=0)
    latent: LatentAttention | None = None
    window: int = Field(default=0, ge=0)
    window_layers: int = Field(default=0, ge=0)
    chunked_window: bool = False
    other_parameters: int = Field(default=0, ge=0)
    weights: WeightFormat | None = None
    kv_dtype_bytes: float | None = Field(default=None, gt=0)
    mtp_modules: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.experts_per_token > self.experts or bool(self.experts) != bool(
            self.experts_per_token
        ):
            raise ValueError(
                f"{self.experts_per_token} of {self.experts} experts a token are impossible"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"{self.heads} attention heads are not a multiple of {self.kv_heads} KV heads"
            )
        return self

    @model_validator(mode="after")
    def _layers_add_up(self):
        if self.dense_layers and not (
            self.experts and self.dense_intermediate and self.dense_layers < self.layers
        ):
            raise ValueError(
                f"{self.dense_layers} of {self.layers} layers cannot be dense: dense_layers is "
                "for mixtures of experts, with dense_intermediate"
            )
        if self.weights is not None and self.weights.experts_only and not self.experts:
            raise ValueError(f"{self.weights.name} weights are for mixtures of experts")
        if self.weights is not None and self.plain_share > 1:
            raise ValueError(f"{self.weights.plain} plain parameters are more than the matrices")
        if self.shared_intermediate and not self.experts:
            raise ValueError("shared_intermediate is for mixtures of experts; drop it")
        if bool(self.window) != bool(self.window_layers) or self.window_layers > self.layers:
            raise ValueError(
                f"window {self.window} in {self.window_layers} of {self.layers} layers: impossible"
            )
        if self.latent is not None and self.kv_heads != 1:
            raise ValueError("latent attention caches one vector for all heads: kv_heads is 1")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, dump):
        """Without what only newer kinds of models have, so that files of others keep their bits."""
        data = dump(self)
        return {k: v for k, v in data.items() if k not in NEWER or v != NEWER[k]}

    @property
    def layer_matrix_parameters(self) -> int:
        """Parameters of one layer's matrices, all experts; attention scores left out. Of a mixture,
        a layer that has experts."""
        return self.attention_parameters + max(self.experts, 1) * self.mlp_parameters + self.shared

    @property
    def attention_parameters(self) -> int:
        """Parameters of one layer's projections, and of its router with experts."""
        return self._projections + self.experts * self.hidden

    @property
    def _projections(self) -> int:
        if self.latent is not None:
            return self.latent.projections(self.hidden, self.heads)
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Of one MLP or expert."""
        return self._matrices * self.hidden * self.intermediate

    @property
    def _matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    @property
    def shared(self) -> int:
        """Parameters of the experts of one layer that every token passes."""
        return self._matrices * self.hidden * self.shared_intermediate

    @property
    def expert_layers(self) -> int:
        """Layers that have experts; 0 for a dense model."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def expert_parameters(self) -> int:
        """Of all routed experts of all layers."""
        return self.expert_layers * self.experts * self.mlp_parameters

    @property
    def matrix_parameters(self) -> int:
        dense = self._projections + self._matrices * self.hidden * self.dense_intermediate
        return (
            self.layers - self.dense_layers
        ) * self.layer_matrix_parameters + self.dense_layers * dense

    @property
    def active_parameters(self) -> int:
        """Parameters that one token passes, embeddings left out and the output projection not."""
        idle = self.expert_layers * (self.experts - self.experts_per_token) * self.mlp_parameters
        return self.matrix_parameters - idle + self.head_parameters

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
            + self.other_parameters
        )

    @property
    def weight_bytes(self) -> float:
        if self.weights is None:
            return self.parameters * self.dtype_bytes
        quantised = self.expert_parameters
        if not self.weights.experts_only:
            routers = self.expert_layers * self.experts * self.hidden
            quantised = self.matrix_parameters - routers - self.weights.plain
        saved = self.dtype_bytes - self.weights.bits / 8
        return self.parameters * self.dtype_bytes - quantised * saved

    @property
    def matrix_bytes(self) -> tuple[float, float]:
        """Bytes a parameter of matrices that every token passes, and of routed experts."""
        if self.weights is None:
            return self.dtype_bytes, self.dtype_bytes
        stored, plain = self.weights.bits / 8, self.plain_share
        if plain in (0, 1):
            return (self.dtype_bytes if plain else stored), stored
        return stored + plain * (self.dtype_bytes - stored), stored

    @property
    def plain_share(self) -> float:
        """Of the matrices that every token passes, those that keep 16 bits: 0 to 1."""
        if self.weights is None or self.weights.experts_only:
            return 1.0
        return self.weights.plain / (self.matrix_parameters - self.expert_parameters)

    @property
    def kv_value_bytes(self) -> float:
        """Of one value in the KV cache."""
        return self.kv_dtype_bytes or self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """What all layers cache of one token, in bytes, stored once (see `rank_kv_bytes_per_token`
        for TP). Layers with a window count in full, as vLLM stores them with
        `--disable-hybrid-kv-cache-manager`."""
        if self.latent is not None:
            return self.layers * self.latent.cached * self.kv_value_bytes
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_value_bytes

    def rank_kv_bytes_per_token(self, tp: int) -> float:
        """The same on one of `tp` ranks: heads are split, and copied once there are more ranks than
        heads."""
        return self.kv_bytes_per_token / min(tp, self.kv_heads)

    @property
    def attention_flops_per_pair(self) -> int:
        """Scores and weighted values of one (query token, key token) pair over all layers and
        heads; of latent attention, as prompts compute it."""
        if self.latent is not None:
            width = self.latent.nope_dim + self.latent.rope_dim + self.latent.v_dim
            return 2 * self.layers * self.heads * width
        return 4 * self.layers * self.heads * self.head_dim

    @property
    def decode_flops_per_pair(self) -> int:
        """The same as decodes compute it: latent attention works on the latent vectors
        themselves."""
        if self.latent is None:
            return self.attention_flops_per_pair
        width = self.latent.cached + self.latent.kv_rank
        return 2 * self.layers * self.heads * width

    def check_tp(self, tp: int) -> None:
        """Raise ProfileError if `tp` ranks cannot split the heads as vLLM requires."""
        if tp < 1 or self.heads % tp or (self.kv_heads % tp and tp % self.kv_heads):
            raise ProfileError(
                f"{self.name}: {self.heads} heads ({self.kv_heads} KV heads) cannot be split over"
                f" tp={tp}; choose a tp that divides the head counts"
            )


FEW_BITS = ("fp8_flops", "int8_flops", "fp4_flops")
# Fields of ModelSpec that older files do not have, and what they are there.
NEWER = {
    "shared_intermediate": 0,
    "dense_layers": 0,
    "dense_intermediate": 0,
    "latent": None,
    "window": 0,
    "window_layers": 0,
    "chunked_window": False,
    "other_parameters": 0,
    "weights": None,
    "kv_dtype_bytes": None,
    "mtp_modules": 0,
    "norms_over_heads": False,
}


@dataclass(frozen=True, config=STRICT)
class GpuSpec:
    """A GPU's data-sheet numbers. Rates are dense (no sparsity) and, for links, one direction of
    one GPU.

    `peak_flops`: FLOP/s of bf16 tensor cores with fp32 accumulation (fp16 without bf16).
    `memory_bytes`: what CUDA reports as the total, which is what vLLM's utilisation is a share of.
    `nvlink_bytes_per_s`: None = tensor parallelism goes over PCIe. `family`: whose efficiency
    constants apply. `fp8_flops`, `int8_flops`, `fp4_flops`: of tensor cores for fewer bits, if any;
    only in profiles of quantised models.
    """

    name: str = Field(min_length=1)
    family: str = Field(min_length=1)
    peak_flops: float = Field(gt=0)
    memory_bytes_per_s: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    pcie_bytes_per_s: float = Field(gt=0)
    nvlink_bytes_per_s: float | None = Field(default=None, gt=0)
    fp8_flops: float | None = Field(default=None, gt=0)
    int8_flops: float | None = Field(default=None, gt=0)
    fp4_flops: float | None = Field(default=None, gt=0)

    @model_serializer(mode="wrap")
    def _as_before(self, dump):
        """Without rates that are not said, so that older files keep their bits."""
        return {k: v for k, v in dump(self).items() if k not in FEW_BITS or v is not None}

    def flops_of(self, multiplies: str) -> float:
        """FLOP/s of products in "bf16", "fp8", "int8" or "fp4": of 16 bits if the GPU lacks such
        tensor cores."""
        few = {"fp8": self.fp8_flops, "int8": self.int8_flops, "fp4": self.fp4_flops}
        return few.get(multiplies) or self.peak_flops

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
