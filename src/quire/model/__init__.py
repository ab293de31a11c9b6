"""A Hugging Face model made to run on the paged cache: load, prepare, linear, probe; the embedded model."""

from quire.startup import scan_models_once

scan_models_once()  # before anything below imports transformers' models

from quire.model.load import LoadedModel, load  # noqa: E402
from quire.model.prepare import PreparedModel  # noqa: E402
from quire.model.step import ForwardStep  # noqa: E402

__all__ = ["ForwardStep", "LoadedModel", "PreparedModel", "load"]
