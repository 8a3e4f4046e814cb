"""Suggestions for an unknown option or command: near in meaning, or else in spelling."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

_LIKE = 0.6  # of two words, for one to be a slip of the other

# option -> words that people have for it, and how it is written where its name does not tell
_OPTIONS: tuple[tuple[str, str, str], ...] = (
    ("--tp", "tp tensor-parallel tensor-parallel-size num-gpus-per-replica", ""),
    ("--gpus", "gpu hardware device gpu-type accelerator", ""),
    ("--rate", "qps rps arrival-rate req-rate requests-per-second", ""),
    ("--rate-scale", "speedup scale time-scale rate-factor", ""),
    ("--grow", "rate-scale growth traffic-growth", ""),
    ("--requests", "num-requests n count limit max-requests", ""),
    ("--load", "utilization utilisation rho", ""),
    ("--trace", "dataset dataset-name dataset-path data workload input input-file", ""),
    ("--pool", "best-effort batch-jobs offline-requests pool-size", ""),
    ("--max-num-seqs", "batch-size max-batch-size batch max-batch max-running-requests", ""),
    (
        "--max-num-batched-tokens",
        "chunk chunk-size chunked-prefill-size enable-chunked-prefill max-tokens-per-step "
        "token-budget",
        "",
    ),
    ("--max-model-len", "context context-length max-length max-seq-len", ""),
    ("--gpu-memory-utilization", "gpu-memory memory mem-fraction-static gpu-mem", ""),
    ("--num-blocks", "kv-blocks cache-blocks kv-cache-size num-kv-blocks", ""),
    ("--num-blocks", "num-gpu-blocks-override", "one less: without vLLM's null block"),
    ("--block-tokens", "page-size kv-block-size", ""),
    ("--host-blocks", "swap-space cpu-offload-gb swap cpu-blocks", ""),
    ("--kv-cache-dtype", "kv-dtype", ""),
    (
        "--speculate",
        "speculative-config num-speculative-tokens draft speculative spec",
        "k=3,acceptance=0.7",
    ),
    ("--policy", "scheduler scheduling-policy algorithm scheduler-cls strategy", ""),
    ("--kv", "ledger allocator block-manager", ""),
    ("--tensor-parallel-size", "tp tensor-parallel", ""),
    ("--pipeline-parallel-size", "pp pipeline-parallel", ""),
    ("--data-parallel-size", "dp data-parallel", ""),
    ("--enable-expert-parallel", "ep expert-parallel", ""),
    ("--profile", "gpu gpus hardware device accelerator model gpu-type", "MODEL@GPU"),
    ("--profile", "dtype quantization", "the name says it: docs/profiles.md"),
    ("--replicas", "instances nodes num-replicas servers engines workers", ""),
    ("--router", "load-balancer lb balancer routing", ""),
    ("--fleet", "disaggregated prefill-decode pd kv-transfer-config", "FILE, docs/fleet.md"),
    ("--autoscale", "autoscaler hpa scaling scaler", ""),
    ("--mttf", "mtbf failure-rate crash-rate", ""),
    ("--survive", "failures spare redundancy", ""),
    ("--client-timeout", "timeout request-timeout", ""),
    ("--slo", "sla deadline objective objectives target", ""),
    ("--slo", "ttft tpot", "ttft=SECONDS,tpot=SECONDS"),
    ("--slo", "goodput", '"ttft p90 < 1 s"'),
    ("--out", "output output-dir result-dir save-result save results dir", ""),
    ("--json", "output-format print-json", ""),
    ("--quiet", "silent no-progress disable-tqdm", ""),
    ("--seed", "random-seed", ""),
    ("--seeds", "repeats runs num-runs trials", ""),
    ("--repeats", "seeds runs num-runs trials", ""),
    ("--workers", "jobs j processes parallel threads", ""),
    ("--overwrite", "force f replace", ""),
    ("--config", "run-json from-run", ""),
    ("--timeline", "perfetto chrome-trace profile-trace", ""),
)
# command -> words that people have for it
_COMMANDS = {
    "simulate": "run sim bench benchmark start",
    "sweep": "grid search explore tune",
    "plan": "capacity size provision cost recommend",
    "report": "html plot show visualize visualise",
    "trace": "dataset datasets workload workloads",
    "profiles": "hardware",
    "policies": "schedulers scheduler",
    "calibrate": "measure fit profile-engine",
    "compare": "diff check",
    "validate": "verify",
    "completion": "completions autocomplete",
}


def option_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown option, `--qps=3` or `--qps`, as ` Did you mean --rate?`;
    empty if no option is near.

    known  the options that the command has
    """
    name = word.split("=", 1)[0].lstrip("-").replace("_", "-").lower()
    for option, words, how in _OPTIONS:
        if option in known and name in words.split():
            return f" Did you mean {option}{f' ({how})' if how else ''}?"
    if name == "title":
        return " twinserve report has it, for the page."
    return _slip(f"--{name}", known)


def command_meant(word: str, known: Collection[str]) -> str:
    """Return a suggestion for an unknown command, as `option_meant`."""
    for command, words in _COMMANDS.items():
        if command in known and word.lower() in words.split():
            return f" Did you mean {command}?"
    return _slip(word, known)


def _slip(word: str, known: Collection[str]) -> str:
    """The word whose letters are nearest. Dashes before it are no likeness."""
    bare = {name.lstrip("-"): name for name in known if name.startswith("--") == (word[:2] == "--")}
    found = difflib.get_close_matches(word.lstrip("-"), list(bare), n=1, cutoff=_LIKE)
    return f" Did you mean {bare[found[0]]}?" if found else ""


def without_guess(line: str) -> str:
    """Return a parser's complaint without the parser's own suggestion."""
    return re.sub(r" Did you mean \S+\?.*$", "", line)
