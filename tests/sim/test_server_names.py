"""Names of models and GPUs as servers, nodes and clouds have them."""

import pytest

from tests.parameters import each
from tests.truth import truth
from twinserve.profiles.catalog import find_model
from twinserve.profiles.gpu_labels import gpu_of_label, machine_of_label
from twinserve.profiles.gpus import GPUS
from twinserve.profiles.models.hub_ids import PUBLISHED, catalogue_name, longest_request
from twinserve.profiles.specs import ProfileError


@each("name", PUBLISHED)
def test_every_catalogue_model_is_known_by_its_id(name):
    published = PUBLISHED[name]
    assert {catalogue_name(published.hub), catalogue_name(published.shipped or published.hub)} == {
        name
    }


@pytest.mark.parametrize(
    ("model", "name", "longest"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("meta-llama/meta-llama-3-8b-instruct", "llama-3.1-8b", 8192),
        ("RedHatAI/Meta-Llama-3.1-70B-Instruct-FP8-dynamic", "llama-3.1-70b-fp8", None),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b-int4", None),
        ("Qwen/Qwen2.5-72B-Instruct-GPTQ-Int8", "qwen2.5-72b-gptq8", 32768),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "qwen2.5-14b-awq", 32768),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b", None),
        ("mistralai/Mistral-7B-Instruct-v0.1", None, None),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3", None),
        ("nvidia/DeepSeek-R1-FP4", None, None),
        ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "deepseek-r1-0528-qwen3-8b", None),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b-2507-fp8", None),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2-0905", None),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2-thinking", None),
        ("nvidia/Kimi-K2.7-Code-NVFP4", "kimi-k2.6-nvfp4", None),
        ("mistralai/Ministral-3-8B-Instruct-2512", "ministral-3-8b-fp8", None),
        ("mistralai/Ministral-3-8B-Reasoning-2512", "ministral-3-8b", None),
        ("zai-org/GLM-4.7-FP8", "glm-4.6-fp8", None),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b", None),
        ("openai/gpt-oss-120b", "gpt-oss-120b", None),
        ("Qwen/Qwen3-32B-Tuned", None, None),
    ],
)
def test_variants_are_their_catalogue_models(model, name, longest):
    assert (catalogue_name(model), longest_request(model)) == (name, longest)


def test_ids_of_public_recipes_are_understood():
    ids = truth("recipe_ids.txt").read_text(encoding="utf-8").split()
    assert sum(catalogue_name(model) is not None for model in ids) >= 64


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("Qwen/Qwen3.5-27B", "fixed state"),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", "fixed state"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", "fixed state"),
        ("deepseek-ai/DeepSeek-V3.2", "sparse attention"),
        ("zai-org/GLM-5.1-FP8", "sparse attention"),
        ("google/gemma-4-31B-it", "heads or head size"),
        ("openai/whisper-large-v3", "speech, pictures or vectors"),
    ],
)
def test_a_model_of_another_kind_is_refused_for_what_it_is(model, why):
    with pytest.raises(ProfileError, match=why) as error:
        find_model(model)
    assert "hf download" not in str(error.value) and catalogue_name(model) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA-H100-80GB-HBM3", "h100"), ("NVIDIA H100 PCIe", "h100-pcie"), ("H200", "h200"),
        ("GPU 0: NVIDIA H200 (UUID: GPU-5e1)", "h200"), ("nvidia-l4", "l4"), ("Tesla-T4", "t4"),
        ("A100-SXM4-40GB", "a100-40g"), ("NVIDIA-A100-SXM4-80GB", "a100-80g"),
        ("nvidia-tesla-a100", "a100-40g"), ("NVIDIA-GeForce-RTX-4090", "rtx4090"),
        ("AMD_Instinct_MI300X_OAM", "mi300x"), ("p4d.24xlarge", "a100-40g"),
        ("a3-highgpu-8g", "h100"), ("Standard_ND96isr_H100_v5", "h100"), ("ND H100 v5", "h100"),
        ("NVIDIA-A100-80GB-PCIe", "a100-pcie-80g"), ("m8g.large", None),
        ("NVIDIA-H100-NVL", "h100-nvl"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80g"),
        ("Standard_NC40ads_H100_v5", "h100-nvl"), ("BM.GPU.H100.8", "h100"),
        ("gpu_8x_h100_sxm5", "h100"), ("g7e.2xlarge", "rtxpro6000"), ("VM.GPU.A10.2", "a10"),
    ],
)  # fmt: skip
def test_labels_and_instance_types_name_gpus(text, name):
    assert gpu_of_label(text) == name


def test_instance_types_have_a_number_of_gpus():
    said = {
        text: machine_of_label(text)
        for text in (
            "p5.48xlarge", "g5.12xlarge", "g2-standard-24", "VM.GPU.A10.2", "a2-highgpu-4g",
        )
    }  # fmt: skip
    assert said == {
        "p5.48xlarge": ("h100", 8), "g5.12xlarge": ("a10g", 4), "g2-standard-24": ("l4", 2),
        "VM.GPU.A10.2": ("a10", 2), "a2-highgpu-4g": ("a100-40g", 4),
    }  # fmt: skip
    assert all(gpu_of_label(name) in (name, None) for name in GPUS)
