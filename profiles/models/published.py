"""Where the catalogue's models are published, where their config.json was seen, and how many
parameters are said there.

The counts check ours (tests/profiles/test_catalogue.py), and so does each config.json that
aiconfigurator-core ships. Where a card gives a round number, it is kept as round as it is there.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinserve.profiles.tables import rows


@dataclass(frozen=True)
class Published:
    """hub: the id on Hugging Face whose config.json it is; billions: of parameters, as said in
    `source`. seen: where the fields of its config.json were read; shipped: the id under which
    aiconfigurator-core has that file."""

    hub: str
    billions: str
    source: str
    seen: str
    shipped: str


# What `seen` means. Fields that a list leaves out are what the configuration classes of
# transformers 5.19 have for the family. The parameter counts bear out widths, biases and tables.
SEEN = {
    "package": "aiconfigurator-core 0.12.0, model_configs",
    "litgpt": "litgpt 0.5.13, litgpt/config.py",
    "mlc": "github.com/mlc-ai/mlc-llm, python/mlc_llm/model/model_preset.py",
    "thunder": "github.com/kevinstephano/thunder_model_blocks, mistral/mistral_config.py",
    "paper": "sizes in the paper or model card, the rest from transformers' class of the family",
    "quoted": "the hub's config.json as tests in public source code quote it",
    "class": "transformers 5.19: the defaults of the configuration class, which name the model",
    "card": "sizes in the model card, the rest as the hub's config.json of the family",
    "slime": "github.com/THUDM/slime, scripts/models",
    "easydel": "EasyDeL 0.0.8, modules/opt: the hub's config.json",
}


PUBLISHED = {row.pop("name"): Published(**row) for row in rows(__package__, "published.csv")}
"By the catalogue's name."
