"""The ways to run what lies below a model's head; transformers' modules are the specification of the others."""
