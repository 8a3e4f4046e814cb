from twinserve.backends.live.tiny_model import VOCAB, write_model  # noqa: F401
