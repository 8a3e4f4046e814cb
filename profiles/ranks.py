"""How the GPUs of an engine split a model, and which splits vLLM refuses.

tp   ranks that split every matrix and the heads: one engine
pp   stages of an engine, each of `tp` ranks with layers of its own
dp   engines, each of `tp` ranks with requests of its own, that share the experts of a mixture
ep   experts lie whole on the `tp` x `dp` ranks that share them, and are not split themselves

Rules are those of vLLM 0.32 (`config/model.py`, and what `_check_scales` names).

Pipeline stages: which layers of a model each has, and what that is in weights and KV.
"""

from dataclasses import replace
from itertools import accumulate, pairwise

from twinserve.profiles.specs import ModelSpec, ProfileError, WeightFormat

# GPUs that are linked to each other directly; how long steps take across servers is not known.
_LINKED = {"gb200": 72}
SERVER = 8
MOST_EXPERTS = 1024  # of a layer, whose busiest rank is counted out (forms/busiest.py)


def check_ranks(
    llm: ModelSpec, gpu: str, tp: int, dp: int = 1, ep: bool = False, links: bool = True
) -> None:
    """ProfileError, one line, for ranks that vLLM would refuse, or whose links are not known.
    links: False where step times were measured, and so need no links."""
    llm.check_tp(tp)
    if ep and not llm.experts:
        raise ProfileError(
            f"{llm.name}: expert parallelism (ep) needs a mixture of experts, and vLLM refuses "
            "this model; drop :ep"
        )
    if ep and tp * dp == 1:
        raise ProfileError(
            f"{llm.name}: expert parallelism (ep) of one rank does nothing, and vLLM ignores the "
            "flag; drop :ep, or give ranks as :tp2:ep"
        )
    if dp > 1 and not llm.experts:
        raise ProfileError(
            f"{llm.name}: data-parallel ranks (dp{dp}) of a dense model share nothing; drop :dp"
            f"{dp}, and give --replicas {dp}"
        )
    if ep and llm.experts > MOST_EXPERTS:
        raise ProfileError(f"{llm.name}: :ep is simulated up to {MOST_EXPERTS:,} experts a layer")
    linked = _LINKED.get(gpu, SERVER)
    if links and tp * dp > linked:
        ranks = f"tp{tp} x dp{dp} ranks share experts," if dp > 1 else f"tp{tp}: these are"
        raise ProfileError(
            f"{llm.name}: {ranks} more than the {linked} GPUs of {gpu} that are linked directly; "
            "choose fewer, since links between servers are not simulated"
        )
    _check_widths(llm, tp, tp if ep else tp * dp, ep)


def check_stages(llm: ModelSpec, gpu: str, tp: int, pp: int, dp: int = 1) -> None:
    """ProfileError, one line, for pipeline stages that the model cannot have, or whose links are
    not known. vLLM's rules leave none of the known architectures out."""
    if pp == 1:
        return
    if dp > 1:
        raise ProfileError(
            f"{llm.name}: pipeline stages (pp{pp}) of data-parallel ranks (dp{dp}) are not "
            "simulated; drop one of them"
        )
    if pp > llm.layers or llm.layers // pp <= llm.dense_layers:
        what = "layers" if pp > llm.layers else "layers with experts"
        raise ProfileError(
            f"{llm.name}: its {llm.layers} layers leave a stage of pp{pp} without {what}; choose "
            "fewer stages"
        )
    linked = _LINKED.get(gpu, SERVER)
    if tp * pp > linked:
        raise ProfileError(
            f"{llm.name}: tp{tp} x pp{pp} are more than the {linked} GPUs of {gpu} that are linked "
            "directly; choose fewer, since links between servers are not simulated"
        )


def _check_widths(llm: ModelSpec, tp: int, slices: int, ep: bool) -> None:
    """Each rank's part of an MLP is whole, and parts of quantised matrices are whole groups or
    blocks of weights that share a scale."""
    dense = llm.dense_intermediate if llm.experts else llm.intermediate
    parts = {"MLP": (dense, tp), "shared experts": (llm.shared_intermediate, tp)}
    if llm.experts:
        parts["experts"] = (llm.intermediate, 1 if ep else slices)
    for what, (width, ranks) in parts.items():
        if width % ranks:
            raise ProfileError(
                f"{llm.name}: {what} of width {width} cannot be split over {ranks} ranks"
            )
    if llm.weights is not None and not llm.weights.experts_only:
        _check_scales(llm, llm.weights, tp, parts)


# Of AWQ and GPTQ vLLM cuts groups of routed experts in halves until they divide, down to this many
# (`MoeWNA16Method.create_weights`); those of compressed-tensors must divide as they are.
_LEAST_GROUP = 32
_HALVED = ("awq", "gptq", "gptq-8bit")


def _check_scales(
    llm: ModelSpec, weights: WeightFormat, tp: int, parts: dict[str, tuple[int, int]]
) -> None:
    """Groups lie along the inputs of a matrix. AWQ: vLLM's Marlin refuses what does not divide
    (`check_marlin_supports_layer`), and so does what it falls back to (`BaseAWQLinearMethod`).
    compressed-tensors: `verify_group_size_divides_partition`. GPTQ: no kernel but ExLlama takes it,
    which would have a rank read the scales of its neighbour's weights. NVFP4: inputs of a rank
    are a multiple of 16 (modelopt.py). On NVIDIA's GPUs none of these depends on which; the
    optional packages humming and conch are taken to be absent.

    Blocks lie along inputs and outputs, and only inputs that are not split may end within one
    (`validate_fp8_block_shape`, `validate_fp8_block_shape_moe`)."""
    split = dict(parts)
    v_dim = llm.head_dim if llm.latent is None else llm.latent.v_dim
    split["attention output"] = (llm.heads * v_dim, tp)
    if weights.group:
        split["hidden size"] = (llm.hidden, 1)
    elif weights.block and llm.latent is None:
        split["KV heads"] = (max(llm.kv_heads, tp) * llm.head_dim, tp)
    for what, (width, ranks) in split.items():
        unit, part = weights.group or weights.block, width // ranks
        if what == "experts" and weights.name in _HALVED:
            while unit % 2 == 0 and unit > _LEAST_GROUP and part % unit:
                unit //= 2
        if unit and part % unit and not (what == "attention output" and weights.block and tp == 1):
            _refuse_scales(llm, weights, what, (width, ranks))


def _refuse_scales(llm: ModelSpec, weights: WeightFormat, what: str, part: tuple[int, int]) -> None:
    width, ranks = part
    gptq = weights.name.startswith("gptq")
    verdict = "no vLLM kernel reads that correctly" if gptq else "vLLM refuses that"
    shared = weights.group or weights.block
    each = f"over {ranks} ranks is {width // ranks:,} each, " if ranks > 1 else "is "
    advice = "choose a smaller tp" if ranks > 1 else "choose another format or group size"
    if what == "experts" and ranks > 1:
        advice += ", or keep experts whole with :ep"
    raise ProfileError(
        f"{llm.name}: {what} of width {width:,} {each}no multiple of the {shared} weights that "
        f"share a scale ({weights.name}), and {verdict}; {advice}"
    )


def local_experts(llm: ModelSpec, ranks: int) -> int:
    """Of a layer, on the rank that has most: whole experts, as evenly as it goes."""
    return -(-llm.experts // ranks)


def rank_weight_bytes(llm: ModelSpec, tp: int, dp: int = 1, ep: bool = False) -> float:
    """Bytes of weights on the rank that has most."""
    if dp == 1 and not (ep and llm.experts % tp):
        return llm.weight_bytes / tp
    of_experts = llm.expert_parameters * llm.matrix_bytes[1]
    share = local_experts(llm, tp * dp) / llm.experts if ep else 1 / (tp * dp)
    return (llm.weight_bytes - of_experts) / tp + of_experts * share


def layers_of_stages(layers: int, pp: int) -> list[int]:
    """As vLLM shares them (`distributed/utils.py`, `get_pp_indices`): those left over go to stages
    from the last but one backwards, since first and last hold embeddings besides."""
    counts = [layers // pp] * pp
    for i in range(layers % pp):
        counts[-2 - i] += 1
    return counts


def stage_models(llm: ModelSpec, pp: int) -> list[ModelSpec]:
    """The layers of each stage as a model of its own, with embeddings that count once. Dense layers
    of a mixture come first; layers with a window are spread evenly. Other parts of the model
    (`other_parameters`, a position table) are the first stage's."""
    bounds = [0, *accumulate(layers_of_stages(llm.layers, pp))]
    return [_stage(llm, start, end) for start, end in pairwise(bounds)]


def _stage(llm: ModelSpec, start: int, end: int) -> ModelSpec:
    windowed = llm.window_layers * end // llm.layers - llm.window_layers * start // llm.layers
    dense = max(0, min(end, llm.dense_layers) - start)
    return replace(
        llm,
        layers=end - start,
        dense_layers=dense,
        dense_intermediate=llm.dense_intermediate if dense else 0,
        window_layers=windowed,
        window=llm.window if windowed else 0,
        tied_embeddings=True,
        learned_positions=0 if start else llm.learned_positions,
        other_parameters=0 if start else llm.other_parameters,
    )


def without_embeddings(llm: ModelSpec, stage: int, pp: int) -> float:
    """Return the bytes that a stage of `stage_models` has less, because it has neither embeddings
    nor an output projection."""
    return 0.0 if stage in (0, pp - 1) else llm.head_parameters * llm.dtype_bytes
