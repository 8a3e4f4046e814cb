"""Why our numbers differ from those of LayerKV: the run that shows it, or what was tried."""

from __future__ import annotations

BREAKDOWN = (
    "Where it begins depends on how many requests are there at once, and so on arrivals; the "
    "paper gives neither these "
    "nor the block count. With half of the blocks (figure `settings`) queueing is the larger "
    "part at 1,024 tokens."
)
CONTEXT = (
    "The gain is largest where vLLM's memory is just too small: vLLM's queue then grows to the "
    "end of the run and LayerKV's does not. With more memory it shrinks, and below vLLM's capacity "
    "(0.2 requests/s) it does not differ significantly from none (figure `settings`)."
)
CONTEXT_THROUGHPUT = (
    "The rate is far beyond capacity at long contexts. Lower, where steps fetch layers for "
    "longer than they compute: with "
    "four times the PCIe rate the loss shrinks (figure `settings`). Higher, where vLLM "
    "recomputes what it preempts, which "
    "LayerKV does not: a vLLM that swaps has as much; and at 16k, where memory holds few such "
    "prompts: with a quarter more "
    "of it vLLM has as much (figure `higher`)."
)
THROUGHPUT = (
    "Algorithm 1 keeps the TPOT objective, which vLLM does not on this profile, by beginning "
    "fewer prompts. Without it "
    "(`slo_aware=false` in the table) throughput is vLLM's."
)
DEGREE = (
    "Memory suffices on eight GPUs, and on four at 1,024 tokens: with four times as much vLLM has "
    "the same numbers. On four GPUs at 4,096 tokens it gains a little (figure `links`). "
    "Algorithm 1 makes LayerKV slower: it keeps a TPOT of 0.2 s for more requests than vLLM does "
    "by letting prompts wait. Without it (`slo_aware=false` in the table) LayerKV is not slower "
    "than vLLM. Faster all-reduces: figure `links`."
)
LINK = (
    "Rows of the same figure: vLLM with four times the memory says how much there is to gain, "
    "LayerKV without Algorithm 1 how much of it LayerKV gets. Algorithm 1 makes prompts wait as "
    "long as steps pass the TPOT objective, which they do less with faster all-reduces."
)
NARROWS = (
    "The gap that is left with more GPUs is Algorithm 1's, which lets prompts wait: without it "
    "(`slo_aware=false` in the "
    "table) there is none with eight."
)
RATE = (
    "As printed, a request with a negative allowance holds all prompts up: leaving those out gives "
    "the gain of no Algorithm 1 back, known lengths a part of it, another TPOT in eq. 1 none "
    "(figure `rules`). With any number parked as well TTFT is lower still, and more miss their "
    "TPOT: that one of the four cells comes nearest to the paper (figure `trade`). On larger "
    "models the TPOT objective makes prompts wait: without Algorithm 1 (`slo_aware=false` in the "
    "table) Yi-34B gains, and Llama-3.1-70B, which preempts nobody, has vLLM's numbers."
)
ONSET = (
    "Overload begins at a rate that depends on the lengths that a seed draws: the onset of a "
    "single seed is any of several "
    "rates of the sweep."
)
VIOLATIONS = (
    "As printed, Algorithm 1 gives the gain in TTFT away (see Fig. 6); without the requests that "
    "are late in any case it is left (figure `rules`). Seeds overload at different rates, so "
    "intervals are wide."
)
NO_SLO = (
    "At this rate neither has many violations, and seeds differ by more than the policies do. "
    "What the paper says needs a vLLM "
    "without violations by TTFT at a rate where LayerKV has some by TPOT; here TTFT is what vLLM "
    "misses first."
)
