"""Methods of a model's modules that are replaced for the duration of a pass."""
