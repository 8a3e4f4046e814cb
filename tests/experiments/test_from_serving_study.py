"""The study of an operator's whole way: what it refuses before it starts a server."""

import pytest

from twinserve.backends.live.versions import LiveEngineError
from twinserve.experiments.from_serving import main as study


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("predict --repeats 0", "give 1 or more"),
        ("plan --requests 5", "give 20 or more"),
        ("plan", "no vLLM is installed"),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_no_folder(
    tmp_path, capsys, monkeypatch, words, said
):
    def missing():
        raise LiveEngineError("no vLLM is installed")

    monkeypatch.setattr(study, "installed_vllm", missing)
    with pytest.raises(SystemExit) as end:
        study.main([*words.split(), "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err
    assert end.value.code and said in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()
