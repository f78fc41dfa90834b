"""What can go wrong between a model's name and a loaded model.

    ModelError
    ├── UnknownModelError       no model, folder or hub repository of that name
    ├── ModelUnavailableError   the files are not cached and can't be fetched
    ├── ChecksumError           what was fetched is not what is pinned
    └── ModelFilesError         the files are there and are wrong: missing, damaged, of another model
        └── WeightsError        tensors missing, unknown, of the wrong shape or unreadable

Every message names the file or model, what was found and what is accepted. Knows nothing of single models.
"""


class ModelError(Exception):
    """A model that can't be loaded."""


class UnknownModelError(ModelError):
    """The name is neither in the catalog nor a local folder nor a hub repository."""


class ModelUnavailableError(ModelError):
    """The model is not cached and could not be fetched; the message says how to fetch it."""


class ChecksumError(ModelError):
    """A fetched file differs from the pinned one. Nothing of it was kept."""


class ModelFilesError(ModelError):
    """A model's files are incomplete or contradict each other."""


class WeightsError(ModelFilesError):
    """A weights file is damaged or does not hold exactly the tensors of the network."""
