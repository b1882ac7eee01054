"""One file a model family: `FAMILY`, an instance of `headloom.hf.model.family.Family`."""
