"""A Hugging Face model made to run on the paged cache: load, prepare, linear, probe; the embedded model."""

from quire.model.load import LoadedModel, load
from quire.model.prepare import PreparedModel
from quire.model.step import ForwardStep

__all__ = ["ForwardStep", "LoadedModel", "PreparedModel", "load"]
