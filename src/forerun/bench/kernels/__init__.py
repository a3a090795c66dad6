"""`forerun bench kernels`: verification from logits to tokens, against transformers and against memory's speed."""
