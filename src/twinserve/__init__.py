"""One scheduling and KV-cache policy for LLM serving, run by two engines: a simulator and live
vLLM.

The packages lie at the top of the repository, where readers look for them; here are links to them,
so that `import twinserve`, installers and type checkers all see one package.
"""

from pathlib import Path

_ROOMS = ("backends", "experiments", "policies", "profiles", "sim", "traces")
_lost = [name for name in _ROOMS if not (Path(__file__).parent / name).is_dir()]
if _lost:
    raise ImportError(
        f"twinserve: {', '.join(_lost)} in {Path(__file__).parent} should be links to the "
        "folders at the top of the "
        "repository, and this copy was made without them; clone again with git config "
        "core.symlinks true (on Windows: in "
        "developer mode), or pip install a wheel"
    )
